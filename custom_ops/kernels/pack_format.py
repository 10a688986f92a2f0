"""Kernel packs as files: the structs of `custom_ops/runtime/moonpoly.h`, written and read with
numpy.

A pack holds the cubins of one architecture, their launch metadata and cost tables. A catalog is a
pack without cubins: it can plan, not launch.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from moonpoly_ort.errors import PackError

from .spec import Dtype, Family, KernelSpec, Precision, name

Code = TypeVar("Code")
Reader = TypeVar("Reader", bound=Callable[..., Any])

MAGIC = b"MOONPACK"
VERSION = 6
CUBIN_ALIGNMENT = 64


class Param(IntEnum):
    """`mp_param`: what a kernel's parameter means to the launcher."""

    DESC_A, DESC_B, DESC_Y = 1, 2, 3
    PTR_A, PTR_B, PTR_Y, PTR_BIAS, PTR_WORKSPACE, PTR_COUNTERS = 4, 5, 6, 7, 8, 9
    M, N, K, SPLIT = 10, 11, 12, 13
    A_DIV, A_MOD, B_DIV, B_MOD, Z0 = 14, 15, 16, 17, 18
    LDA, LDB, LDC = 19, 20, 21
    A_BATCH, B_BATCH, C_BATCH = 22, 23, 24
    BIAS_M, BIAS_N = 25, 26
    ALPHA, BETA = 27, 28
    NULL = 29
    BATCH = 30
    ORDER = 31
    PTR_RESIDUAL, ACTIVATION, ACT_ALPHA, ACT_BETA = 32, 33, 34, 35
    CONV_X, CONV_W, CONV_Y, CONV_BIAS = 64, 65, 66, 67
    CONV_C, CONV_K, CONV_GROUPS, CONV_HAS_BIAS = 68, 69, 70, 71
    CONV_IN_D, CONV_IN_H, CONV_IN_W, CONV_OUT_H, CONV_OUT_W = 72, 73, 74, 75, 76
    CONV_KERNEL_D, CONV_KERNEL_H, CONV_KERNEL_W = 77, 78, 79
    CONV_STRIDE_D, CONV_STRIDE_H, CONV_STRIDE_W = 80, 81, 82
    CONV_DILATION_D, CONV_DILATION_H, CONV_DILATION_W = 83, 84, 85
    CONV_PAD_D, CONV_PAD_H, CONV_PAD_W = 86, 87, 88
    CONV_PIXELS = 89
    CONV_CHANNEL, CONV_W_G, CONV_W_K, CONV_W_C, CONV_W_H, CONV_W_W = 90, 91, 92, 93, 94, 95


FAMILY_CODE = {
    Family.GEMM_TMA: 0, Family.GEMM_POINTER: 1, Family.GEMM_WS: 2, Family.GEMM_DOT: 6,
    Family.GEMM_SHALLOW: 7, Family.GEMV: 10, Family.GEMM_TMA_MASKED: 8, Family.COPY_PADDED: 9,
    Family.CONV: 16, Family.CONV_TAPS4: 17, Family.CONV_TAPS8: 18, Family.CONV_TRANSPOSED: 19,
    Family.CONV_DEPTHWISE: 20, Family.CONV_DEPTHWISE_TRANSPOSED: 21,
}  # fmt: skip
DTYPE_CODE = {Dtype.F16: 0, Dtype.BF16: 1, Dtype.F32: 2}
PRECISION_CODE = {Precision.TF32: 0, Precision.IEEE: 1}

