"""Convolution of images that `conv_stage` has stored anew: a sum of products over the taps, each of
W's tap with the staged image, shifted (sm_90 and up).

Tiles of both factors come through TMA tensor maps, so that a K step costs no instruction a pixel:
in `conv.py`, which gathers, an element of X takes about 8. The maps are (taps, output channels,
channels) of W and (positions of all images, channels) of X; channels beyond C load as zeros.

A tile covers consecutive positions of the first plane, which between two rows of outputs are a few
that no output belongs to: they are computed and not stored. With a kernel of 3 they are 2 columns
of a row.
"""

import triton
import triton.language as tl

from .tiles import ceil_div, locate, multiply, slice_of, sum_slices


@triton.jit(do_not_specialize=[
    "M", "P", "C", "split", "z0", "has_bias", "rows", "plane", "width", "phases_w", "out_h",
    "out_w", "kernel_h", "kernel_w", "stride_h", "stride_w", "dilation_h", "dilation_w",
])  # fmt: skip
def conv_staged(
    x_desc, w_desc, y, bias, workspace, counters, M, P, C, split, z0, has_bias,
    rows, plane, width, phases_w, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w,
    dilation_h, dilation_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    STRIDED: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """P positions from the first output of an image to its last; `rows` of all its planes."""
    part, slot, z, m, p = locate(M, P, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    blocks = ceil_div(C, BK)
    first, last = slice_of(kernel_h * kernel_w * blocks, part, split, 1, SPLIT_K)
    c = first % blocks * BK
    tap = first // blocks
    tap_h = tap // kernel_w
    tap_w = tap % kernel_w
    image = z * rows + p

    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = tl.full((ROWS, COLS), 0.0, tl.float32)
    for _ in range(first, last):
        dh = tap_h * dilation_h
        dw = tap_w * dilation_w
        if STRIDED:
            shift = (dh % stride_h * phases_w + dw % stride_w) * plane
            shift += dh // stride_h * width + dw // stride_w
        else:
            shift = dh * width + dw
        weights = w_desc.load([tap, m, c]).reshape(BM, BK)
        pixels = tl.trans(x_desc.load([image + shift, c]))
        acc = multiply(weights, pixels, acc, SWAP, PRECISION, ROUND)
        c += BK
        carry = c >= C
        c = tl.where(carry, 0, c)
        tap += tl.where(carry, 1, 0)
        tap_w += tl.where(carry, 1, 0)
        carry = tap_w >= kernel_w
        tap_w = tl.where(carry, 0, tap_w)
        tap_h += tl.where(carry, 1, 0)

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS, 0)
    if mine:
        tile = tl.trans(acc) if SWAP else acc
        offs_m = m + tl.arange(0, BM)
        offs_p = p + tl.arange(0, BN)
        h = offs_p // width
        w = offs_p % width
        added = tl.load(bias + offs_m, mask=offs_m < M * has_bias, other=0.0)
        tile += added.to(tl.float32)[:, None]
        y += z.to(tl.int64) * M * (out_h * out_w)
        y_tile = y + offs_m.to(tl.int64)[:, None] * (out_h * out_w) + (h * out_w + w)[None, :]
        inside = (offs_m < M)[:, None] & ((h < out_h) & (w < out_w))[None, :]
        tl.store(y_tile, tile.to(y.dtype.element_ty), mask=inside)
