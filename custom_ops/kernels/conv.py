"""Convolution as an implicit GEMM by gathered loads: any strides, dilations, pads, groups and
alignment, one to three spatial dimensions, every architecture.

Y[k, p] = sum over channels c and taps t of W[k, c, t] * X[c, at(p, t)], one product of M = k rows
and N = pixels of all images for each group; at(p, t) is a pixel of X, or lies outside and counts as
0. X, Y are (images, groups, channels, pixels), contiguous; W is addressed by strides. Missing
leading axes have size 1. A tile may begin in one image and end in another: tiles of 128 columns for
single images of 130 pixels would stay half empty.

A K step is BK / TAPS channels at TAPS neighbouring taps along the width; steps run over blocks of
channels, then along the width, height and depth of the kernel. Where a tile's pixels lie in X is
worked out once, relative to the image that its first pixel belongs to; a step moves them by
additions. TAPS > 1 is for few channels, which would leave
most of BK unused.

Pixels are contiguous in X but for the row ends, and aligned to nothing. Loads of 2 bytes pass
through registers and cannot be pipelined by the compiler, so that each step loads the next one's
pixels before it multiplies.
"""

import triton
import triton.language as tl

from .conv_epilogue import store_images
from .tiles import ceil_div, locate, multiply, slice_of, sum_slices


@triton.jit
def input_at(out, tap, stride, dilation, pad, size, TRANSPOSED: tl.constexpr):
    """The coordinate of X that an output coordinate meets at a tap, and whether it is inside."""
    if TRANSPOSED:
        reach = out + pad - tap * dilation
        at = tl.maximum(reach, 0) // stride
        inside = (reach >= 0) & (at * stride == reach) & (at < size)
    else:
        at = out * stride - pad + tap * dilation
        inside = (at >= 0) & (at < size)
    return at, inside


