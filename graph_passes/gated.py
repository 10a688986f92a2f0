"""Mul(Silu(MatMul(X, G)), MatMul(X, U)) -> ai.moonpoly.MatMulGatedSilu(X, GU)

SwiGLU, GeGLU and their kind: two products of one input, at most one with an activation, multiplied
with each other. The columns of both weights alternate in one constant of the same size, and so do
the biases; one launch then computes both products, whose epilogue multiplies neighbours.

Weights that others read stay beside the new ones. They must be initializers of the main graph, so
that their data is moved without being parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .fusion import Fused, Fusion, NearMiss, NewConstant, Product
from .operators import ACTIVATIONS, Operator, Residual
from .report import Reason, Refusal
from .tree import Array, Columns

GATED = {"MatMul": "MatMulGated", "MatMulBias": "MatMulGatedBias"}
"""What becomes of a product in which gates and values alternate."""


class _Pair(NamedTuple):
    """The two products: of the gates, which has the activation, and of the values."""

    gate: Product
    value: Product


class GatedFusion(Fusion):
    name = "gated"
    op_type = "Mul"
    transformation = (
        "Mul(Silu(MatMul(X, G)), MatMul(X, U)) -> ai.moonpoly.MatMulGatedSilu(X, GU), the columns "
        "of G and U in turn"
    )
    changes_weights = True

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.only_reader()
        if not product.settled or node is None or node.op_type != "Mul":
            return None
        if not product.is_standard(node) or len(node.input) != 2:
            return None
        partner = product.neighbour(product.beside(node))
        if partner is None or partner.node is product.node:
            return None
        pair = _paired(product, partner)
        if pair is None:
            return None
        gate, value = pair
        refusal = product.refuse_readers(product.output, partner.output, by=[node])
        biases = None
        if refusal is None and len(gate.inputs) > 2:
            biases = _alternating_biases(gate, value)
            refusal = biases if isinstance(biases, Refusal) else None
        weights = Columns(gate.operand(1)), Columns(value.operand(1))
        refusal = refusal or product.refuse_alternating(*weights)
        if refusal is not None:
            return NearMiss(node, refusal)
        activation = gate.operator.activation
        parameters = ACTIVATIONS[activation].parameters if activation else ()
        numbers = {name: gate.attribute(name) for name in parameters}
        return Fused(
            Operator(GATED[gate.operator.base], activation),
            gate.inputs,
            absorbed=[partner.node, node],
            constants={} if biases is None or isinstance(biases, Refusal) else {2: biases},
            alternating={1: weights},
            attributes={name: number.f for name, number in numbers.items() if number is not None},
        )


def _paired(one: Product, other: Product) -> _Pair | None:
    """The products in their roles; None where they are no such pair."""
    for product in (one, other):
        if product.operator.base not in GATED or product.operator.residual is not Residual.NONE:
            return None
    if one.operator.base != other.operator.base or one.operand(0) != other.operand(0):
        return None
    activated = [product for product in (one, other) if product.operator.activation]
    if len(activated) == 2:
        return None
    return _Pair(other, one) if activated == [other] else _Pair(one, other)


def _alternating_biases(gate: Product, value: Product) -> NewConstant | Refusal:
    arrays = []
    for product in (gate, value):
        array = product.constant(product.operand(2))
        if array is None:
            return Refusal(Reason.NOT_CONSTANT, f"{product.operand(2)!r} is not a constant")
        arrays.append(array)
    if arrays[0].shape != arrays[1].shape:
        shapes = " and ".join(str(list(array.shape)) for array in arrays)
        return Refusal(Reason.BROADCASTS, f"the biases are {shapes}")
    return alternating(gate.operand(2), *arrays)


def alternating(name: str, one: Array, other: Array) -> NewConstant:
    """The elements of two biases in turn, under a name that tells where they come from."""
    return NewConstant(f"{name}/gated", np.stack([one, other], axis=-1).reshape(-1))
