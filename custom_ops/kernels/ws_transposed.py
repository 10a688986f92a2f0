"""`ws_epilogue.store_tile` for accumulators that hold the transposed tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .ws_epilogue import columns, fragments, from_fragments, part_of


@gluon.jit
def store_transposed(acc, y_desc, y_tiles, bias, workspace, helper, block, z, m, n, M, N,
                     bias_stride_m, bias_stride_n, alpha, beta,
                     GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
                     STREAM_K: gl.constexpr):  # fmt: skip
    """Y's rows from m, columns from n: alpha * (acc^T + parts of other blocks) + beta * C.

    The rows of `acc` are columns of Y; chunks of its columns leave as rows of Y's box.
    """
    ROWS: gl.constexpr = y_desc.block_shape[2]
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    COUNT: gl.constexpr = acc.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, WIDTH, acc.type.layout.instr_shape[2]],
    )  # fmt: skip
    offs_n = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
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
            offs_m = m + c * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            in_m = (offs_m < M) & (bias_stride_m != 0)
            in_n = (offs_n < N) & (bias_stride_m == 0)
            column = gl.load(bias + offs_m * bias_stride_m, mask=in_m, other=0.0)
            row = gl.load(bias + offs_n * bias_stride_n, mask=in_n, other=0.0)
            tile += beta * (column.to(gl.float32)[None, :] + row.to(gl.float32)[:, None])
        buffer = y_tiles.index(2 * GROUP + c % 2)
        tma.store_wait(1 if COUNT > 1 else 0)  # the store that read this buffer last is through
        buffer.reshape([WIDTH, ROWS]).store(tile.to(y_desc.dtype).permute((1, 0)))
        fence_async_shared()
        tma.async_store(y_desc, [z, m + c * WIDTH, n], buffer)
