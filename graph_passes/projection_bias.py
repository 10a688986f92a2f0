"""MultiHeadAttention(x Wq, x Wk, x Wv, b) -> MultiHeadAttention(x Wq + bq, x Wk + bk, x Wv + bv)

Of com.microsoft. Behind the products, a bias is fused into them; in attention it is a kernel of its
own, or three, that read and write all of Q, K and V. The same where one product is split into the
three, to which b is then added whole.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx

from . import multi_head_attention, projection
from .edited_graph import EditedGraph, edit
from .multi_head_attention import BIAS
from .projection import Projection

_OPSET = 13  # the first whose Split takes its sizes as an input


def move(model: onnx.ModelProto) -> int:
    """Moves biases of the main graph's attention nodes to their products; returns how many.

    A bias stays if it is no constant, or if Q, K or V is not the product of a constant matrix or is
    read elsewhere.
    """
    return edit(model, lambda graph: partial(_move, graph), opset=_OPSET)


def _move(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if not multi_head_attention.is_attention(node):
        return 0
    operands = list(node.input)
    if len(operands) <= BIAS or operands[BIAS] not in graph.initializers:
        return 0
    if not (_split(graph, node, operands) or _three(graph, node, operands)):
        return 0
    operands[BIAS] = ""
    graph.rewire(node, operands)
    return 1


def _product(graph: EditedGraph, value: str, reader: onnx.NodeProto) -> Projection | None:
    """The product without a bias that a value is, if only `reader` reads it."""
    found = projection.find(graph, value)
    if found is None or found.total is not None or not graph.is_read_only_by(value, reader):
        return None
    return found


def _columns(graph: EditedGraph, product: Projection) -> int:
    matrix = graph.matrix(product.weight)
    return matrix[1] if matrix else 0


def _split(graph: EditedGraph, node: onnx.NodeProto, operands: list[str]) -> bool:
    """Q, K and V are all of a Split, in this order."""
    split = graph.producer(operands[0], "Split")
    if split is None or list(split.output) != operands[:3]:
        return False
    product = _product(graph, split.input[0], split)
    if product is None or graph.shape(operands[BIAS]) != [_columns(graph, product)]:
        return False
    inputs = [product.output, operands[BIAS]]
    total = graph.insert(split, "Add", inputs, f"{inputs[0]}_biased")
    graph.rewire(split, [total, *split.input[1:]])
    return True


def _three(graph: EditedGraph, node: onnx.NodeProto, operands: list[str]) -> bool:
    """Changes `operands` if Q, K and V are products of their own."""
    found = [_product(graph, value, node) for value in operands[:3]]
    products = [product for product in found if product is not None]
    sizes = [_columns(graph, product) for product in products]
    if len(set(operands[:3])) != 3 or len(products) != 3:
        return False
    if graph.shape(operands[BIAS]) != [sum(sizes)]:
        return False
    stem = operands[BIAS]
    parts = [graph.new_name(f"{stem}_{part}") for part in "qkv"]
    lengths = graph.add_constant(np.array(sizes, np.int64), f"{stem}_sizes")
    graph.insert_for(node, "Split", [stem, lengths], parts, axis=0)
    for index, part in enumerate(parts):
        inputs = [operands[index], part]
        operands[index] = graph.insert(node, "Add", inputs, f"{operands[index]}_biased")
    return True
