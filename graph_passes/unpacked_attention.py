"""Attention(x, Concat(Wq, Wk, Wv), b) -> MultiHeadAttention(x Wq, x Wk, x Wv, b)
Attention(x, W, b) -> MultiHeadAttention(Split(x W), b), for a weight that is packed for good

Of com.microsoft. Attention multiplies by the packed weight itself, in cuBLAS; unpacked, the
products are nodes that the rules of products take. Not part of the rewrite: `optimize=` asks for
it by name ("onnxscript-mha").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .domain import imported_version

MICROSOFT = "com.microsoft"

_SIZES = "qkv_hidden_sizes"
_KEPT = ("num_heads", "unidirectional", "mask_filter_value", "scale")
"""Attributes that mean the same on both operators. A node with others than these stays."""

_INPUT, _WEIGHT, _BIAS, _MASK, _PAST, _ATTENTION_BIAS = range(6)
_SPLIT_TAKES_SIZES = 13  # the opset from which they are an input


def unpack(model: onnx.ModelProto) -> int:
    """Unpacks the main graph's Attention nodes, in place; returns how many.

    A node stays if it has a mask of lengths, a cache, a second output or rotary embedding, or a
    weight whose columns are not known to be those of Q, K and V.
    """
    opset = imported_version(model.opset_import) or 0
    producers = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        unpacked = None
        if _is_plain(node):
            weight = node.input[_WEIGHT]
            if parts := _concatenated(producers.get(weight)):
                unpacked = _three_products(node, parts)
            elif weight in constants and opset >= _SPLIT_TAKES_SIZES:
                unpacked = _split_product(node, constants[weight], model.graph)
        nodes += unpacked or [node]
        count += unpacked is not None
    if count:
        read = {name for node in nodes for name in node.input}
        read |= {value.name for value in model.graph.output}
        nodes = [node for node in nodes if node.op_type != "Concat" or node.output[0] in read]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return count


def _is_plain(node: onnx.NodeProto) -> bool:
    return (
        node.op_type == "Attention"
        and node.domain == MICROSOFT
        and len(node.output) == 1
        and len(node.input) <= _ATTENTION_BIAS + 1
        and all(attribute.name in (*_KEPT, _SIZES) for attribute in node.attribute)
        and not _operand(node, _MASK)
        and not _operand(node, _PAST)
    )


def _operand(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def _concatenated(node: onnx.NodeProto | None) -> Sequence[str] | None:
    """The weights of Q, K and V where they are packed in the graph, along the columns."""
    if node is None or node.op_type != "Concat" or len(node.input) != 3:
        return None
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    return node.input if axis in (1, -1) else None


def _three_products(node: onnx.NodeProto, weights: Sequence[str]) -> list[onnx.NodeProto]:
    parts = _part_names(node)
    products = [
        helper.make_node("MatMul", [node.input[_INPUT], weight], [part], f"{part}_MatMul")
        for part, weight in zip(parts, weights, strict=True)
    ]
    return [*products, _attention(node, parts)]


def _split_product(
    node: onnx.NodeProto, weight: onnx.TensorProto, graph: onnx.GraphProto
) -> list[onnx.NodeProto] | None:
    sizes = next((list(a.ints) for a in node.attribute if a.name == _SIZES), None)
    columns = weight.dims[1] if len(weight.dims) == 2 else 0
    sizes = sizes or [columns // 3] * 3
    if len(sizes) != 3 or not columns or sum(sizes) != columns:
        return None
    parts = _part_names(node)
    packed, lengths = f"{node.output[0]}_qkv", f"{node.output[0]}_qkv_sizes"
    graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), lengths))
    return [
        helper.make_node("MatMul", list(node.input[:2]), [packed], f"{packed}_MatMul"),
        helper.make_node("Split", [packed, lengths], parts, f"{packed}_Split", axis=-1),
        _attention(node, parts),
    ]


def _part_names(node: onnx.NodeProto) -> list[str]:
    return [f"{node.output[0]}_{part}" for part in "qkv"]


def _attention(node: onnx.NodeProto, parts: Sequence[str]) -> onnx.NodeProto:
    operands = [*parts, _operand(node, _BIAS), "", _operand(node, _ATTENTION_BIAS)]
    while not operands[-1]:
        operands.pop()
    attention = helper.make_node(
        "MultiHeadAttention", operands, list(node.output), node.name, domain=MICROSOFT
    )
    attention.attribute.extend(a for a in node.attribute if a.name in _KEPT)
    return attention
