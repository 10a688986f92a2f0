"""x Wq, x Wk, x Wv -> Split(x Concat(Wq, Wk, Wv)), in front of attention

The products of one input that queries, keys and values are made of become one, with their biases.
K and V may be narrower than Q, and a rotary embedding, a cache and the repetition of heads may
stand between them and the attention. One product and a Split in place of three products are a
launch and a node less, and a wide product uses a GPU better than narrow ones; the Split costs a
pass through the result.

The weights are put together by a node that reads nothing but constants: ONNX Runtime computes it
once, when a session is created, and weights are neither read nor copied here.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from . import projection
from .edited_graph import MICROSOFT, EditedGraph, edit
from .projection import Projection

_OPSET = 13  # the first whose Split takes its sizes as an input
_PASSED = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Gather", "Identity",
    "RotaryEmbedding",
})  # fmt: skip
"""What may stand between a product and its attention, with the value as first input."""
_DEEPEST = 16


def merge(model: onnx.ModelProto) -> int:
    """Merges the products in front of the main graph's MultiHeadAttention and GroupQueryAttention
    nodes, in place; returns how many nodes it served.
    """
    return edit(model, lambda graph: _Merging(graph).merge, opset=_OPSET)


class _Merging:
    """Merges products once, and only those that were there before."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._order = {id(node): index for index, node in enumerate(graph.nodes)}
        self._merged: set[int] = set()

    def merge(self, node: onnx.NodeProto) -> int:
        known = node.op_type in ("MultiHeadAttention", "GroupQueryAttention")
        if not known or node.domain != MICROSOFT or len(node.input) < 3:
            return 0
        found = [_source(self._graph, value, self._order) for value in node.input[:3]]
        products = [product for product in found if product is not None]
        ids = {id(product.product) for product in products}
        if len(ids) != 3 or ids & self._merged or not _fit(self._graph, products):
            return 0
        _merge(self._graph, sorted(products, key=lambda one: self._order[id(one.product)]))
        self._merged |= ids
        return 1


def _source(
    graph: EditedGraph, value: str, order: dict[int, int], depth: int = _DEEPEST
) -> Projection | None:
    """The product that a query, key or value is made of alone, but for a cache in front of it or
    rows of constants behind it.
    """
    node = graph.producer(value)
    if node is None or id(node) not in order or not depth:
        return None
    if node.op_type in ("MatMul", "Add"):
        return projection.find(graph, value)
    if node.op_type == "Concat" and len(node.input) == 2:
        sources = (_source(graph, part, order, depth - 1) for part in node.input)
        found = [source for source in sources if source is not None]
        return found[0] if len(found) == 1 else None
    if node.op_type in _PASSED:
        return _source(graph, node.input[0], order, depth - 1)
    return None


def _fit(graph: EditedGraph, products: list[Projection]) -> bool:
    """One input, and weights of one height and type."""
    inputs = {product.x for product in products}
    weights = [product.weight for product in products]
    heights = {matrix[0] for matrix in map(graph.matrix, weights) if matrix is not None}
    types = {graph.element_type(weight) for weight in weights}
    return len(inputs) == len(heights) == len(types) == 1


def _merge(graph: EditedGraph, products: list[Projection]) -> None:
    first = products[0].product
    stem = "_".join(product.product.output[0] for product in products)
    weights = [product.weight for product in products]
    columns = [matrix[1] for matrix in map(graph.matrix, weights) if matrix is not None]
    for product in products:
        graph.hoist(product.weight)
        graph.hoist(product.bias)
    weight = graph.insert(first, "Concat", weights, f"{stem}_weights", axis=1)
    whole = graph.insert(first, "MatMul", [first.input[0], weight], f"{stem}_product")
    if any(product.bias for product in products):
        dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(weights[0]))
        biases = [
            product.bias or graph.add_constant(np.zeros(size, dtype), f"{stem}_no_bias")
            for product, size in zip(products, columns, strict=True)
        ]
        bias = graph.insert(first, "Concat", biases, f"{stem}_biases", axis=0)
        whole = graph.insert(first, "Add", [whole, bias], f"{stem}_biased")
    sizes = graph.add_constant(np.array(columns, np.int64), f"{stem}_columns")
    outputs = [product.output for product in products]
    for product in products:
        graph.remove(product.total or product.product)
    graph.insert_for(first, "Split", [whole, sizes], outputs, axis=-1)
