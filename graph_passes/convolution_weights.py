"""A factor and an offset for each channel behind a convolution, taken into W and B.

The new constants are computed in float64 and rounded once, and only where that is accurate in their
type. They come last among the initializers, or into Constant nodes where the old W was in one.
Constants that nothing reads any more go.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx

from .fusion import Fused, NewConstant, Product
from .operators import BASES, Operator
from .report import Reason, Refusal
from .tree import Array

FLOATS = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def scaled(
    product: Product, node: onnx.NodeProto, factor: Array, offset: Array | None = None
) -> Fused | Refusal:
    """What becomes of a convolution that absorbs a node behind it.

    Args:
        product: A convolution.
        node: What multiplies its output with `factor` and then adds `offset`.
        factor: A float64 for each output channel, or one for all of them.
        offset: A float64 for each output channel.
    """
    transposed = product.operator.standard == "ConvTranspose"
    group = product.attribute("group")
    if transposed and group is not None and group.ref_attr_name:
        return Refusal(Reason.UNBOUND_ATTRIBUTE, "group differs from call to call")
    arrays: list[Array] = []
    for name in filter(None, product.inputs[1:]):
        if not product.is_constant(name):
            return Refusal(Reason.NOT_CONSTANT, f"{name!r} is not a constant")
        try:
            array = product.weight(name)
        except ValueError as error:
            return Refusal(Reason.INVALID, f"{name!r} cannot be read: {error}")
        if array.dtype not in FLOATS:
            return Refusal(Reason.INVALID, f"{name!r} is of type {array.dtype.name}")
        arrays.append(array)
    weight, *vectors = arrays
    groups = 1 if group is None else group.i
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if offset is not None:
        vectors.append(offset)
    if any(v.shape != (channels,) for v in (*vectors, *([factor] if factor.ndim else []))):
        return Refusal(Reason.INVALID, f"constants of other than {channels} channels")
    factor = np.broadcast_to(factor, channels)
    with np.errstate(all="ignore"):
        exact = weight.astype(np.float64)
        exact *= _per_channel(factor, weight.shape, transposed, groups)
        new = {"weight": exact.astype(weight.dtype)}
        if vectors:
            bias = np.zeros(channels) if offset is None else offset
            for old in arrays[1:]:
                bias = bias + old.astype(np.float64) * factor
            new["bias"] = bias.astype(weight.dtype)
    finite = all(np.isfinite(array.astype(np.float64)).all() for array in new.values())
    if not finite or not _is_close(new["weight"], exact, transposed):
        return Refusal(Reason.INEXACT, f"in {weight.dtype.name}, the product would not be accurate")
    base = product.operator.standard if vectors else product.operator.base
    named = [NewConstant(f"{node.output[0]}/{what}", array) for what, array in new.items()]
    return Fused(
        Operator(base),
        [*product.inputs, ""][: len(BASES[base].inputs)],
        absorbed=[node],
        constants=dict(enumerate(named, start=1)),
    )


def _per_channel(factor: Array, shape: tuple[int, ...], transposed: bool, groups: int) -> Array:
    """The factors of the output channels, for each element of W."""
    ones = (1,) * (len(shape) - 2)
    if not transposed:
        return factor.reshape(-1, 1, *ones)
    # Rows of W are input channels, and each group of them has output channels of its own.
    rows = np.repeat(factor.reshape(groups, shape[1]), shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *ones)


def _is_close(stored: Array, exact: Array, transposed: bool) -> bool:
    """Whether rounding lost no more than it does to normal numbers, in each output channel.

    It does where a factor is so small that W becomes subnormal.
    """
    axes = tuple(axis for axis in range(exact.ndim) if axis != int(transposed))
    error = np.sqrt(np.square(stored.astype(np.float64) - exact).sum(axis=axes))
    size = np.sqrt(np.square(exact).sum(axis=axes))
    epsilon = float(ml_dtypes.finfo(stored.dtype).eps)  # type: ignore[no-untyped-call]
    return bool((error <= size * epsilon).all())
