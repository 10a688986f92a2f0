"""x W and x W + b: the products that queries, keys and values of attention are made of."""

from __future__ import annotations

from typing import NamedTuple

import onnx

from .edited_graph import EditedGraph


class Projection(NamedTuple):
    """The node of the product, that of the sum if there is one, and the name of b or nothing."""

    product: onnx.NodeProto
    total: onnx.NodeProto | None
    bias: str

    @property
    def x(self) -> str:
        return str(self.product.input[0])

    @property
    def weight(self) -> str:
        return str(self.product.input[1])

    @property
    def output(self) -> str:
        return str((self.total or self.product).output[0])


def find(graph: EditedGraph, value: str) -> Projection | None:
    """The projection that a value is: W a constant matrix, b a constant with its columns, and x W
    read by nothing but the sum.
    """
    node = graph.producer(value, "MatMul", "Add")
    if node is None or node.domain:
        return None
    if node.op_type == "MatMul":
        return Projection(node, None, "") if graph.matrix(node.input[1]) else None
    for operand, bias in (node.input, reversed(node.input)):
        product = graph.producer(operand, "MatMul")
        if product is None or product.domain:
            continue
        matrix = graph.matrix(product.input[1])
        fits = matrix is not None and graph.constant_dims(bias) == [matrix[1]]
        if fits and graph.is_read_only_by(operand, node):
            return Projection(product, node, bias)
    return None
