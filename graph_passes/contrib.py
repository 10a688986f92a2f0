"""com.microsoft.FusedGemm(A, B, C?) -> ai.moonpoly.GemmRelu(A, B, C?)

ONNX Runtime's own products, as its optimizers leave them in a model: FusedMatMul, FusedGemm and
FusedConv. Each is checked as the standard operator in it (`stand_ins.py`), and then for what it has
beyond that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from .conv import ConvRule
from .domain import DOMAIN
from .gemm import GemmRule
from .matmul import MatMulRule
from .operators import ACTIVATIONS, OPERATORS, Operator, Residual
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
from .scale import refuse_factor
from .stand_ins import CONTRIB, TRANSPOSED
from .transpose import exchanged

_FUSED = ("Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "HardSigmoid")
"""Activations of FusedGemm and FusedConv that there are operators for."""


class FusedMatMulRule(Rule):
    name = "fused_matmul"
    op_type = "FusedMatMul"
    domain = CONTRIB
    transformation = (
        "com.microsoft.FusedMatMul(A, B) -> ai.moonpoly.Gemm(A, B), ScaledMatMul(A, B) or "
        "MatMulTransposed(A, B)"
    )

    def check_original(self, node: onnx.NodeProto, view: ir.Node, scope: Scope) -> Refusal | None:
        attributes = _given(node)
        if referring := [a.name for a in node.attribute if a.ref_attr_name]:
            return Refusal(
                Reason.UNBOUND_ATTRIBUTE, f"{', '.join(referring)} may differ from call to call"
            )
        for name in ("transBatchA", "transBatchB"):
            if attributes.get(name):
                return Refusal(Reason.RANK_UNSUPPORTED, f"{name} is 1; no product of ours has it")
        turned, alpha = _is_turned(attributes), attributes.get("alpha", 1.0)
        for name, value in zip("AB", view.inputs if turned else (), strict=False):
            shape = None if value is None else value.shape
            if shape is None:
                return Refusal(Reason.RANK_UNKNOWN, f"transposed, and {name} has no known rank")
            if len(shape) < 2 or (len(shape) > 2 and attributes.get("transA")):
                return Refusal(
                    Reason.RANK_UNSUPPORTED,
                    f"transposed, and {name} is {shape}; 2 dimensions are supported, or more where "
                    "only B is transposed",
                )
        is_plain = not turned and alpha == 1.0
        return None if is_plain or _is_rank_2([view]) else _refuse_scaled(alpha, scope)

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        transposed = [flags for flags, name in TRANSPOSED.items() if name == node.op_type]
        if transposed:
            return self._check_transposed(node, transposed[0], scope)
        return MatMulRule().check(node, scope)

    def _check_transposed(
        self, node: ir.Node, flags: Collection[str], scope: Scope
    ) -> Refusal | None:
        if len(node.inputs) != 2 or None in node.inputs:
            return Refusal(Reason.INVALID, f"{len(node.inputs)} inputs; 2 are legal")
        a, b = (value.shape for value in node.inputs if value is not None)
        product = "Gemm" if _is_rank_2([node]) else "MatMul"
        return (
            refuse_opset(node, scope, product)
            or refuse_malformed(node, scope, product)
            or refuse_dtype(node, scope, product)
            or _refuse_inner(a, b, flags)
            or refuse_static(node, scope)
        )

    def refuse_calls(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> Refusal | None:
        if _is_turned(_given(node)) and not _is_rank_2(views) and len(_ranks_of_b(views)) != 1:
            return Refusal(Reason.RANK_UNSUPPORTED, "transposed, and the rank of B differs by call")
        return None

    def rewrite(self, node: ir.Node) -> None:
        node.domain = DOMAIN

    def adapt(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> None:
        attributes = _given(node)
        alpha = float(attributes.get("alpha", 1.0))
        del node.attribute[:]
        if _is_turned(attributes) and not _is_rank_2(views):
            (rank,) = _ranks_of_b(views)
            node.op_type = "MatMulTransposed"
            _set(node, {"perm": exchanged(range(rank)), "alpha": alpha})
        elif _is_turned(attributes) or (alpha != 1.0 and _is_rank_2(views)):
            node.op_type = "Gemm"
            flags = {flag: int(bool(attributes.get(flag))) for flag in ("transA", "transB")}
            _set(node, {**flags, "alpha": alpha, "beta": 1.0})
        elif alpha != 1.0:
            node.op_type = "ScaledMatMul"
            _set(node, {"alpha": alpha})
        else:
            node.op_type = "MatMul"


class FusedGemmRule(Rule):
    name = "fused_gemm"
    op_type = "FusedGemm"
    domain = CONTRIB
    transformation = "com.microsoft.FusedGemm(A, B, C?) -> ai.moonpoly.GemmRelu(A, B, C?)"

    def check_original(self, node: onnx.NodeProto, view: ir.Node, scope: Scope) -> Refusal | None:
        attributes = _given(node)
        given = [attributes.get(f"activation_{which}") for which in ("alpha", "beta")]
        return _refuse_activation(node, [value for value in given if value is not None], scope)

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        return GemmRule().check(node, scope)

    def rewrite(self, node: ir.Node) -> None:
        GemmRule().rewrite(node)

    def adapt(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> None:
        attributes = _given(node)
        operator = Operator("Gemm", _activation(node))
        parameters = ACTIVATIONS[operator.activation].parameters if operator.activation else ()
        _finish(node, operator, [float(attributes[name]) for name in parameters])


class FusedConvRule(Rule):
    name = "fused_conv"
    op_type = "FusedConv"
    domain = CONTRIB
    transformation = "com.microsoft.FusedConv(X, W, B?, Z?) -> ai.moonpoly.ConvAddRelu(X, W, B, Z)"

    def check_original(self, node: onnx.NodeProto, view: ir.Node, scope: Scope) -> Refusal | None:
        return _refuse_activation(node, _given(node).get("activation_params", []), scope)

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        return ConvRule().check(node, scope)

    def rewrite(self, node: ir.Node) -> None:
        node.domain = DOMAIN

    def adapt(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> None:
        inputs = [*node.input, "", ""][:4]
        residual = Residual.BEFORE if inputs[3] else Residual.NONE
        operator = Operator("Conv" if inputs[2] else "ConvNoBias", _activation(node), residual)
        del node.input[:]
        node.input.extend(name for name in inputs if name)
        _finish(node, operator, _given(node).get("activation_params", []))


def _refuse_activation(
    node: onnx.NodeProto, parameters: Sequence[float], scope: Scope
) -> Refusal | None:
    activation = _activation(node)
    if not activation:
        return None
    if activation not in _FUSED:
        return Refusal(
            Reason.NO_SUCH_OPERATOR, f"activation {activation!r}; supported: {', '.join(_FUSED)}"
        )
    needed = len(ACTIVATIONS[activation].parameters)
    if len(parameters) < needed:
        return Refusal(Reason.INVALID, f"{activation} needs {needed} parameters")
    least = ACTIVATIONS[activation].min_opset
    if scope.body_opset is not None and scope.body_opset < least:
        return Refusal(
            Reason.OPSET,
            f"{activation} needs ai.onnx version {least} (CastLike); the model imports "
            f"{scope.body_opset}",
        )
    return None


def _activation(node: onnx.NodeProto) -> str:
    value = _given(node).get("activation", b"")
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _finish(node: onnx.NodeProto, operator: Operator, parameters: Sequence[float]) -> None:
    """Sets the operator and its parameters, and drops attributes that it does not have."""
    node.op_type = operator.name
    names = ACTIVATIONS[operator.activation].parameters if operator.activation else ()
    for attribute in list(node.attribute):
        if attribute.name not in OPERATORS[operator.name].attributes or attribute.name in names:
            node.attribute.remove(attribute)
    _set(node, dict(zip(names, map(float, parameters), strict=False)))


def _given(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node but for those that refer to one of the function around it."""
    return {
        a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name
    }


