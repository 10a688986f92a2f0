"""What every GEMM family shares on the device: which tile a block computes, the deterministic sum
of K slices, and the epilogue.

The module is imported twice: as itself for ahead-of-time compilation, and as a second copy under
another package name with Triton's interpreter on (see `loading.py`). Functions of
`triton.language` that are themselves `triton.jit` functions (`tl.zeros`, `tl.cdiv`) exist once
only, compiled, so none is used.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

# The interpreter multiplies the bit patterns of bf16, not their values; widening first is exact.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def await_previous_kernel(ready, DEPENDENT_LAUNCH: tl.constexpr, LATE: tl.constexpr = False):
    """Programmatic dependent launch (sm_90 and up): the next kernel of the stream may be placed on
    the SMs as soon as all blocks of this one run, and each waits here, before it touches memory,
    until the kernel in front of it is complete. That hides about 1 us of launch latency a kernel.

    `ready`, an i32 that is not negative, is worked out first: where a block works, some 300
    instructions of a small kernel. The wait depends on it, since ptxas would move it in front.

    LATE: the next kernel is let in only when this one starts its work, so that no more than one
    kernel waits beside the one that runs, and the SMs do not fill up with blocks that wait.
    """
    if DEPENDENT_LAUNCH:
        if not LATE:
            gdc_launch_dependents()
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p griddepcontrol.wait; mov.b32 $0, 0; }",
            "=r,r", [ready], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        if LATE:
            gdc_launch_dependents()


@triton.jit
def ceil_div(x, y):
    return (x + y - 1) // y


@triton.jit
def locate(
    M, N, split, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr
):
    """The block's work: (K slice, arrival slot, batch entry, first row, first column).

    Blocks run K slice innermost, then tile, then batch entry. Tiles go column by column through
    groups of GROUP_M tile rows, so that the blocks in flight share their rows of A and columns of
    B in L2.
    """
    block = tl.program_id(0)
    part = 0
    slot = block
    if SPLIT_K:
        part = block % split
        slot = block // split
    tile_rows = ceil_div(M, BM)
    tile_cols = ceil_div(N, BN)
    tile = slot % (tile_rows * tile_cols)
    z = slot // (tile_rows * tile_cols)
    per_group = GROUP_M * tile_cols
    first_row = tile // per_group * GROUP_M
    height = tl.minimum(tile_rows - first_row, GROUP_M)
    m = (first_row + tile % per_group % height) * BM
    n = tile % per_group // height * BN
    return part, slot, z, m, n


@triton.jit
def slice_of(K, part, split, BK: tl.constexpr, SPLIT_K: tl.constexpr):
    """The K steps [first, last) of one slice; empty when there are fewer steps than slices."""
    steps = ceil_div(K, BK)
    first = 0
    last = steps
    if SPLIT_K:
        share = ceil_div(steps, split)
        first = tl.minimum(part * share, steps)
        last = tl.minimum(first + share, steps)
    return first, last


@triton.jit
def multiply(a, b, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """acc + a @ b, or its transpose for SWAP: the wide side of the tensor core then covers the
    columns of b.

    ROUND (TF32) names the factors, "left", "both" or "none", that pass through registers anyway.
    The tensor core truncates f32 to 10 mantissa bits, which shrinks a product by 7e-4 on average;
    scaled by 1 + 0.72 * 2^-11 first, a factor is right on average, values of 10 bits stay exact,
    and NaN and Inf stay what they are. On wgmma it also makes the compiler feed the left factor
    from registers, where it may be stored along either dimension; in shared memory TF32 must be
    K-major.
    """
    if SWAP:
        left = tl.trans(b)
        right = tl.trans(a)
    else:
        left = a
        right = b
    if ROUND != "none":
        left *= 1.00035156
    if ROUND == "both":
        right *= 1.00035156
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def sum_slices(acc, workspace, counters, slot, part, split, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Stores this slice's partial tile and arrives; the last block to arrive reads all of them
    back in slice order, so that the sum has the same bits whatever the order of arrival, and
    resets the counter.

    Returns (is_last, sum). The sum is meaningful only in the last block.
    """
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    partials = workspace + slot.to(tl.int64) * split * (ROWS * COLS)
    tl.store(partials + part.to(tl.int64) * (ROWS * COLS) + offsets, acc)
    tl.debug_barrier()  # every thread's stores come before the one release below
    is_last = tl.atomic_add(counters + slot, 1, sem="acq_rel") == split - 1
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    if is_last:
        for _ in range(split):
            total += tl.load(partials + offsets, cache_modifier=".cg")
            partials += ROWS * COLS
        tl.store(counters + slot, 0)
    return is_last, total


@triton.jit
def epilogue(
    acc, bias, offs_m, offs_n, M, N, bias_stride_m, bias_stride_n, alpha, beta,
    SWAP: tl.constexpr, BIAS_MATRIX: tl.constexpr,
):  # fmt: skip
    """The tile of alpha * A @ B + beta * C in fp32, upright also for SWAP. Where beta is 0, C is
    not touched: it may be null.

    A vector C varies along one dimension only, so one of the two loads below is masked off
    entirely.
    """
    tile = (tl.trans(acc) if SWAP else acc) * alpha
    if BIAS_MATRIX:
        offsets = (
            offs_m.to(tl.int64)[:, None] * bias_stride_m
            + offs_n.to(tl.int64)[None, :] * bias_stride_n
        )
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :] & (beta != 0)
        tile += beta * tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        along_m = (beta != 0) & (bias_stride_m != 0)
        along_n = (beta != 0) & (bias_stride_m == 0)
        column = tl.load(bias + offs_m * bias_stride_m, mask=(offs_m < M) & along_m, other=0.0)
        row = tl.load(bias + offs_n * bias_stride_n, mask=(offs_n < N) & along_n, other=0.0)
        tile += beta * (column.to(tl.float32)[:, None] + row.to(tl.float32)[None, :])
    return tile
