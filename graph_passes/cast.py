"""Cast<to = FLOAT>(MatMul(A, B)) -> ai.moonpoly.MatMulToFloat(A, B)

Exporters of 16-bit models put such a Cast behind the product that gives the logits, and others
behind attention scores. The result is rounded to the type of the product all the same, so that
values stay what they are.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from .fusion import Fused, Fusion, NearMiss, Product
from .operators import OPERATORS, Operator
from .report import Reason, Refusal

_HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


class CastFusion(Fusion):
    name = "cast"
    op_type = "Cast"
    transformation = "Cast<to = FLOAT>(MatMul(A, B)) -> ai.moonpoly.MatMulToFloat(A, B)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.reader("Cast")
        if node is None or not product.is_standard(node):
            return None
        to = next((a for a in node.attribute if a.name == "to" and not a.ref_attr_name), None)
        if to is None or to.i != onnx.TensorProto.FLOAT:
            return None
        dtypes = {view.dtype for view in product.types(product.output)}
        if not dtypes or not dtypes <= _HALVES:
            return None
        operator = product.operator
        wanted = Operator(f"{operator.base}ToFloat")
        refusal = product.refuse_readers(product.output, by=[node])
        if refusal is None and (not operator.is_base or wanted.name not in OPERATORS):
            detail = f"there is no {operator.name} with a result of fp32"
            refusal = Refusal(Reason.NO_SUCH_OPERATOR, detail)
        if refusal is not None:
            return NearMiss(node, refusal)
        return Fused(wanted, product.inputs, absorbed=[node])
