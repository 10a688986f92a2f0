"""Warp-specialised persistent GEMM for sm_90: one warpgroup loads tiles through TMA, one to three
warpgroups multiply them with wgmma: each its own rows of every tile, or with PINGPONG, two in turn
whole tiles.

Per stage of the ring there is one `full` barrier (one arrival: the producer's, completed by the
bytes that it expects) and one `empty` barrier (one arrival from each consumer that reads it).
Producer and consumers walk the same work items in the same order, so the ring runs on across tiles:
loads of the next tile overlap this one's epilogue, which leaves through its own shared memory and
TMA. With PINGPONG the products of the next tile overlap it, too. Stages come in the order of tiles,
and the parity of `full` tells the next phase from this one but not from the last: a consumer starts
a tile when the other has the last stage of its own, which a `turns` barrier says (one for each, one
arrival).
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .ws_epilogue import publish, store_tile, wait_for
from .ws_schedule import ceil_div, item, origin, owner_of, share_of
from .ws_slices import leave, parts_ready, slice_of, store_part, store_share


@gluon.constexpr_function
def low_part(columns):
    """The columns of a tile that its first accumulator has, a power of two as all tensors'; a
    second one has the rest."""
    return 1 << (columns.bit_length() - 1)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring; the phase flips each time round."""
    stage += 1
    around = stage == STAGES
    return gl.where(around, 0, stage), phase ^ gl.where(around, 1, 0)


