"""What a compiled micro-kernel is, as plain data: the one description that the builder, the
planner's catalog, the interpreter and the tuner share. Imports neither Triton nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Family(StrEnum):
    GEMM_TMA = "gemm_tma"
    GEMM_POINTER = "gemm_pointer"
    GEMM_WS = "gemm_ws"
    GEMM_TMA_MASKED = "gemm_tma_masked"
    COPY_PADDED = "copy_padded"
    GEMM_DOT = "gemm_dot"
    GEMM_SHALLOW = "gemm_shallow"
    GEMV = "gemv"
    CONV = "conv"
    CONV_TAPS4 = "conv_taps4"
    CONV_TAPS8 = "conv_taps8"
    CONV_TRANSPOSED = "conv_transposed"
    CONV_DEPTHWISE = "conv_depthwise"
    CONV_DEPTHWISE_TRANSPOSED = "conv_depthwise_transposed"

    @property
    def tensor_maps(self) -> bool:
        """Whether operands come through TMA tensor maps."""
        return self in (Family.GEMM_TMA, Family.GEMM_WS, Family.GEMM_TMA_MASKED)

    @property
    def maps(self) -> str:
        """Which of A, B and Y have a tensor map."""
        if self is Family.GEMM_TMA_MASKED:
            return "AB"
        return "ABY" if self.tensor_maps else ""

    @property
    def scalar(self) -> bool:
        """Whether products are multiplied on the scalar units, in fp32, whatever their dtype."""
        return self in (Family.GEMM_DOT, Family.GEMM_SHALLOW, Family.GEMV)

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
    tf32x3: bool = False  # ieee: by three TF32 products of split factors, not on the scalar units
    sliced: bool = False  # gemm_ws with split-K: a block has one slice of one tile
    pingpong: bool = False  # gemm_ws: consumers take whole tiles in turn, not rows of each

    @property
    def source(self) -> str:
        """The kernel function's name, which is that of its module."""
        if self.family.convolves:
            return "conv_depthwise" if self.family.depthwise else "conv"
        return f"{self.family}_x3" if self.persistent and self.tf32x3 else str(self.family)

    @property
    def persistent(self) -> bool:
        """Whether blocks walk over tiles: the grid is then at most what the device holds."""
        return self.family is Family.GEMM_WS

    @property
    def consumers(self) -> int:
        """gemm_ws: the warpgroups that multiply, each its own rows of the tile; one more loads, and
        of split factors another writes the lower parts."""
        return self.warps // 4 - (2 if self.tf32x3 else 1)

    @property
    def consumer_rows(self) -> int:
        """gemm_ws: rows of a tile that one consumer multiplies."""
        return self.bm if self.pingpong else self.bm // self.consumers

    @property
    def multiplying_warps(self) -> int:
        """Those that multiply one tile."""
        if self.family is not Family.GEMM_WS:
            return self.warps
        return 4 if self.pingpong else 4 * self.consumers

    @property
    def b_columns(self) -> int:
        """Columns of the tile of B that one TMA load brings. What a tile of gemm_ws has beyond a
        power of two has an accumulator of its own."""
        return self.bn & -self.bn

    @property
    def slices_at_once(self) -> int:
        """Split-K: how many slices of a tile's sums are being loaded while they are added up: what
        fits the shared memory of the K loop, and at least two, or four of few sums.
        """
        loop = (self.stages - 1) * (self.bm + self.bn) * self.bk * self.dtype.bytes
        tile = 4 * self.bm * self.bn
        return max(4 if tile <= 16 << 10 else 2, min(12, loop // tile))

    @property
    def chunks(self) -> int:
        """Groups of columns in which an activation goes through the tile: of 16 sums a thread. That
        bounds its code (128 sums at once: 135 KB a kernel) and its registers.
        """
        return max(1, self.bm * self.bn // (32 * self.warps) // 16)

    @property
    def y_box(self) -> tuple[int, int]:
        """Rows and columns of the tile of Y that one TMA store writes."""
        if self.family is not Family.GEMM_WS:
            return self.bm, self.bn
        if self.swap:
            columns = self.bn // self.consumers
            return min(self.bm, 8192 // columns // self.dtype.bytes), columns
        rows = self.consumer_rows
        most = self.b_columns if self.b_columns == self.bn else 32  # room for two such boxes
        return rows, min(most, 8192 // rows // self.dtype.bytes)


def name(spec: KernelSpec) -> str:
    """The kernel's unique name, e.g. `gemm_tma_f16_nn_128x256x64_w8_s3`."""
    dtype = "f32ieee" if spec.precision is Precision.IEEE else str(spec.dtype)
    layout = "" if spec.family.convolves else "_" + "nt"[spec.trans_a] + "nt"[spec.trans_b]
    parts = [
        f"{spec.family}_{dtype}{layout}_{spec.bm}x{spec.bn}x{spec.bk}_w{spec.warps}_s{spec.stages}",
        "" if spec.group_m == 8 else f"g{spec.group_m}",
        "swap" if spec.swap else "",
        "sliced" if spec.sliced else "split" if spec.split_k else "",
        "pingpong" if spec.pingpong else "",
        "cmatrix" if spec.bias_matrix else "",
        "x3" if spec.tf32x3 else "",
        "" if spec.family.tensor_maps else f"a{spec.align_a}b{spec.align_b}c{spec.align_c}",
    ]
    return "_".join(part for part in parts if part)


def why_illegal(spec: KernelSpec, sm: int) -> str | None:
    """Why the kernel cannot be compiled for an architecture, or None: the legality predicate."""
    if sm not in SHARED_LIMIT:
        return (
            f"sm_{sm} is not supported; supported are {', '.join(f'sm_{s}' for s in SHARED_LIMIT)}"
        )
    if (spec.sliced or spec.pingpong) and spec.family is not Family.GEMM_WS:
        return "slices added up together and tiles taken in turn are for gemm_ws alone"
    if spec.family is Family.GEMM_WS:
        reason = _why_illegal_ws(spec, sm)
        if reason is not None:
            return reason
    elif spec.warps not in (1, 2, 4, 8):
        return f"{spec.warps} warps: 1, 2, 4 or 8 are supported"
    if spec.family.scalar and (reason := _why_illegal_scalar(spec)):
        return reason
    for field in ("bm", "bn", "bk") if not spec.family.depthwise else ():
        size = getattr(spec, field)
        checked = spec.family.scalar or (spec.family is Family.GEMM_WS and field != "bk")
        if size not in (16, 32, 64, 128, 256) and not checked:
            return f"{field} = {size}: tile sizes are powers of two from 16 to 256"
    if not 1 <= spec.stages <= 8:
        return f"{spec.stages} stages: 1 to 8 are supported"
    if spec.group_m < 1:
        return f"group_m = {spec.group_m}: must be positive"
    if spec.precision is Precision.IEEE and spec.dtype is not Dtype.F32:
        return f"ieee precision is a mode of f32, not of {spec.dtype}"
    if spec.tf32x3 and spec.precision is not Precision.IEEE:
        return "three TF32 products are a way to ieee precision, not to tf32"
    for field in ("align_a", "align_b", "align_c"):
        align = getattr(spec, field)
        if align not in (2, 4, 8, 16) or align < spec.dtype.bytes:
            return f"{field} = {align}: powers of two from {spec.dtype.bytes} to 16 are accepted"
    if spec.family.tensor_maps:
        if sm < 90:
            return f"tensor maps need sm_90, not sm_{sm}"
        mapped = zip("ABY", (spec.align_a, spec.align_b, spec.align_c), strict=True)
        if any(align != 16 for operand, align in mapped if operand in spec.family.maps):
            return "tensor maps need rows aligned to 16 bytes"
    if spec.family is Family.COPY_PADDED and spec.trans_a == spec.trans_b:
        return "copies are for NT operands as they are, or for TN operands, transposed"
    most = 160 if spec.family is Family.GEMM_WS and spec.consumers < 3 else 128
    if spec.tf32x3:
        most = 64  # a step has sums of its own
    if spec.bm * spec.bn > most * 32 * spec.multiplying_warps:
        return (
            f"{spec.bm}x{spec.bn} sums take more than {most} registers a thread of "
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
    if spec.bias_matrix:
        return "it takes a vector C only"
    if spec.tf32x3:
        if (spec.warps, spec.bn if spec.swap else spec.bm) != (16, 128):
            return "of split factors it computes tiles of 128 rows, or columns, with 16 warps"
        if spec.pingpong:
            return "of split factors consumers take their own rows of each tile"
        if spec.trans_a or spec.trans_b == spec.swap:
            return "of split factors the right one must be contiguous along K: nt, or nn swapped"
        return None
    if spec.pingpong and (spec.consumers != 2 or spec.split_k):
        return "tiles are taken in turn by two consumers, and whole"
    if spec.consumer_rows not in (64, 128) or spec.bm % spec.consumer_rows:
        return f"bm = {spec.bm}: each of {spec.consumers} consumers takes 64 or 128 rows"
    if spec.swap:
        return "it computes upright tiles only"
    if spec.sliced and not spec.split_k:
        return "slices of K are a way to split it"
    if spec.bn not in (16, 32, 64, 96, 128, 160, 192, 256):
        return f"bn = {spec.bn}: tiles have 96, 160, 192 or a power of two from 16 to 256 columns"
    if spec.b_columns < spec.bn and spec.split_k and not spec.sliced:
        return f"tiles of {spec.bn} columns take slices of K only"
    if spec.precision is Precision.IEEE:
        return "wgmma has no ieee precision"
    if spec.dtype is Dtype.F32 and (spec.trans_a or not spec.trans_b):
        return "wgmma wants TF32 operands contiguous along K: layout nt only"
    return None


def _why_illegal_scalar(spec: KernelSpec) -> str | None:
    if spec.family is Family.GEMM_DOT:
        return _why_illegal_dot(spec)
    if spec.swap or spec.tf32x3:
        return "kernels on the scalar units are upright and need no split factors"
    if spec.family is Family.GEMM_SHALLOW:
        if spec.split_k or spec.bias_matrix:
            return "outer products are of all of K, and take a vector C"
        if not 1 <= spec.bk <= 32:
            return f"bk = {spec.bk}: 1 to 32 are unrolled"
        if spec.bm not in (16, 32, 64, 128) or spec.bn not in (32, 64, 128, 256, 512):
            return f"{spec.bm}x{spec.bn} outputs: 16 to 128 rows of 32 to 512 columns are supported"
        return None
    if spec.trans_a or spec.trans_b:
        return "rows of B are read as they are stored: layout nn only"
    if not spec.bias_matrix:
        return "it takes a matrix C"
    if spec.align_b < 16:
        return f"align_b = {spec.align_b}: rows of B are read 16 bytes at a time"
    if spec.bm not in (1, 2, 4, 8):
        return f"bm = {spec.bm}: 1, 2, 4 or 8 rows are supported"
    if spec.bn not in (16, 32, 64, 128, 256) or spec.bk not in (8, 16, 32, 64, 128, 256):
        return f"{spec.bk}x{spec.bn} of B: 8 to 256 rows of 16 to 256 columns are supported"
    if spec.bm * spec.bn * spec.bk > 64 * 32 * spec.warps:
        return f"{spec.bm} sums of {spec.bk}x{spec.bn} parts do not fit {spec.warps} warps"
    return None


def _why_illegal_dot(spec: KernelSpec) -> str | None:
    if spec.trans_a or not spec.trans_b:
        return "dot products take operands contiguous along K: layout nt only"
    if spec.split_k or spec.swap or not spec.bias_matrix:
        return "dot products are upright, of all of K, and take a matrix C"
    if spec.bm not in (1, 2, 4, 8) or spec.bn not in (1, 2, 4, 8):
        return f"{spec.bm}x{spec.bn} outputs: 1, 2, 4 or 8 each way are supported"
    if spec.bk not in (256, 512, 1024, 2048, 4096):
        return f"bk = {spec.bk}: powers of two from 256 to 4096 are supported"
    if spec.bm * spec.bn * spec.bk > 128 * 32 * spec.warps:
        return f"{spec.bm * spec.bn} sums of {spec.bk} parts do not fit {spec.warps} warps"
    return None


def legal(spec: KernelSpec, sm: int) -> bool:
    """Whether the kernel compiles and runs on an architecture (90 for sm_90)."""
    return why_illegal(spec, sm) is None


def can_launch_early(spec: KernelSpec, sm: int) -> bool:
    """Whether a kernel can be launched before the one in front of it has ended, for which it waits
    itself. Tried on sm_90 alone. Whether it is launched so depends on the grid, too: the runtime's
    `is_launched_early`.
    """
    return sm == 90 and spec.source != "gemm_ws_x3" and not spec.family.convolves


def accepts(
    spec: KernelSpec, *, dtype: Dtype, k: int, precision: Precision = Precision.TF32,
    trans_a: bool = False, trans_b: bool = False, bias_matrix: bool = False,
    align_a: int = 16, align_b: int = 16, align_c: int = 16,
) -> bool:  # fmt: skip
    """Whether the kernel computes a product with these properties, whatever its M, N and batch.

    A tensor map cannot describe a matrix without elements, so K = 0 is left to the others; outer
    products are unrolled for K up to `bk`.
    """
    return (
        spec.family is not Family.COPY_PADDED
        and not spec.family.convolves
        and spec.dtype is dtype
        and spec.precision is precision
        and (spec.trans_a, spec.trans_b) == (trans_a, trans_b)
        and spec.bias_matrix >= bias_matrix
        and spec.align_a <= align_a
        and spec.align_b <= align_b
        and spec.align_c <= align_c
        and (k > 0 or not spec.family.tensor_maps)
        and (k <= spec.bk or spec.family is not Family.GEMM_SHALLOW)
    )


def is_wide(spec: KernelSpec, sm: int) -> bool:
    """Whether the product runs on wgmma or tcgen05, which read their operands from shared memory,
    and not on mma.sync or the scalar units, which read registers.
    """
    rows = spec.bn if spec.swap else spec.bm
    if spec.family is Family.COPY_PADDED or spec.family.scalar:
        return False
    scalar = spec.precision is Precision.IEEE and not spec.tf32x3
    return sm in (90, 100) and not scalar and rows >= 64 and spec.warps >= 4


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
    return replace(
        spec, family=Family.GEMM_TMA, bm=spec.y_box[0], bn=spec.b_columns, warps=8, swap=False,
        split_k=False, sliced=False,
    )  # fmt: skip


def estimated_resources(spec: KernelSpec, sm: int) -> tuple[int, int]:
    """(shared bytes per block, registers per thread), as the compiler will report them or near it.

    Calibrated on the compiled kernels; the tests hold the shared bytes to them.
    """
    e = spec.dtype.bytes
    if spec.family is Family.GEMM_WS:
        return _resources_ws(spec)
    if spec.family is Family.COPY_PADDED:
        return _resources_copy(spec)
    if spec.family.scalar:
        return _resources_scalar(spec)
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
    if wide and spec.tf32x3:  # the lower part of the right factor, and all of it where not K-major
        copied = spec.family is Family.GEMM_TMA and not right_is_k_major(spec)
        loop = right[1] * (2 if copied else 1)
    for (align, tile), k_major, is_left in (
        (left, left_is_k_major(spec), True),
        (right, right_is_k_major(spec), False),
    ):
        if not is_async(align):
            loop += tile * (2 if sm == 100 and wide else 1)
            continue
        # Factors that are split leave their buffers for registers.
        buffers = spec.stages if wide and not spec.tf32x3 else max(spec.stages - 1, 1)
        if wide and spec.dtype is Dtype.F32 and not k_major and not spec.tf32x3:
            # The left factor leaves its buffer for registers early, the right one for a copy.
            copied = sm == 100 and spec.family.tensor_maps
            buffers += -1 if is_left else 2 * copied
        loop += tile * buffers
        if spec.family.tensor_maps:
            loop += 8 * buffers  # barriers
    if spec.split_k:
        stored = 4 * spec.bm * spec.bn * spec.slices_at_once
    elif spec.family is Family.GEMM_POINTER and spec.stages == 1:
        loop, stored = _resources_shallow(spec, sm, loop)
    elif spec.dtype is Dtype.F32 and spec.family is Family.GEMM_POINTER and not wide:
        stored = 0  # in the layout of the accumulators
    else:
        stored = spec.bm * spec.bn * e
    return max(loop, stored), _estimated_registers(spec, sm)


def _resources_shallow(spec: KernelSpec, sm: int, loop: int) -> tuple[int, int]:
    """Shared bytes of the K loop and of the way to the rows of Y, where there is one stage: read
    off compiled kernels, as the compiler chooses layouts of its own for them.
    """
    tile = spec.bm * spec.bn * spec.dtype.bytes
    wide, rows_aligned = is_wide(spec, sm), spec.align_c == 16
    if sm == 100 and rows_aligned:
        return loop, 0
    if spec.dtype is Dtype.F32:
        if wide or spec.precision is Precision.IEEE:
            return loop, tile if wide else 0
        return spec.bk * max(spec.bm, spec.bn) * 4, 0 if rows_aligned else tile // 2
    if sm == 120:
        return loop, 0
    return loop, tile // 2 if rows_aligned or sm == 90 else tile


def _resources_ws(spec: KernelSpec) -> tuple[int, int]:
    rows, columns = spec.y_box
    ring = spec.stages * ((spec.bm + spec.bn) * spec.bk * spec.dtype.bytes + 16)
    buffers = 0 if spec.sliced else 2
    stores = buffers * spec.consumers * rows * columns * spec.dtype.bytes
    if spec.tf32x3:
        right = spec.bm if spec.swap else spec.bn
        ring += spec.stages * (right * spec.bk * spec.dtype.bytes + 8)  # its lower parts
        ring += 8 * right  # moves rows and columns between layouts
    registers = ws_register_limit(spec) or min(255, 65536 // (32 * spec.warps) // 8 * 8)
    turns = 16 * spec.consumers if spec.pingpong else 0
    return ring + stores + turns + 80 * spec.consumers + 90, registers


def _resources_copy(spec: KernelSpec) -> tuple[int, int]:
    # A transposed tile turns in shared memory.
    return (spec.bm * spec.bn * spec.dtype.bytes if spec.trans_a else 0), 64


def _resources_scalar(spec: KernelSpec) -> tuple[int, int]:
    if spec.family is Family.GEMM_DOT:
        return _resources_dot(spec)
    e, threads = spec.dtype.bytes, 32 * spec.warps
    if spec.family is Family.GEMM_SHALLOW:
        sums = spec.bm * spec.bn // threads
        return 0, min(255, 20 + sums * (2 if spec.bk <= 4 else 5 - e // 2))
    # A joins the pipeline where a thread's part of it is 4 bytes at least.
    staged = e == 4 or spec.bm * spec.bk * e >= 4 * threads
    ring = (spec.stages - 1) * spec.bk * (spec.bn + spec.bm * staged) * e
    across_warps = 4 * spec.bm * spec.bn * spec.warps
    sums = spec.bm * spec.bn * spec.bk // threads
    return max(ring, across_warps), min(255, 50 + 3 * sums // 2 - 4 * e)


def _resources_dot(spec: KernelSpec) -> tuple[int, int]:
    ring = sum(
        (spec.stages - 1) * rows * spec.bk * spec.dtype.bytes
        for rows, align in ((spec.bm, spec.align_a), (spec.bn, spec.align_b))
        if is_async(align)
    )
    across_warps = spec.bm * spec.bn * spec.warps * 4
    sums = spec.bm * spec.bn * spec.bk // (32 * spec.warps)
    return max(ring, across_warps), min(255, 40 + 3 * sums // 2)


def ws_register_limit(spec: KernelSpec) -> int | None:
    """Registers per thread at launch, before the loading warpgroup hands its share to the
    consumers; None: all that a block of this size can have. One consumer with a small enough tile
    leaves room for a second block.
    """
    return 128 if spec.consumers == 1 and spec.bn <= 128 else None


def _estimated_registers(spec: KernelSpec, sm: int) -> int:
    threads = 32 * spec.warps
    sums = spec.bm * spec.bn // threads
    if spec.tf32x3:  # sums, those of one step, and the left factor in its parts
        left = (spec.bn if spec.swap else spec.bm) * spec.bk // threads
        addresses = (spec.bm + spec.bn) * spec.bk * spec.dtype.bytes // threads
        addresses = 24 + addresses // min(spec.align_a, spec.align_b)
        by_pointer = spec.family is Family.GEMM_POINTER
        return min(255, 2 * sums + 2 * left + 28 + (addresses if by_pointer else 0))
    if spec.precision is Precision.IEEE:
        return 2 * sums + 48  # as many again for the factors
    if spec.family.tensor_maps:
        return sums + (80 if sm == 100 else 32)
    loads = (spec.bm + spec.bn) * spec.bk * spec.dtype.bytes // threads
    addresses = loads // min(spec.align_a, spec.align_b)
    return min(255, sums + addresses + (96 if sm == 100 else 56))


def is_async(align: int) -> bool:
    """Whether loads of this alignment bypass registers: the least cp.async moves is 4 bytes."""
    return align >= 4


# It is made of what this module defines.
from . import conv_spec  # noqa: E402
