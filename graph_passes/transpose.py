"""MatMul(A, Transpose(B)) -> ai.moonpoly.Gemm<transB = 1>(A, B), or MatMulTransposed(A, B)

Kernels take either order of both operands. Of rank 2 the product becomes a Gemm, and a Gemm of ours
gets its flag turned. With more axes, MatMulTransposed exchanges the last two of B. The Transpose
goes if nothing else reads it.

Keys of attention, [batch, length, heads, size], come as perm = 0, 2, 3, 1, which lays their numbers
out one by one. Where only the product reads them, the Transpose becomes 0, 2, 1, 3, which copies
whole rows, and leaves rows for the product that are as long as a head, whatever the length is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx

from .fusion import Fused, Fusion, NearMiss, Product
from .operators import Operator
from .report import Reason, Refusal

_FLAGS = ("transA", "transB")


class TransposeFusion(Fusion):
    name = "transpose"
    op_type = "Transpose"
    transformation = (
        "MatMul(A, Transpose(B)) -> ai.moonpoly.Gemm<transB = 1>(A, B), or MatMulTransposed(A, B)"
    )

    def match(self, product: Product) -> Fused | NearMiss | None:
        operator = product.operator
        if operator.base not in ("MatMul", "ScaledMatMul", "Gemm"):
            return None
        if operator.standard == "MatMul" and not operator.is_base:
            return None
        missed = None
        for index, flag in enumerate(_FLAGS):
            transpose = product.producer(product.operand(index))
            if transpose is None or transpose.op_type != "Transpose":
                continue
            if not product.is_standard(transpose) or len(transpose.input) != 1:
                continue
            refusal = _refuse(product, transpose)
            if refusal is not None and flag == "transB" and operator.standard == "MatMul":
                found = _by_perm(product, transpose)
                if isinstance(found, Fused):
                    return found
                refusal = found or refusal
            if refusal is not None:
                missed = missed or NearMiss(transpose, refusal)
                continue
            inputs = list(product.inputs)
            inputs[index] = transpose.input[0]
            attributes: dict[str, float | int] = {flag: 1}
            if operator.standard == "MatMul":
                operator = Operator("Gemm")
                alpha = product.attribute("alpha")
                factor = 1.0 if alpha is None else alpha.f
                attributes = {"transA": 0, "transB": 0, "alpha": factor, "beta": 1.0, flag: 1}
            else:
                old = product.attribute(flag)
                attributes[flag] = 0 if old is not None and old.i else 1
            return Fused(
                operator,
                inputs,
                attributes=attributes,
                concerns=transpose,
            )
        return missed


def _refuse(product: Product, transpose: onnx.NodeProto) -> Refusal | None:
    ranks = [product.rank(product.operand(index)) for index in range(2)]
    if ranks != [2, 2]:
        said = " and ".join("unknown" if rank is None else str(rank) for rank in ranks)
        return Refusal(
            Reason.RANK_UNSUPPORTED,
            f"the operands have rank {said}; 2 is needed, or more where B is transposed",
        )
    for attribute in transpose.attribute:
        if attribute.name == "perm" and list(attribute.ints) != [1, 0]:
            return Refusal(Reason.FORM_UNKNOWN, "its perm is not that of a transposed matrix")
    for flag in (*_FLAGS, "alpha"):
        attribute = product.attribute(flag)
        if attribute is not None and attribute.ref_attr_name:
            return Refusal(Reason.UNBOUND_ATTRIBUTE, f"{flag} differs from call to call")
    return None


def _by_perm(product: Product, transpose: onnx.NodeProto) -> Fused | Refusal | None:
    """The product with B as it is in front of the Transpose, or of a part of it; None where it is
    not yet known whether something else is to be fused, which MatMulTransposed has no place for.
    """
    if not product.joined:
        return None
    rank = product.rank(product.operand(1))
    alpha = product.attribute("alpha")
    referring = [a.name for a in (alpha, *transpose.attribute) if a and a.ref_attr_name]
    if referring:
        return Refusal(Reason.UNBOUND_ATTRIBUTE, f"{referring[0]} differs from call to call")
    perm = _perm(transpose, rank or 0)
    if rank is None or rank < 2 or sorted(perm) != list(range(rank)):
        return Refusal(Reason.RANK_UNKNOWN, "the rank of the transposed operand is not known")
    swap = exchanged(range(rank))
    fused = Fused(
        Operator("MatMulTransposed"),
        [product.operand(0), transpose.input[0]],
        attributes={"alpha": 1.0 if alpha is None else alpha.f, "perm": swap},
        concerns=transpose,
    )
    if _undoes(product, perm, transpose.input[0]):
        return Refusal(
            Reason.FORM_UNKNOWN, "it undoes the Transpose in front: ONNX Runtime removes both"
        )
    if perm == swap:
        return fused
    if perm[-2] != rank - 1:
        return Refusal(Reason.FORM_UNKNOWN, "its perm is not that of a transposed matrix")
    if product.operand(0) == transpose.output[0]:
        return Refusal(Reason.OTHER_READERS, f"{transpose.output[0]!r} is A, too")
    if refusal := product.refuse_readers(transpose.output[0], by=[product.node]):
        return refusal
    rows = onnx.NodeProto()
    rows.CopyFrom(transpose)
    rows.output[0] = product.new_name(f"{transpose.output[0]}/rows")
    del rows.attribute[:]
    rows.attribute.append(onnx.helper.make_attribute("perm", exchanged(perm)))
    return dataclasses.replace(
        fused, inputs=[product.operand(0), rows.output[0]], changes=[(transpose, rows)]
    )


def _undoes(product: Product, perm: Sequence[int], value: str) -> bool:
    """Whether a value is transposed already, and transposed by perm is as it was before."""
    first = product.producer(value)
    if first is None or first.op_type != "Transpose" or not product.is_standard(first):
        return False
    earlier = _perm(first, len(perm))
    return len(earlier) == len(perm) and [earlier[axis] for axis in perm] == sorted(perm)


def _perm(transpose: onnx.NodeProto, rank: int) -> list[int]:
    """That of a Transpose of so many axes: all in reverse, where it says nothing."""
    given = next((list(a.ints) for a in transpose.attribute if a.name == "perm"), [])
    return given or list(range(rank))[::-1]


def exchanged(perm: Sequence[int]) -> list[int]:
    """A permutation with its last two axes in each other's place."""
    return [*perm[:-2], perm[-1], perm[-2]]
