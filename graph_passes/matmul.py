"""MatMul(A, B) -> ai.moonpoly.MatMul(A, B)

All ranks and broadcasts of the standard operator: 1-D operands, batch dimensions that broadcast.
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
