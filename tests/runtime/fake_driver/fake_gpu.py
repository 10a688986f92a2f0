"""Python's side of the fake driver: packs whose "cubins" it understands, and execution of recorded
launches on host memory from nothing but their arguments.
"""

from __future__ import annotations

import copy
import ctypes
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiny_pack as tp
from reference import DTYPES, view

from moonpoly_ort import native
from tests.epilogues import finished

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_argument.restype = ctypes.c_void_p
driver.fake_reset()  # AttributeError: the real driver was found

_SIZES = {
    **dict.fromkeys((tp.DESC_A, tp.DESC_B, tp.DESC_Y), (128, 4, 4, 4, 8, 8, 8)),
    **dict.fromkeys(range(tp.PTR_A, tp.PTR_COUNTERS + 1), (8,)),
    **dict.fromkeys(range(tp.M, tp.Z0 + 1), (4,)),
    **dict.fromkeys(range(tp.LDA, tp.BIAS_N + 1), (8,)),
    tp.ALPHA: (4,), tp.BETA: (4,), tp.NULL: (8,), tp.BATCH: (4,), tp.ORDER: (4,),
    tp.PTR_RESIDUAL: (8,), tp.ACTIVATION: (4,), tp.ACT_ALPHA: (4,), tp.ACT_BETA: (4,),
}  # fmt: skip
_FLOATS = (tp.ALPHA, tp.BETA, tp.ACT_ALPHA, tp.ACT_BETA)
_FORMATS = {128: "128s", 4: "i", 8: "q"}


def _params(kernel: native.KernelRecord | tp.TinyKernel) -> list[int]:
    return tp.PARAMS[native.Family(kernel.family)]


def argument_sizes(kernel: native.KernelRecord | tp.TinyKernel) -> list[int]:
    """Bytes of every argument of a launch."""
    return [size for code in _params(kernel) for size in _SIZES[code]]


def fake_cubin(kernel: tp.TinyKernel) -> bytes:
    sizes = argument_sizes(kernel)
    return b"FAKE" + struct.pack(f"<{len(sizes) + 1}i", len(sizes), *sizes)


def write_fake_pack(
    path: Path, sm: int = 90, vendor_us: float | None = None, *, unaligned: bool = False
) -> Path:
    """With `vendor_us`, a table for GPU 0 says that cuBLASLt takes so long for everything."""
    listed = tp.standard_kernels()
    if unaligned:  # and none that takes unaligned rows of few elements as they are
        listed = [k for k in listed if k.family != native.Family.GEMM_DOT] + tp.unaligned_kernels()
    kernels = [replace(k, cubin=fake_cubin(k)) for k in listed]
    if vendor_us is None:
        return tp.write_pack(path, kernels, sm=sm)
    # Launches of ours that take longer than a call of cuBLASLt keeps the host.
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4000, launch_us=20.0)
    costs = [native.Cost() for _ in kernels]  # nothing of ours was measured
    return tp.write_pack(
        path, kernels, sm=sm, tables=[(table, costs)], vendor=tp.vendor_costs(vendor_us)
    )


def write_pack_that_cuts(path: Path) -> Path:
    """One large tile, quick where it fills whole waves, and a small one with split-K for the rest:
    133 large tiles on the 132 SMs make two regions side by side."""
    like = tp.TinyKernel(family=0, dtype=0, bm=128, bn=128, bk=64)
    small = tp.TinyKernel(family=0, dtype=0, bm=64, bn=64, bk=64, stages=4, split_k=1)
    kernels = [replace(k, cubin=fake_cubin(k)) for k in (like, small)]
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e6, launch_us=1)
    costs = [
        native.Cost(fixed_us=5, step_us=2, single_step_us=2, blocks_per_sm=1),
        native.Cost(fixed_us=1, step_us=1.5, single_step_us=1.5, blocks_per_sm=1),
    ]
    return tp.write_pack(path, kernels, tables=[(table, costs)])


