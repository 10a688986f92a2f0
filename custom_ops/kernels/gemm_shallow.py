"""Products with little K, by outer products on the scalar units: K up to BK, any alignment, every
architecture.

The time of such a product is that of storing Y. A tensor core wants K in units of 16 and its
operands in shared memory; here each thread holds a piece of Y, 16 bytes of a row where Y allows,
and loads for every k its rows' elements of A and its columns' of B straight into registers. Sums
are fp32, in the order of k.

The loads need no detour only where the compiler takes the layout of Y for them, too: it does for
fewer rows and columns than there are threads, and for straight code, hence no loop.
"""

import triton
import triton.language as tl

from .activations import finish
from .tiles import IN_ORDER, await_previous_kernel, epilogue, locate


@triton.jit
def gemm_shallow(
    a, b, y, bias, M, N, K, a_div, a_mod, b_div, b_mod, z0,
    lda, ldb, ldc, a_batch, b_batch, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
    residual, activation, act_alpha, act_beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    _, _, z, m, n = locate(M, N, 1, BM, BN, GROUP_M, False)
    z += z0
    offs_m = m + tl.arange(0, BM)
    offs_n = n + tl.arange(0, BN)
    a += (z // a_div % a_mod).to(tl.int64) * a_batch
    b += (z // b_div % b_mod).to(tl.int64) * b_batch
    # Along the strided dimension, what lies beyond the last row or column is it once more: its sums
    # are not stored. Along the contiguous one a mask keeps loads wide.
    if TRANS_A:
        a_column = a + offs_m
        a_step = lda
    else:
        a_column = a + tl.minimum(offs_m, M - 1).to(tl.int64) * lda
        a_step = 1
    if TRANS_B:
        b_row = b + tl.minimum(offs_n, N - 1).to(tl.int64) * ldb
        b_step = 1
    else:
        b_row = b + offs_n
        b_step = ldb
    await_previous_kernel(m | n | z, IN_ORDER, DEPENDENT_LAUNCH, LATE=True)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in tl.static_range(BK):
        # As vectors: the interpreter makes no mask of a scalar.
        a_in = tl.full((BM,), k, tl.int32) < K
        b_in = tl.full((BN,), k, tl.int32) < K
        if TRANS_A:
            a_in &= offs_m < M
        if not TRANS_B:
            b_in &= offs_n < N
        a_values = tl.load(a_column + k * a_step, mask=a_in, other=0.0)
        b_values = tl.load(b_row + k * b_step, mask=b_in, other=0.0)
        acc += a_values.to(tl.float32)[:, None] * b_values.to(tl.float32)[None, :]
    tile = epilogue(
        acc, bias, offs_m, offs_n, M, N, bias_stride_m, bias_stride_n, alpha, beta, False, False
    )
    at = z.to(tl.int64) * c_batch + offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
    inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if activation != 0:
        tile = finish(tile, residual + at, inside, activation, act_alpha, act_beta)
    tl.store(y + at, tile.to(y.dtype.element_ty), mask=inside)
