"""The work of a persistent block: which output tiles, and which K steps of each.

Without STREAM_K block b computes tiles b, b + blocks, b + 2 * blocks, ... whole. With it the last
tiles (what does not fill all blocks, and one full round before it) are streamed: their K steps,
laid end to end, are dealt to the blocks in equal contiguous shares (Osama et al., Stream-K, 2023;
the two-tile hybrid). A block walks its share from the end: first the one tile it may have to leave
unfinished, last the one that it finishes for others. The block with a tile's last K step finishes
it and waits for blocks of lower index only, each of which publishes its part before it waits for
anything.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ceil_div(x, y):
    return (x + y - 1) // y


@gluon.jit
def origin(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, GROUP_M: gl.constexpr):
    """(batch entry, first row, first column) of a tile, in the order that `tiles.locate` has."""
    tile_rows = ceil_div(M, BM)
    tile_cols = ceil_div(N, BN)
    z = tile // (tile_rows * tile_cols)
    tile = tile % (tile_rows * tile_cols)
    per_group = GROUP_M * tile_cols
    first_row = tile // per_group * GROUP_M
    height = gl.minimum(tile_rows - first_row, GROUP_M)
    m = (first_row + tile % per_group % height) * BM
    n = tile % per_group // height * BN
    return z, m, n


@gluon.jit
def share_of(tiles, steps, STREAM_K: gl.constexpr):
    """(whole, items, streamed, first, last): how many tiles are computed whole by all blocks
    together, and how many work items this block has, of which the first `streamed` make up its
    share [first, last) of the streamed K steps."""
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    if STREAM_K:
        rest = tiles % blocks
        shared = gl.where((rest > 0) & (tiles > blocks), rest + blocks, rest)
        each = shared * steps // blocks
        longer = shared * steps % blocks
        first = block * each + gl.minimum(block, longer)
        last = first + each + gl.where(block < longer, 1, 0)
        streamed = gl.where(last > first, (last - 1) // steps - first // steps + 1, 0)
        whole = tiles - shared
        return whole, streamed + whole // blocks, streamed, first, last
    else:
        return tiles, ceil_div(tiles - block, blocks), 0, 0, 0


@gluon.jit
def item(index, end, whole, streamed, first, steps, STREAM_K: gl.constexpr):
    """(tile, first K step, end of its K steps, new end) of a work item; `end` is where the items
    before have left the block's share."""
    block = gl.program_id(0)
    tile = block + (index - streamed) * gl.num_programs(0)
    begin = 0
    stop = steps
    if STREAM_K:  # noqa: SIM102 - decided by the compiler, not at run time
        if index < streamed:
            tile = (end - 1) // steps
            begin = gl.maximum(first - tile * steps, 0)
            stop = end - tile * steps
            end = tile * steps + begin
            tile += whole
    return tile, begin, stop, end


@gluon.jit
def owner_of(step, tiles, steps):
    """The block whose share holds a streamed K step."""
    blocks = gl.num_programs(0)
    rest = tiles % blocks
    shared = gl.where((rest > 0) & (tiles > blocks), rest + blocks, rest)
    each = shared * steps // blocks
    longer = shared * steps % blocks
    border = longer * (each + 1)
    behind = longer + (step - border) // gl.maximum(each, 1)
    return gl.where(step < border, step // (each + 1), behind)
