"""The convolution kernels of a pack, beside those of matrix products in `kernel_list`. Imports
neither Triton nor torch.

A conv kernel's alignments: A is W, 16 where W is packed for the family (`mp_conv` says how), else
the element size for W as it is stored; B and C are X and Y, in which nothing is aligned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from .spec import Dtype, Family, KernelSpec, Precision

TAPS = {Family.CONV_TAPS4: 4, Family.CONV_TAPS8: 8}


def taps(family: Family) -> int:
    """Neighbouring taps along the width that one K step covers."""
    return TAPS.get(family, 1)


def is_transposed(family: Family) -> bool:
    return family in (Family.CONV_TRANSPOSED, Family.CONV_DEPTHWISE_TRANSPOSED)


class ConvTile(NamedTuple):
    """A tile for 2-byte elements; f32 takes half of `bk`. Letters: s also with split-K (of a packed
    W: a W that the graph computes is rare, and few channels or a transposed kernel have few steps),
    f also for f32, u also for a W that is not packed, k for few channels, t for transposed
    convolutions.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    use: str
    swap: bool = False


# An element of X costs about 8 instructions and is multiplied by BM weights: from 256 on wgmma is
# what limits a tile, at 128 the loads take half as long again.
TALL = (
    ConvTile(256, 128, 32, 8, 3, ""),
    ConvTile(256, 64, 64, 8, 3, "s"),
)
WIDE = (
    ConvTile(128, 128, 64, 8, 3, ""),
    ConvTile(128, 128, 32, 8, 3, "f"),
    ConvTile(128, 64, 64, 8, 3, "s"),
    ConvTile(64, 128, 32, 4, 3, "sfk"),
    ConvTile(64, 64, 32, 4, 3, "sfut"),
    ConvTile(32, 128, 32, 4, 3, "fk", swap=True),
    ConvTile(16, 128, 32, 4, 3, "fukt", swap=True),
)
# TF32, sm_90. A K step of 128x128x16 costs a warp 213 instructions, of which 127 are for the step
# itself, whatever it loads: the tensor cores of an SM, which need 246 clocks for it, get it every
# 426 at best (1000 were measured). Steps of 32 bring that to 0.82 of their pace, more weights for
# each pixel to 0.98 (256x64). Two blocks of four warps on an SM wait for each other's loads less
# than one of eight.
TALL_TF32 = (
    ConvTile(256, 128, 64, 8, 3, "f"),
    ConvTile(256, 64, 64, 8, 3, "fs"),
    ConvTile(128, 128, 64, 8, 3, "f"),
    ConvTile(128, 64, 64, 4, 4, "f"),
)
# Without them both factors pass through registers, which larger tiles would not leave room for.
NARROW = (
    ConvTile(128, 128, 32, 8, 3, "f"),
    ConvTile(128, 64, 32, 8, 3, "s"),
    ConvTile(64, 128, 32, 4, 3, "sfk"),
    ConvTile(64, 64, 32, 4, 3, "sfut"),
    ConvTile(32, 128, 32, 4, 3, "fk"),
    ConvTile(16, 64, 32, 4, 3, "fukt"),
)
IEEE = (
    ConvTile(64, 128, 32, 8, 2, "f"),
    ConvTile(64, 64, 32, 8, 2, "sfut"),
    ConvTile(16, 128, 32, 4, 2, "fukt"),
)
# (channels, pixels, taps along the width or 1 for any, rows of taps that are loaded at once) of
# depthwise tiles, each of four warps. They add up in fp32 on the scalar units, so that those of f32
# serve both precisions. Of tiles that load all rows at once only one was faster, by 6%.
DEPTHWISE = (
    (4, 256, 1, 1), (16, 64, 1, 1), (4, 256, 3, 1), (16, 64, 3, 1), (4, 256, 5, 1), (16, 64, 5, 1),
    (4, 128, 5, 5),
)  # fmt: skip


