"""What every GEMM family shares on the device: which tile a block computes, the deterministic sum
of K slices, and the epilogue.

The module is imported twice: as itself for ahead-of-time compilation, and as a second copy under
another package name with Triton's interpreter on (see `loading.py`). Functions of
`triton.language` that are themselves `triton.jit` functions (`tl.zeros`, `tl.cdiv`) exist once
only, compiled, so none is used.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The interpreter multiplies the bit patterns of bf16, not their values; widening first is exact.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# How a kernel's start and end relate to its neighbours on the stream: `mp_order` in moonpoly.h.
IN_ORDER = tl.constexpr(0)
LETS_NEXT_JOIN = tl.constexpr(1)
JOINS_PREVIOUS = tl.constexpr(2)


@triton.jit
def await_previous_kernel(ready, order, DEPENDENT_LAUNCH: tl.constexpr, LATE: tl.constexpr = False):
    """Programmatic dependent launch (sm_90 and up): the next kernel of the stream may be placed on
    the SMs as soon as all blocks of this one run, and each waits here, before it touches memory,
    until the kernel in front of it is complete. That hides about 1 us of launch latency a kernel.

    `ready`, an i32 that is not negative, is worked out first: where a block works, some 300
    instructions of a small kernel. The wait depends on it, since ptxas would move it in front.

    LATE: the next kernel is let in only when this one starts its work, so that no more than one
    kernel waits beside the one that runs, and the SMs do not fill up with blocks that wait.

    Two kernels that write disjoint parts of one result run side by side where the second one
    (`order` JOINS_PREVIOUS) does not wait here. It then relies on the first one for what came
    before: that one (LETS_NEXT_JOIN) lets it start only after its own wait, when all of that is
    complete.
    """
    if DEPENDENT_LAUNCH:
        if not LATE:  # noqa: SIM102 - decided by the compiler, the next one at run time
            if order != LETS_NEXT_JOIN:
                gdc_launch_dependents()
        if order != JOINS_PREVIOUS:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p griddepcontrol.wait; mov.b32 $0, 0; }",
                "=r,r", [ready], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        if LATE:
            gdc_launch_dependents()
        else:
            if order == LETS_NEXT_JOIN:
                gdc_launch_dependents()


@triton.jit
def await_joined_kernel(order, DEPENDENT_LAUNCH: tl.constexpr):
    """The last thing a block does: a kernel that joined the one in front of it is not complete
    before that one is, so that whoever waits for this kernel waits for both.
    """
    if DEPENDENT_LAUNCH:  # noqa: SIM102 - decided by the compiler, not at run time
        if order == JOINS_PREVIOUS:
            gdc_wait()


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
def truncated(x):
    """x with the 10 mantissa bits that the tensor core sees of an f32; Inf stays Inf."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def multiply(a, b, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """acc + a @ b, or its transpose for SWAP: the wide side of the tensor core then covers the
    columns of b.

    ROUND (TF32) names the factors, "left", "both" or "none", that pass through registers anyway.
    The tensor core truncates f32 to 10 mantissa bits, which shrinks a product by 7e-4 on average;
    scaled by 1 + 0.72 * 2^-11 first, a factor is right on average, values of 10 bits stay exact,
    and NaN and Inf stay what they are. On wgmma it also makes the compiler feed the left factor
    from registers, where it may be stored along either dimension; in shared memory TF32 must be
    K-major. "nan" makes all NaNs quiet: of others, truncation may leave Inf.
    """
    if SWAP:
        left = tl.trans(b)
        right = tl.trans(a)
    else:
        left = a
        right = b
    if PRECISION == "tf32x3":
        return multiply_split(left, right, acc, ROUND)
    if ROUND == "nan":
        left += 0.0
        right += 0.0
    elif ROUND != "none":
        left *= 1.00035156
    if ROUND == "both":
        right *= 1.00035156
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def multiply_split(left, right, acc, ROUND: tl.constexpr):
    """acc + left @ right in the accuracy class of fp32, by three TF32 products.

    Each factor is a sum of its leading 11 bits and the other 13, of which the tensor core takes
    11. What is left out would shrink a product by 2.9e-7 on average, at most 2^-19.2; the lower
    parts are scaled up by all that leaves values of 11 bits exact, which makes 0.3e-7 and 2^-20 of
    it. The tensor core truncates its sums, too: over a long K that would add up (to 3e-5 over 4096
    terms of one sign), so each step starts from zero, smallest products first, and is added to
    `acc` with rounding.

    An Inf or NaN leaves NaN wherever it has a part (Inf - Inf): see `has_nan`. Below 2^-113 bits
    of the lower part are lost, since it cannot be less than 2^-136.
    """
    high_left = truncated(left)
    low_left = (left - high_left) * 1.00048
    high_right = truncated(right)
    low_right = (right - high_right) * 1.00048
    if INTERPRETED:
        low_left = truncated(low_left)
        low_right = truncated(low_right)
    elif ROUND != "both":
        high_right = right  # stays in the shared memory that it was loaded to; truncated there
    part = tl.dot(low_left, high_right, input_precision="tf32")
    part = tl.dot(high_left, low_right, part, input_precision="tf32")
    part = tl.dot(high_left, high_right, part, input_precision="tf32")
    return acc + part


@triton.jit
def has_nan(acc):
    """Whether a tile holds NaN; in the interpreter, which has no quick reduction, always true."""
    if INTERPRETED:
        return True
    else:
        return tl.max((acc != acc).to(tl.int32)) > 0


@triton.jit
def sum_slices(
    acc, workspace, counters, slot, part, split,
    ROWS: tl.constexpr, COLS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Stores this slice's partial tile and arrives; the last block to arrive reads all of them
    back in slice order, so that the sum has the same bits whatever the order of arrival, and
    resets the counter.

    AT_ONCE slices are in flight, through the shared memory that the K loop has left: one after the
    other, each waited for the L2, which took 0.5 us a slice of 64x64 on an H200.

    Returns (is_last, sum). The sum is meaningful only in the last block.
    """
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    partials = workspace + slot.to(tl.int64) * split * (ROWS * COLS)
    tl.store(partials + part.to(tl.int64) * (ROWS * COLS) + offsets, acc)
    tl.debug_barrier()  # every thread's stores come before the one release below
    is_last = tl.atomic_add(counters + slot, 1, sem="acq_rel") == split - 1
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    if is_last:
        for _ in tl.range(0, split, num_stages=AT_ONCE + 1):
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
    entirely. C is read past L1: a kernel that joined the one in front of it has not waited for the
    writer of C by itself.
    """
    tile = (tl.trans(acc) if SWAP else acc) * alpha
    if BIAS_MATRIX:
        offsets = (
            offs_m.to(tl.int64)[:, None] * bias_stride_m
            + offs_n.to(tl.int64)[None, :] * bias_stride_n
        )
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :] & (beta != 0)
        values = tl.load(bias + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        tile += beta * values.to(tl.float32)
    else:
        along_m = (beta != 0) & (bias_stride_m != 0)
        along_n = (beta != 0) & (bias_stride_m == 0)
        in_m = (offs_m < M) & along_m
        in_n = (offs_n < N) & along_n
        column = tl.load(bias + offs_m * bias_stride_m, mask=in_m, other=0.0, cache_modifier=".cg")
        row = tl.load(bias + offs_n * bias_stride_n, mask=in_n, other=0.0, cache_modifier=".cg")
        tile += beta * (column.to(tl.float32)[:, None] + row.to(tl.float32)[None, :])
    return tile
