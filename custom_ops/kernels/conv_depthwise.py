"""Depthwise convolution, one channel a group, on the scalar units: bound by memory, not arithmetic.

A tile is BM output channels of one image by BN pixels; where a pixel lies in X is worked out once
for all of its channels. Each output channel m belongs to group m // multiplier. Sums are exact
products added up in fp32, whatever the type. A kernel of WIDTH taps along the width (0: any) is
unrolled there, so that the loads of a row are in flight together, and those of ROWS rows.
"""

import triton
import triton.language as tl

from .activations import finish
from .conv import input_at
from .tiles import locate


@triton.jit
def add_tap(
    acc, x_rows, line, inside, w_line, w_in, v, tap_w, in_w, stride_w, dilation_w, pad_w,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at_w, at_in = input_at(v, tap_w, stride_w, dilation_w, pad_w, in_w, TRANSPOSED)
    pixels = tl.load(
        x_rows[:, None] + (line + at_w)[None, :], mask=(inside & at_in)[None, :], other=0.0
    )
    weights = tl.load(w_line, mask=w_in, other=0.0) if ROWS > 1 else tl.load(w_line)
    return acc + weights.to(tl.float32)[:, None] * pixels.to(tl.float32)


@triton.jit
def conv_depthwise(
    x, w, y, bias, M, N, multiplier, z0, has_bias,
    in_d, in_h, in_w, out_h, out_w, kernel_d, kernel_h, kernel_w, stride_d, stride_h, stride_w,
    dilation_d, dilation_h, dilation_w, pad_d, pad_h, pad_w, channel, w_g, w_k, w_h, w_w,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, TRANSPOSED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    _, _, z, m, n = locate(M, N, 1, BM, BN, GROUP_M, False)
    z += z0
    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    pixel_in = offs_n < N
    d = offs_n // (out_h * out_w)
    h = offs_n // out_w % out_h
    v = offs_n % out_w

    row = tl.minimum(offs_m, M - 1)
    group = row // multiplier
    x_rows = x + (z.to(tl.int64) * (M // multiplier) + group) * channel
    w_rows = w + group.to(tl.int64) * w_g + (row % multiplier).to(tl.int64) * w_k
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for tap_d in range(kernel_d):
        at_d, d_in = input_at(d, tap_d, stride_d, dilation_d, pad_d, in_d, TRANSPOSED)
        for first_h in range(0, kernel_h, ROWS):
            for next_h in tl.static_range(ROWS):
                tap_h = first_h + next_h
                at_h, h_in = input_at(h, tap_h, stride_h, dilation_h, pad_h, in_h, TRANSPOSED)
                line = (at_d * in_h + at_h) * in_w
                inside = pixel_in & d_in & h_in
                w_in = row < M
                if ROWS > 1:
                    w_in = row < tl.where(kernel_h > tap_h, M, 0)
                    inside = inside & (offs_n < tl.where(kernel_h > tap_h, N, 0))
                if WIDTH > 0:
                    for tap_w in tl.static_range(WIDTH):
                        acc = add_tap(
                            acc, x_rows, line, inside, w_rows + tap_w * w_w, w_in,
                            v, tap_w, in_w, stride_w, dilation_w, pad_w, TRANSPOSED, ROWS,
                        )  # fmt: skip
                else:
                    for tap_w in range(kernel_w):
                        acc = add_tap(
                            acc, x_rows, line, inside, w_rows + tap_w * w_w, w_in,
                            v, tap_w, in_w, stride_w, dilation_w, pad_w, TRANSPOSED, ROWS,
                        )  # fmt: skip
                if ROWS > 1:  # behind the last row comes the first of the next depth
                    w_rows += tl.where(kernel_h > tap_h, w_h, 0)
                else:
                    w_rows += w_h

    acc += tl.load(bias + row, mask=row < M * has_bias, other=0.0).to(tl.float32)[:, None]
    at = (z.to(tl.int64) * M + offs_m)[:, None] * N + offs_n[None, :]
    inside = (offs_m < M)[:, None] & pixel_in[None, :]
    if activation != 0:
        acc = finish(acc, residual + at, inside, activation, act_alpha, act_beta)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