@dataclass
class TensorMap:
    dtype: int
    swizzle: int
    address: int
    dims: tuple[int, int, int]  # batch, rows, columns
    strides: tuple[int, int]  # bytes: batch, row
    box: tuple[int, int, int]

    @classmethod
    def decode(cls, data: bytes) -> TensorMap:
        dtype, swizzle, address, *rest = struct.unpack_from("<iiQ3Q2Q3I", data)
        dims, strides, box = rest[:3], rest[3:5], rest[5:]
        return cls(dtype, swizzle, address, tuple(dims[::-1]), tuple(strides[::-1]),
                   tuple(box[::-1]))  # fmt: skip


@dataclass
class Launch:
    grid: int
    block: int
    shared: int
    stream: int
    raw: list[bytes]

    def decode(self, kernel: native.KernelRecord) -> dict[int, list[object]]:
        """Parameter code -> its values."""
        values: dict[int, list[object]] = {}
        at = 0
        for code in _params(kernel):
            own = []
            for size in _SIZES[code]:
                assert len(self.raw[at]) == size
                layout = "f" if code in _FLOATS else _FORMATS[size]
                (value,) = struct.unpack("<" + layout, self.raw[at])
                own.append(TensorMap.decode(value) if size == 128 else value)
                at += 1
            values[code] = own
        assert at == len(self.raw)
        return values


def launches(only: int | None = None) -> list[Launch]:
    """All launches since the last reset, or only one."""
    out = []
    for i in range(driver.fake_launches()) if only is None else (only,):
        head = (ctypes.c_uint64 * 4)()
        driver.fake_launch(i, head)
        raw = []
        size = ctypes.c_int()
        while address := driver.fake_argument(i, len(raw), ctypes.byref(size)):
            raw.append(ctypes.string_at(address, size.value))
        out.append(Launch(*head, raw))
    return out