def _is_turned(attributes: Mapping[str, object]) -> bool:
    return bool(attributes.get("transA") or attributes.get("transB"))


def _is_rank_2(views: Sequence[ir.Node]) -> bool:
    """Whether both operands are known to be matrices, in every call."""
    shapes = [value.shape for view in views for value in view.inputs[:2] if value is not None]
    return all(shape is not None and len(shape) == 2 for shape in shapes)


def _refuse_inner(a: ir.Shape | None, b: ir.Shape | None, flags: Collection[str]) -> Refusal | None:
    if a is None or b is None:
        return None
    return refuse_inner(a[-2 if "transA" in flags else -1], b[-1 if "transB" in flags else -2])


def _ranks_of_b(views: Sequence[ir.Node]) -> set[int]:
    shapes = [value.shape for view in views for value in view.inputs[1:2] if value is not None]
    return {len(shape) for shape in shapes if shape is not None}


def _refuse_scaled(alpha: float, scope: Scope) -> Refusal | None:
    least = OPERATORS["ScaledMatMul"].min_opset
    if scope.body_opset is not None and scope.body_opset < least:
        return Refusal(
            Reason.OPSET,
            f"scaled or transposed: that needs ai.onnx version {least} (CastLike), the model has "
            f"{scope.body_opset}",
        )
    return refuse_factor(alpha)


def _set(node: onnx.NodeProto, attributes: Mapping[str, float | Sequence[int]]) -> None:
    for name, value in attributes.items():
        node.attribute.append(onnx.helper.make_attribute(name, value))
