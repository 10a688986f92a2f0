"""What follows the product, as `activations.finish`, for the chunks in which the consumers of
`gemm_ws` dispose of their accumulators.

A scheduler has a warp or two of them, too few to hide what one element waits for: a chain of a
dozen dependent instructions, a hundred cycles. So the elements of a chunk are computed side by
side, which takes code without branches between elements: `activations` maps them one by one.

R comes row by row, 16 bytes a thread, and changes its layout in the buffer that the chunk of Y
leaves from. As accumulators lie it would come in loads of four bytes, eight rows to a warp.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activations import (
    AFTER,
    BEFORE,
    GELU,
    GELU_TANH,
    LARGEST_SQUARE,
    LOG2_E,
    NORMAL,
    QUICK_GELU,
    SIGMOID,
    TANH_CUBIC,
    TANH_LINEAR,
    activated,
    power_of_2,
    reciprocal,
)

RELU = gl.constexpr(1)  # mp_activation


@gluon.jit
def shared_by(x, logit):
    """x / (1 + 2^logit)."""
    return x * reciprocal(1.0 + power_of_2(logit))


@gluon.jit
def gelu(x):
    # Limited, so that 0 * x^2 stays 0 and large x do not turn the polynomial's sign.
    square = tl.minimum(x * x, LARGEST_SQUARE)
    logit = square * NORMAL[6] + NORMAL[5]
    logit = logit * square + NORMAL[4]
    logit = logit * square + NORMAL[3]
    logit = logit * square + NORMAL[2]
    logit = logit * square + NORMAL[1]
    logit = logit * square + NORMAL[0]
    return shared_by(x, logit * x)


@gluon.jit
def gelu_tanh(x):
    square = tl.minimum(x * x, LARGEST_SQUARE)
    return shared_by(x, (square * TANH_CUBIC + TANH_LINEAR) * x)


@gluon.jit
def activate(x, activation, alpha, beta):
    """`activations.activated`; what models have most has code of its own."""
    if activation == RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == GELU:
        x = gelu(x)
    elif activation == GELU_TANH:
        x = gelu_tanh(x)
    elif (activation == SIGMOID) | (activation > GELU_TANH):  # QuickGelu and Silu
        slope = tl.where(activation == QUICK_GELU, alpha, 1.0) * -LOG2_E
        x = shared_by(tl.where(activation == SIGMOID, 1.0, x), x * slope)
    else:
        x = activated(x, activation, alpha, beta)
    return x


@gluon.jit
def rows_of(residual, m, n, M, N, pitch, wanted, desc, ROWS: gl.constexpr, COLS: gl.constexpr):
    """The ROWS x COLS elements of R from row m, column n on, where they are `wanted`; `residual`
    points at its batch entry. A thread has 16 bytes of a row: N and the pitch are multiples."""
    UNIT: gl.constexpr = 128 // desc.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = COLS // UNIT if COLS < 32 * UNIT else 32
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = n + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    start = (row.to(gl.int64) * pitch)[:, None]
    inside = (row < M)[:, None] & ((column < N) & wanted)[None, :]
    return gl.load(residual + (start + column[None, :]), mask=inside, other=0.0)


@gluon.jit
def finished(tile, buffer, activation, act_alpha, act_beta):
    """The chunk, finished. `buffer`: its part of R, in the tile's orientation; read where the code
    names an R."""
    layout: gl.constexpr = tile.type.layout
    kind = activation >> 8
    if kind == BEFORE:
        tile += buffer.load(layout).to(gl.float32)
    if (activation & 255) != 0:
        tile = activate(tile, activation & 255, act_alpha, act_beta)
    if kind > BEFORE:
        other = buffer.load(layout).to(gl.float32)
        if kind == AFTER:
            tile += other
        else:
            tile *= other
    return tile


@gluon.constexpr_function
def in_quads(rows, columns, across):
    """A layout with the rows where accumulators have them, so that only the four threads that share
    a row exchange elements. `across`: the columns by which these four differ.

    An exchange of one bit takes shuffles alone, one of two bits shared memory, which is full.
    """
    low, high = across
    own = [[0, 1 << i] for i in range(columns.bit_length() - 1) if 1 << i not in across]
    own += [[8, 0], [64, 0]] if rows == 128 else [[8, 0]]
    lane = [[0, low], [0, high], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lane, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store_gated(tile, y, m, n, M, N, pitch, activation, act_alpha, act_beta):
    """Stores of each pair of neighbouring columns of the chunk, from row m, column n of the product
    on, the product; the even one has the activation. `y` points at its batch entry.

    As accumulators lie they would leave in stores of one element, four to a row.
    """
    ROWS: gl.constexpr = tile.shape[0]
    HALF: gl.constexpr = tile.shape[1] // 2
    gate, up = tile.reshape((ROWS, HALF, 2)).split()
    if (activation & 255) != 0:
        gate = activate(gate, activation & 255, act_alpha, act_beta)
    layout: gl.constexpr = in_quads(ROWS, HALF, (HALF // 2, HALF // 4))
    half = (gate * up).to(y.dtype.element_ty)
    half = gl.convert_layout(half, in_quads(ROWS, HALF, (HALF // 2, 2)))
    half = gl.convert_layout(half, layout)
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = n // 2 + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    inside = (row < M)[:, None] & (column < N // 2)[None, :]
    gl.store(y + ((row.to(gl.int64) * pitch)[:, None] + column[None, :]), half, mask=inside)


@gluon.jit
def store_wide(tile, y, m, n, M, N, pitch):
    """Stores the chunk as fp32, rounded to the 16-bit type that the kernel knows Y by all the same;
    four threads have 32 bytes of a row."""
    if y.dtype.element_ty.primitive_bitwidth < 32:
        layout: gl.constexpr = tile.type.layout
        row = m + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
        column = n + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
        inside = (row < M)[:, None] & (column < N)[None, :]
        wide = y.to(gl.pointer_type(gl.float32), bitcast=True)
        wide += (row.to(gl.int64) * pitch)[:, None] + column[None, :]
        gl.store(wide, tile.to(y.dtype.element_ty).to(gl.float32), mask=inside)
