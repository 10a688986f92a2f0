"""`gemm_ws` in the accuracy class of fp32: TF32 products of split factors (see
`tiles.multiply_split`), on sm_90.

The left factor of the tensor core passes through the consumers' registers, where they split it; it
may be stored along either dimension. The right one must be contiguous along K: beside the loading
warpgroup there is one that writes its lower parts to a ring of their own. Left is A, or with SWAP
the transpose of B, and the accumulators then hold the transposed tile. Per stage there are three
barriers: `full` (TMA has written), `ready` (so has the splitting warpgroup) and `empty` (all
consumers have read).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ws_epilogue import publish, store_tile, wait_for
from .ws_schedule import ceil_div, item, origin, owner_of, share_of
from .ws_transposed import store_transposed


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage that follows in the ring; the phase flips each time round."""
    stage += 1
    around = stage == STAGES
    return gl.where(around, 0, stage), phase ^ gl.where(around, 1, 0)


@gluon.jit
def split(x):
    """(the 11 leading bits of x, the others, scaled as in `tiles.multiply_split`)."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, (x - high) * 1.00048


@gluon.jit
def load_tiles(left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, tiles,
               left_div, left_mod, right_div, right_mod, z0,
               BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
               SWAP: gl.constexpr, STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """The loading warpgroup."""
    ROWS: gl.constexpr = (BN if SWAP else BM) // CONSUMERS
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 1  # the wait for the phase before the first one returns at once: the ring starts empty
    for index in range(items):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        left_z = (z + z0) // left_div % left_mod
        right_z = (z + z0) // right_div % right_mod
        for step in range(begin, stop):
            k = step * BK
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (BM + BN) * BK * 4)
            for group in gl.static_range(CONSUMERS):
                at = [left_z, k, n + group * ROWS] if SWAP else [left_z, m + group * ROWS, k]
                tma.async_load(left_desc, at, bar, left_ring.index(stage * CONSUMERS + group))
            at = [right_z, m if SWAP else n, k]
            tma.async_load(right_desc, at, bar, right_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def split_tiles(right_ring, low_ring, full, ready, K, tiles, COLUMNS: gl.constexpr,
                BK: gl.constexpr, STREAM_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The splitting warpgroup. A stage of `low_ring` is free when that of `right_ring` was."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BK, BK // 4], [4, 1], [1, 0])
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 0
    for index in range(items):
        _tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        for _ in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            whole_tile = right_ring.index(stage).reshape([COLUMNS, BK])
            lower_tile = low_ring.index(stage).reshape([COLUMNS, BK])
            for row in gl.static_range(0, COLUMNS, 64):  # few registers at a time
                _high, low = split(whole_tile.slice(row, 64).load(layout))
                lower_tile.slice(row, 64).store(low)
            fence_async_shared()
            gl.barrier()  # every thread's stores come before the arrival below
            mbarrier.arrive(ready.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_tiles(left, right, y_desc, left_ring, right_ring, low_ring, y_tiles, full, ready,
                   empty, bias, workspace, counters, M, N, K, tiles,
                   left_div, left_mod, right_div, right_mod, z0,
                   left_pitch, right_pitch, left_batch, right_batch,
                   bias_stride_m, bias_stride_n, alpha, beta, after, GROUP: gl.constexpr,
                   BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
                   SWAP: gl.constexpr, STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """The warpgroup that multiplies number GROUP of the left factor's parts of each tile."""
    ROWS: gl.constexpr = (BN if SWAP else BM) // CONSUMERS
    COLUMNS: gl.constexpr = BM if SWAP else BN
    WIDTH: gl.constexpr = y_desc.block_shape[1] if SWAP else y_desc.block_shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 8]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    block = gl.program_id(0)
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 0
    for index in range(items):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for _ in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            own = left_ring.index(stage * CONSUMERS + GROUP)
            own = own.reshape([BK, ROWS]).permute([1, 0]) if SWAP else own.reshape([ROWS, BK])
            high, low = split(own.load(operand))
            other = right_ring.index(stage).reshape([COLUMNS, BK]).permute([1, 0])
            part = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
            part = warpgroup_mma(low, other, part, use_acc=False, precision="tf32", is_async=True)
            mbarrier.wait(ready.index(stage), phase)
            lower = low_ring.index(stage).reshape([COLUMNS, BK]).permute([1, 0])
            part = warpgroup_mma(high, lower, part, precision="tf32", is_async=True)
            part = warpgroup_mma(high, other, part, precision="tf32", is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage))
            acc += part
            stage, phase = next_stage(stage, phase, STAGES)

        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        if SWAP:
            n += GROUP * ROWS
        else:
            m += GROUP * ROWS
        if gl.max(gl.max((acc != acc).to(gl.int32), 1), 0) > 0:
            # An Inf or NaN among the operands leaves NaN wherever it takes part.
            left_z = left + (z + z0) // left_div % left_mod * left_batch
            right_z = right + (z + z0) // right_div % right_mod * right_batch
            if SWAP:
                acc = without_splitting(acc, left_z + n, right_z + m * right_pitch, N - n, M - m,
                                        begin * BK, gl.minimum(stop * BK, K),
                                        1, left_pitch, right_pitch)  # fmt: skip
            else:
                acc = without_splitting(acc, left_z + m * left_pitch, right_z + n * right_pitch,
                                        M - m, N - n, begin * BK, gl.minimum(stop * BK, K),
                                        left_pitch, 1, right_pitch)  # fmt: skip
        if STREAM_K and stop < steps:
            publish(acc, workspace, counters, block, GROUP, CONSUMERS, WIDTH)
        else:
            helper = block
            if STREAM_K and begin > 0:
                helper = owner_of((tile - whole) * steps, tiles, steps)
                wait_for(counters, helper, block, GROUP, CONSUMERS)
            if SWAP:
                store_transposed(acc, y_desc, y_tiles, bias, workspace, helper, block, z + z0, m, n,
                                 M, N, bias_stride_m, bias_stride_n, alpha, beta, after,
                                 GROUP, CONSUMERS, STREAM_K)  # fmt: skip
            else:
                store_tile(acc, y_desc, y_tiles, bias, workspace, helper, block, z + z0, m, n,
                           M, N, bias_stride_m, bias_stride_n, alpha, beta, after, 0,
                           GROUP, CONSUMERS, STREAM_K)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def without_splitting(acc, left, right, rows, columns, first, last, left_row, left_k, right_row):
    """`acc` with its NaNs computed again over K from `first` to `last`, on the scalar units.

    `left` and `right` point at the tile's first row of either factor, of which `rows` and `columns`
    are left; pitches are in elements, and the right factor is contiguous along K.
    """
    layout: gl.constexpr = acc.type.layout
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # few addresses a thread
    down = gl.arange(0, acc.shape[0], layout=line)
    across = gl.arange(0, acc.shape[1], layout=line)
    left += down * left_row + first * left_k
    right += across * right_row + first
    again = gl.zeros((acc.shape[0], acc.shape[1]), gl.float32, layout)
    for _ in range(first, last):
        column = gl.load(left, mask=down < rows, other=0.0)
        row = gl.load(right, mask=across < columns, other=0.0)
        column = gl.convert_layout(column, gl.SliceLayout(1, layout))
        row = gl.convert_layout(row, gl.SliceLayout(0, layout))
        again += column[:, None] * row[None, :]
        left += left_k
        right += 1
    return gl.where(acc != acc, again, acc)


