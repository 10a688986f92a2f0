"""Whether a kernel of convolutions computes the right thing: as `product_gate`, for odd ones.

X, W and the bias lie between NaN; the result starts as NaN, and what lies around it must stay so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from .. import native
from ..custom_ops.kernels.conv_spec import is_transposed, taps
from ..custom_ops.kernels.pack_format import FAMILY_CODE
from ..custom_ops.kernels.spec import Family
from ..errors import KernelMissingError
from .cuda import Gpu
from .device_array import Array, DeviceArray
from .measuring import DTYPES
from .product_gate import SPLIT, error_limit, run_twice

GUARD = 128  # elements on either side of each operand; keeps 16-byte alignment
FAMILIES = {code: family for family, code in FAMILY_CODE.items()}


def cases(kernel: native.KernelRecord) -> Iterator[native.Conv]:
    """Channels and pixels just beyond a tile, strides and dilations, an image beside another, and a
    single pixel; W packed where the kernel wants it so."""
    family = FAMILIES[kernel.family]
    many, few = _channels(kernel, family)
    width = 7 if family is Family.CONV_TAPS8 else 3
    if family.depthwise and kernel.bk > 1:
        width = kernel.bk
    transposed = is_transposed(family)
    beyond = -(-(kernel.bn + 5) // 7)
    layers: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...] = (
        (many, (7, beyond), (1, 1), 1),
        (few, (9, 11), (2, 3), 2),
        (few, (1, 1), (1, 1), 1),
    )
    for channels, size, strides, dilation in layers:
        groups, c, k = 1, channels, kernel.bm + 3
        if family.depthwise:
            groups, c, k = (kernel.bm + 3) // 2 + 1, 1, 2
        shape = (1, width) if family in (Family.CONV_TAPS4, Family.CONV_TAPS8) else (3, width)
        reach = [dilation * (side - 1) for side in shape]
        attributes = native.ConvAttributes.of_node(
            transposed, group=groups, strides=strides, dilations=(dilation, dilation),
            pads=() if transposed else [*(r // 2 for r in reach), *(r - r // 2 for r in reach)],
        )  # fmt: skip
        w = (groups * c, k, *shape) if transposed else (groups * k, c, *shape)
        conv = native.conv_problem(
            (2, groups * c, *size), w, attributes, native.Dtype(kernel.dtype),
            native.Precision(kernel.precision), bias=True,
        ).conv  # fmt: skip
        if kernel.align_a == 16:
            conv, _ = native.conv_packed(conv)
            if conv.w_taps != taps(family):
                continue
        yield conv


def _channels(kernel: native.KernelRecord, family: Family) -> tuple[int, int]:
    """Channels for which W is packed the kernel's way: of several steps, and of one."""
    split = SPLIT if kernel.split_k else 1
    if family is Family.CONV_TAPS8:
        return (2, 1) if kernel.dtype == native.Dtype.F32 else (3, 2)
    if family is Family.CONV_TAPS4:
        return 8, 7
    return kernel.bk * split + 3, kernel.bk - 1


class Guarded(DeviceArray):
    """An array on the device between NaN."""

    def __init__(self, gpu: Gpu, values: Array) -> None:
        self.count = values.size
        around = np.full(GUARD, np.nan, values.dtype)
        super().__init__(gpu, np.concatenate([around, values.reshape(-1), around]))

    @property
    def pointer(self) -> int:
        return super().pointer + GUARD * self.contents.itemsize


def check_conv(
    gpu: Gpu, launcher: native.Launcher, pack: native.Pack, device: native.Device, index: int
) -> str:
    """As `product_gate.check`."""
    for conv in cases(pack.kernels[index]):
        if fault := _check(gpu, launcher, pack, device, index, conv):
            return (
                f"{conv.n} x {conv.c}->{conv.k} in {conv.groups} groups, of "
                f"{'x'.join(map(str, conv.inputs))} by {'x'.join(map(str, conv.kernel))}: {fault}"
            )
    return ""