@triton.jit
def load_pixels(
    x, c, tap_d, tap_h, tap_w, wanted, C, start, d, h, w, in_d, in_h, in_w, kernel_w,
    stride_d, stride_h, stride_w, dilation_d, dilation_h, dilation_w, pad_d, pad_h, pad_w, channel,
    BK: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr, HUGE: tl.constexpr,
):  # fmt: skip
    """The (BK, BN) tile of X at channels from c on and taps from (tap_d, tap_h, tap_w) on, for the
    output pixels (d, h, w) that are wanted, of images that start so many elements from x. Without
    HUGE, BK channels of all these images span less than 2^31 elements, and `start` is i32: an
    address then takes 3 instructions instead of 8.
    """
    offs_k = tl.arange(0, BK)
    at_d, d_in = input_at(d, tap_d, stride_d, dilation_d, pad_d, in_d, TRANSPOSED)
    at_h, h_in = input_at(h, tap_h, stride_h, dilation_h, pad_h, in_h, TRANSPOSED)
    row = (at_d * in_h + at_h) * in_w + start
    inside = wanted & d_in & h_in
    x += c.to(tl.int64) * channel
    if HUGE:
        rows = (offs_k // TAPS).to(tl.int64) * channel
    else:
        rows = offs_k // TAPS * channel.to(tl.int32)
    if TAPS == 1:
        at_w, w_in = input_at(w, tap_w, stride_w, dilation_w, pad_w, in_w, TRANSPOSED)
        offsets = (row + at_w)[None, :]
        # One compare an element: how many of the channels a pixel has, none where it is outside.
        mask = offs_k[:, None] < tl.where(inside & w_in, C - c, 0)[None, :]
    else:
        taps = tap_w + offs_k % TAPS
        at_w, w_in = input_at(
            w[None, :], taps[:, None], stride_w, dilation_w, pad_w, in_w, TRANSPOSED
        )
        offsets = row[None, :] + at_w
        mask = (offs_k // TAPS)[:, None] < tl.where(inside, C - c, 0)[None, :]
        mask = mask & w_in & (taps < kernel_w)[:, None]
    return tl.load(x + (rows[:, None] + offsets), mask=mask, other=0.0)


@triton.jit
def conv(
    x, w, y, bias, workspace, counters, M, N, C, split, groups, z0, has_bias,
    in_d, in_h, in_w, out_h, out_w, kernel_d, kernel_h, kernel_w, stride_d, stride_h, stride_w,
    dilation_d, dilation_h, dilation_w, pad_d, pad_h, pad_w, channel, w_g, w_k, w_c, w_h, w_w,
    pixels, residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    TAPS: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, PREFETCH: tl.constexpr,
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    UNIT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    part, slot, z, m, n = locate(M, N, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    HUGE: tl.constexpr = not PACKED
    # From here on images and columns count from the image that the tile begins in.
    image = n // pixels
    n -= image * pixels
    N -= image * pixels
    entry = image.to(tl.int64) * groups + z
    x += entry * C * channel
    y += entry * M * pixels
    w += z.to(tl.int64) * w_g
    bias += z * M

    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    pixel_in = offs_n < N
    x_pitch = groups.to(tl.int64) * C * channel
    y_pitch = groups.to(tl.int64) * M * pixels
    if not HUGE:
        x_pitch = x_pitch.to(tl.int32)
        y_pitch = y_pitch.to(tl.int32)
    start = offs_n // pixels * x_pitch
    pixel = offs_n % pixels
    d = pixel // (out_h * out_w)
    h = pixel // out_w % out_h
    v = pixel % out_w

    CHANNELS: tl.constexpr = BK // TAPS
    blocks = ceil_div(C, CHANNELS)
    along_w = ceil_div(kernel_w, TAPS)
    first, last = slice_of(kernel_d * kernel_h * along_w * blocks, part, split, 1, SPLIT_K)
    step_tap = first // tl.maximum(blocks, 1)
    c = first % tl.maximum(blocks, 1) * CHANNELS
    tap_w = step_tap % along_w * TAPS
    tap_h = step_tap // along_w % kernel_h
    tap_d = step_tap // along_w // kernel_h

    # Rows beyond M matter to no stored element: they repeat the last one.
    w_rows = w + tl.minimum(offs_m, M - 1).to(tl.int64) * w_k
    C_loaded = C
    c_stride = w_c
    if PACKED:
        # Units of 16 bytes, and blocks of taps, are loaded whole: what fills them up is zero.
        if TAPS == 1:
            w_columns = offs_k
            c_stride = 1
            C_loaded = ceil_div(C, UNIT) * UNIT
        else:
            w_columns = offs_k // TAPS * w_c + offs_k % TAPS
    else:
        w_columns = offs_k // TAPS * w_c + offs_k % TAPS * w_w
    w_tile = w_rows[:, None] + w_columns[None, :]

    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = tl.full((ROWS, COLS), 0.0, tl.float32)
    if PREFETCH:
        x_next = load_pixels(
            x, c, tap_d, tap_h, tap_w, offs_n < N * tl.minimum(last - first, 1), C, start, d, h, v,
            in_d, in_h, in_w, kernel_w, stride_d, stride_h, stride_w,
            dilation_d, dilation_h, dilation_w, pad_d, pad_h, pad_w, channel,
            BK, TAPS, TRANSPOSED, HUGE,
        )  # fmt: skip
    for step in range(first, last):
        # The divisions tell the compiler what both are multiples of.
        c_first = c // CHANNELS * CHANNELS
        tap_first = tap_w // TAPS * TAPS
        at = (tap_d * kernel_h + tap_h).to(tl.int64) * w_h + tap_first * w_w + c_first * c_stride
        k_in = offs_k // TAPS < C_loaded - c_first
        if TAPS > 1 and not PACKED:
            k_in = k_in & (offs_k % TAPS < kernel_w - tap_w)
        weights = tl.load(w_tile + at, mask=k_in[None, :], other=0.0)
        if PREFETCH:
            x_tile = x_next
        else:
            x_tile = load_pixels(
                x, c, tap_d, tap_h, tap_w, pixel_in, C, start, d, h, v, in_d, in_h, in_w,
                kernel_w, stride_d, stride_h, stride_w, dilation_d, dilation_h, dilation_w,
                pad_d, pad_h, pad_w, channel, BK, TAPS, TRANSPOSED, HUGE,
            )  # fmt: skip
        c += CHANNELS
        carry = c >= C
        c = tl.where(carry, 0, c)
        tap_w += tl.where(carry, TAPS, 0)
        carry = tap_w >= kernel_w
        tap_w = tl.where(carry, 0, tap_w)
        tap_h += tl.where(carry, 1, 0)
        carry = tap_h >= kernel_h
        tap_h = tl.where(carry, 0, tap_h)
        tap_d += tl.where(carry, 1, 0)
        if PREFETCH:
            x_next = load_pixels(
                x, c, tap_d, tap_h, tap_w, offs_n < N * tl.minimum(last - step - 1, 1), C, start,
                d, h, v, in_d, in_h, in_w, kernel_w, stride_d, stride_h, stride_w,
                dilation_d, dilation_h, dilation_w, pad_d, pad_h, pad_w, channel,
                BK, TAPS, TRANSPOSED, HUGE,
            )  # fmt: skip
        acc = multiply(weights, x_tile, acc, SWAP, PRECISION, ROUND)

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS, 0)
    if mine:
        tile = tl.trans(acc) if SWAP else acc
        added = tl.load(bias + offs_m, mask=offs_m < M * has_bias, other=0.0)
        tile += added.to(tl.float32)[:, None]
        store_images(
            tile, y, residual + entry * M * pixels, m, n, M, N, pixels, y_pitch,
            activation, act_alpha, act_beta, CHUNKS,
        )  # fmt: skip
