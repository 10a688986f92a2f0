"""Mul(MatMul(A, B), s) -> ai.moonpoly.ScaledMatMul<alpha = s>(A, B)

s is a constant number, behind the product or on one of its operands, as exporters write the scale
of attention; Div by a number too. What the node adds already is scaled with it: beta of a Gemm or a
bias. A convolution has no such attribute, and takes a number behind it into its weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import onnx

from .convolution_weights import scaled
from .fusion import Fused, Fusion, NearMiss, Product
from .operators import BASES
from .report import Reason, Refusal

_SCALED = {
    "MatMul": "ScaledMatMul",
    "MatMulBias": "ScaledMatMulBias",
    "ScaledMatMul": "ScaledMatMul",
    "ScaledMatMulBias": "ScaledMatMulBias",
    "MatMulTransposed": "MatMulTransposed",
    "Gemm": "Gemm",
}
"""What a base becomes. Those to float round in front of the factor, and gated ones multiply."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class ScaleFusion(Fusion):
    name = "scale"
    op_type = "Mul, Div"
    transformation = "Mul(MatMul(A, B), s) -> ai.moonpoly.ScaledMatMul<alpha = s>(A, B)"
    changes_weights = True

    def match(self, product: Product) -> Fused | NearMiss | None:
        behind = _behind(product)
        if isinstance(behind, Fused):
            return behind
        front = _in_front(product)
        return front if isinstance(front, Fused) else behind or front


def _behind(product: Product) -> Fused | NearMiss | None:
    """The product and what it adds are scaled."""
    node = product.reader("Mul", "Div")
    factor = None if node is None else _factor(product, node, product.output)
    if node is None or factor is None:
        return None
    refusal = product.refuse_readers(product.output, by=[node])
    if refusal is None and not product.operator.is_base:
        what = f"{product.operator.name} has no factor behind what it adds or activates"
        refusal = Refusal(Reason.NO_SUCH_OPERATOR, what)
    if refusal is not None:
        return NearMiss(node, refusal)
    if product.is_convolution:
        found = refuse_factor(factor) or scaled(product, node, np.array(factor))
        return NearMiss(node, found) if isinstance(found, Refusal) else found
    return _scaled(product, node, {"alpha": factor, "beta": factor}, absorbed=True)


def _in_front(product: Product) -> Fused | NearMiss | None:
    """An operand is scaled, and nothing else reads it."""
    if product.operator.standard in ("Conv", "ConvTranspose"):
        return None
    missed = None
    for index in range(2):
        node = product.producer(product.operand(index))
        if node is None or len(node.input) != 2:
            continue
        for operand in node.input:
            factor = _factor(product, node, operand)
            if factor is None:
                continue
            refusal = product.refuse_readers(node.output[0], by=[product.node])
            if product.operand(0) == product.operand(1):
                refusal = Refusal(Reason.FORM_UNKNOWN, "both operands are it: it counts twice")
            if refusal is not None:
                missed = missed or NearMiss(node, refusal)
                continue
            found = _scaled(product, node, {"alpha": factor}, operand={index: operand})
            if isinstance(found, Fused):
                return found
            missed = missed or found
    return missed


def _factor(product: Product, node: onnx.NodeProto, value: str) -> float | None:
    """The number that a node multiplies a value with, whose shape it keeps."""
    if node.op_type not in ("Mul", "Div") or not product.is_standard(node):
        return None
    if len(node.input) != 2 or value not in node.input:
        return None
    if node.op_type == "Div" and node.input[0] != value:
        return None
    other = node.input[list(node.input).index(value) ^ 1]
    rank = product.least_rank() if value == product.output else product.rank(value)
    number = None if other == value else product.number(other, rank or 0)
    if number is None or node.op_type == "Mul":
        return number
    return 1 / number if number else math.inf


def _scaled(
    product: Product,
    node: onnx.NodeProto,
    factors: Mapping[str, float],
    *,
    absorbed: bool = False,
    operand: Mapping[int, str] | None = None,
) -> Fused | NearMiss:
    base = _SCALED.get(product.operator.base)
    if base is None:
        what = f"{product.operator.name} has no factor"
        return NearMiss(node, Refusal(Reason.NO_SUCH_OPERATOR, what))
    attributes: dict[str, float | int] = {}
    for name in [name for name in ("alpha", "beta") if name in BASES[base].attributes]:
        old = product.attribute(name)
        if old is not None and old.ref_attr_name:
            return NearMiss(
                node, Refusal(Reason.UNBOUND_ATTRIBUTE, f"{name} differs from call to call")
            )
        factor = factors.get(name, 1.0)
        attributes[name] = (1.0 if old is None else old.f) * factor
        refusal = refuse_factor(factor)
        if refusal is None and old is not None and old.f:
            refusal = refuse_factor(attributes[name])
        if refusal is not None:
            return NearMiss(node, refusal)
    inputs = [(operand or {}).get(index, name) for index, name in enumerate(product.inputs)]
    return Fused(
        dataclasses.replace(product.operator, base=base),
        inputs,
        absorbed=[node] if absorbed else [],
        attributes=attributes,
        concerns=node,
    )


def refuse_factor(factor: float) -> Refusal | None:
    """A product times 0 is NaN where it overflows, and no number is larger than fp32's."""
    if _SMALLEST <= abs(factor) <= _LARGEST:
        return None
    return Refusal(Reason.INEXACT, f"the factor is {factor:g}, which is no normal number of fp32")
