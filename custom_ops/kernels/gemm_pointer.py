"""GEMM through masked loads: any alignment, every architecture.

The masks keep every access inside the matrices. Rows beyond M and columns beyond N matter to no
stored element, so along the strided dimension they are clamped to the last valid one instead of
masked (one compare fewer per element), except in tiles of few rows, where most may lie beyond: each
would be read from the L2 again. Along the contiguous dimension they are masked, which keeps loads
wide. K tails are masked in both operands: 0 * NaN would leak.
"""

import triton
import triton.language as tl

from .activations import entry_of, store_product
from .tiles import (
    IN_ORDER,
    await_previous_kernel,
    epilogue,
    has_nan,
    locate,
    multiply,
    slice_of,
    sum_slices,
)

FEW_ROWS = tl.constexpr(32)


@triton.jit
def sum_of_products(
    a, b, offs_m, offs_n, M, N, K, first, last, lda, ldb,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """The tile of rows `offs_m` and columns `offs_n` over the K steps [first, last). With
    DEPENDENT_LAUNCH it first waits for the kernel in front of this one.
    """
    offs_k = tl.arange(0, BK)
    k = first * BK
    # Row offsets are 64-bit: M * lda may exceed 2^31. `*_in` is the mask of the dimension that is
    # not K.
    if TRANS_A:
        a_tile = a + (k + offs_k).to(tl.int64)[None, :] * lda + offs_m[:, None]
        a_step = BK * lda
        a_in = (offs_m < M)[:, None]
    else:
        a_tile = a + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * lda + (k + offs_k)[None, :]
        a_step = BK
        a_in = (offs_m < M)[:, None] if BM <= FEW_ROWS else True
    if TRANS_B:
        b_tile = b + tl.minimum(offs_n, N - 1).to(tl.int64)[None, :] * ldb + (k + offs_k)[:, None]
        b_step = BK
        b_in = (offs_n < N)[None, :] if BN <= FEW_ROWS else True
    else:
        b_tile = b + (k + offs_k).to(tl.int64)[:, None] * ldb + offs_n[None, :]
        b_step = BK * ldb
        b_in = (offs_n < N)[None, :]

    await_previous_kernel(first, IN_ORDER, DEPENDENT_LAUNCH, LATE=True)
    acc = tl.full((BN, BM) if SWAP else (BM, BN), 0.0, tl.float32)
    # At least one step, all masked where there is none: without a branch around the loop the
    # compiler leaves the addresses where they are.
    for step in tl.range(0, tl.maximum(last - first, 1), num_stages=STAGES):
        k_in = offs_k < K - (first + step) * BK
        a_values = tl.load(a_tile, mask=k_in[None, :] & a_in, other=0.0)
        b_values = tl.load(b_tile, mask=k_in[:, None] & b_in, other=0.0)
        acc = multiply(a_values, b_values, acc, SWAP, PRECISION, ROUND)
        a_tile += a_step
        b_tile += b_step
    return acc


@triton.jit
def gemm_pointer(
    a, b, y, bias, workspace, counters, M, N, K, split, a_div, a_mod, b_div, b_mod, z0,
    lda, ldb, ldc, a_batch, b_batch, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr,
    BIAS_MATRIX: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    part, slot, z, m, n = locate(M, N, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    a += (z // a_div % a_mod).to(tl.int64) * a_batch
    b += (z // b_div % b_mod).to(tl.int64) * b_batch
    y += entry_of(z, c_batch, activation)

    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    first, last = slice_of(K, part, split, BK, SPLIT_K)
    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = sum_of_products(
        a, b, offs_m, offs_n, M, N, K, first, last, lda, ldb, BM, BN, BK, TRANS_A, TRANS_B, SWAP,
        PRECISION, ROUND, None, DEPENDENT_LAUNCH,
    )  # fmt: skip
    if PRECISION == "tf32x3":  # noqa: SIM102 - decided while compiling, the next one on the GPU
        if has_nan(acc):  # where Inf or NaN takes part, one product tells what becomes of it
            once = sum_of_products(
                a, b, offs_m, offs_n, M, N, K, first, last, lda, ldb, BM, BN, BK,
                TRANS_A, TRANS_B, SWAP, "tf32", "nan", 1, False,
            )  # fmt: skip
            acc = tl.where(acc != acc, once, acc)

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS, AT_ONCE)
    if mine:
        tile = epilogue(
            acc, bias, offs_m, offs_n, M, N,
            bias_stride_m, bias_stride_n, alpha, beta, SWAP, BIAS_MATRIX,
        )  # fmt: skip
        if activation == 0:
            y_tile = y + offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
            inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            tl.store(y_tile, tile.to(y.dtype.element_ty), mask=inside)
        else:
            residual += z.to(tl.int64) * c_batch
            store_product(
                tile, y, residual, m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS
            )
