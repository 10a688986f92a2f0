"""Convolutions in Triton's interpreter: one region of a plan. `interpreter` is the public side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .custom_ops.kernels import loading
from .custom_ops.kernels.conv_spec import taps
from .custom_ops.kernels.pack_format import Param
from .custom_ops.kernels.signature import PARAMETERS
from .custom_ops.kernels.spec import Dtype, KernelSpec

if TYPE_CHECKING:
    from .native import Conv, Region


def weight_elements(conv: Conv) -> int:
    """Elements that W spans in memory, its last unit of 16 bytes or block of taps included."""
    if min(conv.c, conv.k) == 0:
        return 0
    kernel = conv.kernel
    rows = kernel[0] * kernel[1]
    last = (conv.groups - 1) * conv.w_g + (conv.k - 1) * conv.w_k + (rows - 1) * conv.w_h
    if conv.w_taps == 0:
        return int(1 + last + (conv.c - 1) * conv.w_c + (kernel[2] - 1) * conv.w_w)
    if conv.w_taps == 1:
        return int(last + (kernel[2] - 1) * conv.w_w + conv.w_k)
    return int(last + conv.w_k)


def run_conv_region(
    torch: Any,
    elements: Callable[[int, Dtype, int], Any],
    spec: KernelSpec,
    conv: Conv,
    region: Region,
    x: int,
    w: int,
    bias: int | None,
    y: int,
    residual: int | None,
) -> None:
    """Runs one region; `elements` makes tensors of host memory. Nothing beyond the operands is
    reachable.
    """
    channel = math.prod(conv.inputs)
    pixels = math.prod(conv.out)
    outputs = conv.groups * conv.k
    # X, Y and R from the region's first image on.
    first = region.n0 // pixels
    left = conv.n - first
    image, size = outputs * pixels, spec.dtype.bytes
    of_x = conv.groups * conv.c * channel
    images = elements(x + first * of_x * size, spec.dtype, left * of_x)
    y += first * image * size
    residual = residual and residual + first * image * size
    result = elements(y, spec.dtype, left * image)
    other = elements(residual, spec.dtype, len(result)) if residual and conv.residual else None
    added = elements(bias, spec.dtype, outputs) if bias and conv.bias else None
    values: dict[Param, Any] = {
        Param.CONV_X: images, Param.CONV_W: elements(w, spec.dtype, weight_elements(conv)),
        Param.CONV_Y: result, Param.CONV_BIAS: result if added is None else added,
        Param.CONV_HAS_BIAS: int(added is not None),
        Param.PTR_RESIDUAL: elements(0, spec.dtype, 0) if other is None else other,
        Param.ACTIVATION: conv.activation | conv.residual << 8,
        Param.ACT_ALPHA: conv.act_alpha, Param.ACT_BETA: conv.act_beta,
        # The workspace starts as NaN: reading what no slice wrote would show.
        Param.PTR_WORKSPACE: torch.full((region.workspace_bytes // 4,), float("nan")),
        Param.PTR_COUNTERS: torch.zeros(region.counters, dtype=torch.int32),
        Param.M: region.m, Param.N: region.n, Param.SPLIT: region.split, Param.Z0: region.z0,
        Param.CONV_C: conv.c, Param.CONV_K: conv.k, Param.CONV_GROUPS: conv.groups,
        Param.CONV_OUT_H: conv.out[1], Param.CONV_OUT_W: conv.out[2], Param.CONV_CHANNEL: channel,
        Param.CONV_PIXELS: pixels,
        Param.CONV_W_G: conv.w_g, Param.CONV_W_K: conv.w_k, Param.CONV_W_C: conv.w_c,
        Param.CONV_W_H: conv.w_h, Param.CONV_W_W: conv.w_w,
    }  # fmt: skip
    for first, sizes in (
        (Param.CONV_IN_D, conv.inputs), (Param.CONV_KERNEL_D, conv.kernel),
        (Param.CONV_STRIDE_D, conv.stride), (Param.CONV_DILATION_D, conv.dilation),
        (Param.CONV_PAD_D, conv.pad),
    ):  # fmt: skip
        values |= {Param(first + axis): size for axis, size in enumerate(sizes)}
    if spec.align_a == 16 and conv.w_taps != taps(spec.family):
        raise ValueError(f"W is stored for {conv.w_taps} taps at a time")
    function = loading.kernel(spec.source, interpret=True)
    function[(region.grid,)](
        *(values[param] for param in PARAMETERS[spec.source].values()),
        **loading.constants(spec),
    )
