"""Numbers that a graph computes from constants: Sqrt(CastLike(2.0, x)) of Gelu's function body.

Function bodies and exporters write their numbers in the type of a tensor by CastLike or Cast, and
leave sqrt(2 / pi) to whoever folds constants. The rewrite comes before that.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from .fusion import Product

_FLOATS = {
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
}


def computed_number(product: Product, value: str, rank: int, depth: int) -> float | None:
    """The number that at most `depth` nodes in a row compute from constants, in the same graph.

    All values on the way have a rank up to `rank`.

    Raises:
        UnreadableError: A constant is in another file, which cannot be read.
    """
    node = product.producer(value)
    if node is None or not depth or not product.is_standard(node) or len(node.output) != 1:
        return None
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return None
    dtypes = {view.dtype for view in product.types(value)}
    if not dtypes or not dtypes <= _FLOATS:
        return None
    # What else CastLike reads gives a type, no number.
    names = node.input[:1] if node.op_type == "CastLike" else node.input
    numbers = [product.number(name, rank, depth - 1) for name in names]
    known = [number for number in numbers if number is not None]
    return _result(node.op_type, known) if known and len(known) == len(numbers) else None


def _result(op_type: str, numbers: list[float]) -> float | None:
    match op_type, numbers:
        case (("Cast" | "CastLike" | "Identity"), [x]):
            return x
        case "Neg", [x]:
            return -x
        case "Sqrt", [x] if x >= 0:
            return math.sqrt(x)
        case "Reciprocal", [x] if x:
            return 1 / x
        case "Add", [x, y]:
            return x + y
        case "Sub", [x, y]:
            return x - y
        case "Mul", [x, y]:
            return x * y
        case "Div", [x, y] if y:
            return x / y
    return None
