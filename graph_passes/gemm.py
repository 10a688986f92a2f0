"""Gemm(A, B, C?) -> ai.moonpoly.Gemm(A, B, C?)

transA, transB, alpha and beta are written out on the new node, so that neither the function body
nor a kernel has to know their defaults. C may have any shape that broadcasts to the output, or be
absent.
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

_FLAGS = ("transA", "transB")
_FACTORS = ("alpha", "beta")


class GemmRule(Rule):
    name = "gemm"
    op_type = "Gemm"
    transformation = "Gemm(A, B, C?) -> ai.moonpoly.Gemm(A, B, C?)"

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        return (
            refuse_opset(node, scope)
            or refuse_malformed(node, scope)
            or refuse_dtype(node, scope)
            or self._refuse_flags(node)
            or self._refuse_shapes(node)
            or refuse_static(node, scope)
        )

    def rewrite(self, node: ir.Node) -> None:
        node.domain = DOMAIN
        for flag in _FLAGS:
            if flag not in node.attributes:
                node.attributes.add(ir.AttrInt64(flag, 0))
        for factor in _FACTORS:
            if factor not in node.attributes:
                node.attributes.add(ir.AttrFloat32(factor, 1.0))

    def _refuse_flags(self, node: ir.Node) -> Refusal | None:
        for flag in _FLAGS:
            value = node.attributes.get_int(flag, 0)
            if value not in (0, 1):
                return Refusal(Reason.INVALID, f"{flag} is {value}; 0 and 1 are legal")
        return None

    def _refuse_shapes(self, node: ir.Node) -> Refusal | None:
        a, b = (value.shape for value in node.inputs[:2] if value is not None)
        for name, shape in (("A", a), ("B", b)):
            if shape is not None and len(shape) != 2:
                return Refusal(Reason.INVALID, f"{name} is {shape}; Gemm needs rank 2")
        if a is None or b is None:
            return None
        return refuse_inner(
            a[0 if node.attributes.get_int("transA", 0) else 1],
            b[1 if node.attributes.get_int("transB", 0) else 0],
        )
