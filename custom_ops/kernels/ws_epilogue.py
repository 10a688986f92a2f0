"""How a consumer warpgroup of `gemm_ws` disposes of its accumulators: to Y, or, where another block
finishes the tile, to the workspace.

Both go in chunks of columns as wide as the box of Y's tensor map, which bounds the registers and
the shared memory needed; two buffers let one chunk be written while TMA reads the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@gluon.jit
def columns(x, COUNT: gl.constexpr):
    """The tile cut into COUNT (a power of two) groups of columns; threads keep their elements."""
    if COUNT == 1:
        return (x,)
    else:
        low, high = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        return columns(low, COUNT // 2) + columns(high, COUNT // 2)


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
               bias_stride_m, bias_stride_n, alpha, beta, CHUNK: gl.constexpr,
               GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STREAM_K: gl.constexpr):  # fmt: skip
    """Y's rows from m, columns from n: alpha * (acc + parts of blocks [helper, block)) + beta * C,
    of which the first chunk of columns is number CHUNK of the tile.

    The parts are added in the order of blocks: the sum has the same bits whoever came first.
    Where beta is 0, C is not touched: it may be null.
    """
    ROWS: gl.constexpr = y_desc.block_shape[1]
    WIDTH: gl.constexpr = y_desc.block_shape[2]
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    COUNT: gl.constexpr = acc.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, WIDTH, acc.type.layout.instr_shape[2]],
    )  # fmt: skip
    offs_m = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    chunks = columns(acc, COUNT)
    for c in gl.static_range(COUNT):
        tile = gl.convert_layout(chunks[c], layout, assert_trivial=True)
        if STREAM_K:
            values = fragments(tile)
            offsets = c * (ROWS * WIDTH) + gl.arange(0, ROWS * WIDTH, layout=values.type.layout)
            for other in range(helper, block):
                part = part_of(workspace, other, GROUP, CONSUMERS, SIZE)
                values += gl.load(part + offsets, cache_modifier=".cg")
            tile = from_fragments(values, ROWS, WIDTH)
            tile = gl.convert_layout(tile, layout, assert_trivial=True)
        tile *= alpha
        if beta != 0:
            # A vector C varies along one dimension only: one load is masked off.
            offs_n = n + c * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            in_m = (offs_m < M) & (bias_stride_m != 0)
            in_n = (offs_n < N) & (bias_stride_m == 0)
            column = gl.load(bias + offs_m * bias_stride_m, mask=in_m, other=0.0)
            row = gl.load(bias + offs_n * bias_stride_n, mask=in_n, other=0.0)
            tile += beta * (column.to(gl.float32)[:, None] + row.to(gl.float32)[None, :])
        buffer = y_tiles.index(2 * GROUP + (CHUNK + c) % 2)
        # The store that read this buffer last is through: the one before last, but that a tile's
        # last chunk may have left the buffer of the next one's first.
        tma.store_wait(1 if CHUNK + c > 0 else 0)
        buffer.reshape([ROWS, WIDTH]).store(tile.to(y_desc.dtype))
        fence_async_shared()
        tma.async_store(y_desc, [z, m, n + c * WIDTH], buffer)
