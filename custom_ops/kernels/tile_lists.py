"""The tiles of the kernels for products of middle and large size, by the unit that multiplies and
by what the operands allow; `kernel_list` makes kernels of them. Those for small products are in
`small_tiles`. Plain data.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """A tile for 2-byte elements, and how many such blocks shall share an SM: the pipeline gets as
    many stages as the shared memory then allows. Kernels for f32 take half of `bk`, which is as
    many bytes.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    per_sm: int
    use: str  # letters: s also with split-K, f also for f32, t also for transposed A
    swap: bool = False


# wgmma (sm_90): 64 rows per instruction, operands in shared memory.
WIDE_MMA = (
    Tile(128, 256, 64, 8, 1, "ft"),
    Tile(256, 128, 64, 8, 1, ""),
    Tile(128, 128, 64, 8, 1, "sft"),
    Tile(128, 128, 64, 4, 2, ""),
    Tile(64, 256, 64, 4, 1, ""),
    Tile(128, 64, 64, 4, 2, "f"),
    Tile(64, 128, 64, 4, 2, "sft"),
    Tile(64, 128, 128, 4, 1, ""),
    Tile(64, 64, 64, 4, 3, "sft"),
    Tile(64, 64, 128, 4, 1, "s"),
    # Few rows: the columns of B go on the 64-wide side, and deep pipelines stream B.
    Tile(16, 64, 128, 4, 2, "sf", swap=True),
    Tile(16, 128, 64, 4, 2, "", swap=True),
    Tile(16, 128, 128, 4, 1, "sft", swap=True),
    Tile(32, 64, 128, 4, 2, "s", swap=True),
    Tile(32, 128, 64, 4, 2, "", swap=True),
    Tile(32, 128, 128, 4, 1, "sf", swap=True),
    Tile(64, 128, 64, 4, 2, "s", swap=True),
)
# tcgen05 keeps the sums in tensor memory, and needs registers for them to come back.
TCGEN05_MMA = (Tile(128, 256, 64, 8, 1, "t"), *WIDE_MMA[2:])
# mma.sync (sm_80, 86, 89, 120): 16 rows per instruction, operands through registers.
NARROW_MMA = (
    Tile(128, 256, 32, 8, 1, "ft"),
    Tile(256, 128, 32, 8, 1, ""),
    Tile(128, 128, 64, 8, 1, "ft"),
    Tile(128, 128, 32, 4, 2, "sf"),
    Tile(64, 256, 32, 4, 1, ""),
    Tile(128, 64, 32, 4, 2, "f"),
    Tile(64, 128, 32, 4, 2, "sft"),
    Tile(64, 128, 64, 4, 1, ""),
    Tile(64, 64, 32, 4, 3, "f"),
    Tile(64, 64, 64, 4, 2, "st"),
    Tile(32, 64, 64, 4, 2, "sf"),
    Tile(32, 128, 64, 4, 2, "s"),
    Tile(32, 128, 32, 4, 3, "f"),
    Tile(16, 64, 128, 4, 2, "sf"),
    Tile(16, 128, 64, 4, 2, "sft"),
    Tile(16, 128, 128, 4, 1, "s"),
)
# Warp-specialised, sm_90. The warps include the loading warpgroup; s is split-K by streaming. What
# counts at middle sizes is that the tiles fill the device once or twice, hence so many.
SPECIALIZED = (
    Tile(128, 256, 64, 12, 1, "sf"),
    Tile(256, 128, 64, 12, 1, "f"),
    Tile(192, 192, 64, 16, 1, ""),
    Tile(192, 128, 64, 16, 1, "sf"),
    Tile(128, 192, 64, 12, 1, "f"),
    Tile(128, 128, 64, 12, 1, "sf"),
    Tile(128, 128, 64, 8, 2, ""),
    Tile(256, 64, 64, 12, 1, ""),
    Tile(64, 256, 64, 8, 1, ""),
    Tile(64, 192, 64, 8, 1, ""),
    Tile(64, 128, 128, 8, 1, ""),
    Tile(64, 128, 64, 8, 2, "f"),
    Tile(64, 64, 128, 8, 1, "f"),
)
# The same, two consumers in turn: the epilogue of a tile, an activation above all, costs nothing
# where the products of the next take longer. With tiles of 128x128 and 64x256 they do not.
PINGPONG = (
    Tile(128, 128, 64, 12, 1, "f"),
    Tile(128, 64, 64, 12, 1, ""),
    Tile(64, 128, 64, 12, 1, "f"),
)
# The same, K cut into slices that the blocks of a tile add up together: few tiles, long K.
SLICED = (
    Tile(128, 128, 64, 12, 1, "f"),
    Tile(64, 192, 64, 8, 1, ""),
    Tile(64, 128, 128, 8, 1, ""),
    Tile(64, 64, 128, 8, 1, "f"),
    Tile(64, 32, 128, 8, 1, ""),
)
# Warp-specialised tiles on trial.
TRIED = (Tile(192, 64, 64, 16, 1, ""),)
# The same for split factors, which need another warpgroup that splits: fp32 NT and NN.
SPECIALIZED_SPLIT = (Tile(128, 128, 64, 16, 1, "sf"), Tile(128, 64, 64, 16, 1, "sf"))
SPECIALIZED_SPLIT_SWAPPED = (Tile(128, 128, 64, 16, 1, "sf"), Tile(64, 128, 64, 16, 1, "sf"))
# Rows of fewer than 16 aligned bytes: loads are narrow and many, so tiles stay small enough for
# registers.
UNALIGNED = (
    Tile(128, 128, 32, 8, 2, "f"),
    Tile(64, 64, 32, 4, 3, "sft"),
    Tile(16, 128, 32, 4, 3, "sft"),
)
# One K step or few, latency alone: two to twenty loads a thread, all under way at once.
TINY = (
    Tile(16, 64, 16, 4, 4, ""),
    Tile(64, 16, 16, 4, 4, ""),
    Tile(16, 32, 64, 4, 4, "f"),
    Tile(64, 16, 64, 4, 4, "f"),
)
WIDE_UNALIGNED = (*UNALIGNED[:2], Tile(16, 128, 32, 4, 3, "sft", swap=True))
# fp32 on the scalar units. The sizes are again those of 2-byte elements.
IEEE = (
    Tile(128, 128, 32, 8, 2, "f"),
    Tile(64, 128, 32, 8, 2, "f"),
    Tile(64, 64, 32, 8, 2, "sft"),
    Tile(16, 128, 32, 4, 2, "sft"),
)
# fp32 on tensor cores, by three TF32 products.
WIDE_SPLIT = (
    Tile(128, 128, 64, 8, 1, "sf"),
    Tile(64, 128, 64, 4, 2, "sf"),
    Tile(128, 64, 64, 4, 2, "f"),
    Tile(64, 64, 64, 4, 3, "sft"),
    Tile(16, 64, 128, 4, 2, "sft", swap=True),
    Tile(32, 128, 64, 4, 3, "sf", swap=True),
    Tile(64, 128, 64, 4, 2, "sf", swap=True),
)
WIDE_SPLIT_UNALIGNED = (
    Tile(128, 128, 32, 8, 1, "f"),
    Tile(64, 64, 32, 4, 3, "sft"),
    Tile(16, 64, 64, 4, 3, "sf", swap=True),
)
NARROW_SPLIT = (
    Tile(128, 128, 32, 8, 1, "sf"),
    Tile(64, 64, 32, 4, 2, "sft"),
    Tile(16, 64, 64, 4, 2, "sft"),
)
# Rows of Y of fewer than 16 aligned bytes, the operands padded (`copy_padded`): layout NT only.
MASKED = (
    Tile(128, 256, 64, 8, 1, "f"),
    Tile(128, 128, 64, 8, 1, "sf"),
    Tile(64, 128, 64, 4, 2, "sf"),
    Tile(64, 64, 64, 4, 3, "sf"),
    # Narrow N: what the slices of a long K leave to be summed stays small.
    Tile(64, 16, 128, 4, 3, "sf"),
    Tile(16, 16, 256, 2, 2, "sf"),
    Tile(16, 64, 128, 4, 2, "sf", swap=True),
    Tile(16, 128, 128, 4, 1, "sf", swap=True),
)
# Copies: a tile is read and written at once, 32 elements a thread.
COPIES = {False: Tile(32, 128, 32, 4, 8, "f"), True: Tile(64, 64, 32, 4, 8, "ft")}
# A full matrix C is read through registers at the end, beside the accumulators.
MATRIX_BIAS = (Tile(128, 128, 64, 8, 1, ""), Tile(64, 64, 64, 4, 2, "ft"))
