"""What a compiled micro-kernel is, as plain data: the one description that the builder, the
planner's catalog, the interpreter and the tuner share. Imports neither Triton nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import NamedTuple


class Family(StrEnum):
    GEMM_TMA = "gemm_tma"
    GEMM_POINTER = "gemm_pointer"
    GEMM_WS = "gemm_ws"
    CONV = "conv"
    CONV_TAPS4 = "conv_taps4"
    CONV_TAPS8 = "conv_taps8"
    CONV_TRANSPOSED = "conv_transposed"
    CONV_DEPTHWISE = "conv_depthwise"
    CONV_DEPTHWISE_TRANSPOSED = "conv_depthwise_transposed"

    @property
    def tensor_maps(self) -> bool:
        """Whether operands and result go through TMA tensor maps."""
        return self is not Family.GEMM_POINTER and not self.convolves

    @property
    def convolves(self) -> bool:
        """Whether it computes convolutions; the others compute matrix products."""
        return self.value.startswith("conv")

    @property
    def depthwise(self) -> bool:
        return self.value.startswith("conv_depthwise")


class Dtype(StrEnum):
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def bytes(self) -> int:
        return 4 if self is Dtype.F32 else 2


class Precision(StrEnum):
    TF32 = "tf32"
    IEEE = "ieee"


# Opt-in shared memory of one block, bytes. The keys are the architectures that packs are built for.
SHARED_LIMIT = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One micro-kernel. Tile sizes in elements; `align_*` in bytes (16, 8, 4 or 2).

    An alignment is the least that the kernel accepts for an operand's base pointer, its row pitch,
    its batch stride and the length of its rows (columns of the matrix as it is stored).
    """

    family: Family
    dtype: Dtype
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    trans_a: bool = False
    trans_b: bool = False
    precision: Precision = Precision.TF32
    split_k: bool = False
    swap: bool = False
    bias_matrix: bool = False
    group_m: int = 8
    align_a: int = 16
    align_b: int = 16
    align_c: int = 16

    @property
    def persistent(self) -> bool:
        """Whether blocks walk over tiles: the grid is then at most what the device holds."""
        return self.family is Family.GEMM_WS

    @property
    def consumers(self) -> int:
        """gemm_ws: the warpgroups that multiply, each its own rows of the tile; one more loads."""
        return self.warps // 4 - 1

    @property
    def multiplying_warps(self) -> int:
        return 4 * self.consumers if self.family is Family.GEMM_WS else self.warps

    @property
    def y_box(self) -> tuple[int, int]:
        """Rows and columns of the tile of Y that one TMA store writes."""
        if self.family is not Family.GEMM_WS:
            return self.bm, self.bn
        rows = self.bm // self.consumers
        return rows, min(self.bn, 8192 // rows // self.dtype.bytes)


def name(spec: KernelSpec) -> str:
    """The kernel's unique name, e.g. `gemm_tma_f16_nn_128x256x64_w8_s3`."""
    dtype = "f32ieee" if spec.precision is Precision.IEEE else str(spec.dtype)
    layout = "" if spec.family.convolves else "_" + "nt"[spec.trans_a] + "nt"[spec.trans_b]
    parts = [
        f"{spec.family}_{dtype}{layout}_{spec.bm}x{spec.bn}x{spec.bk}_w{spec.warps}_s{spec.stages}",
        "" if spec.group_m == 8 else f"g{spec.group_m}",
        "swap" if spec.swap else "",
        "split" if spec.split_k else "",
        "cmatrix" if spec.bias_matrix else "",
        "" if spec.family.tensor_maps else f"a{spec.align_a}b{spec.align_b}c{spec.align_c}",
    ]
    return "_".join(part for part in parts if part)


def why_illegal(spec: KernelSpec, sm: int) -> str | None:
    """Why the kernel cannot be compiled for an architecture, or None: the legality predicate."""
    if sm not in SHARED_LIMIT:
        return (
            f"sm_{sm} is not supported; supported are {', '.join(f'sm_{s}' for s in SHARED_LIMIT)}"
        )
    if spec.family is Family.GEMM_WS:
        reason = _why_illegal_ws(spec, sm)
        if reason is not None:
            return reason
    elif spec.warps not in (1, 2, 4, 8):
        return f"{spec.warps} warps: 1, 2, 4 or 8 are supported"
    for field in ("bm", "bn", "bk") if not spec.family.depthwise else ():
        size = getattr(spec, field)
        by_consumers = spec.family is Family.GEMM_WS and field == "bm"  # checked already
        if size not in (16, 32, 64, 128, 256) and not by_consumers:
            return f"{field} = {size}: tile sizes are powers of two from 16 to 256"
    if not 1 <= spec.stages <= 8:
        return f"{spec.stages} stages: 1 to 8 are supported"
    if spec.group_m < 1:
        return f"group_m = {spec.group_m}: must be positive"
    if spec.precision is Precision.IEEE and spec.dtype is not Dtype.F32:
        return f"ieee precision is a mode of f32, not of {spec.dtype}"
    for field in ("align_a", "align_b", "align_c"):
        align = getattr(spec, field)
        if align not in (2, 4, 8, 16) or align < spec.dtype.bytes:
            return f"{field} = {align}: powers of two from {spec.dtype.bytes} to 16 are accepted"
    if spec.family.tensor_maps:
        if sm < 90:
            return f"tensor maps need sm_90, not sm_{sm}"
        if (spec.align_a, spec.align_b, spec.align_c) != (16, 16, 16):
            return "tensor maps need rows aligned to 16 bytes"
    if spec.bm * spec.bn > 128 * 32 * spec.multiplying_warps:
        return (
            f"{spec.bm}x{spec.bn} sums take more than 128 registers a thread of "
            f"{spec.multiplying_warps} warps"
        )
    if spec.family.convolves and (reason := conv_spec.why_illegal_conv(spec)):
        return reason
    shared, _ = estimated_resources(spec, sm)
    if shared > SHARED_LIMIT[sm]:
        return f"{shared} bytes of shared memory exceed the {SHARED_LIMIT[sm]} of sm_{sm}"
    return None


def _why_illegal_ws(spec: KernelSpec, sm: int) -> str | None:
    if sm != 90:
        return f"warp specialisation is written for the wgmma of sm_90, not sm_{sm}"
    if spec.warps not in (8, 12, 16):
        return f"{spec.warps} warps: 8, 12 or 16, of which one warpgroup loads, are supported"
    if spec.bm not in (64 * spec.consumers, 128 * spec.consumers):
        return f"bm = {spec.bm}: each of {spec.consumers} consumers takes 64 or 128 rows"
    if spec.swap or spec.bias_matrix:
        return "it computes upright tiles and takes a vector C only"
    if spec.precision is Precision.IEEE:
        return "wgmma has no ieee precision"
    if spec.dtype is Dtype.F32 and (spec.trans_a or not spec.trans_b):
        return "wgmma wants TF32 operands contiguous along K: layout nt only"
    return None


def legal(spec: KernelSpec, sm: int) -> bool:
    """Whether the kernel compiles and runs on an architecture (90 for sm_90)."""
    return why_illegal(spec, sm) is None


def is_launched_early(spec: KernelSpec, sm: int) -> bool:
    """Whether a kernel is launched before the one in front of it has ended. Tried on sm_90 alone.

    Its blocks then fill what the other's leave free. Deep pipelines, a block or two to an SM, gain
    5% from that; where many blocks fit an SM they end up on a few of them: pointer kernels took up
    to 2.5 times as long on an H200.
    """
    return sm == 90 and spec.family is Family.GEMM_TMA


def accepts(
    spec: KernelSpec, *, dtype: Dtype, k: int, precision: Precision = Precision.TF32,
    trans_a: bool = False, trans_b: bool = False, bias_matrix: bool = False,
    align_a: int = 16, align_b: int = 16, align_c: int = 16,
) -> bool:  # fmt: skip
    """Whether the kernel computes a product with these properties, whatever its M, N and batch.

    A tensor map cannot describe a matrix without elements, so K = 0 is left to the pointer family.
    """
    return (
        not spec.family.convolves
        and spec.dtype is dtype
        and spec.precision is precision
        and (spec.trans_a, spec.trans_b) == (trans_a, trans_b)
        and spec.bias_matrix >= bias_matrix
        and spec.align_a <= align_a
        and spec.align_b <= align_b
        and spec.align_c <= align_c
        and (k > 0 or spec.family is Family.GEMM_POINTER)
    )


def is_wide(spec: KernelSpec, sm: int) -> bool:
    """Whether the product runs on wgmma or tcgen05, which read their operands from shared memory,
    and not on mma.sync or the scalar units, which read registers.
    """
    rows = spec.bn if spec.swap else spec.bm
    return sm in (90, 100) and spec.precision is Precision.TF32 and rows >= 64 and spec.warps >= 4


def left_is_k_major(spec: KernelSpec) -> bool:
    """Whether consecutive elements of the left factor of the tensor core lie along K."""
    return spec.trans_b if spec.swap else not spec.trans_a


def right_is_k_major(spec: KernelSpec) -> bool:
    return not spec.trans_a if spec.swap else spec.trans_b


def interpreted(spec: KernelSpec) -> KernelSpec:
    """The kernel that computes the same in Triton's interpreter, which Gluon kernels do not have.

    For a `gemm_ws` kernel it is a `gemm_tma` one without split-K, to be launched with one block for
    each of its own tiles, which are as high as one consumer's rows.
    """
    if spec.family is not Family.GEMM_WS:
        return spec
    return replace(spec, family=Family.GEMM_TMA, bm=spec.y_box[0], warps=8, split_k=False)


def estimated_resources(spec: KernelSpec, sm: int) -> tuple[int, int]:
    """(shared bytes per block, registers per thread), as the compiler will report them or near it.

    Calibrated on the compiled kernels; the tests hold the shared bytes to them.
    """
    e = spec.dtype.bytes
    if spec.family is Family.GEMM_WS:
        return _resources_ws(spec)
    if spec.family.convolves:
        return conv_spec.conv_resources(spec, is_wide(spec, sm))
    wide = is_wide(spec, sm)
    left = (
        (spec.align_b, spec.bk * spec.bn * e)
        if spec.swap
        else (spec.align_a, spec.bm * spec.bk * e)
    )
    right = (
        (spec.align_a, spec.bm * spec.bk * e)
        if spec.swap
        else (spec.align_b, spec.bk * spec.bn * e)
    )
    loop = 0
    for (align, tile), k_major, is_left in (
        (left, left_is_k_major(spec), True),
        (right, right_is_k_major(spec), False),
    ):
        if not _is_async(align):
            loop += tile * (2 if sm == 100 else 1)
            continue
        buffers = spec.stages if wide else max(spec.stages - 1, 1)
        if wide and spec.dtype is Dtype.F32 and not k_major:
            # The left factor leaves its buffer for registers early, the right one for a copy.
            copied = sm == 100 and spec.family is Family.GEMM_TMA
            buffers += -1 if is_left else 2 * copied
        loop += tile * buffers
        if spec.family is Family.GEMM_TMA:
            loop += 8 * buffers  # barriers
    stored = spec.bm * spec.bn * (4 if spec.split_k and wide else e)
    if spec.dtype is Dtype.F32 and spec.family is Family.GEMM_POINTER and not wide:
        stored = 0  # in the layout of the accumulators
    return max(loop, stored), _estimated_registers(spec, sm)


def _resources_ws(spec: KernelSpec) -> tuple[int, int]:
    rows, columns = spec.y_box
    ring = spec.stages * ((spec.bm + spec.bn) * spec.bk * spec.dtype.bytes + 16)
    stores = 2 * spec.consumers * rows * columns * spec.dtype.bytes
    registers = ws_register_limit(spec) or min(255, 65536 // (32 * spec.warps) // 8 * 8)
    return ring + stores + 80 * spec.consumers + 90, registers


def ws_register_limit(spec: KernelSpec) -> int | None:
    """Registers per thread at launch, before the loading warpgroup hands its share to the
    consumers; None: all that a block of this size can have. One consumer with a small enough tile
    leaves room for a second block.
    """
    return 128 if spec.consumers == 1 and spec.bn <= 128 else None


def _estimated_registers(spec: KernelSpec, sm: int) -> int:
    threads = 32 * spec.warps
    sums = spec.bm * spec.bn // threads
    if spec.precision is Precision.IEEE:
        return 2 * sums + 48  # as many again for the factors
    if spec.family is Family.GEMM_TMA:
        return sums + (80 if sm == 100 else 32)
    loads = (spec.bm + spec.bn) * spec.bk * spec.dtype.bytes // threads
    addresses = loads // min(spec.align_a, spec.align_b)
    return min(255, sums + addresses + (96 if sm == 100 else 56))


def _is_async(align: int) -> bool:
    """Whether loads of this alignment bypass registers: the least cp.async moves is 4 bytes."""
    return align >= 4


# ---- the list ------------------------------------------------------------------------------------
MAX_STAGES = 6
RESERVED_SHARED = 1 << 10  # taken from each block by the driver


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
# tcgen05 keeps the sums in tensor memory; these need more registers than there are to come back.
TCGEN05_MMA = (Tile(128, 256, 64, 8, 1, "t"), *WIDE_MMA[2:])
SPILLING = {
    100: {
        "gemm_pointer_f16_nn_16x128x32_w4_s6_swap_split_a2b16c16",
        "gemm_pointer_bf16_nn_16x128x32_w4_s6_swap_split_a2b16c16",
        "gemm_pointer_f32_nn_16x128x16_w4_s6_swap_split_a4b4c4",
        "gemm_pointer_f32ieee_nt_64x128x16_w8_s6_a4b4c4",
    }
}
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
# Warp-specialised, sm_90: on trial. The warps include the loading warpgroup.
SPECIALIZED = (
    Tile(128, 256, 64, 12, 1, "sf"),
    Tile(256, 128, 64, 12, 1, "s"),
    Tile(192, 128, 64, 16, 1, "s"),
    Tile(128, 128, 64, 12, 1, "sf"),
    Tile(128, 128, 64, 8, 2, "s"),
    Tile(64, 256, 64, 8, 1, "s"),
    Tile(64, 128, 64, 8, 2, "sf"),
    Tile(64, 128, 128, 8, 1, "s"),
    Tile(128, 64, 64, 8, 2, "s"),
    Tile(64, 64, 128, 8, 1, "s"),
)
# Rows of fewer than 16 aligned bytes: loads are narrow and many, so tiles stay small enough for
# registers.
UNALIGNED = (
    Tile(128, 128, 32, 8, 2, "f"),
    Tile(64, 64, 32, 4, 3, "sft"),
    Tile(16, 128, 32, 4, 3, "sft"),
)
WIDE_UNALIGNED = (*UNALIGNED[:2], Tile(16, 128, 32, 4, 3, "sft", swap=True))
# fp32 on the scalar units. The sizes are again those of 2-byte elements.
IEEE = (
    Tile(128, 128, 32, 8, 2, "f"),
    Tile(64, 128, 32, 8, 2, "f"),
    Tile(64, 64, 32, 8, 2, "sft"),
    Tile(16, 128, 32, 4, 2, "sft"),
)
# A full matrix C is read through registers at the end, beside the accumulators.
MATRIX_BIAS = (Tile(128, 128, 64, 8, 1, ""), Tile(64, 64, 64, 4, 2, "ft"))


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
    if not _is_async(max(spec.align_a, spec.align_b)):
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
        if "s" in tile.use and not spec.bias_matrix:
            yield replace(spec, split_k=True)


def specs(sm: int, *, trial: bool = False) -> list[KernelSpec]:
    """The kernels of the pack for an architecture (90 for sm_90), in pack order; every one is
    legal. With `trial`, those of families on trial follow: `gemm_ws`, on sm_90.

    Any problem in f16, bf16 or f32 has a kernel: the pointer family is there in every layout and
    precision at the least alignment, with and without a matrix C. Raises ValueError for an
    unsupported architecture.
    """
    if sm not in SHARED_LIMIT:
        known = ", ".join(f"sm_{s}" for s in SHARED_LIMIT)
        raise ValueError(f"sm_{sm} is not a supported architecture; supported are {known}")
    tiles = {90: WIDE_MMA, 100: TCGEN05_MMA}.get(sm, NARROW_MMA)
    unaligned_tiles = WIDE_UNALIGNED if sm in (90, 100) else UNALIGNED
    out: list[KernelSpec] = []
    for dtype, layout in product(Dtype, (NN, NT, TN, TT)):
        family = Family.GEMM_TMA if sm >= 90 else Family.GEMM_POINTER
        aligned = KernelSpec(family, dtype, 16, 16, 16, 4, 2, *layout)
        out += _expand(tiles, aligned, sm)
        out += _expand(MATRIX_BIAS, replace(aligned, bias_matrix=True), sm)

        pointer = replace(aligned, family=Family.GEMM_POINTER)
        least = _aligned(pointer, dtype.bytes, dtype.bytes, dtype.bytes)
        for align_a, align_b, align_c in _classes(layout, dtype.bytes):
            out += _expand(unaligned_tiles, _aligned(pointer, align_a, align_b, align_c), sm)
        out += _expand(MATRIX_BIAS[1:], replace(least, bias_matrix=True), sm)

        if dtype is Dtype.F32:
            for spec in (pointer, least):
                out += _expand(IEEE, replace(spec, precision=Precision.IEEE), sm)
            spec = replace(least, precision=Precision.IEEE, bias_matrix=True)
            out += _expand(IEEE[2:3], spec, sm)
    if trial:
        for dtype, layout in product(Dtype, (NN, NT)):
            out += _expand(
                SPECIALIZED, KernelSpec(Family.GEMM_WS, dtype, 64, 16, 16, 8, 2, *layout), sm
            )
    out += conv_spec.conv_specs(sm)
    return [spec for spec in out if legal(spec, sm) and name(spec) not in SPILLING.get(sm, ())]


def _aligned(spec: KernelSpec, a: int, b: int, c: int) -> KernelSpec:
    return replace(spec, align_a=a, align_b=b, align_c=c)


# It is made of what this module defines.
from . import conv_spec  # noqa: E402
