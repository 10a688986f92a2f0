"""GEMM whose operands come through TMA tensor maps, and whose result leaves by masked stores: for
rows of Y that are not aligned to 16 bytes (sm_90 and up).

TMA writes whole units of 16 bytes, so it cannot end a row in between. Ordinary stores can, and cost
little beside a K loop of any length.
"""

import triton
import triton.language as tl

from .activations import entry_of, store_product
from .gemm_tma import sum_of_products
from .tiles import (
    await_joined_kernel,
    await_previous_kernel,
    epilogue,
    locate,
    slice_of,
    sum_slices,
)


@triton.jit
def gemm_tma_masked(
    a_desc, b_desc, y, bias, workspace, counters, M, N, K, split, a_div, a_mod, b_div, b_mod,
    z0, order, ldc, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
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
        a_desc, b_desc, a_z, b_z, m, n, first, last,
        BM, BN, BK, TRANS_A, TRANS_B, SWAP, PRECISION, ROUND, None,
    )  # fmt: skip

    mine = True
    if SPLIT_K:
        mine, acc = sum_slices(acc, workspace, counters, slot, part, split, ROWS, COLS, AT_ONCE)
    if mine:
        offs_m = m + tl.arange(0, BM)
        offs_n = n + tl.arange(0, BN)
        tile = epilogue(
            acc, bias, offs_m, offs_n, M, N,
            bias_stride_m, bias_stride_n, alpha, beta, SWAP, BIAS_MATRIX,
        )  # fmt: skip
        y += entry_of(z, c_batch, activation)
        if activation == 0:
            y_tile = y + offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
            inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            tl.store(y_tile, tile.to(y.dtype.element_ty), mask=inside)
        else:
            residual += z.to(tl.int64) * c_batch
            store_product(
                tile, y, residual, m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS
            )
    await_joined_kernel(order, DEPENDENT_LAUNCH)
