"""Tiles for products with few outputs, few rows or columns, little K, or many small entries. They
were chosen among 246 kernels by their times on 113 such shapes on an H200: without any of them, the
shapes that it is for take 0.5% longer or more.
"""

from __future__ import annotations

from typing import NamedTuple


class SmallTile(NamedTuple):
    """A tile for 2-byte elements, pipeline included: these are small enough to share an SM, however
    deep. Kernels for f32 take half of `bk`, which is as many bytes.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    # Letters. s: also with split-K; S: with it only; x: not for f32; i: also for IEEE fp32; n:
    # layout NN only. Of the pointer family, by the alignments of A and B (least: those of a single
    # element): a: where rows of A are not aligned; b: where those of B are not; l: not where both
    # are at their least.
    use: str = ""
    swap: bool = False


class OuterTile(NamedTuple):
    """A tile for outer products with 8 warps, and the longest K. Letters: h for 2-byte types, f for
    fp32 as TF32, i for IEEE fp32, t also for layout NT.
    """

    bm: int
    bn: int
    bk: int
    use: str


# Tensor maps. Few rows of A: the time is that of streaming B. Few columns of B: that of A. A single
# warp for batches of few rows each.
FEW_ROWS = (
    SmallTile(16, 64, 256, 4, 5, "s", swap=True),
    SmallTile(16, 32, 64, 1, 3),
    SmallTile(16, 16, 64, 1, 3, "n"),
)
FEW_COLUMNS = (SmallTile(64, 16, 128, 4, 4, "Sx"), SmallTile(128, 16, 128, 4, 3, "x"))

# Masked loads, layout NN. Few outputs or a batch of them: the time is mostly that of a launch.
POINTER_TINY = (
    SmallTile(16, 16, 32, 1, 4, "i"),
    SmallTile(16, 64, 64, 4, 3, "i"),
    SmallTile(16, 32, 32, 2, 4, "al"),
    SmallTile(32, 64, 32, 4, 4, "l"),
)
# Few columns and long K, which is cut: much of it is in flight.
POINTER_LONG = (SmallTile(32, 16, 128, 4, 4, "sb"), SmallTile(16, 16, 256, 4, 3, "Sb"))
# Little K: the time is that of storing Y.
SHALLOW = (SmallTile(64, 128, 16, 4, 1, "ai"),)

# Masked loads, layout NT.
POINTER_TINY_NT = (SmallTile(16, 16, 32, 1, 4, "i"),)
POINTER_LONG_NT = (SmallTile(32, 16, 128, 4, 4, "S"),)
# Dot products on the scalar units.
DOT = (
    SmallTile(1, 1, 2048, 8, 8, "i"),
    SmallTile(1, 4, 2048, 8, 5, "i"),
    SmallTile(1, 2, 2048, 8, 6, "il"),
    SmallTile(2, 2, 1024, 8, 5, "il"),
)
# One row of A or few, layout NN: 16 KB of B at a time, and 64 KB under way in each block.
GEMV = (
    SmallTile(1, 64, 128, 8, 5, "si"),
    SmallTile(1, 32, 256, 8, 5, "i"),
    SmallTile(1, 256, 32, 8, 5, "Si"),
    SmallTile(4, 64, 64, 8, 6, "si"),
)
# Outer products. What a tensor core multiplies at its full rate pays from a shorter K on.
OUTER = (
    OuterTile(32, 128, 4, "hfi"),
    OuterTile(64, 128, 4, "hfi"),
    OuterTile(32, 128, 8, "fi"),
    OuterTile(64, 128, 8, "hfit"),
    OuterTile(64, 128, 16, "fit"),
    OuterTile(64, 128, 24, "it"),
)
