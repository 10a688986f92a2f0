"""Products with few outputs and long K, by dot products of whole rows: both operands contiguous
along K, any alignment, every architecture.

A block has all of K for its few outputs, so nothing is left to add up between blocks, which costs
2 us and more. Its threads take neighbouring pieces of K, in fp32 on the scalar units: the memory
is what limits such a product.
"""

import triton
import triton.language as tl

from .activations import store_whole
from .tiles import IN_ORDER, await_previous_kernel, epilogue, locate


@triton.jit
def gemm_dot(
    a, b, y, bias, M, N, K, a_div, a_mod, b_div, b_mod, z0,
    lda, ldb, ldc, a_batch, b_batch, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    _, _, z, m, n = locate(M, N, 1, BM, BN, GROUP_M, False)
    z += z0
    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    # Rows beyond the last are it once more: their sums are not stored.
    a += (z // a_div % a_mod).to(tl.int64) * a_batch
    b += (z // b_div % b_mod).to(tl.int64) * b_batch
    a_tile = a + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * lda + offs_k[None, :]
    b_tile = b + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * ldb + offs_k[None, :]
    await_previous_kernel(m | n | z, IN_ORDER, DEPENDENT_LAUNCH, LATE=True)
    sums = tl.full((BM, BN, BK), 0.0, tl.float32)
    # K - 1: rounding K up to the step may exceed an i32.
    for step in tl.range(0, (K - 1) // BK + 1, num_stages=STAGES):
        inside = (offs_k < K - step * BK)[None, :]
        a_values = tl.load(a_tile, mask=inside, other=0.0).to(tl.float32)
        b_values = tl.load(b_tile, mask=inside, other=0.0).to(tl.float32)
        sums += a_values[:, None, :] * b_values[None, :, :]
        a_tile += BK
        b_tile += BK
    # `tl.sum` is compiled once and for all, this is not.
    total = tl.reduce(sums, 2, tl.standard._sum_combine)
    tile = epilogue(
        total, bias, offs_m, offs_n, M, N, bias_stride_m, bias_stride_n, alpha, beta, False, True
    )
    store_whole(tile, y, residual, z, c_batch, m, n, M, N, ldc, activation, act_alpha, act_beta)
