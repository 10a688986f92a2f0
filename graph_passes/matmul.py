"""MatMul(A, B) -> ai.moonpoly.MatMul(A, B)

All ranks and broadcasts of the standard operator: 1-D operands, batch dimensions that broadcast.
A B that is dequantized from constant integers stays: ONNX Runtime makes one MatMulNBits of both,
which reads the integers; a product of ours would have them dequantized anew in every run.
"""

from __future__ import annotations

import onnx_ir as ir

from .domain import DOMAIN
from .report import Reason, Refusal
from .rule import (
    Rule,
    Scope,
    refuse_dtype,
    refuse_inner,
    refuse_malformed,
    refuse_opset,
    refuse_static,
)
from .typed_graph import is_constant

_INTEGERS = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8)


class MatMulRule(Rule):
    name = "matmul"
    op_type = "MatMul"
    transformation = "MatMul(A, B) -> ai.moonpoly.MatMul(A, B)"

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        return (
            refuse_opset(node, scope)
            or refuse_malformed(node, scope)
            or refuse_dtype(node, scope)
            or self._refuse_shapes(node)
            or _refuse_quantized(node)
            or refuse_static(node, scope)
        )

    def rewrite(self, node: ir.Node) -> None:
        node.domain = DOMAIN

    def _refuse_shapes(self, node: ir.Node) -> Refusal | None:
        a, b = (value.shape for value in node.inputs if value is not None)
        if (a is not None and not len(a)) or (b is not None and not len(b)):
            return Refusal(Reason.INVALID, "an operand has rank 0; MatMul needs 1 or more")
        if a is None or b is None:
            return None
        return refuse_inner(a[-1], b[0] if len(b) == 1 else b[-2])


def _refuse_quantized(node: ir.Node) -> Refusal | None:
    b = node.inputs[1]
    producer = None if b is None else b.producer()
    if producer is None or producer.op_type != "DequantizeLinear" or not producer.inputs:
        return None
    stored = producer.inputs[0]
    if stored is None or stored.dtype not in _INTEGERS or not is_constant(stored):
        return None
    return Refusal(
        Reason.QUANTIZED,
        f"B is dequantized from constants of {stored.dtype.name}, which ONNX Runtime multiplies as "
        "they are stored",
    )
