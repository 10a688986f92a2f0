"""Which kernels the pack of an architecture holds. Imports neither Triton nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from . import conv_spec, small_tiles, tile_lists
from .left_out import LEFT_OUT
from .small_tiles import SmallTile
from .spec import (
    SHARED_LIMIT,
    Dtype,
    Family,
    KernelSpec,
    Precision,
    estimated_resources,
    is_async,
    is_wide,
    legal,
    name,
)
from .tile_lists import Tile

MAX_STAGES = 6
RESERVED_SHARED = 1 << 10  # taken from each block by the driver
# Kernels that need more registers than there are.
SPILLING = {
    100: frozenset(
        {
            "gemm_pointer_f16_nn_16x128x32_w4_s6_swap_split_a2b16c16",
            "gemm_pointer_bf16_nn_16x128x32_w4_s6_swap_split_a2b16c16",
            "gemm_pointer_f32_nn_16x128x16_w4_s6_swap_split_a4b4c4",
            "gemm_pointer_f32ieee_nt_64x128x16_w8_s6_a4b4c4",
            "gemm_tma_masked_f16_nt_128x256x64_w8_s4",
            "gemm_tma_masked_bf16_nt_128x256x64_w8_s4",
            "gemm_tma_masked_f32_nt_128x256x32_w8_s4",
        }
    ),
    120: frozenset(
        {
            "gemm_tma_masked_f16_nt_128x256x64_w8_s3",
            "gemm_tma_masked_bf16_nt_128x256x64_w8_s3",
        }
    ),
}


class Layout(NamedTuple):
    trans_a: bool
    trans_b: bool


NN, NT, TN, TT = (Layout(a, b) for a in (False, True) for b in (False, True))


def _classes(layout: Layout, element: int) -> list[tuple[int, int, int]]:
    """The alignment classes (A, B, C) of the pointer family: everything at its least for any
    problem, and the mixtures that odd sizes of contiguous tensors give. Odd N: B and C of NN, C of
    NT. Odd K: A of NN.
    """
    least = (element, element, element)
    if layout == NN:
        mixed = [(16, 4, 4), (4, 16, 16)]
        return [least, *mixed, *([(16, 2, 2), (2, 16, 16)] if element == 2 else [])]
    if layout == NT:
        return [least, (16, 16, element)]
    return [least]


def _stages(spec: KernelSpec, sm: int, per_sm: int) -> int:
    """The deepest pipeline that lets `per_sm` blocks share an SM's memory, or at least 2."""
    if spec.family is Family.COPY_PADDED:
        return 1  # no loop
    if not is_async(max(spec.align_a, spec.align_b)):
        return 2  # nothing to pipeline
    budget = SHARED_LIMIT[sm]
    if per_sm > 1:
        budget = (budget + RESERVED_SHARED) // per_sm - RESERVED_SHARED
    deepest = 8 if spec.family is Family.GEMM_WS else MAX_STAGES
    for stages in range(deepest, 2, -1):
        if estimated_resources(replace(spec, stages=stages), sm)[0] <= budget:
            return stages
    return 2


def _expand(tiles: Iterable[Tile], like: KernelSpec, sm: int) -> Iterator[KernelSpec]:
    """The kernels like `like` with other tiles, where a tile is meant for its dtype and layout."""
    f32 = like.dtype is Dtype.F32
    for tile in tiles:
        if (like.trans_a and "t" not in tile.use) or (f32 and "f" not in tile.use):
            continue
        spec = replace(
            like, bm=tile.bm, bn=tile.bn, bk=tile.bk // 2 if f32 else tile.bk, warps=tile.warps,
            swap=tile.swap,
        )  # fmt: skip
        if f32 and not spec.trans_b and is_wide(replace(spec, swap=True), sm):
            # TF32 operands in shared memory must be K-major; only the left factor may come from
            # registers instead, so B, which is not, has to be the left one.
            spec = replace(spec, swap=True)
        spec = replace(spec, stages=_stages(spec, sm, tile.per_sm))
        yield spec
        if "s" in tile.use and not (spec.bias_matrix or spec.sliced):
            yield replace(spec, split_k=True)


