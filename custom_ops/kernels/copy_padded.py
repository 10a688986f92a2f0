"""Copies a batch of matrices so that their rows lie along K and fill whole units of 16 bytes.

    Y[z] = op(A[z]), M x K, followed in each row by zeros up to N columns

The source has any alignment; rows of Y are aligned to 16 bytes. The zeros make K effectively N: a
tensor map may span them, and what they are multiplied with does not matter unless it is NaN or
infinite, so both operands are zero there (the other one by its own padding or its map's bounds).
Elements are moved as integers of their size.
"""

import triton
import triton.language as tl

from .tiles import IN_ORDER, await_previous_kernel, ceil_div


@triton.jit
def copy_padded(
    a, y, M, N, K, lda, ldc, a_batch, c_batch,
    BM: tl.constexpr, BN: tl.constexpr, TRANS_A: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    across = ceil_div(N, BN)
    tiles = across * ceil_div(M, BM)
    z = (block // tiles).to(tl.int64)
    tile = block % tiles
    row = tile // across * BM
    column = tile % across * BN
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    a += z * a_batch
    y += z * c_batch
    await_previous_kernel(row | column, IN_ORDER, DEPENDENT_LAUNCH)
    if TRANS_A:  # read along the source's rows, which are columns of Y
        source = a + columns.to(tl.int64)[:, None] * lda + rows[None, :]
        there = (columns < K)[:, None] & (rows < M)[None, :]
        values = tl.trans(tl.load(source, mask=there, other=0))
    else:
        source = a + rows.to(tl.int64)[:, None] * lda + columns[None, :]
        there = (rows < M)[:, None] & (columns < K)[None, :]
        values = tl.load(source, mask=there, other=0)
    target = y + rows.to(tl.int64)[:, None] * ldc + columns[None, :]
    tl.store(target, values, mask=(rows < M)[:, None] & (columns < N)[None, :])
