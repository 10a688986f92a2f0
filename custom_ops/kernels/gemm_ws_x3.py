"""`gemm_ws` in the accuracy class of fp32: TF32 products of split factors (see
`tiles.multiply_split`), on sm_90, for operands contiguous along K.

Beside the loading warpgroup and the consumers there is one that splits: it writes the lower parts
of B's tile to a ring of their own. Consumers take A to registers and split it there. Per stage
there are three barriers: `full` (TMA has written), `ready` (so has the splitting warpgroup) and
`empty` (all consumers have read).
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
def load_tiles(a_desc, b_desc, a_ring, b_ring, full, empty, M, N, K, tiles,
               a_div, a_mod, b_div, b_mod, z0,
               BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
               STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The loading warpgroup."""
    ROWS: gl.constexpr = BM // CONSUMERS
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 1  # the wait for the phase before the first one returns at once: the ring starts empty
    for index in range(items):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        a_z = (z + z0) // a_div % a_mod
        b_z = (z + z0) // b_div % b_mod
        for step in range(begin, stop):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (BM + BN) * BK * 4)
            for group in gl.static_range(CONSUMERS):
                a = a_ring.index(stage * CONSUMERS + group)
                tma.async_load(a_desc, [a_z, m + group * ROWS, step * BK], bar, a)
            tma.async_load(b_desc, [b_z, n, step * BK], bar, b_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def split_tiles(b_ring, low_ring, full, ready, K, tiles,
                BN: gl.constexpr, BK: gl.constexpr, STREAM_K: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    """The splitting warpgroup. A stage of `low_ring` is free when that of `b_ring` was."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BK, BK // 4], [4, 1], [1, 0])
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 0
    for index in range(items):
        _tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        for _ in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            whole_tile = b_ring.index(stage).reshape([BN, BK])
            lower_tile = low_ring.index(stage).reshape([BN, BK])
            for row in gl.static_range(0, BN, 64):  # few registers at a time
                _high, low = split(whole_tile.slice(row, 64).load(layout))
                lower_tile.slice(row, 64).store(low)
            fence_async_shared()
            gl.barrier()  # every thread's stores come before the arrival below
            mbarrier.arrive(ready.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_tiles(a, b, y_desc, a_ring, b_ring, low_ring, y_tiles, full, ready, empty,
                   bias, workspace, counters, M, N, K, tiles, a_div, a_mod, b_div, b_mod, z0,
                   lda, ldb, a_batch, b_batch, bias_stride_m, bias_stride_n, alpha, beta,
                   GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
                   GROUP_M: gl.constexpr, STREAM_K: gl.constexpr, CONSUMERS: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """The warpgroup that multiplies the rows of number GROUP in each tile."""
    ROWS: gl.constexpr = BM // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    block = gl.program_id(0)
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    stage = 0
    phase = 0
    for index in range(items):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        acc = gl.zeros((ROWS, BN), gl.float32, layout)
        for _ in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            a_tile = a_ring.index(stage * CONSUMERS + GROUP)
            high, low = split(a_tile.reshape([ROWS, BK]).load(left))
            right = b_ring.index(stage).reshape([BN, BK]).permute([1, 0])
            part = gl.zeros((ROWS, BN), gl.float32, layout)
            part = warpgroup_mma(low, right, part, use_acc=False, precision="tf32", is_async=True)
            mbarrier.wait(ready.index(stage), phase)
            lower = low_ring.index(stage).reshape([BN, BK]).permute([1, 0])
            part = warpgroup_mma(high, lower, part, precision="tf32", is_async=True)
            part = warpgroup_mma(high, right, part, precision="tf32", is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage))
            acc += part
            stage, phase = next_stage(stage, phase, STAGES)

        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        if gl.max(gl.max((acc != acc).to(gl.int32), 1), 0) > 0:
            # An Inf or NaN among the operands leaves NaN wherever it takes part.
            a_z = a + (z + z0) // a_div % a_mod * a_batch
            b_z = b + (z + z0) // b_div % b_mod * b_batch
            acc = without_splitting(acc, a_z, b_z, m + GROUP * ROWS, n, M, N, begin * BK,
                                    gl.minimum(stop * BK, K), lda, ldb)  # fmt: skip
        if STREAM_K and stop < steps:
            publish(acc, workspace, counters, block, GROUP, CONSUMERS, y_desc.block_shape[2])
        else:
            helper = block
            if STREAM_K and begin > 0:
                helper = owner_of((tile - whole) * steps, tiles, steps)
                wait_for(counters, helper, block, GROUP, CONSUMERS)
            store_tile(acc, y_desc, y_tiles, bias, workspace, helper, block,
                       z + z0, m + GROUP * ROWS, n, M, N, bias_stride_m, bias_stride_n, alpha, beta,
                       GROUP, CONSUMERS, STREAM_K)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def without_splitting(acc, a, b, m, n, M, N, first, last, lda, ldb):
    """`acc` with its NaNs computed again over K from `first` to `last`, on the scalar units."""
    layout: gl.constexpr = acc.type.layout
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # few addresses a thread
    offs_m = m + gl.arange(0, acc.shape[0], layout=line)
    offs_n = n + gl.arange(0, acc.shape[1], layout=line)
    a += offs_m * lda  # 64-bit, as the pitches are
    b += offs_n * ldb
    again = gl.zeros((acc.shape[0], acc.shape[1]), gl.float32, layout)
    for k in range(first, last):
        column = gl.load(a + k, mask=offs_m < M, other=0.0)
        row = gl.load(b + k, mask=offs_n < N, other=0.0)
        column = gl.convert_layout(column, gl.SliceLayout(1, layout))
        row = gl.convert_layout(row, gl.SliceLayout(0, layout))
        again += column[:, None] * row[None, :]
    return gl.where(acc != acc, again, acc)


@gluon.jit
def gemm_ws_x3(a_desc, b_desc, y_desc, a, b, bias, workspace, counters, M, N, K,
               a_div, a_mod, b_div, b_mod, z0, batch, lda, ldb, a_batch, b_batch,
               bias_stride_m, bias_stride_n, alpha, beta,
               BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
               TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, STREAM_K: gl.constexpr,
               CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    gl.static_assert(TRANS_B and not TRANS_A and CONSUMERS == 2)
    A_BOX: gl.constexpr = a_desc.block_shape
    B_BOX: gl.constexpr = b_desc.block_shape
    Y_BOX: gl.constexpr = y_desc.block_shape
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * CONSUMERS, A_BOX[0], A_BOX[1], A_BOX[2]], a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, B_BOX[0], B_BOX[1], B_BOX[2]], b_desc.layout
    )
    low_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, B_BOX[0], B_BOX[1], B_BOX[2]], b_desc.layout
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
        [(multiply_tiles, (a, b, y_desc, a_ring, b_ring, low_ring, y_tiles, full, ready, empty,
                           bias, workspace, counters, M, N, K, tiles, a_div, a_mod, b_div, b_mod,
                           z0, lda, ldb, a_batch, b_batch, bias_stride_m, bias_stride_n, alpha,
                           beta, 0, BM, BN, BK, GROUP_M, STREAM_K, CONSUMERS, STAGES)),
         (multiply_tiles, (a, b, y_desc, a_ring, b_ring, low_ring, y_tiles, full, ready, empty,
                           bias, workspace, counters, M, N, K, tiles, a_div, a_mod, b_div, b_mod,
                           z0, lda, ldb, a_batch, b_batch, bias_stride_m, bias_stride_n, alpha,
                           beta, 1, BM, BN, BK, GROUP_M, STREAM_K, CONSUMERS, STAGES)),
         (split_tiles, (b_ring, low_ring, full, ready, K, tiles, BN, BK, STREAM_K, STAGES)),
         (load_tiles, (a_desc, b_desc, a_ring, b_ring, full, empty, M, N, K, tiles,
                       a_div, a_mod, b_div, b_mod, z0,
                       BM, BN, BK, GROUP_M, STREAM_K, CONSUMERS, STAGES))],
        [4, 4, 4], [216, 40, 40])  # fmt: skip
