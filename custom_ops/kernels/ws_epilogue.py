"""How a consumer warpgroup of `gemm_ws` disposes of its accumulators: to Y, or, where another block
finishes the tile, to the workspace.

Both go in chunks of columns as wide as the box of Y's tensor map, which bounds the registers and
the shared memory needed; two buffers let one chunk be written while TMA reads the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .activations import GATED, WIDE, columns, entry_of, rest_of
from .ws_finish import finished, rows_of, store_gated, store_wide


@gluon.jit
def fragments(x):
    """The chunk as a vector in which each thread's elements come in runs of four, neighbours
    side by side: global accesses then take 16 bytes a thread and whole lines a warp."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    x = x.reshape((R // 16, 2, 8, C // 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    return x.reshape((R * C,))


@gluon.jit
def from_fragments(x, R: gl.constexpr, C: gl.constexpr):
    """The chunk that `fragments` made a vector of."""
    return x.reshape((R // 16, C // 8, 8, 4, 2, 2)).permute((0, 4, 2, 1, 3, 5)).reshape((R, C))


@gluon.jit
def part_of(workspace, block, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, SIZE: gl.constexpr):
    """Where a consumer of a block leaves its partial tile of SIZE elements."""
    return workspace + (block * CONSUMERS + GROUP) * SIZE


@gluon.jit
def publish(acc, workspace, counters, block, GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
            WIDTH: gl.constexpr):  # fmt: skip
    """Stores the partial tile and raises this consumer's flag."""
    R: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    part = part_of(workspace, block, GROUP, CONSUMERS, R * N)
    chunks = columns(acc, N // WIDTH)
    for c in gl.static_range(N // WIDTH):
        values = fragments(chunks[c])
        offsets = c * (R * WIDTH) + gl.arange(0, R * WIDTH, layout=values.type.layout)
        gl.store(part + offsets, values)
    gl.barrier()  # every thread's stores come before the one release below
    gl.atomic_add(counters + (block * CONSUMERS + GROUP), 1, sem="release")


@gluon.jit
def wait_for(counters, helper, block, GROUP: gl.constexpr, CONSUMERS: gl.constexpr):
    """Waits for the flags of blocks [helper, block) and lowers them: each has this one reader."""
    for other in range(helper, block):
        flag = counters + (other * CONSUMERS + GROUP)
        while gl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        gl.store(flag, 0)


@gluon.jit
def store_tile(acc, y_desc, y_tiles, bias, workspace, helper, block, z, m, n, M, N,
               bias_stride_m, bias_stride_n, alpha, beta, after, CHUNK: gl.constexpr,
               GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STREAM_K: gl.constexpr):  # fmt: skip
    """Y's rows from m, columns from n: alpha * (acc + parts of blocks [helper, block)) + beta * C,
    of which the first chunk of columns is number CHUNK of the tile. `after`: what follows, (R, its
    pitch, its batch stride, the code of `activations.finish`, act_alpha, act_beta).

    The parts are added in the order of blocks: the sum has the same bits whoever came first.
    Where beta is 0, C is not touched: it may be null. So may R, where the code names none. From the
    code GATED on the place of R holds Y: one more pointer to keep, and the K loop of the largest
    tiles would read it from local memory.
    """
    ROWS: gl.constexpr = y_desc.block_shape[1]
    WIDTH: gl.constexpr = y_desc.block_shape[2]
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    COUNT: gl.constexpr = acc.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, WIDTH, acc.type.layout.instr_shape[2]],
    )  # fmt: skip
    residual, ldc, c_batch, activation, act_alpha, act_beta = after
    part = part_of(workspace, helper, GROUP, CONSUMERS, SIZE)
    chunks = columns(acc, COUNT)
    if activation == 0:
        for c in gl.static_range(COUNT):
            tile = gl.convert_layout(chunks[c], layout, assert_trivial=True)
            if STREAM_K:
                tile = with_parts(tile, part + c * (ROWS * WIDTH), helper, block, CONSUMERS * SIZE)
            tile = with_bias(tile * alpha, bias, m, n + c * WIDTH, M, N,
                             bias_stride_m, bias_stride_n, beta)  # fmt: skip
            store_chunk(tile, y_desc, y_tiles, CHUNK + c, z, m, n + c * WIDTH, GROUP)
    elif activation >= GATED:
        y = residual + entry_of(z, c_batch, activation)
        for c in range(COUNT):
            tile = gl.convert_layout(chunks[0], layout, assert_trivial=True)
            if STREAM_K:
                tile = with_parts(tile, part + c * (ROWS * WIDTH), helper, block, CONSUMERS * SIZE)
            tile = with_bias(tile * alpha, bias, m, n + c * WIDTH, M, N,
                             bias_stride_m, bias_stride_n, beta)  # fmt: skip
            if activation < WIDE:
                store_gated(tile, y, m, n + c * WIDTH, M, N, ldc, activation, act_alpha, act_beta)
            else:
                store_wide(tile, y, m, n + c * WIDTH, M, N, ldc)
            chunks = rest_of(chunks)
    else:  # one copy of the code for all chunks
        has_r = activation > 255
        residual += z * c_batch
        r = rows_of(residual, m, n, M, N, ldc, has_r, y_desc, ROWS, WIDTH)
        for c in range(COUNT):
            tile = gl.convert_layout(chunks[0], layout, assert_trivial=True)
            if STREAM_K:
                tile = with_parts(tile, part + c * (ROWS * WIDTH), helper, block, CONSUMERS * SIZE)
            tile = with_bias(tile * alpha, bias, m, n + c * WIDTH, M, N,
                             bias_stride_m, bias_stride_n, beta)  # fmt: skip
            buffer = y_tiles.index(2 * GROUP + (CHUNK + c) % 2).reshape([ROWS, WIDTH])
            if has_r:
                wait_for_buffer(CHUNK + c)
                buffer.store(r)
                # The next chunk's part comes while this one is computed.
                r = rows_of(residual, m, n + (c + 1) * WIDTH, M, N, ldc, c + 1 < COUNT, y_desc,
                            ROWS, WIDTH)  # fmt: skip
            tile = finished(tile, buffer, activation, act_alpha, act_beta)
            store_chunk(tile, y_desc, y_tiles, CHUNK + c, z, m, n + c * WIDTH, GROUP)
            chunks = rest_of(chunks)


@gluon.jit
def with_parts(tile, part, helper, block, STRIDE: gl.constexpr):
    """The chunk with what blocks [helper, block) have of it; the first one's lies at `part`."""
    layout: gl.constexpr = tile.type.layout
    values = fragments(tile)
    part += gl.arange(0, tile.shape[0] * tile.shape[1], layout=values.type.layout)
    for _ in range(helper, block):
        values += gl.load(part, cache_modifier=".cg")
        part += STRIDE
    tile = from_fragments(values, tile.shape[0], tile.shape[1])
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def with_bias(tile, bias, m, n, M, N, bias_stride_m, bias_stride_n, beta):
    """The tile from row m, column n on, plus beta * C."""
    # A vector C varies along one dimension only. What it takes for each element counts: the
    # consumers do nothing else meanwhile.
    layout: gl.constexpr = tile.type.layout
    if beta != 0:
        if bias_stride_m == 0:
            offs_n = n + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
            row = gl.load(bias + offs_n * bias_stride_n, mask=offs_n < N, other=0.0)
            tile += (beta * row.to(gl.float32))[None, :]
        else:
            offs_m = m + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
            column = gl.load(bias + offs_m * bias_stride_m, mask=offs_m < M, other=0.0)
            tile += (beta * column.to(gl.float32))[:, None]
    return tile


@gluon.jit
def wait_for_buffer(number):
    """Waits until the store that read the buffer of a tile's chunk last is through: the one before
    last, but that a tile's last chunk may have left the buffer of the next one's first."""
    if number > 0:
        tma.store_wait(1)
    else:
        tma.store_wait(0)


@gluon.jit
def store_chunk(tile, y_desc, y_tiles, number, z, m, n, GROUP: gl.constexpr):
    """Sends a chunk of Y off, number `number` of its tile."""
    ROWS: gl.constexpr = y_desc.block_shape[1]
    WIDTH: gl.constexpr = y_desc.block_shape[2]
    buffer = y_tiles.index(2 * GROUP + number % 2)
    wait_for_buffer(number)
    buffer.reshape([ROWS, WIDTH]).store(tile.to(y_desc.dtype))
    fence_async_shared()
    tma.async_store(y_desc, [z, m, n], buffer)
