"""Add(MatMul(A, B), R) -> ai.moonpoly.MatMulAdd(A, B, R)

R is proven to have the shape of the product: it broadcasts in neither direction. It is added before
an activation or behind one, or multiplied with a product, where there is an operator for that.
"""

from __future__ import annotations

from .fusion import Fused, Fusion, NearMiss, Product
from .operators import OPERATORS, Operator, Residual
from .report import Reason, Refusal


class ResidualFusion(Fusion):
    name = "residual"
    op_type = "Add, Mul"
    transformation = "Add(MatMul(A, B), R) -> ai.moonpoly.MatMulAdd(A, B, R)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.only_reader()
        operator = product.operator
        if node is None or operator.residual is not Residual.NONE or len(node.input) != 2:
            return None
        if node.op_type not in ("Add", "Mul") or not product.is_standard(node):
            return None
        residual = node.input[list(node.input).index(product.output) ^ 1]
        if residual == product.output:  # a product added to itself
            return None
        if node.op_type == "Mul":
            if not product.settled:  # R may be another product, which has yet to get its activation
                return None
            place = Residual.FACTOR
        else:
            place = Residual.AFTER if operator.activation else Residual.BEFORE
        wanted = Operator(operator.base, operator.activation, place)
        if product.rank(residual) in (0, 1) or wanted.name not in OPERATORS:
            return None
        others = product.refuse_readers(product.output, by=[node])
        refusal = self._refuse_shape(product, residual)
        if others is not None and refusal is not None:  # wrong in every way is no near miss
            return None
        if refusal := others or refusal:
            return NearMiss(node, refusal)
        return Fused(wanted, [*product.inputs, residual], absorbed=[node])

    def _refuse_shape(self, product: Product, residual: str) -> Refusal | None:
        if product.same_shape(residual, product.output):
            return None
        said = []
        for name in (product.output, residual):
            shapes = product.shapes(name)
            said.append(f"{name!r} is {shapes[0] if shapes else 'of unknown rank'}")
        return Refusal(Reason.SHAPE_UNPROVEN, f"not proven to have one shape: {', '.join(said)}")
