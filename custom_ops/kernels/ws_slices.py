"""Few tiles and a long K: every block of `gemm_ws` has one slice of K of one tile, and the blocks
of a tile then add up their parts together, each its own runs of the tile's elements.

An owner that adds all parts alone takes a trip through L2 for each; here every block takes about
one for all of them. That wants all blocks of a tile resident at once. Where they are not, as when
two such kernels share the device and each holds what the other waits for, a block stops waiting
after a while and leaves its runs to the block that comes last.

A tile's word counts in its low half the blocks that have come, in its high half those that have
left, and is zero again once all have. One that leaves before all have come has left its runs, too:
the last to come, which sees that in the word, then adds up all runs of the tile. Some of them twice
over, perhaps: each element has one order of adding up, so the bits are the same whoever does it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .activations import GATED, WIDE, activated, entry_of, finish

RUN = gl.constexpr(512)  # elements that a warpgroup adds up at a time: 16 bytes a thread
IN_FLIGHT = gl.constexpr(8)  # parts whose loads are under way together
POLLS = gl.constexpr(32)  # half a microsecond each: blocks that start together wait for few
LEFT = gl.constexpr(0x10000)  # one block, in the high half of a word
CAME = gl.constexpr(0xFFFF)  # the low half


@gluon.jit
def slice_of(tiles, steps):
    """(tile, part, parts, first K step, end of the K steps) of this block."""
    parts = gl.num_programs(0) // tiles
    tile = gl.program_id(0) // parts
    part = gl.program_id(0) % parts
    return tile, part, parts, part * steps // parts, (part + 1) * steps // parts


@gluon.jit
def store_part(acc, target, PITCH: gl.constexpr):
    """Stores accumulators row by row."""
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    gl.store(target + row[:, None] * PITCH + column[None, :], acc)


@gluon.jit
def parts_ready(word, part, parts):
    """(whether all parts are stored, whether this block has yet to leave, its first run, how far
    apart its runs are), once it has told of its own part and waited for the others'."""
    gl.barrier()  # every thread's stores come before the one release below
    seen = gl.atomic_add(word, 1, sem="acq_rel")
    last = (seen & CAME) == parts - 1
    alone = last & (seen >= LEFT)
    ready = last
    present = True
    polls = 0
    while (polls < POLLS) & (not ready):
        ready = (gl.atomic_add(word, 0, sem="acquire") & CAME) == parts
        polls += 1
    if not ready:
        ready = leave(word, parts)
        present = False
    return ready, present, gl.where(alone, 0, part), gl.where(alone, 1, parts)


@gluon.jit
def leave(word, parts):
    """Whether all blocks of the tile had come by then."""
    seen = gl.atomic_add(word, LEFT, sem="acq_rel")
    if seen == (parts - 1) * LEFT + parts:
        gl.store(word, 0)
    return (seen & CAME) == parts


@gluon.jit
def store_share(partials, first_run, stride, parts, y, bias, z, m, n, M, N, ldc, c_batch,
                bias_stride_m, bias_stride_n, alpha, beta, after, ROWS: gl.constexpr,
                COLS: gl.constexpr):  # fmt: skip
    """Y at every `stride`th run of the tile from row m, column n: alpha * (sum of the parts, in
    their order) + beta * C.

    Where beta is 0, C is not touched: it may be null. `after` is as for `ws_epilogue.store_tile`.
    """
    residual, _pitch, _stride, activation, act_alpha, act_beta = after
    SIZE: gl.constexpr = ROWS * COLS
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    y += entry_of(z, c_batch, activation)
    residual += z * c_batch
    for run in range(first_run, SIZE // RUN, stride):
        at = run * RUN + gl.arange(0, RUN, layout=layout)
        total = gl.full([RUN], 0.0, gl.float32, layout=layout)
        for first in range(0, parts, IN_FLIGHT):
            left = (parts - first) * SIZE
            values = ()
            for i in gl.static_range(IN_FLIGHT):
                value = gl.load(
                    partials + first * SIZE + (i * SIZE + at), mask=i * SIZE + at < left,
                    other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                values += (value,)  # type: ignore[assignment]
            for i in gl.static_range(IN_FLIGHT):
                total += values[i]
        row = m + at // COLS
        column = n + at % COLS
        inside = (row < M) & (column < N)
        total *= alpha
        if beta != 0:
            c = gl.load(bias + row * bias_stride_m + column * bias_stride_n, mask=inside, other=0.0)
            total += beta * c.to(gl.float32)
        if (activation != 0) & (activation < GATED):
            r = residual + row * ldc + column
            total = finish(total, r, inside, activation, act_alpha, act_beta, "")
        if activation < GATED:
            gl.store(y + row * ldc + column, total.to(y.dtype.element_ty), mask=inside)
        else:
            store_run(total, y, row, column, inside, ldc, activation, act_alpha, act_beta)


@gluon.jit
def store_run(total, y, row, column, inside, ldc, activation, act_alpha, act_beta):
    """`activations.store_gated` or `store_wide` of a run, of which a thread has four neighbours."""
    if activation < WIDE:
        gate, up = total.reshape((RUN // 2, 2)).split()
        if (activation & 255) != 0:
            gate = activated(gate, activation & 255, act_alpha, act_beta)
        at, _ = (row * ldc + column // 2).reshape((RUN // 2, 2)).split()
        there, _ = inside.to(gl.int32).reshape((RUN // 2, 2)).split()
        gl.store(y + at, (gate * up).to(y.dtype.element_ty), mask=there != 0)
    elif y.dtype.element_ty.primitive_bitwidth < 32:
        wide = y.to(gl.pointer_type(gl.float32), bitcast=True)
        rounded = total.to(y.dtype.element_ty).to(gl.float32)
        gl.store(wide + (row * ldc + column), rounded, mask=inside)
