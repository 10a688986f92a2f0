"""Writes kernel packs straight from the layout in moonpoly.h: an independent check of the format,
and packs small enough to reason about.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpoly_ort import native

# mp_param codes, in the order of the families in docs/architecture.md.
DESC_A, DESC_B, DESC_Y = 1, 2, 3
PTR_A, PTR_B, PTR_Y, PTR_BIAS, PTR_WORKSPACE, PTR_COUNTERS = 4, 5, 6, 7, 8, 9
M, N, K, SPLIT = 10, 11, 12, 13
A_DIV, A_MOD, B_DIV, B_MOD, Z0 = 14, 15, 16, 17, 18
LDA, LDB, LDC, A_BATCH, B_BATCH, C_BATCH = 19, 20, 21, 22, 23, 24
BIAS_M, BIAS_N, ALPHA, BETA, NULL, BATCH, ORDER = 25, 26, 27, 28, 29, 30, 31
PTR_RESIDUAL, ACTIVATION, ACT_ALPHA, ACT_BETA = 32, 33, 34, 35

_MIDDLE = [PTR_BIAS, PTR_WORKSPACE, PTR_COUNTERS, M, N, K, SPLIT, A_DIV, A_MOD, B_DIV, B_MOD, Z0]
_END = [
    BIAS_M, BIAS_N, ALPHA, BETA, PTR_RESIDUAL, ACTIVATION, ACT_ALPHA, ACT_BETA, NULL, NULL,
]  # fmt: skip
TMA_PARAMS = [DESC_A, DESC_B, DESC_Y, PTR_Y, *_MIDDLE, ORDER, LDC, C_BATCH, *_END]
WS_PARAMS = [
    DESC_A, DESC_B, DESC_Y, PTR_Y, LDC, C_BATCH, *(p for p in _MIDDLE if p != SPLIT), BATCH, *_END,
]  # fmt: skip
POINTER_PARAMS = [
    PTR_A, PTR_B, PTR_Y, *_MIDDLE, LDA, LDB, LDC, A_BATCH, B_BATCH, C_BATCH, *_END,
]  # fmt: skip
PARAMS = {
    native.Family.GEMM_TMA: TMA_PARAMS,
    native.Family.GEMM_POINTER: POINTER_PARAMS,
    native.Family.GEMM_WS: WS_PARAMS,
    native.Family.GEMM_DOT: [
        p for p in POINTER_PARAMS if p not in (PTR_WORKSPACE, PTR_COUNTERS, SPLIT)
    ],
    native.Family.GEMM_TMA_MASKED: [DESC_A, DESC_B, PTR_Y, *_MIDDLE, ORDER, LDC, C_BATCH, *_END],
    native.Family.COPY_PADDED: [
        PTR_A,
        PTR_Y,
        M,
        N,
        K,
        LDA,
        LDC,
        A_BATCH,
        C_BATCH,
        NULL,
        NULL,
    ],
}


@dataclass(frozen=True)
class TinyKernel:
    family: int
    dtype: int
    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 3
    precision: int = 0
    trans_a: int = 0
    trans_b: int = 0
    split_k: int = 0
    swap: int = 0
    bias_matrix: int = 0
    align: int = 16
    align_c: int = 0  # 0: as the others
    sliced: int = 0
    cubin: bytes = b""

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == native.Dtype.F32 else 2

    def record(self, param_offset: int, params: Sequence[int]) -> native.KernelRecord:
        record = native.KernelRecord()
        name = (
            f"{native.Family(self.family).name.lower()}_{self.dtype}{self.precision}_"
            f"{self.trans_a}{self.trans_b}_{self.bm}x{self.bn}x{self.bk}_w{self.warps}_"
            f"s{self.stages}_k{self.split_k}_b{self.bias_matrix}_a{self.align}_x{self.swap}_l{self.sliced}"
        )
        record._name = name.encode()
        record._entry = b"kernel"
        for field in (
            "family", "dtype", "precision", "trans_a", "trans_b", "bm", "bn", "bk", "warps",
            "stages", "split_k", "swap", "bias_matrix", "sliced",
        ):  # fmt: skip
            setattr(record, field, getattr(self, field))
        record.group_m = 8
        record.persistent = self.family == native.Family.GEMM_WS
        record.align_a = record.align_b = self.align
        record.align_c = self.align_c or self.align
        record.shared_bytes = (self.bm + self.bn) * self.bk * self.element_bytes * self.stages
        record.registers = 128
        record.param_offset, record.param_count = param_offset, len(params)
        record.dependent_launch = True
        if self.family not in (
            native.Family.GEMM_POINTER, native.Family.GEMM_DOT, native.Family.COPY_PADDED
        ):  # fmt: skip
            boxes = ((self.bm, self.bk), (self.bk, self.bn), (self.bm, self.bn))
            for shape, (rows, columns) in zip(record.desc, boxes, strict=True):
                shape.box[:] = (1, rows, min(columns, 128 // self.element_bytes))
                shape.swizzle = 3
        return record


def standard_kernels(cubin: bytes = b"") -> list[TinyKernel]:
    """For every dtype and layout: TMA and pointer kernels with and without split-K and matrix bias,
    and for pointers every alignment. Persistent ones for 16-bit NN and NT, dot products for NT.
    """
    kernels = []
    for dtype, precision in ((0, 0), (1, 0), (2, 0), (2, 1)):
        least = 4 if dtype == native.Dtype.F32 else 2
        bk = 32 if dtype == native.Dtype.F32 else 64
        for layout in range(4):
            common = {
                "dtype": dtype, "precision": precision, "trans_a": layout >> 1,
                "trans_b": layout & 1, "bk": bk, "cubin": cubin,
            }  # fmt: skip
            for bm, bn in ((16, 64), (64, 64), (128, 128)):
                for split in (0, 1):
                    kernels.append(
                        TinyKernel(family=0, bm=bm, bn=bn, split_k=split, bias_matrix=1, **common)
                    )
            if least == 2 and layout < 2:
                for bn, split in ((128, 0), (128, 1), (64, 0), (64, 1)):
                    warps = 12 if bn == 128 else 8
                    kernels.append(
                        TinyKernel(family=2, bm=bn, bn=bn, warps=warps, split_k=split, **common)
                    )
                kernels.append(
                    TinyKernel(family=2, bm=128, bn=64, warps=8, split_k=1, sliced=1, **common)
                )
            for align in (16, least):
                for split in (0, 1):
                    kernels.append(
                        TinyKernel(family=1, bm=64, bn=64, split_k=split, align=align, **common)
                    )
                kernels.append(
                    TinyKernel(family=1, bm=64, bn=64, bias_matrix=1, align=align, **common)
                )
            if layout == 1:  # products of rows: both stored along K
                few = common | {"bk": 512}
                kernels.append(TinyKernel(family=6, bm=2, bn=4, bias_matrix=1, align=least, **few))
    return kernels


def unaligned_kernels(cubin: bytes = b"") -> list[TinyKernel]:
    """What copies operands of any alignment, and multiplies the copies into any Y."""
    kernels = []
    for dtype, precision in ((0, 0), (1, 0), (2, 0)):
        least = 4 if dtype == native.Dtype.F32 else 2
        kind = {"dtype": dtype, "precision": precision, "cubin": cubin}
        for split in (0, 1):
            kernels.append(
                TinyKernel(family=8, bm=64, bn=64, bk=64, trans_b=1, split_k=split,
                           align_c=least, **kind)
            )  # fmt: skip
        for trans in (0, 1):
            kernels.append(
                TinyKernel(family=9, bm=32, bn=64, bk=16, stages=1, trans_a=trans,
                           trans_b=1 - trans, align=least, **kind)
            )  # fmt: skip
    return kernels


def checksum(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        total += (word ^ word >> 32) * (2 * i + 0x9E3779B97F4A7C15)
    return total % 2**64


def pack_bytes(
    kernels: Iterable[TinyKernel],
    *,
    sm: int = 90,
    tables: Sequence[tuple[native.Table, Sequence[native.Cost]]] = (),
    vendor: Sequence[native.VendorCost] = (),
) -> bytes:
    """`vendor`: what every table says of cuBLASLt."""
    kernels = list(kernels)
    header = native.PackHeader(magic=b"MOONPACK", version=6, sm=sm, key=b"0" * 64, triton=b"tiny")
    header.header_bytes = ctypes.sizeof(header)
    params: list[int] = []
    records = []
    for kernel in kernels:
        own = PARAMS[native.Family(kernel.family)]
        records.append(kernel.record(len(params), own))
        params += own
    params += [NULL] * (len(params) % 2)  # keeps the tables at 8 bytes
    for table, _ in tables:
        table.vendor_count = len(vendor)
    table_data = b"".join(
        bytes(table) + b"".join(bytes(cost) for cost in (*costs, *vendor))
        for table, costs in tables
    )
    header.kernel_count, header.param_count = len(kernels), len(params)
    header.table_count = len(tables)
    header.kernels_offset = header.header_bytes
    header.params_offset = header.kernels_offset + len(kernels) * ctypes.sizeof(native.KernelRecord)
    header.tables_offset = header.params_offset + 4 * len(params)
    header.cubins_offset = -(-(header.tables_offset + len(table_data)) // 64) * 64
    cubins = b""
    for kernel, record in zip(kernels, records, strict=True):
        if kernel.cubin:
            record.cubin_offset = header.cubins_offset + len(cubins)
            record.cubin_bytes = len(kernel.cubin)
            cubins += kernel.cubin + bytes(-len(kernel.cubin) % 64)
    body = b"".join(bytes(record) for record in records)
    body += b"".join(param.to_bytes(4, "little") for param in params) + table_data
    body += bytes(header.cubins_offset - header.header_bytes - len(body)) + cubins
    header.file_bytes = header.header_bytes + len(body)
    header.checksum = checksum(body)
    return bytes(header) + body


def write_pack(path: Path, kernels: Iterable[TinyKernel], **options: object) -> Path:
    path.write_bytes(pack_bytes(kernels, **options))  # type: ignore[arg-type]
    return path


def vendor_costs(us: float, **fields: float) -> list[native.VendorCost]:
    """cuBLASLt takes `us` for everything, in every class of problems."""
    costs = []
    for number in ((0, 0), (1, 0), (2, 0), (2, 1)):
        for rest in range(16):
            cost = native.VendorCost(
                dtype=number[0], precision=number[1], trans_a=rest >> 3, trans_b=rest >> 2 & 1,
                aligned=rest >> 1 & 1, batched=rest & 1, tile_count=1, margin=1.0, fixed_us=us,
                bandwidth_gbps=1e12, **fields,
            )  # fmt: skip
            cost.tiles[0] = native.VendorTile(bm=128, bn=128, step_us=1e-12)
            costs.append(cost)
    return costs


def h200(**changes: float) -> native.Device:
    attributes = {
        "sm": 90, "sm_count": 132, "shared_per_sm": 233472, "shared_per_block": 232448,
        "registers_per_sm": 65536, "threads_per_sm": 2048, "blocks_per_sm": 32,
        "clock_mhz": 1980, "memory_clock_mhz": 3201, "memory_bus_bits": 6144,
        "l2_bytes": 60 << 20, "memory_bytes": 141 << 30,
    }  # fmt: skip
    return native.Device(name="NVIDIA H200", **(attributes | changes))
