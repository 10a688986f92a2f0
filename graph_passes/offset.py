"""Add(Conv(X, W, B), s) -> ai.moonpoly.Conv(X, W, B + s)

s is a constant number, as learned ones stand behind the convolutions of PP-OCRv4, or has a value
for each channel. B is constant or absent. The sums are computed in float64 and rounded once, which
may change the last bits of results.
"""

from __future__ import annotations

import numpy as np

from .bias import per_channel
from .convolution_weights import FLOATS
from .fusion import Fused, Fusion, NearMiss, NewConstant, Product
from .operators import Operator
from .report import Reason, Refusal
from .tree import Array


class OffsetFusion(Fusion):
    name = "offset"
    op_type = "Add"
    transformation = "Add(Conv(X, W, B), s) -> ai.moonpoly.Conv(X, W, B + s)"
    changes_weights = True

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.reader("Add")
        if not product.is_convolution or node is None or not product.is_standard(node):
            return None
        if len(node.input) != 2:
            return None
        addend = product.beside(node)
        offset = _offset(product, addend)
        if offset is None:
            return None
        bias = product.operand(2) if len(product.inputs) > 2 else ""
        refusal = product.refuse_readers(product.output, by=[node])
        found = refusal or _sum(product, bias, offset)
        if isinstance(found, Refusal):
            return NearMiss(node, found)
        return Fused(
            Operator(product.operator.standard),
            [*product.inputs[:2], bias],
            constants={2: NewConstant(f"{node.output[0]}/bias", found)},
            absorbed=[node],
        )


def _offset(product: Product, addend: str) -> Array | None:
    """What is added to each channel, in float64; None where it is neither of the two."""
    if not addend or addend == product.output:
        return None
    number = product.scalar(addend)
    if number is not None:
        return np.array(number)
    found = per_channel(product, addend)
    return found.astype(np.float64) if isinstance(found, np.ndarray) else None


def _sum(product: Product, bias: str, offset: Array) -> Array | Refusal:
    """The new B, of the old one if there is one."""
    if bias:
        if not product.is_constant(bias):
            return Refusal(Reason.NOT_CONSTANT, f"{bias!r} is not a constant")
        old = product.constant(bias)
        if old is None or old.dtype not in FLOATS or old.ndim != 1:
            return Refusal(Reason.INVALID, f"{bias!r} is no vector")
    else:
        sizes = {shape[1] for shape in product.shapes(product.output) or ()}
        dtypes = {view.dtype for view in product.types(product.output)}
        size = sizes.pop() if len(sizes) == 1 else None
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if not isinstance(size, int) or dtype is None:
            return Refusal(Reason.SHAPE_UNPROVEN, "the number of channels or the type is not known")
        old = np.zeros(size, dtype.numpy())
    with np.errstate(all="ignore"):
        new = (old.astype(np.float64) + offset).astype(old.dtype)
    if not np.isfinite(new.astype(np.float64)).all():
        return Refusal(Reason.INEXACT, f"the sum is no finite {old.dtype.name}")
    return new
