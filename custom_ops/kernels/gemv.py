"""Products with one row of A or few, and a B whose rows lie along N: the time is that of reading B,
once. Rows of B of 16 aligned bytes, every architecture.

A block owns BN columns. Its threads take 16 bytes of a row each and many rows at once, through a
pipeline of asynchronous copies, and multiply in fp32 on the scalar units; what the threads of a
column have is added up once, at the end of K. Sums are exact fp32 sums of fp32 products.
"""

import triton
import triton.language as tl

from .activations import store_whole
from .tiles import IN_ORDER, await_previous_kernel, epilogue, locate, slice_of, sum_slices


@triton.jit
def gemv(
    a, b, y, bias, workspace, counters, M, N, K, split, a_div, a_mod, b_div, b_mod, z0,
    lda, ldb, ldc, a_batch, b_batch, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, SPLIT_K: tl.constexpr, AT_ONCE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    part, slot, z, m, n = locate(M, N, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    first, last = slice_of(K, part, split, BK, SPLIT_K)
    k = first * BK
    # Rows beyond the last are it once more: their sums are not stored.
    a += (z // a_div % a_mod).to(tl.int64) * a_batch
    b += (z // b_div % b_mod).to(tl.int64) * b_batch
    a_tile = a + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * lda + (k + offs_k)[None, :]
    b_tile = b + (k + offs_k).to(tl.int64)[:, None] * ldb + offs_n[None, :]
    b_in = (offs_n < N)[None, :]
    await_previous_kernel(first, IN_ORDER, DEPENDENT_LAUNCH, LATE=True)
    sums = tl.full((BM, BK, BN), 0.0, tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k_in = offs_k < K - step * BK
        a_values = tl.load(a_tile, mask=k_in[None, :], other=0.0).to(tl.float32)
        b_values = tl.load(b_tile, mask=k_in[:, None] & b_in, other=0.0).to(tl.float32)
        sums += a_values[:, :, None] * b_values[None, :, :]
        a_tile += BK
        b_tile += BK * ldb
    # `tl.sum` is compiled once and for all, this is not.
    total = tl.reduce(sums, 1, tl.standard._sum_combine)
    mine = True
    if SPLIT_K:
        mine, total = sum_slices(total, workspace, counters, slot, part, split, BM, BN, AT_ONCE)
    if mine:
        tile = epilogue(
            total, bias, offs_m, offs_n, M, N,
            bias_stride_m, bias_stride_n, alpha, beta, False, True,
        )  # fmt: skip
        store_whole(tile, y, residual, z, c_batch, m, n, M, N, ldc, activation, act_alpha, act_beta)