@gluon.jit
def gemm_ws_x3(a_desc, b_desc, y_desc, a, b, bias, workspace, counters, M, N, K,
               a_div, a_mod, b_div, b_mod, z0, batch, lda, ldb, a_batch, b_batch, ldc, c_batch,
               bias_stride_m, bias_stride_n, alpha, beta,
               residual, activation, act_alpha, act_beta,
               BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
               TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, SWAP: gl.constexpr,
               STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    gl.static_assert(not TRANS_A and TRANS_B != SWAP and CONSUMERS == 2)
    after = (residual, ldc, c_batch, activation, act_alpha, act_beta)
    if SWAP:
        both_consumers_and_helpers(
            b_desc, a_desc, y_desc, b, a, bias, workspace, counters, M, N, K, b_div, b_mod, a_div,
            a_mod, z0, batch, ldb, lda, b_batch, a_batch, bias_stride_m, bias_stride_n, alpha, beta,
            after, BM, BN, BK, GROUP_M, SWAP, STREAM_K, CONSUMERS, STAGES,
        )  # fmt: skip
    else:
        both_consumers_and_helpers(
            a_desc, b_desc, y_desc, a, b, bias, workspace, counters, M, N, K, a_div, a_mod, b_div,
            b_mod, z0, batch, lda, ldb, a_batch, b_batch, bias_stride_m, bias_stride_n, alpha, beta,
            after, BM, BN, BK, GROUP_M, SWAP, STREAM_K, CONSUMERS, STAGES,
        )  # fmt: skip


@gluon.jit
def both_consumers_and_helpers(
        left_desc, right_desc, y_desc, left, right, bias, workspace, counters, M, N, K,
        left_div, left_mod, right_div, right_mod, z0, batch, left_pitch, right_pitch,
        left_batch, right_batch, bias_stride_m, bias_stride_n, alpha, beta, after,
        BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
        SWAP: gl.constexpr, STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr,
        STAGES: gl.constexpr):  # fmt: skip
    LEFT: gl.constexpr = left_desc.block_shape
    RIGHT: gl.constexpr = right_desc.block_shape
    Y_BOX: gl.constexpr = y_desc.block_shape
    left_ring = gl.allocate_shared_memory(
        left_desc.dtype, [STAGES * CONSUMERS, LEFT[0], LEFT[1], LEFT[2]], left_desc.layout
    )
    right_ring = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES, RIGHT[0], RIGHT[1], RIGHT[2]], right_desc.layout
    )
    low_ring = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES, RIGHT[0], RIGHT[1], RIGHT[2]], right_desc.layout
    )
    y_tiles = gl.allocate_shared_memory(
        y_desc.dtype, [2 * CONSUMERS, Y_BOX[0], Y_BOX[1], Y_BOX[2]], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    tiles = ceil_div(M, BM) * ceil_div(N, BN) * batch
    gl.warp_specialize(
        [(multiply_tiles, (left, right, y_desc, left_ring, right_ring, low_ring, y_tiles, full,
                           ready, empty, bias, workspace, counters, M, N, K, tiles, left_div,
                           left_mod, right_div, right_mod, z0, left_pitch, right_pitch, left_batch,
                           right_batch, bias_stride_m, bias_stride_n, alpha, beta, after, 0,
                           BM, BN, BK, GROUP_M, SWAP, STREAM_K, CONSUMERS, STAGES)),
         (multiply_tiles, (left, right, y_desc, left_ring, right_ring, low_ring, y_tiles, full,
                           ready, empty, bias, workspace, counters, M, N, K, tiles, left_div,
                           left_mod, right_div, right_mod, z0, left_pitch, right_pitch, left_batch,
                           right_batch, bias_stride_m, bias_stride_n, alpha, beta, after, 1,
                           BM, BN, BK, GROUP_M, SWAP, STREAM_K, CONSUMERS, STAGES)),
         (split_tiles, (right_ring, low_ring, full, ready, K, tiles, BM if SWAP else BN, BK,
                        STREAM_K, STAGES)),
         (load_tiles, (left_desc, right_desc, left_ring, right_ring, full, empty, M, N, K, tiles,
                       left_div, left_mod, right_div, right_mod, z0,
                       BM, BN, BK, GROUP_M, SWAP, STREAM_K, CONSUMERS, STAGES))],
        [4, 4, 4], [216, 40, 40])  # fmt: skip
