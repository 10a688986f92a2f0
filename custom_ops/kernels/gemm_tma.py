"""GEMM whose operands and result go through TMA tensor maps (sm_90 and up, 16-byte aligned rows).

The maps have rank 3 (batch, rows, columns) and describe the matrices as they are stored:
out-of-range rows and columns load as zeros and are not stored, so no mask is needed and a K tail
never reads the next batch entry. Small M is served by SWAP, which puts the columns of B on the
64-wide side of wgmma.
"""

import triton
import triton.language as tl

from .tiles import await_previous_kernel, epilogue, locate, multiply, slice_of, sum_slices


@triton.jit
def accumulate(
    a_desc, b_desc, a_z, b_z, m, n, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The fp32 sums of K steps [first, last) of the tile at (m, n); transposed for SWAP."""
    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = tl.full((ROWS, COLS), 0.0, tl.float32)
    for step in range(first, last):
        k = step * BK
        if TRANS_A:
            a = tl.trans(a_desc.load([a_z, k, m]).reshape(BK, BM))
        else:
            a = a_desc.load([a_z, m, k]).reshape(BM, BK)
        if TRANS_B:
            b = tl.trans(b_desc.load([b_z, n, k]).reshape(BN, BK))
        else:
            b = b_desc.load([b_z, k, n]).reshape(BK, BN)
        acc = multiply(a, b, acc, SWAP, PRECISION, ROUND)
    return acc


@triton.jit
def gemm_tma(
    a_desc, b_desc, y_desc, bias, workspace, counters, M, N, K, split, a_div, a_mod, b_div, b_mod,
    z0, bias_stride_m, bias_stride_n, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr,
    BIAS_MATRIX: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    part, slot, z, m, n = locate(M, N, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    a_z = z // a_div % a_mod
    b_z = z // b_div % b_mod
    first, last = slice_of(K, part, split, BK, SPLIT_K)
    await_previous_kernel(m | n | first | a_z | b_z, DEPENDENT_LAUNCH)

    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = accumulate(
        a_desc, b_desc, a_z, b_z, m, n, first, last,
        BM, BN, BK, TRANS_A, TRANS_B, SWAP, PRECISION, ROUND,
    )  # fmt: skip

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS)
    if mine:
        tile = epilogue(
            acc, bias, m + tl.arange(0, BM), n + tl.arange(0, BN), M, N,
            bias_stride_m, bias_stride_n, alpha, beta, SWAP, BIAS_MATRIX,
        )  # fmt: skip
        y_desc.store([z, m, n], tile.to(y_desc.dtype).reshape(1, BM, BN))