@gluon.jit
def skip(stage, phase, steps, STAGES: gl.constexpr):
    """`advance`, `steps` times."""
    stage += steps
    return stage % STAGES, phase ^ (stage // STAGES % 2)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage that came before. Not a variable that remembers it: Triton 3.9 takes one that
    starts equal to `stage`, and is then assigned its last value, for a constant of the loop."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def produce(a_desc, b_desc, a_ring, b_ring, b_rest, full, empty,
            M, N, K, tiles, a_div, a_mod, b_div, b_mod, z0,
            BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
            TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, STREAM_K: gl.constexpr,
            CONSUMERS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
            SLICED: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    """The loading warpgroup."""
    PARTS: gl.constexpr = 1 if PINGPONG else CONSUMERS
    ROWS: gl.constexpr = BM // PARTS
    LOW: gl.constexpr = low_part(BN)
    REST: gl.constexpr = BN - LOW
    BYTES: gl.constexpr = (BM + BN) * BK * a_desc.dtype.primitive_bitwidth // 8
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    if SLICED:
        items = 1
    stage = 0
    phase = 1  # the wait for the phase before the first one returns at once: the ring starts empty
    for index in range(items):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        if SLICED:
            tile, _, _, begin, stop = slice_of(tiles, steps)
        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        a_z = (z + z0) // a_div % a_mod
        b_z = (z + z0) // b_div % b_mod
        if DEPENDENT_LAUNCH:
            gdc_wait()  # all that comes before overlaps the end of the kernel in front
        for step in range(begin, stop):
            k = step * BK
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            for part in gl.static_range(PARTS):
                rows = m + part * ROWS
                a = a_ring.index(stage * PARTS + part)
                tma.async_load(a_desc, [a_z, k, rows] if TRANS_A else [a_z, rows, k], bar, a)
            b = b_ring.index(stage)
            if REST == 0:
                at = [b_z, n, k] if TRANS_B else [b_z, k, n]
                tma.async_load(b_desc, at, bar, b)
            else:
                chunks = b.reinterpret(
                    shape=[LOW // REST, 1, b_desc.block_shape[1], b_desc.block_shape[2]],
                    layout=b_desc.layout,
                )
                for chunk in gl.static_range(LOW // REST):
                    columns = n + chunk * REST
                    at = [b_z, columns, k] if TRANS_B else [b_z, k, columns]
                    tma.async_load(b_desc, at, bar, chunks.index(chunk))
                at = [b_z, n + LOW, k] if TRANS_B else [b_z, k, n + LOW]
                tma.async_load(b_desc, at, bar, b_rest.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def consume(y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full, empty, turns,
            bias, workspace, counters, M, N, K, tiles, z0, bias_stride_m, bias_stride_n,
            alpha, beta, after, GROUP: gl.constexpr,
            BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
            TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, STREAM_K: gl.constexpr,
            CONSUMERS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
            SLICED: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    """The warpgroup number GROUP of those that multiply: the rows of that number in each tile, or,
    in turn with the others, whole tiles."""
    PARTS: gl.constexpr = 1 if PINGPONG else CONSUMERS
    PART: gl.constexpr = 0 if PINGPONG else GROUP
    ROWS: gl.constexpr = BM // PARTS
    LOW: gl.constexpr = low_part(BN)
    REST: gl.constexpr = BN - LOW
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, LOW, 256 // a_ring.dtype.primitive_bitwidth],
    )  # fmt: skip
    block = gl.program_id(0)
    steps = ceil_div(K, BK)
    whole, items, streamed, first, end = share_of(tiles, steps, STREAM_K)
    if SLICED:
        items = 1
    stage = 0
    phase = 0
    turn = 1 - GROUP  # the first one's first wait returns at once
    if PINGPONG:
        stage, phase = skip(stage, phase, GROUP * steps, STAGES)
    for index in range(GROUP if PINGPONG else 0, items, CONSUMERS if PINGPONG else 1):
        tile, begin, stop, end = item(index, end, whole, streamed, first, steps, STREAM_K)
        if SLICED:
            tile, part, parts, begin, stop = slice_of(tiles, steps)
        z, m, n = origin(tile, M, N, BM, BN, GROUP_M)
        m += PART * ROWS
        acc = gl.zeros((ROWS, LOW), gl.float32, layout)
        if REST > 0:
            rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1],
                instr_shape=[16, REST, 256 // a_ring.dtype.primitive_bitwidth],
            )  # fmt: skip
            rest = gl.zeros((ROWS, REST), gl.float32, rest_layout)
        if PINGPONG:
            mbarrier.wait(turns.index(GROUP), turn)
            turn ^= 1
        for step in range(begin, stop):
            mbarrier.wait(full.index(stage), phase)
            a = a_ring.index(stage * PARTS + PART)
            b = b_ring.index(stage)
            a = a.reshape([BK, ROWS]).permute([1, 0]) if TRANS_A else a.reshape([ROWS, BK])
            b = b.reshape([LOW, BK]).permute([1, 0]) if TRANS_B else b.reshape([BK, LOW])
            acc = warpgroup_mma(a, b, acc, precision="tf32", is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index(1 - GROUP), pred=step == stop - 1)
            # One stage in flight: the one before is read.
            if REST > 0:
                b = b_rest.index(stage)
                b = b.reshape([REST, BK]).permute([1, 0]) if TRANS_B else b.reshape([BK, REST])
                rest = warpgroup_mma(a, b, rest, precision="tf32", is_async=True)
                acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), pred=step > begin)
            stage, phase = advance(stage, phase, STAGES)
        if REST > 0:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before(stage, STAGES)))

        if DEPENDENT_LAUNCH:
            gdc_wait()
        if SLICED:
            slot = tile * CONSUMERS + GROUP
            partials = workspace + slot * parts * (ROWS * BN)
            store_part(acc, partials + part * (ROWS * BN), BN)
            if REST > 0:
                store_part(rest, partials + part * (ROWS * BN) + LOW, BN)
            ready, present, run, stride = parts_ready(counters + slot, part, parts)
            if ready:
                store_share(partials, run, stride, parts, y, bias, z + z0, m, n,
                            M, N, ldc, c_batch, bias_stride_m, bias_stride_n, alpha, beta,
                            after, ROWS, BN)  # fmt: skip
                if present:
                    leave(counters + slot, parts)
        elif STREAM_K and stop < steps:
            publish(acc, workspace, counters, block, GROUP, CONSUMERS, y_desc.block_shape[2])
        else:
            helper = block
            if STREAM_K and begin > 0:
                helper = owner_of((tile - whole) * steps, tiles, steps)
                wait_for(counters, helper, block, GROUP, CONSUMERS)
            store_tile(acc, y_desc, y_tiles, bias, workspace, helper, block,
                       z + z0, m, n, M, N, bias_stride_m, bias_stride_n, alpha, beta,
                       after, 0, GROUP, CONSUMERS, STREAM_K)  # fmt: skip
            if REST > 0:
                store_tile(rest, y_desc, y_tiles, bias, workspace, helper, block,
                           z + z0, m, n + LOW, M, N, bias_stride_m, bias_stride_n,
                           alpha, beta, after, LOW // y_desc.block_shape[2],
                           GROUP, CONSUMERS, STREAM_K)  # fmt: skip
        if PINGPONG:
            stage, phase = skip(stage, phase, (CONSUMERS - 1) * steps, STAGES)
    tma.store_wait(0)


