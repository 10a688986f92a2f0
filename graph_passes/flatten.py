"""Reshape(Gemm(Reshape(X, [-1, K]), B, C)) -> ai.moonpoly.MatMulBias(X, B, C)

Exporters flatten the leading dimensions of X to use a Gemm, and unfold them behind it. MatMul does
so without being told, and then a residual of the unfolded shape can be added in it.
"""

from __future__ import annotations

from .fusion import Fused, Fusion, NearMiss, Product, same_size
from .operators import Operator
from .report import Reason, Refusal


class FlattenFusion(Fusion):
    name = "flatten"
    op_type = "Reshape"
    transformation = "Reshape(Gemm(Reshape(X, [-1, K]), B, C)) -> ai.moonpoly.MatMulBias(X, B, C)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        if product.operator != Operator("Gemm"):
            return None
        flat, unfolding = product.producer(product.operand(0)), product.only_reader()
        if flat is None or unfolding is None:
            return None
        for node in (flat, unfolding):
            if node.op_type != "Reshape" or not product.is_standard(node) or len(node.input) != 2:
                return None
        if unfolding.input[0] != product.output:
            return None
        refusal = product.refuse_readers(product.output, by=[unfolding])
        refusal = refusal or _refuse_factors(product)
        refusal = refusal or _refuse_shapes(product, flat.input[0], unfolding.output[0])
        if refusal is not None:
            return NearMiss(unfolding, refusal)
        bias = product.operand(2)
        return Fused(
            Operator("MatMulBias" if bias else "MatMul"),
            [flat.input[0], product.operand(1), *([bias] if bias else [])],
            absorbed=[unfolding],
        )


def _refuse_factors(product: Product) -> Refusal | None:
    wanted = {"transA": 0, "transB": 0, "alpha": 1.0}
    if product.operand(2):
        wanted["beta"] = 1.0
    for name, value in wanted.items():
        attribute = product.attribute(name)
        if attribute is None or attribute.ref_attr_name or (attribute.i or attribute.f) != value:
            return Refusal(Reason.FORM_UNKNOWN, f"{name} is not {value:g}, as MatMul has it")
    return None


def _refuse_shapes(product: Product, x: str, unfolded: str) -> Refusal | None:
    """[.., K] and [.., N], with the same dimensions in front."""
    if not product.same_sizes(x, unfolded, slice(0, -1)):
        return Refusal(
            Reason.SHAPE_UNPROVEN, f"{unfolded!r} is not proven to unfold what {x!r} had flattened"
        )
    pairs = [(x, product.operand(0)), (unfolded, product.output)]
    bias = product.operand(2)
    if bias:
        pairs.append((product.output, bias))
        if product.rank(bias) != 1:
            return Refusal(Reason.BROADCASTS, f"C is {product.shapes(bias)}, not a vector")
    for one, other in pairs:
        columns = [
            [shape[-1] for shape in product.shapes(value) or () if len(shape)]
            for value in (one, other)
        ]
        known = columns[0] and len(columns[0]) == len(columns[1])
        if not known or not all(map(same_size, *columns)) or 0 in columns[0]:
            return Refusal(Reason.SHAPE_UNPROVEN, f"{one!r} and {other!r} may differ in columns")
    return None
