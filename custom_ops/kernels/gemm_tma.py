"""GEMM whose operands and result go through TMA tensor maps (sm_90 and up, 16-byte aligned rows).

The maps have rank 3 (batch, rows, columns) and describe the matrices as they are stored:
out-of-range rows and columns load as zeros and are not stored, so no mask is needed and a K tail
never reads the next batch entry. Small M is served by SWAP, which puts the columns of B on the
64-wide side of wgmma.
"""

import triton
import triton.language as tl

from .activations import entry_of, store_product
from .tiles import (
    await_joined_kernel,
    await_previous_kernel,
    epilogue,
    has_nan,
    locate,
    multiply,
    slice_of,
    sum_slices,
)


@triton.jit
def sum_of_products(
    a_desc, b_desc, a_z, b_z, m, n, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr, ROUND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tile at (m, n) over the K steps [first, last)."""
    acc = tl.full((BN, BM) if SWAP else (BM, BN), 0.0, tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
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
    a_desc, b_desc, y_desc, y, bias, workspace, counters, M, N, K, split,
    a_div, a_mod, b_div, b_mod, z0, order, ldc, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, SPLIT_K: tl.constexpr, SWAP: tl.constexpr,
    BIAS_MATRIX: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    part, slot, z, m, n = locate(M, N, split, BM, BN, GROUP_M, SPLIT_K)
    z += z0
    a_z = z // a_div % a_mod
    b_z = z // b_div % b_mod
    first, last = slice_of(K, part, split, BK, SPLIT_K)
    await_previous_kernel(m | n | first | a_z | b_z, order, DEPENDENT_LAUNCH)

    ROWS: tl.constexpr = BN if SWAP else BM
    COLS: tl.constexpr = BM if SWAP else BN
    acc = sum_of_products(
        a_desc, b_desc, a_z, b_z, m, n, first, last, BM, BN, BK, TRANS_A, TRANS_B, SWAP,
        PRECISION, ROUND, None,
    )  # fmt: skip
    if PRECISION == "tf32x3":  # noqa: SIM102 - decided while compiling, the next one on the GPU
        if has_nan(acc):  # where Inf or NaN takes part, one product tells what becomes of it
            once = sum_of_products(
                a_desc, b_desc, a_z, b_z, m, n, first, last, BM, BN, BK, TRANS_A, TRANS_B, SWAP,
                "tf32", "nan", 1,
            )  # fmt: skip
            acc = tl.where(acc != acc, once, acc)

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS, AT_ONCE)
    if mine:
        tile = epilogue(
            acc, bias, m + tl.arange(0, BM), n + tl.arange(0, BN), M, N,
            bias_stride_m, bias_stride_n, alpha, beta, SWAP, BIAS_MATRIX,
        )  # fmt: skip
        if activation == 0:
            y_desc.store([z, m, n], tile.to(y_desc.dtype).reshape(1, BM, BN))
        else:
            store_product(
                tile, y + entry_of(z, c_batch, activation), residual + z.to(tl.int64) * c_batch,
                m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS,
            )  # fmt: skip
    await_joined_kernel(order, DEPENDENT_LAUNCH)