def memsets() -> list[tuple[int, int, int]]:
    out = []
    for i in range(driver.fake_memsets()):
        values = (ctypes.c_uint64 * 3)()
        driver.fake_memset(i, values)
        out.append(tuple(values))
    return out  # type: ignore[return-value]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def execute(launch: Launch, kernel: native.KernelRecord) -> dict[int, list[object]]:
    """Does on host memory what the kernel would, and checks counters and workspace on the way."""
    v = launch.decode(kernel)
    dtype = DTYPES[native.Dtype(kernel.dtype)]
    size = dtype.itemsize

    def one(code: int) -> int:
        (value,) = v[code]
        return value  # type: ignore[return-value]

    m, n, k = one(tp.M), one(tp.N), one(tp.K)
    tiles = _ceil_div(m, kernel.bm) * _ceil_div(n, kernel.bn)
    assert launch.block == 32 * kernel.warps
    assert launch.shared == kernel.shared_bytes
    assert v[tp.NULL] == [0]
    if kernel.family == native.Family.COPY_PADDED:
        assert launch.grid % tiles == 0
        for z in range(launch.grid // tiles):
            shape = (k, m) if kernel.trans_a else (m, k)
            strides = (one(tp.LDA), 1)
            source = view(one(tp.PTR_A) + z * one(tp.A_BATCH) * size, shape, strides, dtype)
            target = view(
                one(tp.PTR_Y) + z * one(tp.C_BATCH) * size, (m, n), (one(tp.LDC), 1), dtype
            )
            target[...] = 0
            target[:, :k] = source.T if kernel.trans_a else source
        return v
    if kernel.persistent:
        batch = one(tp.BATCH)
        assert kernel.split_k or launch.grid <= tiles * batch
        flags = launch.grid * (kernel.warps // 4 - 1)
    else:
        split = 1 if kernel.family == native.Family.GEMM_DOT else one(tp.SPLIT)
        assert launch.grid % (tiles * split) == 0
        assert (split > 1) == bool(kernel.split_k)
        batch = launch.grid // (tiles * split)
        flags = tiles * batch
    if kernel.split_k:
        arrivals = view(one(tp.PTR_COUNTERS), (flags,), (1,), np.dtype(np.int32))
        assert not arrivals.any()
        partials = launch.grid * kernel.bm * kernel.bn
        view(one(tp.PTR_WORKSPACE), (partials,), (1,), np.dtype(np.float32))[...] = np.nan

    def stored(operand: int, entry: int, rows: int, columns: int) -> npt.NDArray[np.generic]:
        """Rows x columns of an operand as it is stored in one batch entry."""
        masked = kernel.family == native.Family.GEMM_TMA_MASKED and operand == 2
        pointers = (native.Family.GEMM_POINTER, native.Family.GEMM_DOT)
        if kernel.family not in pointers and not masked:
            tensor_map, *sides = v[tp.DESC_A + operand]
            assert isinstance(tensor_map, TensorMap)
            tf32 = kernel.precision == native.Precision.TF32 and operand < 2
            element_type = {0: 6, 1: 9, 2: 11 if tf32 else 7}[kernel.dtype]
            assert tensor_map.dtype == element_type
            assert tensor_map.box == tuple(kernel.desc[operand].box)
            assert tensor_map.swizzle == kernel.desc[operand].swizzle
            assert tuple(sides[:3]) == tensor_map.dims
            assert sides[3] * size == tensor_map.strides[0]  # type: ignore[operator]
            assert sides[4] * size == tensor_map.strides[1]  # type: ignore[operator]
            assert sides[5] == 1
            # zeros up to the next 16 bytes belong to a row of A and B
            unit = 16 // size if operand < 2 else 1
            assert tensor_map.dims[1:] == (rows, _ceil_div(columns, unit) * unit)
            assert 0 <= entry < tensor_map.dims[0]
            base = tensor_map.address + entry * tensor_map.strides[0]
            return view(base, (rows, columns), (tensor_map.strides[1] // size, 1), dtype)
        base = one(tp.PTR_A + operand) + entry * one(tp.A_BATCH + operand) * size
        return view(base, (rows, columns), (one(tp.LDA + operand), 1), dtype)

    alpha, beta = v[tp.ALPHA][0], v[tp.BETA][0]
    for z in range(one(tp.Z0), one(tp.Z0) + batch):
        a_entry = z // one(tp.A_DIV) % one(tp.A_MOD)
        b_entry = z // one(tp.B_DIV) % one(tp.B_MOD)
        a = stored(0, a_entry, *((k, m) if kernel.trans_a else (m, k))).astype(np.float64)
        b = stored(1, b_entry, *((n, k) if kernel.trans_b else (k, n))).astype(np.float64)
        value = alpha * ((a.T if kernel.trans_a else a) @ (b.T if kernel.trans_b else b))  # type: ignore[operator]
        if beta != 0:
            strides = (one(tp.BIAS_M), one(tp.BIAS_N))
            bias = view(one(tp.PTR_BIAS), (m, n), strides, dtype).astype(np.float64)
            value = value + beta * bias  # type: ignore[operator]
        activation, residual = one(tp.ACTIVATION) & 255, one(tp.ACTIVATION) >> 8
        r = None
        if residual:
            base = one(tp.PTR_RESIDUAL) + z * one(tp.C_BATCH) * size
            r = view(base, (m, n), (one(tp.LDC), 1), dtype).astype(np.float64)
        else:
            assert one(tp.PTR_RESIDUAL) == 0
        value = finished(
            value, native.Activation(activation), native.Residual(residual),
            v[tp.ACT_ALPHA][0], v[tp.ACT_BETA][0], r,  # type: ignore[arg-type]
        )  # fmt: skip
        stored(2, z, m, n)[...] = value.astype(dtype)
    return v


class Aligned:
    """A numpy array at a multiple of 64 bytes plus an offset, as device memory would be."""

    def __init__(self, array: npt.NDArray[np.generic], offset: int = 0) -> None:
        self._store = np.zeros(array.nbytes + 128, np.uint8)
        start = -self._store.ctypes.data % 64 + offset
        self.array = (
            self._store[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        )
        self.array[...] = array
        self.address = self._store.ctypes.data + start

    def first_rows(self, rows: int) -> Aligned:
        """The same memory as a matrix of fewer rows."""
        part = copy.copy(self)
        part.array = self.array[:rows]
        return part