HEADER = np.dtype([
    ("magic", "S8"), ("version", "<u4"), ("sm", "<u4"), ("file_bytes", "<u8"), ("checksum", "<u8"),
    ("kernel_count", "<u4"), ("param_count", "<u4"), ("table_count", "<u4"),
    ("header_bytes", "<u4"), ("kernels_offset", "<i8"), ("params_offset", "<i8"),
    ("tables_offset", "<i8"), ("cubins_offset", "<i8"),
    ("key", "S64"), ("triton", "S32"),
])  # fmt: skip
DESC_SHAPE = np.dtype([("box", "<i4", 3), ("swizzle", "<i4")])
KERNEL = np.dtype([
    ("name", "S96"), ("entry", "S64"),
    *((field_name, "<i4") for field_name in (
        "family", "dtype", "precision", "trans_a", "trans_b", "bm", "bn", "bk", "warps", "stages",
        "group_m", "split_k", "swap", "bias_matrix", "align_a", "align_b", "align_c",
        "shared_bytes", "registers", "param_offset", "param_count",
    )),
    ("desc", DESC_SHAPE, 3), ("dependent_launch", "<i4"), ("persistent", "<i4"),
    ("tf32x3", "<i4"), ("sliced", "<i4"), ("pingpong", "<i4"),
    ("cubin_offset", "<i8"), ("cubin_bytes", "<i8"),
])  # fmt: skip
COST = np.dtype([
    ("fixed_us", "<f4"), ("step_us", "<f4"), ("single_step_us", "<f4"), ("blocks_per_sm", "<f4"),
])  # fmt: skip
TABLE = np.dtype([
    ("gpu", "S64"), ("sm_count", "<i4"), ("vendor_count", "<i4"), ("bandwidth_gbps", "<f8"),
    ("launch_us", "<f8"),
])  # fmt: skip
VENDOR_TILE = np.dtype([("bm", "<i4"), ("bn", "<i4"), ("step_us", "<f4")])
VENDOR_TILES = 8
VENDOR_NODES = 5
LOG_FACTORS = np.dtype([("misaligned", "<f4", (3, 3)), ("nodes", "<f4", (VENDOR_NODES,) * 3)])
VENDOR = np.dtype([
    *((field_name, "<i4") for field_name in (
        "dtype", "precision", "trans_a", "trans_b", "aligned", "batched", "tile_count",
    )),
    *((field_name, "<f4") for field_name in (
        "margin", "fixed_us", "epilogue_us", "split_us", "slice_us", "lone_share", "bandwidth_gbps",
    )),
    ("tiles", VENDOR_TILE, VENDOR_TILES), ("correction", LOG_FACTORS), ("promise", LOG_FACTORS),
])  # fmt: skip


@dataclass(frozen=True)
class Descriptor:
    """The TMA box of one operand: elements (batch, rows, columns), and Triton's swizzle code: 1, 2
    and 3 for 32, 64 and 128 bytes.
    """

    box: tuple[int, int, int]
    swizzle: int


@dataclass(frozen=True)
class PackedKernel:
    """One kernel as a pack stores it. `cubin` is empty in a catalog, whose resources are
    estimates.
    """

    spec: KernelSpec
    entry: str
    cubin: bytes
    shared_bytes: int
    registers: int
    params: tuple[Param, ...]
    descriptors: tuple[Descriptor, ...] = ()  # A, B, Y; empty for the pointer family
    local_bytes: int = field(default=0, compare=False)  # spilled, per thread; not stored
    dependent_launch: bool = False  # it waits for the kernel in front of it by itself


@dataclass(frozen=True)
class CostTable:
    """Measured costs on one GPU: one row of `COST` per kernel, in pack order; a zero row is not
    measured. `vendor`: a row of `VENDOR` for each class of problems on which cuBLASLt was measured.
    """

    gpu: str
    sm_count: int
    bandwidth_gbps: float
    launch_us: float
    costs: npt.NDArray[np.void] = field(compare=False)
    vendor: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, VENDOR), compare=False)


@dataclass(frozen=True)
class PackInfo:
    """The identity of a pack file."""

    sm: int
    key: str
    triton: str
    kernel_count: int
    file_bytes: int


@dataclass(frozen=True)
class Pack:
    info: PackInfo
    kernels: list[PackedKernel]
    tables: list[CostTable]


