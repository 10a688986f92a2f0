"""Every kernel once on an odd shape, in allocations of exactly the bytes it may touch; no torch.

    compute-sanitizer --tool memcheck --padding 256 python -m benchmarks.odd_shapes --pack sm_90.mpk

Made for a memory checker: an allocator that pools memory, as torch's does, would hide accesses
out of bounds. Kernels come in a shuffled order, so that a run cut short has seen all sorts. Exit
codes: 0 all right, 1 a wrong result.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moonpoly_ort import native
from moonpoly_ort.errors import DeviceError

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
LIMITS = (2e-3, 1e-2, 1e-3)
Array = np.ndarray[Any, np.dtype[Any]]


class Driver:
    """The few CUDA driver calls needed, on a device's primary context."""

    def __init__(self, ordinal: int) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"this needs an NVIDIA driver: {error}") from error
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            raise DeviceError(f"{name} failed: {(text.value or b'').decode()} ({status})")

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        return pointer.value

    def upload(self, pointer: int, data: Array) -> None:
        data = np.ascontiguousarray(data)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), ctypes.c_void_p(data.ctypes.data),
                  ctypes.c_size_t(data.nbytes))  # fmt: skip

    def download(self, pointer: int, data: Array) -> None:
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(pointer),
                  ctypes.c_size_t(data.nbytes))  # fmt: skip

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))


class Buffer:
    """A matrix whose last element ends the allocation, its base at exactly `align` bytes."""

    def __init__(self, driver: Driver, values: Array, align: int) -> None:
        size, (rows, columns) = values.dtype.itemsize, values.shape
        self.pitch = columns
        while math.gcd(self.pitch * size, 16) != align:
            self.pitch += 1
        self.lead = align if align < 16 else 0
        flat = np.full(max((rows - 1) * self.pitch + columns, 0), np.nan, values.dtype)
        for row in range(rows):
            flat[row * self.pitch : row * self.pitch + columns] = values[row]
        self.flat, self.shape, self.driver = flat, (rows, columns), driver
        self.base = driver.allocate(self.lead + flat.nbytes)
        driver.upload(self.pointer, flat)

    @property
    def pointer(self) -> int:
        return self.base + self.lead

    def read(self) -> Array:
        self.driver.download(self.pointer, self.flat)
        rows, columns = self.shape
        step = self.flat.strides[0]
        return np.lib.stride_tricks.as_strided(
            self.flat, (rows, columns), (self.pitch * step, step)
        )


def sizes(kernel: native.KernelRecord, split: int) -> tuple[int, int, int]:
    """Sizes just beyond a tile and a K step, as odd as the alignment of stored rows lets them."""
    element = DTYPES[kernel.dtype].itemsize
    a, b, c = (align // element for align in (kernel.align_a, kernel.align_b, kernel.align_c))
    units = (
        a if kernel.trans_a else 1,
        max(c, 1 if kernel.trans_b else b),
        max(1 if kernel.trans_a else a, b if kernel.trans_b else 1),
    )
    wanted = (kernel.bm + 3, kernel.bn + 5, kernel.bk * split + 3)
    m, n, k = (-(-size // unit) * unit for size, unit in zip(wanted, units, strict=True))
    return m, n, k


def check(
    driver: Driver, launcher: native.Launcher, pack: native.Pack, device: native.Device, index: int
) -> float:
    """The relative error of one kernel, as a share of its limit."""
    kernel = pack.kernels[index]
    split = 3 if kernel.split_k else 1
    m, n, k = sizes(kernel, split)
    rng, dtype = np.random.default_rng(index), DTYPES[kernel.dtype]
    a = rng.standard_normal((k, m) if kernel.trans_a else (m, k)).astype(dtype)
    b = rng.standard_normal((n, k) if kernel.trans_b else (k, n)).astype(dtype)
    bias = rng.standard_normal((1, n)).astype(dtype)
    left, right = Buffer(driver, a, kernel.align_a), Buffer(driver, b, kernel.align_b)
    row = Buffer(driver, bias, dtype.itemsize)
    out = Buffer(driver, np.full((m, n), np.nan, dtype), kernel.align_c)
    problem = native.Problem(
        dtype=kernel.dtype, precision=kernel.precision,
        trans_a=kernel.trans_a, trans_b=kernel.trans_b,
        m=m, n=n, k=k, batch=1, lda=left.pitch, ldb=right.pitch, ldc=out.pitch,
        a_div=1, a_mod=1, b_div=1, b_mod=1,
        align_a=kernel.align_a, align_b=kernel.align_b, align_c=kernel.align_c,
        bias=1, bias_stride_m=0, bias_stride_n=1, alpha=1.0, beta=1.0,
    )  # fmt: skip
    plan = pack.plan(device, problem, kernel=index, split=split)
    workspace = driver.allocate(plan.workspace_bytes)
    counters = driver.allocate(4 * plan.counters)
    driver.upload(counters, np.zeros(max(plan.counters, 1), np.int32))
    launcher.launch(
        problem, plan, a=left.pointer, b=right.pointer, bias=row.pointer, y=out.pointer,
        workspace=workspace, counters=counters,
    )  # fmt: skip
    driver.call("cuCtxSynchronize")
    wide = (a.T if kernel.trans_a else a).astype(np.float64) @ (
        b.T if kernel.trans_b else b
    ).astype(np.float64)
    wide += bias.astype(np.float64)
    error = float(np.linalg.norm(out.read().astype(np.float64) - wide) / np.linalg.norm(wide))
    for pointer in (left.base, right.base, row.base, out.base, workspace, counters):
        driver.free(pointer)
    ieee = kernel.dtype == 2 and kernel.precision == 1
    return error / (1e-6 * math.sqrt(k) if ieee else LIMITS[kernel.dtype])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    stop = time.monotonic() + arguments.seconds
    driver = Driver(arguments.device)
    pack = native.Pack(arguments.pack)
    device = native.device_query(arguments.device)
    launcher = native.Launcher(pack, arguments.device)
    order = list(range(len(pack.kernels)))
    random.Random(0).shuffle(order)
    done, wrong = 0, []
    for index in order:
        if time.monotonic() > stop:
            break
        share = check(driver, launcher, pack, device, index)
        done += 1
        if not share <= 1:
            wrong.append(pack.kernels[index].name)
    print(
        f"odd shapes: {done} of {len(order)} kernels, {len(wrong)} wrong {' '.join(wrong[:20])}",
        flush=True,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
