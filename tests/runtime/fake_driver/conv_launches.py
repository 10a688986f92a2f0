"""Launches of convolutions on the fake driver: their arguments by meaning, and their work done on
host memory from these alone.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from moonpoly_ort.custom_ops.kernels.conv_spec import is_transposed, taps
from moonpoly_ort.custom_ops.kernels.pack_format import PackedKernel, Param
from moonpoly_ort.custom_ops.kernels.spec import Dtype, KernelSpec, Precision
from reference import view

from moonpoly_ort import native
from tests.epilogues import finished

Array = npt.NDArray[Any]


def size_of(param: Param) -> int:
    pointers = (Param.CONV_X, Param.CONV_W, Param.CONV_Y, Param.CONV_BIAS)
    others = (Param.PTR_WORKSPACE, Param.PTR_COUNTERS, Param.PTR_RESIDUAL, Param.NULL)
    return 8 if param in pointers + others or param >= Param.CONV_CHANNEL else 4


def fake_cubin(kernel: PackedKernel) -> bytes:
    """Code that the fake driver takes for the kernel's."""
    sizes = [size_of(param) for param in kernel.params]
    return b"FAKE" + struct.pack(f"<{len(sizes) + 1}i", len(sizes), *sizes)


def decode(raw: list[bytes], params: tuple[Param, ...]) -> dict[Param, int]:
    assert [len(value) for value in raw] == [size_of(param) for param in params]
    return {
        param: struct.unpack("<q" if len(value) == 8 else "<i", value)[0]
        for param, value in zip(params, raw, strict=True)
    }


def real(v: dict[Param, int], param: Param) -> float:
    """A number that `decode` took for an integer."""
    return float(struct.unpack("<f", struct.pack("<i", v[param]))[0])


def axes(values: dict[Param, int], first: Param) -> tuple[int, ...]:
    return tuple(values[Param(first + axis)] for axis in range(3))


def problem(v: dict[Param, int], entries: int, spec: KernelSpec) -> native.Conv:
    """The convolution of a launch of so many groups, or images of a depthwise kernel."""
    depthwise = spec.family.depthwise
    out_h, out_w = v[Param.CONV_OUT_H], v[Param.CONV_OUT_W]
    pixels = v[Param.N] if depthwise else v[Param.CONV_PIXELS]
    k = v[Param.CONV_K] if depthwise else v[Param.M]
    conv = native.Conv(
        dtype=list(Dtype).index(spec.dtype), precision=list(Precision).index(spec.precision),
        transposed=is_transposed(spec.family), n=entries if depthwise else v[Param.N] // pixels,
        groups=v[Param.M] // k if depthwise else v[Param.CONV_GROUPS],
        c=1 if depthwise else v[Param.CONV_C], k=k,
        w_taps=taps(spec.family) if spec.align_a == 16 else 0,
        w_g=v[Param.CONV_W_G], w_k=v[Param.CONV_W_K], w_c=v.get(Param.CONV_W_C, 1),
        w_h=v[Param.CONV_W_H], w_w=v[Param.CONV_W_W],
    )  # fmt: skip
    conv.out = (pixels // (out_h * out_w), out_h, out_w)
    conv.inputs, conv.kernel = axes(v, Param.CONV_IN_D), axes(v, Param.CONV_KERNEL_D)
    conv.stride, conv.dilation = axes(v, Param.CONV_STRIDE_D), axes(v, Param.CONV_DILATION_D)
    conv.pad = axes(v, Param.CONV_PAD_D)
    return conv


def compute(
    v: dict[Param, int], dtype: np.dtype[Any], entries: int, depthwise: bool, transposed: bool
) -> None:
    """The region of a launch: so many groups, or images of a depthwise kernel."""
    size = dtype.itemsize
    inside, kernel = axes(v, Param.CONV_IN_D), axes(v, Param.CONV_KERNEL_D)
    stride, dilation = axes(v, Param.CONV_STRIDE_D), axes(v, Param.CONV_DILATION_D)
    pad = axes(v, Param.CONV_PAD_D)
    out_h, out_w = v[Param.CONV_OUT_H], v[Param.CONV_OUT_W]
    pixels = v[Param.N] if depthwise else v[Param.CONV_PIXELS]
    assert v[Param.N] % pixels == 0
    assert v[Param.CONV_CHANNEL] == np.prod(inside)
    rows = v[Param.M]
    groups = rows // v[Param.CONV_K] if depthwise else v[Param.CONV_GROUPS]
    k = rows // groups if depthwise else rows
    c = 1 if depthwise else v[Param.CONV_C]
    steps = (v.get(Param.CONV_W_C, 0), v[Param.CONV_W_H], v[Param.CONV_W_W])
    for z in range(v[Param.Z0], v[Param.Z0] + entries):
        images = (
            [(z, g) for g in range(groups)]
            if depthwise
            else [(n, z) for n in range(v[Param.N] // pixels)]
        )
        for n, g in images:
            x = view(v[Param.CONV_X] + (n * groups + g) * c * v[Param.CONV_CHANNEL] * size,
                     (c, *inside), (v[Param.CONV_CHANNEL], inside[1] * inside[2], inside[2], 1),
                     dtype).astype(np.float64)  # fmt: skip
            w = view(v[Param.CONV_W] + g * v[Param.CONV_W_G] * size,
                     (k, c, kernel[0], kernel[1], kernel[2]),
                     (v[Param.CONV_W_K], steps[0], kernel[1] * steps[1], *steps[1:]),
                     dtype).astype(np.float64)  # fmt: skip
            y = np.zeros((k, pixels))
            for p in range(pixels):
                at_out = (p // (out_h * out_w), p // out_w % out_h, p % out_w)
                for tap in np.ndindex(*kernel):
                    place = []
                    for axis in range(3):
                        if transposed:
                            reach = at_out[axis] + pad[axis] - tap[axis] * dilation[axis]
                            here, rest = divmod(reach, stride[axis])
                            place.append(here if rest == 0 else -1)
                        else:
                            place.append(
                                at_out[axis] * stride[axis] - pad[axis] + tap[axis] * dilation[axis]
                            )
                    if all(0 <= i < s for i, s in zip(place, inside, strict=True)):
                        y[:, p] += w[:, :, *tap] @ x[:, *place]
            if v[Param.CONV_HAS_BIAS]:
                bias = view(v[Param.CONV_BIAS] + g * k * size, (k,), (1,), dtype)
                y += bias.astype(np.float64)[:, None]
            at = (n * groups + g) * k * pixels * size
            code = v[Param.ACTIVATION]
            r = None
            if code >> 8:
                r = view(v[Param.PTR_RESIDUAL] + at, (k, pixels), (pixels, 1), dtype)
                r = r.astype(np.float64)
            y = finished(
                y, native.Activation(code & 255), native.Residual(code >> 8),
                real(v, Param.ACT_ALPHA), real(v, Param.ACT_BETA), r,
            )  # fmt: skip
            target = view(v[Param.CONV_Y] + at, (k, pixels), (pixels, 1), dtype)
            target[...] = y.astype(dtype)