def checksum(data: bytes | memoryview) -> int:
    """The 64-bit checksum of `mp_pack_header`: over little-endian 64-bit words w[i], the last one
    padded with zeros, the sum of (w[i] ^ (w[i] >> 32)) * (2 * i + 0x9E3779B97F4A7C15) modulo 2^64.

    Odd multipliers that differ per position: a changed word or two swapped ones change the sum.
    """
    whole = len(data) // 8 * 8
    words = np.frombuffer(data, "<u8", whole // 8)
    if whole != len(data):
        tail = bytes(data[whole:]).ljust(8, b"\0")
        words = np.concatenate([words, np.frombuffer(tail, "<u8")])
    weights = 2 * np.arange(len(words), dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    return int(((words ^ (words >> np.uint64(32))) * weights).sum(dtype=np.uint64))


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


def _text(value: str, capacity: int, what: str) -> bytes:
    data = value.encode()
    if len(data) >= capacity:
        raise ValueError(f"{what} {value!r} has {len(data)} bytes; at most {capacity - 1} fit")
    return data


def encode(
    sm: int,
    kernels: Sequence[PackedKernel],
    tables: Sequence[CostTable] = (),
    *,
    key: str,
    triton: str,
) -> bytes:
    """The bytes of a pack. Raises ValueError for names that do not fit or tables of another
    length.
    """
    params_offset = HEADER.itemsize + len(kernels) * KERNEL.itemsize
    params = np.array([code for kernel in kernels for code in kernel.params], "<i4")
    tables_offset = _align(params_offset + params.nbytes, 8)
    table_bytes = [
        TABLE.itemsize + len(kernels) * COST.itemsize + len(table.vendor) * VENDOR.itemsize
        for table in tables
    ]
    cubins_offset = _align(tables_offset + sum(table_bytes), CUBIN_ALIGNMENT)

    rows = np.zeros(len(kernels), KERNEL)
    param_offset, cubin_offset = 0, cubins_offset
    for row, kernel in zip(rows, kernels, strict=True):
        spec = kernel.spec
        row["name"] = _text(name(spec), 96, "kernel name")
        row["entry"] = _text(kernel.entry, 64, "kernel entry")
        row["family"] = FAMILY_CODE[spec.family]
        row["dtype"] = DTYPE_CODE[spec.dtype]
        row["precision"] = PRECISION_CODE[spec.precision]
        for attribute in (
            "trans_a", "trans_b", "bm", "bn", "bk", "warps", "stages", "group_m", "split_k", "swap",
            "bias_matrix", "align_a", "align_b", "align_c", "persistent", "tf32x3",
            "sliced", "pingpong",
        ):  # fmt: skip
            row[attribute] = getattr(spec, attribute)
        row["shared_bytes"] = kernel.shared_bytes
        row["registers"] = kernel.registers
        row["dependent_launch"] = kernel.dependent_launch
        row["param_offset"] = param_offset
        row["param_count"] = len(kernel.params)
        for slot, descriptor in zip(row["desc"], kernel.descriptors, strict=False):
            slot["box"] = descriptor.box
            slot["swizzle"] = descriptor.swizzle
        row["cubin_offset"] = cubin_offset if kernel.cubin else 0
        row["cubin_bytes"] = len(kernel.cubin)
        param_offset += len(kernel.params)
        cubin_offset = _align(cubin_offset + len(kernel.cubin), CUBIN_ALIGNMENT)
    file_bytes = cubin_offset

    header = np.zeros((), HEADER)
    header["magic"] = MAGIC
    header["version"] = VERSION
    header["sm"] = sm
    header["file_bytes"] = file_bytes
    header["kernel_count"] = len(kernels)
    header["param_count"] = len(params)
    header["table_count"] = len(tables)
    header["header_bytes"] = HEADER.itemsize
    header["kernels_offset"] = HEADER.itemsize
    header["params_offset"] = params_offset
    header["tables_offset"] = tables_offset
    header["cubins_offset"] = cubins_offset
    header["key"] = key.encode()
    header["triton"] = _text(triton, 32, "Triton version")

    out = bytearray(file_bytes)

    def put(offset: int, data: bytes) -> None:
        out[offset : offset + len(data)] = data

    put(HEADER.itemsize, rows.tobytes())
    put(params_offset, params.tobytes())
    table_offset = tables_offset
    for table, own_bytes in zip(tables, table_bytes, strict=True):
        costs = np.asarray(table.costs, COST)
        if costs.shape != (len(kernels),):
            raise ValueError(
                f"the table of {table.gpu} has {costs.size} costs for {len(kernels)} kernels"
            )
        entry = np.zeros((), TABLE)
        entry["gpu"] = _text(table.gpu, 64, "GPU name")
        entry["sm_count"] = table.sm_count
        entry["bandwidth_gbps"] = table.bandwidth_gbps
        entry["launch_us"] = table.launch_us
        vendor = np.asarray(table.vendor, VENDOR)
        entry["vendor_count"] = len(vendor)
        put(table_offset, entry.tobytes() + costs.tobytes() + vendor.tobytes())
        table_offset += own_bytes
    for row, kernel in zip(rows, kernels, strict=True):
        put(int(row["cubin_offset"]), kernel.cubin)
    header["checksum"] = checksum(memoryview(out)[HEADER.itemsize :])
    put(0, header.tobytes())
    return bytes(out)


def write_pack(
    path: str | os.PathLike[str], sm: int, kernels: Sequence[PackedKernel],
    tables: Sequence[CostTable] = (), *, key: str, triton: str,
) -> None:  # fmt: skip
    """Writes a pack aside and renames it, so that `path` is at all times absent, the old pack or
    the new.
    """
    data = encode(sm, kernels, tables, key=key, triton=triton)
    target = Path(path)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)  # mkstemp's 0600 would lock out other users of a shared pack
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def _fault(path: str | os.PathLike[str], what: str) -> PackError:
    return PackError(
        f"{os.fspath(path)}: {what}. Delete the file or rebuild it with `moonpoly pack`."
    )


def _open(path: str | os.PathLike[str]) -> tuple[memoryview, Any]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
    except OSError as error:
        raise PackError(
            f"cannot read the kernel pack {os.fspath(path)}: {error.strerror}"
        ) from error
    if size < HEADER.itemsize or bytes(data[:8]) != MAGIC:
        raise _fault(path, "is not a kernel pack")
    header = np.frombuffer(data, HEADER, 1)[0]
    if header["version"] != VERSION or header["header_bytes"] != HEADER.itemsize:
        raise _fault(path, f"pack version {header['version']}, while this release reads {VERSION}")
    if header["file_bytes"] != size:
        said = header["file_bytes"]
        raise _fault(path, f"has {size} bytes, its header says {said}: truncated or overwritten")
    return data, header


def _refusing_nonsense(read: Reader) -> Reader:
    """Turns what fails on impossible values into a PackError: no checksum covers the header."""

    @functools.wraps(read)
    def checked(path: str | os.PathLike[str], **options: Any) -> Any:
        try:
            return read(path, **options)
        except (ValueError, StopIteration) as error:
            raise _fault(path, f"holds impossible values, so it is corrupt ({error})") from error

    return cast(Reader, checked)


def _info(header: Any) -> PackInfo:
    return PackInfo(
        sm=int(header["sm"]),
        key=header["key"].decode(),
        triton=header["triton"].decode(),
        kernel_count=int(header["kernel_count"]),
        file_bytes=int(header["file_bytes"]),
    )


@_refusing_nonsense
def read_info(path: str | os.PathLike[str], *, verify: bool = True) -> PackInfo:
    """A pack's identity. Raises PackError for a file that is missing, no pack, of another version,
    truncated or, with `verify`, corrupt.
    """
    data, header = _open(path)
    if verify and checksum(data[HEADER.itemsize :]) != header["checksum"]:
        raise _fault(path, "the checksum does not match its content: corrupt")
    return _info(header)


def decode_spec(field_of: Callable[[str], Any]) -> KernelSpec:
    """The spec behind an `mp_kernel`, whose fields `field_of` gives by name."""
    numbers: dict[str, Any] = {
        f.name: bool(field_of(f.name)) if f.type == "bool" else int(field_of(f.name))
        for f in fields(KernelSpec)
        if f.type in ("int", "bool")
    }
    return KernelSpec(
        family=_decoded(FAMILY_CODE, field_of("family")),
        dtype=_decoded(DTYPE_CODE, field_of("dtype")),
        precision=_decoded(PRECISION_CODE, field_of("precision")),
        **numbers,
    )


def _decoded(codes: Mapping[Code, int], code: object) -> Code:
    return next(value for value, known in codes.items() if known == code)


@_refusing_nonsense
def read_tables(path: str | os.PathLike[str]) -> list[CostTable]:
    """The cost tables of a pack, without its code. The content is not verified."""
    data, header = _open(path)
    count = int(header["kernel_count"])
    tables = []
    offset = int(header["tables_offset"])
    for _ in range(int(header["table_count"])):
        entry = np.frombuffer(data, TABLE, 1, offset)[0]
        costs_offset = offset + TABLE.itemsize
        vendor_offset = costs_offset + count * COST.itemsize
        vendor_count = int(entry["vendor_count"])
        tables.append(
            CostTable(
                gpu=entry["gpu"].decode(),
                sm_count=int(entry["sm_count"]),
                bandwidth_gbps=float(entry["bandwidth_gbps"]),
                launch_us=float(entry["launch_us"]),
                costs=np.frombuffer(data, COST, count, costs_offset).copy(),
                vendor=np.frombuffer(data, VENDOR, vendor_count, vendor_offset).copy(),
            )
        )
        offset = vendor_offset + vendor_count * VENDOR.itemsize
    return tables


@_refusing_nonsense
def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Everything in a pack. Raises PackError as `read_info` does."""
    info = read_info(path)
    data, header = _open(path)
    count = info.kernel_count
    rows = np.frombuffer(data, KERNEL, count, int(header["kernels_offset"]))
    params = np.frombuffer(data, "<i4", int(header["param_count"]), int(header["params_offset"]))
    kernels = []
    for row in rows:
        spec = decode_spec(row.__getitem__)
        first = int(row["param_offset"])
        start = int(row["cubin_offset"])
        kernels.append(
            PackedKernel(
                spec=spec,
                entry=row["entry"].decode(),
                cubin=bytes(data[start : start + int(row["cubin_bytes"])]),
                shared_bytes=int(row["shared_bytes"]),
                registers=int(row["registers"]),
                params=tuple(
                    Param(int(p)) for p in params[first : first + int(row["param_count"])]
                ),
                descriptors=tuple(
                    Descriptor(tuple(int(b) for b in d["box"]), int(d["swizzle"]))  # type: ignore[arg-type]
                    for d in row["desc"][: len(spec.family.maps)]
                ),
                dependent_launch=bool(row["dependent_launch"]),
            )
        )
    return Pack(info, kernels, read_tables(path))
