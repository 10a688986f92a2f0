"""Add(MatMul(A, B), R) -> ai.moonpoly.MatMulAdd(A, B, R)

R is proven to have the shape of the product: it broadcasts in neither direction. It is added before
an activation or behind one, or multiplied with a product, where there is an operator for that.
"""

from __future__ import annotations

import onnx

from .fusion import Fused, Fusion, NearMiss, Product
from .operators import Operator, Residual
from .report import Reason, Refusal


class ResidualFusion(Fusion):
    name = "residual"
    op_type = "Add, Mul"
    transformation = "Add(MatMul(A, B), R) -> ai.moonpoly.MatMulAdd(A, B, R)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.reader("Add", "Mul")
        operator = product.operator
        if node is None or len(node.input) != 2 or not product.is_standard(node):
            return None
        residual = product.beside(node)
        if node.op_type == "Mul":
            if not product.settled:  # R may be another product, which has yet to get its activation
                return None
            place = Residual.FACTOR
        else:
            place = Residual.AFTER if operator.activation else Residual.BEFORE
        if self._is_of_other_rules(product, node, residual):
            return None
        wanted = Operator(operator.base, operator.activation, place)
        others = product.refuse_readers(product.output, by=[node])
        refusal = self._refuse_shape(product, residual)
        if others is not None and refusal is not None:  # wrong in every way is no near miss
            return None
        if refusal := others or refusal:
            return NearMiss(node, refusal)
        if operator.residual is not Residual.NONE:
            detail = f"{operator.name} has an R already"
            return NearMiss(node, Refusal(Reason.NO_SUCH_OPERATOR, detail))
        return Fused(wanted, [*product.inputs, residual], absorbed=[node])

    def _is_of_other_rules(self, product: Product, node: onnx.NodeProto, residual: str) -> bool:
        """Vectors that are added and numbers: a bias and a scale say what is wrong with them."""
        if node.op_type == "Add":
            return product.rank(residual) in (0, 1)
        return product.scalar(residual) is not None

    def _refuse_shape(self, product: Product, residual: str) -> Refusal | None:
        if residual == product.output:
            return Refusal(Reason.FORM_UNKNOWN, "both operands are the product itself")
        if product.same_shape(residual, product.output):
            return None
        said = []
        for name in (product.output, residual):
            shapes = product.shapes(name)
            said.append(f"{name!r} is {shapes[0] if shapes else 'of unknown rank'}")
        return Refusal(Reason.SHAPE_UNPROVEN, f"not proven to have one shape: {', '.join(said)}")
