"""`ws_epilogue.store_tile` for accumulators that hold the transposed tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .activations import columns, rest_of
from .ws_epilogue import part_of, with_bias, with_parts
from .ws_finish import finished, rows_of


@gluon.jit
def store_transposed(acc, y_desc, y_tiles, bias, workspace, helper, block, z, m, n, M, N,
                     bias_stride_m, bias_stride_n, alpha, beta, after,
                     GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
                     STREAM_K: gl.constexpr):  # fmt: skip
    """Y's rows from m, columns from n: alpha * (acc^T + parts of other blocks) + beta * C.

    The rows of `acc` are columns of Y; chunks of its columns leave as rows of Y's box.
    """
    residual, ldc, c_batch, activation, act_alpha, act_beta = after
    ROWS: gl.constexpr = y_desc.block_shape[2]
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    COUNT: gl.constexpr = acc.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1],
        instr_shape=[16, WIDTH, acc.type.layout.instr_shape[2]],
    )  # fmt: skip
    part = part_of(workspace, helper, GROUP, CONSUMERS, SIZE)
    chunks = columns(acc, COUNT)
    if activation == 0:
        for c in gl.static_range(COUNT):
            tile = gl.convert_layout(chunks[c], layout, assert_trivial=True)
            if STREAM_K:
                tile = with_parts(tile, part + c * (ROWS * WIDTH), helper, block, CONSUMERS * SIZE)
            # Rows and columns change places, and so do the strides of C.
            tile = with_bias(tile * alpha, bias, n, m + c * WIDTH, N, M,
                             bias_stride_n, bias_stride_m, beta)  # fmt: skip
            store_chunk_transposed(tile, y_desc, y_tiles, c, z, m + c * WIDTH, n, GROUP, COUNT)
    else:  # one copy of the code for all chunks
        has_r = activation > 255
        residual += z * c_batch
        r = rows_of(residual, m, n, M, N, ldc, has_r, y_desc, WIDTH, ROWS)
        for c in range(COUNT):
            tile = gl.convert_layout(chunks[0], layout, assert_trivial=True)
            if STREAM_K:
                tile = with_parts(tile, part + c * (ROWS * WIDTH), helper, block, CONSUMERS * SIZE)
            tile = with_bias(tile * alpha, bias, n, m + c * WIDTH, N, M,
                             bias_stride_n, bias_stride_m, beta)  # fmt: skip
            buffer = y_tiles.index(2 * GROUP + c % 2).reshape([WIDTH, ROWS])
            if has_r:
                tma.store_wait(1 if COUNT > 1 else 0)
                buffer.store(r)
                # The next chunk's part comes while this one is computed.
                r = rows_of(residual, m + (c + 1) * WIDTH, n, M, N, ldc, c + 1 < COUNT, y_desc,
                            WIDTH, ROWS)  # fmt: skip
            tile = finished(tile, buffer.permute((1, 0)), activation, act_alpha, act_beta)
            store_chunk_transposed(tile, y_desc, y_tiles, c, z, m + c * WIDTH, n, GROUP, COUNT)
            chunks = rest_of(chunks)


@gluon.jit
def store_chunk_transposed(tile, y_desc, y_tiles, number, z, m, n, GROUP: gl.constexpr,
                           COUNT: gl.constexpr):  # fmt: skip
    buffer = y_tiles.index(2 * GROUP + number % 2)
    tma.store_wait(1 if COUNT > 1 else 0)  # the store that read this buffer last is through
    buffer.reshape([tile.shape[1], tile.shape[0]]).store(tile.to(y_desc.dtype).permute((1, 0)))
    fence_async_shared()
    tma.async_store(y_desc, [z, m, n], buffer)