def _check(
    gpu: Gpu, launcher: native.Launcher, pack: native.Pack, device: native.Device, index: int,
    conv: native.Conv,
) -> str:  # fmt: skip
    kernel = pack.kernels[index]
    try:
        plan = pack.plan_conv(device, conv, kernel=index, split=SPLIT if kernel.split_k else 1)
    except KernelMissingError:
        return ""  # it does not fit this GPU, so it is never planned
    rng, dtype = np.random.default_rng(index), DTYPES[native.Dtype(kernel.dtype)]

    def random(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    x = random(conv.n, conv.groups, conv.c, *conv.inputs)
    plain = _as_stored(conv)
    w = random(conv.groups, conv.k, conv.c, *conv.kernel)
    stored = np.ascontiguousarray(w.swapaxes(1, 2) if conv.transposed else w)
    bias = random(conv.groups, conv.k)
    if conv.w_taps:
        packed = np.zeros(native.conv_packed(plain)[1] // dtype.itemsize, dtype)
        native.conv_pack(plain, stored.ctypes.data, packed.ctypes.data)
    outputs = np.full((conv.n, conv.groups, conv.k, *conv.out), np.nan, dtype)
    images, weights = Guarded(gpu, x), Guarded(gpu, packed if conv.w_taps else stored)
    added, out = Guarded(gpu, bias), Guarded(gpu, outputs)

    def launch(workspace: int, counters: int) -> None:
        launcher.launch_conv(
            conv, plan, x=images.pointer, w=weights.pointer, y=out.pointer, bias=added.pointer,
            workspace=workspace, counters=counters, stream=gpu.stream.value,
        )  # fmt: skip

    results, left_over = run_twice(gpu, plan, out, launch)
    for one in (images, weights, added, out):
        one.free()

    if results[0].tobytes() != results[1].tobytes():
        return "two runs gave different bits"
    around = np.concatenate([results[0][:GUARD], results[0][-GUARD:]]).astype(np.float64)
    if not np.isnan(around).all():
        return f"{int((~np.isnan(around)).sum())} elements beside the result were overwritten"
    y = results[0][GUARD:-GUARD].reshape(outputs.shape).astype(np.float64)
    exact = reference(conv, x, w) + bias.astype(np.float64)[None, :, :, None, None, None]
    error = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    limit = error_limit(kernel, conv.c * math.prod(conv.kernel))
    if not error <= limit:
        return f"relative error {error:.2e}, at most {limit:.2e} is right"
    return "arrival counters were not left at 0" if left_over else ""


def _as_stored(conv: native.Conv) -> native.Conv:
    """The convolution with the strides of W as ONNX stores it."""
    plain = native.Conv.from_buffer_copy(conv)
    taps_d, taps_h, taps_w = conv.kernel
    plain.w_taps, plain.w_w, plain.w_h = 0, 1, taps_w
    block = taps_d * taps_h * taps_w
    if conv.transposed:
        plain.w_k, plain.w_c = block, conv.k * block
    else:
        plain.w_k, plain.w_c = conv.c * block, block
    plain.w_g = conv.k * conv.c * block
    return plain


def reference(conv: native.Conv, x: Array, w: Array) -> Array:
    """The convolution in float64: x (n, groups, c, *in), w (groups, k, c, *kernel), without bias;
    (n, groups, k, *out).
    """
    images, weights = x.astype(np.float64), w.astype(np.float64)
    by_tap = weights.transpose(3, 4, 5, 0, 1, 2)
    out = np.zeros((conv.n, conv.groups, conv.k, *conv.out))
    for tap in itertools.product(*map(range, conv.kernel)):
        gathered, inside = images, np.ones(tuple(conv.out), bool)
        for axis, (at, valid) in enumerate(_meets(conv, axis, tap[axis]) for axis in range(3)):
            gathered = np.take(gathered, at, axis=3 + axis)
            shape = [1, 1, 1]
            shape[axis] = len(valid)
            inside &= valid.reshape(shape)
        met: Array = gathered * inside
        of_tap: Array = by_tap[tap]
        out += np.einsum("ngcdhw,gkc->ngkdhw", met, of_tap)
    return out


def _meets(conv: native.Conv, axis: int, tap: int) -> tuple[Array, Array]:
    """Along one axis, the pixel of X that each output pixel meets at a tap, and whether any."""
    out, size = np.arange(conv.out[axis]), conv.inputs[axis]
    stride, pad, reach = conv.stride[axis], conv.pad[axis], tap * conv.dilation[axis]
    if conv.transposed:
        at, off = np.divmod(out + pad - reach, stride)
        valid = (off == 0) & (at >= 0) & (at < size)
    else:
        at = out * stride - pad + reach
        valid = (at >= 0) & (at < size)
    return np.clip(at, 0, max(size - 1, 0)), valid
