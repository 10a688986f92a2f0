"""A convolution in its own terms, its exact result, and its operands between poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from moonpoly_ort import interpreter, native
from tests.corpus.comparing import Precision, bound, relative_error

Array = NDArray[Any]
TYPES = {
    native.Dtype.F16: np.dtype(np.float16),
    native.Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    native.Dtype.F32: np.dtype(np.float32),
}
GUARD = 64  # elements before and behind each operand that belong to somebody else


@dataclass(frozen=True)
class ConvCase:
    """Sizes of the spatial axes; `pads` are all begins, then all ends."""

    size: Sequence[int]
    kernel: Sequence[int]
    c: int = 1  # of one group
    k: int = 1
    n: int = 1
    groups: int = 1
    strides: Sequence[int] = ()
    dilations: Sequence[int] = ()
    pads: Sequence[int] = ()
    output_padding: Sequence[int] = ()
    transposed: bool = False
    bias: bool = False
    dtype: native.Dtype = native.Dtype.F32
    precision: native.Precision = native.Precision.IEEE
    packed: bool = False
    seed: int = field(default=0)

    @property
    def attributes(self) -> dict[str, Any]:
        lists = {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": self.pads,
            "output_padding": self.output_padding,
        }
        return {"group": self.groups} | {k: list(v) for k, v in lists.items() if len(v)}

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.groups * self.c, *self.size)

    @property
    def w_shape(self) -> tuple[int, ...]:
        if self.transposed:
            return (self.groups * self.c, self.k, *self.kernel)
        return (self.groups * self.k, self.c, *self.kernel)

    def operands(self) -> tuple[Array, Array, Array | None]:
        generator = np.random.default_rng(self.seed)
        dtype = TYPES[self.dtype]
        x, w = (generator.standard_normal(s).astype(dtype) for s in (self.x_shape, self.w_shape))
        added = generator.standard_normal(self.groups * self.k).astype(dtype)
        return x, w, added if self.bias else None

    def problem(self) -> native.ConvProblem:
        attributes = native.ConvAttributes.of_node(self.transposed, **self.attributes)
        return native.conv_problem(
            self.x_shape, self.w_shape, attributes, self.dtype, self.precision, bias=self.bias
        )


def exact(case: ConvCase, x: Array, w: Array, bias: Array | None) -> Array:
    """In float64, by PyTorch: padding by hand, since its own is symmetric."""
    rank = len(case.size)
    strides = tuple(case.strides) or (1,) * rank
    dilations = tuple(case.dilations) or (1,) * rank
    pads = tuple(case.pads) or (0,) * (2 * rank)
    begins, ends = pads[:rank], pads[rank:]
    images, weights = (torch.from_numpy(a.astype(np.float64)) for a in (x, w))
    added = None if bias is None else torch.from_numpy(bias.astype(np.float64))
    if not case.transposed:
        around = [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair]
        function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        padded = F.pad(images, around)
        return function(
            padded, weights, added, stride=strides, dilation=dilations, groups=case.groups
        ).numpy()
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    whole = function(images, weights, None, stride=strides, dilation=dilations, groups=case.groups)
    extra = tuple(case.output_padding) or (0,) * rank
    grow = [p for e in extra[::-1] for p in (0, e)]
    whole = F.pad(whole, grow)
    crop = tuple(
        slice(b, size - e) for b, e, size in zip(begins, ends, whole.shape[2:], strict=True)
    )
    out = whole[(slice(None), slice(None), *crop)]
    if added is not None:
        out = out + added.reshape(1, -1, *(1,) * rank)
    return out.numpy()


class Guarded:
    """An array within a buffer of NaN, its start aligned to 16 bytes plus `shift` elements."""

    def __init__(self, values: Array, shift: int = 0) -> None:
        item = values.dtype.itemsize
        count = values.size + 2 * GUARD + shift
        spare = np.empty(count * item + 16, np.uint8)
        start = -spare.ctypes.data % 16
        self.buffer = spare[start : start + count * item].view(values.dtype)
        self.buffer[:] = np.nan
        self.inside = slice(GUARD + shift, GUARD + shift + values.size)
        self.buffer[self.inside] = values.reshape(-1)
        self.shape = values.shape
        self._before = self.buffer.copy()

    @property
    def address(self) -> int:
        return int(self.buffer[self.inside].ctypes.data)

    @property
    def values(self) -> Array:
        return self.buffer[self.inside].reshape(self.shape)

    def untouched_around(self) -> bool:
        now, before = self.buffer.copy(), self._before.copy()
        now[self.inside] = before[self.inside] = 0
        return now.tobytes() == before.tobytes()


def check(
    case: ConvCase, pack: native.Pack, device: native.Device, *, kernel: int = -1, split: int = 0,
    plan: native.Plan | None = None,
) -> tuple[native.Plan, Array]:  # fmt: skip
    """Plans and runs a convolution that is no matrix product, and compares; the plan and Y."""
    x, w, bias = case.operands()
    problem = case.problem()
    conv = problem.conv
    expected = exact(case, x, w, bias)
    assert problem.output == expected.shape
    images = Guarded(x, shift=case.seed % 3)
    weights = Guarded(w, shift=0 if case.packed else case.seed % 5)
    if case.packed:
        stored, size = native.conv_packed(conv)
        if size:
            packed = Guarded(np.full(size // w.dtype.itemsize, np.nan, w.dtype))
            native.conv_pack(conv, weights.address, packed.address)
            conv, weights = stored, packed
    y = Guarded(np.full(problem.output, np.nan, x.dtype), shift=case.seed % 7)
    plan = plan or pack.plan_conv(device, conv, kernel=kernel, split=split)
    interpreter.run_conv(
        pack, conv, plan, images.address, weights.address,
        None if bias is None else bias.ctypes.data, y.address,
    )  # fmt: skip
    assert y.untouched_around(), "written outside of the output"
    compare(y.values, expected, conv, case.dtype)
    return plan, y.values


def compare(values: Array, expected: Array, conv: native.Conv, dtype: native.Dtype) -> None:
    assert np.isfinite(values.astype(np.float64)).all(), "poison was let in, or left standing"
    if expected.size == 0:
        return
    precision: Precision = "ieee" if conv.precision == native.Precision.IEEE else "tf32"
    products = conv.c * int(np.prod(conv.kernel))
    assert relative_error(values, expected) <= bound(TYPES[dtype], precision, products)