@gluon.jit
def gemm_ws(a_desc, b_desc, y_desc, y, ldc, c_batch, bias, workspace, counters, M, N, K,
            a_div, a_mod, b_div, b_mod, z0, batch, bias_stride_m, bias_stride_n, alpha, beta,
            residual, activation, act_alpha, act_beta,
            BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
            TRANS_A: gl.constexpr, TRANS_B: gl.constexpr, STREAM_K: gl.constexpr,
            CONSUMERS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
            SLICED: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    PARTS: gl.constexpr = 1 if PINGPONG else CONSUMERS
    A_BOX: gl.constexpr = a_desc.block_shape
    B_BOX: gl.constexpr = b_desc.block_shape
    Y_BOX: gl.constexpr = y_desc.block_shape
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * PARTS, A_BOX[0], A_BOX[1], A_BOX[2]], a_desc.layout
    )
    LOW: gl.constexpr = low_part(BN)
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, 1, LOW, BK] if TRANS_B else [STAGES, 1, BK, LOW], b_desc.layout
    )
    b_rest = b_ring
    if BN > LOW:
        b_rest = gl.allocate_shared_memory(
            b_desc.dtype, [STAGES, B_BOX[0], B_BOX[1], B_BOX[2]], b_desc.layout
        )
    y_tiles = gl.allocate_shared_memory(
        y_desc.dtype, [2 * CONSUMERS, Y_BOX[0], Y_BOX[1], Y_BOX[2]], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=PARTS)
    turns = empty
    if PINGPONG:
        turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(CONSUMERS):
            mbarrier.init(turns.index(group), count=1)
    fence_async_shared()

    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()

    tiles = ceil_div(M, BM) * ceil_div(N, BN) * batch
    after = (residual, ldc, c_batch, activation, act_alpha, act_beta)
    # The last numbers are registers a thread: the loading warpgroup hands some to the consumers. It
    # is a whole warpgroup, though one thread of it does the work: all four warps must execute the
    # same setmaxnreg, and the padding that the compiler adds to a single warp has another one.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (produce, (a_desc, b_desc, a_ring, b_ring, b_rest, full, empty,
                        M, N, K, tiles, a_div, a_mod, b_div, b_mod, z0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG))],
            [4], [40])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 1,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (produce, (a_desc, b_desc, a_ring, b_ring, b_rest, full, empty,
                        M, N, K, tiles, a_div, a_mod, b_div, b_mod, z0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG))],
            [4, 4], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 1,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (consume, (y_desc, y, ldc, c_batch, a_ring, b_ring, b_rest, y_tiles, full,
                        empty, turns, bias, workspace, counters, M, N, K, tiles, z0,
                        bias_stride_m, bias_stride_n, alpha, beta, after, 2,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG)),
             (produce, (a_desc, b_desc, a_ring, b_ring, b_rest, full, empty,
                        M, N, K, tiles, a_div, a_mod, b_div, b_mod, z0,
                        BM, BN, BK, GROUP_M, TRANS_A, TRANS_B, STREAM_K, CONSUMERS, STAGES,
                        DEPENDENT_LAUNCH, SLICED, PINGPONG))],
            [4, 4, 4], [160, 160, 32])  # fmt: skip