def specs(sm: int, *, trial: bool = False) -> list[KernelSpec]:
    """The kernels of the pack for an architecture (90 for sm_90), in pack order; every one is
    legal. With `trial`, those on trial are there too: tiles of `gemm_ws`, on sm_90.

    Any problem in f16, bf16 or f32 has a kernel: the pointer family is there in every layout and
    precision at the least alignment, with and without a matrix C; so has any convolution. Raises
    ValueError for an unsupported architecture.
    """
    if sm not in SHARED_LIMIT:
        known = ", ".join(f"sm_{s}" for s in SHARED_LIMIT)
        raise ValueError(f"sm_{sm} is not a supported architecture; supported are {known}")
    tiles = {90: tile_lists.WIDE_MMA, 100: tile_lists.TCGEN05_MMA}.get(sm, tile_lists.NARROW_MMA)
    unaligned_tiles = tile_lists.WIDE_UNALIGNED if sm in (90, 100) else tile_lists.UNALIGNED
    out: list[KernelSpec] = []
    for dtype, layout in product(Dtype, (NN, NT, TN, TT)):
        family = Family.GEMM_TMA if sm >= 90 else Family.GEMM_POINTER
        aligned = KernelSpec(family, dtype, 16, 16, 16, 4, 2, *layout)
        out += _expand(tiles, aligned, sm)
        out += _expand(tile_lists.MATRIX_BIAS, replace(aligned, bias_matrix=True), sm)

        pointer = replace(aligned, family=Family.GEMM_POINTER)
        least = _aligned(pointer, dtype.bytes, dtype.bytes, dtype.bytes)
        for align_a, align_b, align_c in _classes(layout, dtype.bytes):
            out += _expand(unaligned_tiles, _aligned(pointer, align_a, align_b, align_c), sm)
        out += _expand(tile_lists.TINY, least, sm)
        out += _expand(tile_lists.MATRIX_BIAS[1:], replace(least, bias_matrix=True), sm)

        if layout == NT and family is Family.GEMM_TMA:
            like = replace(aligned, family=Family.GEMM_TMA_MASKED, align_c=dtype.bytes)
            out += _expand(tile_lists.MASKED, like, sm)
        if layout in (NT, TN):
            copy, tile = (
                replace(least, family=Family.COPY_PADDED),
                tile_lists.COPIES[layout.trans_a],
            )
            out += _expand((tile,), copy, sm)

        if dtype is Dtype.F32:
            out += _ieee(aligned, sm)
        out += _small(aligned, sm)
    plain = KernelSpec(Family.GEMM_WS, Dtype.F16, 64, 16, 16, 12, 2)
    for specialized, like, listed in (
        (tile_lists.SPECIALIZED, plain, True),
        (tile_lists.PINGPONG, replace(plain, pingpong=True), True),
        (tile_lists.SLICED, replace(plain, split_k=True, sliced=True), True),
        (tile_lists.TRIED, plain, trial),
    ):
        for dtype, (trans_a, trans_b) in product(Dtype, (NN, NT)):
            if listed:
                spec = replace(like, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
                out += _expand(specialized, spec, sm)
    split = KernelSpec(
        Family.GEMM_WS, Dtype.F32, 128, 16, 16, 16, 2, *NT, precision=Precision.IEEE, tf32x3=True,
    )  # fmt: skip
    out += _expand(tile_lists.SPECIALIZED_SPLIT, split, sm)
    out += _expand(tile_lists.SPECIALIZED_SPLIT_SWAPPED, replace(split, trans_b=False), sm)
    out += conv_spec.conv_specs(sm)
    without = LEFT_OUT.get(sm, frozenset()) | SPILLING.get(sm, frozenset())
    return [spec for spec in out if legal(spec, sm) and name(spec) not in without]


def _ieee(aligned: KernelSpec, sm: int) -> Iterator[KernelSpec]:
    """The kernels of fp32's own accuracy in one layout: on the scalar units, and, for all that is
    not small, on the tensor cores of sm_80 and sm_90. Three TF32 products take less time than one
    of the scalar units there; on sm_86, 89 and 120 TF32 is only twice as fast. On sm_100 they are
    untried.
    """
    aligned = replace(aligned, precision=Precision.IEEE)
    layout = Layout(aligned.trans_a, aligned.trans_b)
    pointer = replace(aligned, family=Family.GEMM_POINTER)
    least = _aligned(pointer, 4, 4, 4)
    yield from _expand(tile_lists.IEEE, least, sm)
    yield from _expand(tile_lists.IEEE[2:3], replace(least, bias_matrix=True), sm)
    if sm not in (80, 90):
        yield from _expand(tile_lists.IEEE, pointer, sm)
        return
    wide = sm == 90
    split = replace(aligned, tf32x3=True)
    yield from dict.fromkeys(
        _expand(tile_lists.WIDE_SPLIT if wide else tile_lists.NARROW_SPLIT, split, sm)
    )
    yield from _expand(tile_lists.MATRIX_BIAS[1:], replace(split, bias_matrix=True), sm)
    tiles = tile_lists.WIDE_SPLIT_UNALIGNED if wide else tile_lists.NARROW_SPLIT[1:]
    for aligns in _classes(layout, 4):
        spec = replace(_aligned(pointer, *aligns), tf32x3=True)
        yield from _expand(tiles, spec, sm)


def small_specs(sm: int) -> list[KernelSpec]:
    """Those of `specs` that are for small products: see `small_tiles`."""
    family = Family.GEMM_TMA if sm >= 90 else Family.GEMM_POINTER
    found = {
        spec for dtype, layout in product(Dtype, (NN, NT))
        for spec in _small(KernelSpec(family, dtype, 16, 16, 16, 4, 2, *layout), sm)
    }  # fmt: skip
    return [spec for spec in specs(sm) if spec in found]


def _small(like: KernelSpec, sm: int) -> Iterator[KernelSpec]:
    """The kernels for small products of a dtype and layout. Those of tensor maps were tried on
    sm_90 alone.
    """
    layout = Layout(like.trans_a, like.trans_b)
    if layout not in (NN, NT):
        return
    if sm == 90:
        yield from _expand_small(small_tiles.FEW_ROWS + small_tiles.FEW_COLUMNS, like)
    e = like.dtype.bytes
    pointer = replace(like, family=Family.GEMM_POINTER)
    tiles: tuple[SmallTile, ...]
    if layout == NN:
        tiles = small_tiles.POINTER_TINY + small_tiles.POINTER_LONG + small_tiles.SHALLOW
    else:
        tiles = small_tiles.POINTER_TINY_NT + small_tiles.POINTER_LONG_NT
    dot = replace(pointer, family=Family.GEMM_DOT, bias_matrix=True)
    dots = [(e, e, e), (4, 4, e), (16, 16, e)][e // 4 :]
    for precision in Precision if like.dtype is Dtype.F32 else (Precision.TF32,):
        for aligns in _classes(layout, e):
            masked = _aligned(replace(pointer, precision=precision), *aligns)
            yield from _expand_small(tiles, masked)
        yield from _outer(replace(like, precision=precision))
        if layout == NN:
            row = replace(pointer, family=Family.GEMV, bias_matrix=True, precision=precision)
            yield from _expand_small(small_tiles.GEMV, _aligned(row, e, 16, e))
        for aligns in dots if layout == NT else ():
            yield from _expand_small(
                small_tiles.DOT, _aligned(replace(dot, precision=precision), *aligns)
            )


def _expand_small(tiles: Iterable[SmallTile], like: KernelSpec) -> Iterator[KernelSpec]:
    f32, e = like.dtype is Dtype.F32, like.dtype.bytes
    for tile in tiles:
        if ("n" in tile.use and like.trans_b) or ("x" in tile.use and f32):
            continue
        if like.precision is Precision.IEEE and "i" not in tile.use:
            continue
        if ("a" in tile.use and like.align_a == 16) or ("b" in tile.use and like.align_b == 16):
            continue
        if "l" in tile.use and like.align_a == like.align_b == e:
            continue
        spec = replace(
            like, bm=tile.bm, bn=tile.bn, bk=max(16, tile.bk // 2) if f32 else tile.bk,
            warps=tile.warps, stages=tile.stages, swap=tile.swap,
        )  # fmt: skip
        if "S" not in tile.use:
            yield spec
        if "s" in tile.use.lower():
            yield replace(spec, split_k=True)


def _outer(like: KernelSpec) -> Iterator[KernelSpec]:
    """The kernels of outer products like `like`. Rows of Y of 16 aligned bytes alone: of others
    each thread would have a single column, and most loads would be of A.
    """
    kind = "i" if like.precision is Precision.IEEE else "f" if like.dtype is Dtype.F32 else "h"
    for tile in small_tiles.OUTER:
        if kind not in tile.use or (like.trans_b and "t" not in tile.use):
            continue
        e = like.dtype.bytes
        yield replace(
            _aligned(like, e, e if like.trans_b else 16, 16), family=Family.GEMM_SHALLOW,
            bm=tile.bm, bn=tile.bn, bk=tile.bk, warps=8, stages=1,
        )  # fmt: skip


def _aligned(spec: KernelSpec, a: int, b: int, c: int) -> KernelSpec:
    return replace(spec, align_a=a, align_b=b, align_c=c)
