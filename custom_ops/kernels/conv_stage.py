"""Images stored anew for `conv_staged`: channels innermost, with their pads, one plane for each
phase of the stride.

Position q = (h, w) of plane (i, j) is the pixel (h stride - pad + i, w stride - pad + j) of X,
zero where that lies outside, with C channels side by side and zeros up to a multiple of 16 bytes.
The pixel that an output (h, w) meets at a tap is then the position (h, w) plus a shift that
depends on the tap alone. A plane has as many rows and columns as the outputs and the taps reach.
"""

import triton
import triton.language as tl

from .tiles import ceil_div


@triton.jit(do_not_specialize=[
    "C", "units", "in_h", "in_w", "rows", "plane", "width", "phases_w", "stride_h", "stride_w",
    "pad_h", "pad_w", "z0",
])  # fmt: skip
def conv_stage(
    x, staged, C, units, in_h, in_w, rows, plane, width, phases_w, stride_h, stride_w, pad_h,
    pad_w, z0,
    BC: tl.constexpr, BP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """`units` of UNIT channels a position, `rows` positions an image, of them `plane` a plane."""
    stored = units * UNIT
    tiles_c = ceil_div(stored, BC)
    tiles_p = ceil_div(rows, BP)
    block = tl.program_id(0)
    z = block // (tiles_c * tiles_p) + z0
    offs_c = block % tiles_c * BC + tl.arange(0, BC)
    offs_p = block // tiles_c % tiles_p * BP + tl.arange(0, BP)

    phase = offs_p // plane
    q = offs_p % plane
    h = q // width * stride_h + phase // phases_w - pad_h
    w = q % width * stride_w + phase % phases_w - pad_w
    inside = (h >= 0) & (h < in_h) & (w >= 0) & (w < in_w) & (offs_p < rows)
    x += z.to(tl.int64) * C * in_h * in_w
    pixels = tl.load(
        x + offs_c.to(tl.int64)[:, None] * (in_h * in_w) + (h * in_w + w)[None, :],
        mask=(offs_c < C)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    staged += (z.to(tl.int64) * rows) * stored
    tl.store(
        staged + offs_p.to(tl.int64)[:, None] * stored + offs_c[None, :],
        tl.trans(pixels),
        mask=(offs_p < rows)[:, None] & (offs_c < stored)[None, :],
    )
