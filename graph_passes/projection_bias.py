"""MultiHeadAttention(x Wq, x Wk, x Wv, b) -> MultiHeadAttention(x Wq + bq, x Wk + bk, x Wv + bv)

Of com.microsoft. Behind the products, a bias is fused into them; in attention it is a kernel of its
own, or three, that read and write all of Q, K and V. The same where one product is split into the
three, to which b is then added whole.
"""

from __future__ import annotations

import numpy as np
import onnx

from .domain import imported_version
from .edited_graph import MICROSOFT, EditedGraph

_OPSET = 13  # the first whose Split takes its sizes as an input
_BIAS = 3


def move(model: onnx.ModelProto) -> int:
    """Moves biases of the main graph's attention nodes to their products; returns how many.

    A bias stays if it is no constant, or if Q, K or V is not the product of a constant matrix or is
    read elsewhere.
    """
    if (imported_version(model.opset_import) or 0) < _OPSET:
        return 0
    graph = EditedGraph(model)
    count = 0
    for node in graph.nodes:
        if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT:
            continue
        operands = list(node.input)
        if len(operands) <= _BIAS or operands[_BIAS] not in graph.initializers:
            continue
        if not (_split(graph, node, operands) or _three(graph, node, operands)):
            continue
        operands[_BIAS] = ""
        graph.rewire(node, operands)
        count += 1
    if count:
        graph.finish()
    return count


def _product(graph: EditedGraph, value: str, *readers: onnx.NodeProto) -> onnx.NodeProto | None:
    node = graph.producer(value, "MatMul")
    if node is None or node.domain or not graph.is_read_only_by(value, *readers):
        return None
    return node if graph.matrix(node.input[1]) else None


def _columns(graph: EditedGraph, product: onnx.NodeProto) -> int:
    matrix = graph.matrix(product.input[1])
    return matrix[1] if matrix else 0


def _split(graph: EditedGraph, node: onnx.NodeProto, operands: list[str]) -> bool:
    """Q, K and V are all of a Split, in this order."""
    split = graph.producer(operands[0], "Split")
    if split is None or list(split.output) != operands[:3]:
        return False
    product = _product(graph, split.input[0], split)
    if product is None or graph.shape(operands[_BIAS]) != [_columns(graph, product)]:
        return False
    inputs = [product.output[0], operands[_BIAS]]
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
    if graph.shape(operands[_BIAS]) != [sum(sizes)]:
        return False
    stem = operands[_BIAS]
    parts = [graph.new_name(f"{stem}_{part}") for part in "qkv"]
    lengths = graph.add_constant(np.array(sizes, np.int64), f"{stem}_sizes")
    graph.insert_for(node, "Split", [stem, lengths], parts, axis=0)
    for index, part in enumerate(parts):
        inputs = [operands[index], part]
        operands[index] = graph.insert(node, "Add", inputs, f"{operands[index]}_biased")
    return True
