"""MatMul(A, Transpose(B)) -> ai.moonpoly.Gemm<transB = 1>(A, B)

For products of rank 2, whose kernels take either order of both operands. A Gemm of ours gets its
flag turned. The Transpose goes if nothing else reads it.
"""

from __future__ import annotations

import onnx

from .fusion import Fused, Fusion, NearMiss, Product
from .operators import Operator
from .report import Reason, Refusal

_FLAGS = ("transA", "transB")


class TransposeFusion(Fusion):
    name = "transpose"
    op_type = "Transpose"
    transformation = "MatMul(A, Transpose(B)) -> ai.moonpoly.Gemm<transB = 1>(A, B)"

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
        return Refusal(Reason.RANK_UNSUPPORTED, f"the operands have rank {said}; 2 is needed")
    for attribute in transpose.attribute:
        if attribute.name == "perm" and list(attribute.ints) != [1, 0]:
            return Refusal(Reason.FORM_UNKNOWN, "its perm is not that of a transposed matrix")
    for flag in (*_FLAGS, "alpha"):
        attribute = product.attribute(flag)
        if attribute is not None and attribute.ref_attr_name:
            return Refusal(Reason.UNBOUND_ATTRIBUTE, f"{flag} differs from call to call")
    return None
