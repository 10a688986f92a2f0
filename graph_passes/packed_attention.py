"""Attention(x, W, b) -> MultiHeadAttention(Reshape(x W' + b'))
MultiHeadAttention(x Wq, x Wk, x Wv, b) -> MultiHeadAttention(Reshape(x W' + b'))

Of com.microsoft, whose packed form reads Q, K and V from one value of shape [batch, length, heads,
3, head size]. W' and b' are the columns of W and b in that order: the product is then one node that
the rules of products take, with its bias, and no kernel adds a bias or splits anything behind it.

The columns are put in order by nodes that read nothing but constants; ONNX Runtime computes them
once, when a session is created. So weights are neither read nor copied here, wherever they are.

Only the CUDA provider has the packed form (as of onnxruntime 1.32). Not part of the rewrite:
`optimize=` asks for it by name ("onnxscript-packed").
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from . import projection
from .edited_graph import MICROSOFT, EditedGraph, edit
from .multi_head_attention import CAUSAL, PLAIN, head_count
from .tree import attributes_of

_SIZES = "qkv_hidden_sizes"

_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
"""Those of the CUDA provider's MultiHeadAttention."""

_OPSET = 13  # the first whose Reshape, Transpose, Concat and Add take all of these types


class _Packed(NamedTuple):
    """What a packed attention is made of: names of values, and numbers."""

    x: str
    weight: str
    bias: str
    heads: int
    rows: int  # of the weight
    columns: int  # of each of Q, K and V
    others: tuple[str, ...]  # from the key padding mask on


def pack(model: onnx.ModelProto) -> int:
    """Packs Q, K and V of the main graph's attention nodes, in place; returns of how many.

    A node stays if it has a cache, rotary embedding, a second output, a causal mask of its own, V
    of another width than Q and K, weights that are no constant matrices, or another type than fp32
    and fp16.
    """
    return edit(model, lambda graph: partial(_pack, graph), opset=_OPSET)


def _pack(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if node.domain != MICROSOFT or len(node.output) != 1:
        return 0
    packed = None
    if node.op_type == "Attention":
        packed = _of_attention(graph, node)
    elif node.op_type == "MultiHeadAttention":
        packed = _of_three_products(graph, node)
    if packed is None:
        return 0
    _replace(graph, node, packed)
    return 1


def _is_plain(node: onnx.NodeProto) -> bool:
    """Packed operands allow no causal attribute; the others mean the same on both operators."""
    given = attributes_of(node)
    return set(given) <= {*PLAIN, CAUSAL, _SIZES} and not given.get(CAUSAL)


def _operands(node: onnx.NodeProto, count: int) -> list[str] | None:
    """The inputs, absent ones empty; None if there are more than `count`."""
    names = list(node.input) + [""] * (count - len(node.input))
    return None if any(names[count:]) else names[:count]


def _of_attention(graph: EditedGraph, node: onnx.NodeProto) -> _Packed | None:
    operands = _operands(node, 6)
    if not _is_plain(node) or operands is None:
        return None
    x, weight, bias, mask, past, attention_bias = operands
    parts = _concatenated(graph, weight)
    matrices = [graph.matrix(part) for part in parts]
    known = [matrix for matrix in matrices if matrix is not None]
    if mask or past or len(known) != len(matrices) or not _are_one_type(graph, parts):
        return None
    total = sum(columns for _, columns in known)
    columns = total // 3
    sizes = next((list(a.ints) for a in node.attribute if a.name == _SIZES), [columns] * 3)
    heads = head_count(node)
    if sizes != [columns] * 3 or 3 * columns != total or not heads or columns % heads:
        return None
    if bias and graph.shape(bias) != [total]:
        return None
    return _Packed(x, weight, bias, heads, known[0][0], columns, ("", attention_bias))


def _concatenated(graph: EditedGraph, weight: str) -> list[str]:
    """The weights of Q, K and V where they are packed in the graph; else the one weight."""
    node = graph.producer(weight, "Concat")
    if node is None or len(node.input) != 3 or attributes_of(node).get("axis") not in (1, -1):
        return [weight]
    return list(node.input)


def _are_one_type(graph: EditedGraph, weights: Iterable[str]) -> bool:
    types = {graph.element_type(weight) for weight in weights}
    return len(types) == 1 and types <= set(_TYPES)


def _of_three_products(graph: EditedGraph, node: onnx.NodeProto) -> _Packed | None:
    operands = _operands(node, 6)
    if not _is_plain(node) or operands is None:
        return None
    bias, mask, attention_bias = operands[3:]
    found = [
        projection.find(graph, value) if graph.is_read_only_by(value, node) else None
        for value in operands[:3]
    ]
    products = [product for product in found if product is not None]
    if len(products) != 3 or len({product.x for product in products}) != 1:
        return None
    weights = [product.weight for product in products]
    matrices = {graph.matrix(weight) for weight in weights}
    heads = head_count(node)
    matrix = matrices.pop()
    if matrices or matrix is None or not heads or matrix[1] % heads:
        return None
    biases = [product.bias for product in products]
    if not _are_one_type(graph, weights) or (any(biases) and bias):
        return None
    if bias and graph.shape(bias) != [3 * matrix[1]]:
        return None
    if any(biases):
        dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(weights[0]))
        if "" in biases:
            zeros = graph.add_constant(np.zeros(matrix[1], dtype), f"{node.output[0]}_no_bias")
            biases = [one or zeros for one in biases]
        bias = graph.insert(node, "Concat", biases, f"{node.output[0]}_biases", axis=0)
    weight = graph.insert(node, "Concat", weights, f"{node.output[0]}_weights", axis=1)
    return _Packed(products[0].x, weight, bias, heads, *matrix, (mask, attention_bias))


def _replace(graph: EditedGraph, node: onnx.NodeProto, packed: _Packed) -> None:
    stem = node.output[0]
    size = packed.columns // packed.heads

    def interleaved(value: str, rows: list[int], what: str) -> str:
        """[.., 3, heads, size] -> [.., heads, 3, size], of the last axis."""
        axes = len(rows)
        apart = np.array([*rows, 3, packed.heads, size], np.int64)
        whole = np.array([*rows, 3 * packed.columns], np.int64)
        value = graph.insert(
            node, "Reshape", [value, graph.add_constant(apart, f"{stem}_{what}_apart")],
            f"{stem}_{what}_by_part",
        )  # fmt: skip
        order = [*range(axes), axes + 1, axes, axes + 2]
        value = graph.insert(node, "Transpose", [value], f"{stem}_{what}_by_head", perm=order)
        return graph.insert(
            node, "Reshape", [value, graph.add_constant(whole, f"{stem}_{what}_whole")],
            f"{stem}_{what}",
        )  # fmt: skip

    weight = interleaved(packed.weight, [packed.rows], "weight")
    product = graph.insert(node, "MatMul", [packed.x, weight], f"{stem}_product")
    if packed.bias:
        bias = interleaved(packed.bias, [], "bias")
        product = graph.insert(node, "Add", [product, bias], f"{stem}_biased")
    shape = np.array([0, 0, packed.heads, 3, size], np.int64)
    query = graph.insert(
        node, "Reshape", [product, graph.add_constant(shape, f"{stem}_shape")], f"{stem}_packed"
    )
    kept = {key: value for key, value in attributes_of(node).items() if key in PLAIN}
    operands = [query, "", "", "", *packed.others]
    graph.become(node, "MultiHeadAttention", operands, domain=MICROSOFT, **kept)
