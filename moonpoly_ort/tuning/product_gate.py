"""Whether a kernel computes the right thing: odd shapes against float64, the same bits twice.

Operands lie in allocations of exactly the bytes that a kernel may touch, between rows of NaN; the
result starts as NaN, and what lies between its rows must stay so. No kernel may win in tuning
before it has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .. import native
from ..errors import KernelMissingError
from .cuda import Gpu
from .device_array import Array, DeviceArray
from .measuring import DTYPES

SPLIT = 3
NAN_WORD = 0x7FC00000  # a NaN in fp32


def error_limit(kernel: native.KernelRecord, k: int) -> float:
    """The largest relative Frobenius error that a product of depth `k` may have."""
    if kernel.dtype == native.Dtype.F32 and kernel.precision == native.Precision.IEEE:
        return 1e-6 * math.sqrt(max(k, 1))
    return {native.Dtype.F16: 2e-3, native.Dtype.BF16: 1e-2, native.Dtype.F32: 1.3e-3}[
        native.Dtype(kernel.dtype)
    ]


@dataclass(frozen=True)
class Case:
    """A product to try: sizes, batch entries (of A and Y; B has one), C, factors."""

    m: int
    n: int
    k: int
    batch: int = 1
    bias: native.Bias = native.Bias.VECTOR
    alpha: float = 1.0
    beta: float = 1.0


def cases(kernel: native.KernelRecord) -> Iterator[Case]:
    """Sizes just beyond a tile and a K step, and a batch of small ones, as odd as the alignment of
    the stored rows lets them be."""
    element = DTYPES[native.Dtype(kernel.dtype)].itemsize
    a, b, c = (align // element for align in (kernel.align_a, kernel.align_b, kernel.align_c))
    units = (
        a if kernel.trans_a else 1,
        max(c, 1 if kernel.trans_b else b),
        max(1 if kernel.trans_a else a, b if kernel.trans_b else 1),
    )
    split = SPLIT if kernel.split_k else 1
    most = kernel.bk if kernel.family == native.Family.GEMM_SHALLOW else kernel.bk * split + 3

    def fitted(*wanted: int) -> tuple[int, int, int]:
        m, n, k = (-(-size // unit) * unit for size, unit in zip(wanted, units, strict=True))
        return m, n, k

    beyond = fitted(kernel.bm + 3, kernel.bn + 5, most)
    yield Case(*beyond)
    # The last slice has a single step, and that one is partly full.
    small = fitted(5, 19, kernel.bk * (split - 1) + 1)
    yield Case(*small, batch=3, bias=native.Bias.NONE, alpha=0.5)
    if kernel.bias_matrix:
        yield Case(*beyond, bias=native.Bias.MATRIX, beta=-0.5)


class Matrices(DeviceArray):
    """A stack of matrices whose last element ends the allocation, its base at exactly `align`."""

    def __init__(self, gpu: Gpu, values: Array, align: int) -> None:
        size, (count, rows, columns) = values.dtype.itemsize, values.shape
        self.pitch = columns + 1  # a gap after each row, to see strays
        while math.gcd(self.pitch * size, 16) != align:
            self.pitch += 1
        self.stride = rows * self.pitch
        elements = (count - 1) * self.stride + (rows - 1) * self.pitch + columns
        contents = np.full(elements, np.nan, values.dtype)
        self.view: Array = np.lib.stride_tricks.as_strided(
            contents, values.shape, (self.stride * size, self.pitch * size, size)
        )
        self.view[...] = values
        super().__init__(gpu, contents, lead=align if align < 16 else 0)


def check(
    gpu: Gpu, launcher: native.Launcher, pack: native.Pack, device: native.Device, index: int
) -> str:
    """What is wrong with a kernel, empty if nothing. Raises KernelFault for one that faults or
    hangs: then the process cannot use the GPU any more."""
    kernel = pack.kernels[index]
    for case in cases(kernel):
        fault = _check(gpu, launcher, pack, device, index, case)
        if fault:
            return f"{case.batch} x {case.m}x{case.n}x{case.k}: {fault}"
    return ""


def _check(
    gpu: Gpu, launcher: native.Launcher, pack: native.Pack, device: native.Device, index: int,
    case: Case,
) -> str:  # fmt: skip
    kernel = pack.kernels[index]
    rng, dtype = np.random.default_rng(index), DTYPES[native.Dtype(kernel.dtype)]
    m, n, k = case.m, case.n, case.k

    def random(count: int, rows: int, columns: int) -> Array:
        return rng.standard_normal((count, rows, columns)).astype(dtype)

    left = Matrices(gpu, random(case.batch, *((k, m) if kernel.trans_a else (m, k))),
                    kernel.align_a)  # fmt: skip
    right = Matrices(gpu, random(1, *((n, k) if kernel.trans_b else (k, n))), kernel.align_b)
    matrix = case.bias is native.Bias.MATRIX
    extra = Matrices(gpu, random(1, m if matrix else 1, n), dtype.itemsize)
    out = Matrices(gpu, np.full((case.batch, m, n), np.nan, dtype), kernel.align_c)
    problem = native.Problem(
        dtype=kernel.dtype, precision=kernel.precision,
        trans_a=kernel.trans_a, trans_b=kernel.trans_b, m=m, n=n, k=k, batch=case.batch,
        lda=left.pitch, ldb=right.pitch, ldc=out.pitch, a_batch_stride=left.stride,
        b_batch_stride=right.stride, c_batch_stride=out.stride,
        a_div=1, a_mod=case.batch, b_div=1, b_mod=1,
        align_a=kernel.align_a, align_b=kernel.align_b, align_c=kernel.align_c, bias=case.bias,
        bias_stride_m=extra.pitch if matrix else 0, bias_stride_n=int(bool(case.bias)),
        alpha=case.alpha, beta=case.beta if case.bias else 0.0,
    )  # fmt: skip
    split = SPLIT if kernel.split_k else 1
    owned = [left, right, extra, out]
    try:
        plan = pack.plan(device, problem, kernel=index, split=split)
    except KernelMissingError:
        for one in owned:
            one.free()
        return ""  # it does not fit this GPU, so it is never planned
    before = out.contents.copy()

    def launch(workspace: int, counters: int) -> None:
        launcher.launch(
            problem, plan, a=left.pointer, b=right.pointer, y=out.pointer,
            bias=extra.pointer if case.bias else None, workspace=workspace, counters=counters,
            stream=gpu.stream.value,
        )  # fmt: skip

    results, left_over = run_twice(gpu, plan, out, launch)
    for one in owned:
        one.free()

    a = left.view.swapaxes(1, 2) if kernel.trans_a else left.view
    b = right.view.swapaxes(1, 2) if kernel.trans_b else right.view
    exact = case.alpha * (a.astype(np.float64) @ b.astype(np.float64))
    if case.bias:
        exact += case.beta * extra.view.astype(np.float64)
    return _verdict(out, before, results, exact, error_limit(kernel, k), left_over)


def run_twice(
    gpu: Gpu, plan: native.Plan, out: DeviceArray, launch: Callable[[int, int], None]
) -> tuple[list[Array], bool]:
    """What `launch(workspace, counters)` leaves in `out` each time, which starts as it was made,
    the workspace as NaN; and whether a counter is left."""
    workspace, counters = gpu.allocate(plan.workspace_bytes), gpu.allocate(4 * plan.counters)
    gpu.fill(counters, 4 * plan.counters)
    results = []
    for _ in range(2):
        out.upload()
        gpu.fill(workspace, plan.workspace_bytes, NAN_WORD)
        launch(workspace, counters)
        gpu.wait()
        results.append(out.download())
    left_over = np.zeros(max(plan.counters, 1), np.int32)
    gpu.download(counters, left_over[: plan.counters])
    for pointer in (workspace, counters):
        gpu.free(pointer)
    return results, bool(left_over.any())


def _verdict(
    out: Matrices, before: Array, results: list[Array], exact: Array, limit: float, left_over: bool
) -> str:
    first, second = (result.view(np.uint8) for result in results)
    if not np.array_equal(first, second):
        return "two runs gave different bits"
    gaps = np.ones(before.shape, bool)
    size = before.itemsize
    np.lib.stride_tricks.as_strided(gaps, exact.shape, (out.stride, out.pitch, 1))[...] = False
    changed = (results[0].view(f"u{size}") != before.view(f"u{size}")) & gaps
    if changed.any():
        return f"{int(changed.sum())} elements beside the result were overwritten"
    y = np.lib.stride_tricks.as_strided(
        results[0], exact.shape, (out.stride * size, out.pitch * size, size)
    ).astype(np.float64)
    error = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    if not error <= limit:
        return f"relative error {error:.2e}, at most {limit:.2e} is right"
    return "arrival counters were not left at 0" if left_over else ""