def _expand(tiles: tuple[ConvTile, ...], like: KernelSpec, wide: bool) -> Iterator[KernelSpec]:
    f32 = like.dtype is Dtype.F32
    use = {
        Family.CONV: "", Family.CONV_TAPS4: "k", Family.CONV_TAPS8: "k",
        Family.CONV_TRANSPOSED: "t",
    }[like.family]  # fmt: skip
    wanted = use + "f" * f32 + "u" * (like.align_a < 16)
    for tile in tiles:
        if any(letter not in tile.use for letter in wanted):
            continue
        if like.align_a < 16 and like.family is Family.CONV_TRANSPOSED and tile.bm < 64:
            continue  # rare twice over: one tile has to do
        # TF32 operands of wgmma must be K-major in shared memory; X, which is not, has to be the
        # left factor, which may come from registers.
        tf32 = f32 and like.precision is Precision.TF32
        spec = replace(
            like, bm=tile.bm, bn=tile.bn, bk=tile.bk // 2 if f32 else tile.bk, warps=tile.warps,
            stages=tile.stages, swap=tile.swap or (wide and tf32),
        )  # fmt: skip
        yield spec
        if "s" in tile.use and not wanted.strip("f"):
            yield replace(spec, split_k=True)


def _depthwise(dtype: Dtype, bm: int, bn: int, width: int, rows: int) -> KernelSpec:
    """With loads of so many rows of taps in flight: they are its stages."""
    e = dtype.bytes
    return KernelSpec(
        Family.CONV_DEPTHWISE, dtype, bm, bn, width, 4, rows, align_a=e, align_b=e, align_c=e
    )


def conv_specs(sm: int) -> list[KernelSpec]:
    """The conv kernels of an architecture. Every convolution in f16, bf16 or f32 has one, whatever
    its W.
    """
    out: list[KernelSpec] = []
    wide = sm in (90, 100)  # wgmma or tcgen05
    listed = (*TALL, *WIDE) if sm == 90 else WIDE if wide else NARROW
    modes = [(dtype, Precision.TF32) for dtype in Dtype] + [(Dtype.F32, Precision.IEEE)]
    for dtype, precision in modes:
        e = dtype.bytes
        tiles: tuple[ConvTile, ...] = IEEE if precision is Precision.IEEE else listed
        if sm == 90 and dtype is Dtype.F32 and precision is Precision.TF32:
            tiles = (*TALL_TF32, *WIDE)
        for family in (
            Family.CONV, Family.CONV_TAPS4, Family.CONV_TAPS8, Family.CONV_TRANSPOSED,
        ):  # fmt: skip
            for align in (16, e) if family in (Family.CONV, Family.CONV_TRANSPOSED) else (16,):
                like = KernelSpec(
                    family, dtype, 16, 16, 16, 4, 2, precision=precision,
                    align_a=align, align_b=e, align_c=e,
                )  # fmt: skip
                out += _expand(tiles, like, wide)
    for dtype, (bm, bn, width, rows) in product(Dtype, DEPTHWISE):
        like = _depthwise(dtype, bm, bn, width, rows)
        out.append(like)
        if width == 1 and bm == 4:
            out.append(replace(like, family=Family.CONV_DEPTHWISE_TRANSPOSED))
    return out


def why_illegal_conv(spec: KernelSpec) -> str | None:
    """What a conv kernel lacks beyond the rules for all kernels, or None."""
    if spec.trans_a or spec.trans_b or spec.bias_matrix:
        return "a convolution has no operand layouts and a bias for each channel"
    if spec.family.depthwise and (spec.split_k or spec.bm * spec.bn > 2048):
        return "a depthwise kernel sums over taps alone, for at most 2048 outputs"
    return None


def conv_resources(spec: KernelSpec, wide: bool) -> tuple[int, int]:
    """(shared bytes per block, registers per thread), near what the compiler reports."""
    if spec.family.depthwise:
        return 4 * spec.bm, 64
    e, threads = spec.dtype.bytes, 32 * spec.warps
    w_tile, x_tile = spec.bm * spec.bk * e, spec.bk * spec.bn * e
    buffers = spec.stages if wide else max(spec.stages - 1, 1)
    # As the left factor of wgmma, fp32 pixels leave their buffer for registers early.
    early = wide and e == 4 and spec.precision is Precision.TF32
    loop = w_tile * (buffers if spec.align_a >= 4 else 1) + x_tile * (
        buffers - early if e == 4 else 1
    )
    # On their way to Y, at most 128 columns at a time; sums of fp32 mostly go as they lie in
    # registers.
    stored = spec.bm * min(spec.bn, 128) * (4 if spec.split_k and wide else e)
    if e == 4 and not (spec.precision is Precision.IEEE and spec.bn == 64):
        stored = 0
    sums, loads = spec.bm * spec.bn // threads, spec.bk * spec.bn // threads
    return max(loop, stored), min(255, sums + 3 * loads + 64)
