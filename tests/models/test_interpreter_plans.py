"""Random problems, planned for several GPUs and executed by the real kernels in the interpreter.

Operands lie between NaN: what is beside a row, a matrix or a batch entry must not leak into the
result. The output is poisoned: each of its elements must be written, and nothing beside them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moonpoly_ort import devices, interpreter, native, packs
from moonpoly_ort.errors import KernelMissingError, ProblemError
from tests.catalogs import one_tile_a_block
from tests.corpus.comparing import Precision, bound, relative_error

Array = NDArray[Any]

GPUS = ("H200", "A100-80GB", "L4", "RTX 4090", "RTX 4060 Laptop")
TYPES = {
    native.Dtype.F16: np.dtype(np.float16),
    native.Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    native.Dtype.F32: np.dtype(np.float32),
}
GUARD = 64  # elements before and behind each operand that belong to somebody else


@functools.cache
def _catalog(sm: int) -> native.Pack:
    return native.Pack(packs.catalog(sm))


@dataclass(frozen=True)
class Case:
    """A problem in its own terms: sizes, how operands broadcast, and how they lie in memory.

    pads: elements between rows of A, B and Y. gaps: between batch entries. shifts: of the first
    element behind a 16-byte boundary.
    """

    m: int
    n: int
    k: int
    dtype: native.Dtype = native.Dtype.F32
    precision: native.Precision = native.Precision.IEEE
    trans: tuple[bool, bool] = (False, False)
    batch: int = 1
    a_map: tuple[int, int] = (1, 1)
    b_map: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int] = (0, 0, 0)
    gaps: tuple[int, int, int] = (0, 0, 0)
    shifts: tuple[int, int, int] = (0, 0, 0)
    bias: str = ""  # "", "scalar", "row", "column", "matrix"
    alpha: float = 1.0
    beta: float = 1.0
    seed: int = field(default=0)


class Operand:
    """`entries` matrices in a buffer of poison, and the view of them."""

    def __init__(
        self,
        entries: int,
        rows: int,
        columns: int,
        pad: int,
        gap: int,
        shift: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.pitch = columns + pad
        self.stride = rows * self.pitch + gap
        count = 2 * GUARD + shift + entries * self.stride
        spare = np.empty(count * dtype.itemsize + 16, np.uint8)
        start = -spare.ctypes.data % 16
        self.buffer = spare[start : start + count * dtype.itemsize].view(dtype)
        self.buffer[:] = np.nan
        self.first = GUARD + shift
        self.view = np.lib.stride_tricks.as_strided(
            self.buffer[self.first :],
            (entries, rows, columns),
            tuple(size * dtype.itemsize for size in (self.stride, self.pitch, 1)),
        )
        # The kernels' alignment is that of the base, the pitch, the stride and the row length.
        sizes = (self.first, self.pitch, self.stride, columns)
        bits = functools.reduce(lambda whole, size: whole | size * dtype.itemsize, sizes, 16)
        self.align = bits & -bits

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data) + self.first * self.buffer.itemsize


@dataclass
class Setup:
    problem: native.Problem
    a: Operand
    b: Operand
    y: Operand
    bias: Array | None
    exact: Array


def _set_up(case: Case) -> Setup:
    dtype = TYPES[case.dtype]
    generator = np.random.default_rng(case.seed)
    a_mod, b_mod = case.a_map[1], case.b_map[1]
    a_shape = (case.k, case.m) if case.trans[0] else (case.m, case.k)
    b_shape = (case.n, case.k) if case.trans[1] else (case.k, case.n)
    a, b, y = (
        Operand(entries, *shape, case.pads[i], case.gaps[i], case.shifts[i], dtype)
        for i, (entries, shape) in enumerate(
            ((a_mod, a_shape), (b_mod, b_shape), (case.batch, (case.m, case.n)))
        )
    )
    for operand in (a, b):
        operand.view[:] = generator.standard_normal(operand.view.shape).astype(dtype)
    shapes = {
        "scalar": (1, 1),
        "row": (1, case.n),
        "column": (case.m, 1),
        "matrix": (case.m, case.n),
    }
    bias = None
    if case.bias:
        bias = generator.standard_normal(shapes[case.bias]).astype(dtype)
    # A matrix of one row or column is still a matrix; a vector's stride is 0 where it broadcasts.
    strides = (0, 0)
    if bias is not None:
        strides = (
            (case.n, 1)
            if case.bias == "matrix"
            else (int(case.bias == "column"), int(case.bias == "row"))
        )
    kind = {"": native.Bias.NONE, "matrix": native.Bias.MATRIX}.get(case.bias, native.Bias.VECTOR)
    problem = native.Problem(
        dtype=case.dtype,
        precision=case.precision if case.dtype == native.Dtype.F32 else native.Precision.TF32,
        trans_a=case.trans[0],
        trans_b=case.trans[1],
        m=case.m,
        n=case.n,
        k=case.k,
        batch=case.batch,
        lda=a.pitch,
        ldb=b.pitch,
        ldc=y.pitch,
        a_batch_stride=a.stride,
        b_batch_stride=b.stride,
        c_batch_stride=y.stride,
        a_div=case.a_map[0],
        a_mod=a_mod,
        b_div=case.b_map[0],
        b_mod=b_mod,
        align_a=a.align,
        align_b=b.align,
        align_c=y.align,
        bias=kind,
        bias_stride_m=strides[0],
        bias_stride_n=strides[1],
        alpha=case.alpha,
        beta=case.beta if case.bias else 0.0,
    )
    entries = np.arange(case.batch)
    wide_a, wide_b = (
        operand.view.astype(np.float64)[entries // div % mod]
        for operand, (div, mod) in ((a, case.a_map), (b, case.b_map))
    )
    if case.trans[0]:
        wide_a = wide_a.swapaxes(1, 2)
    if case.trans[1]:
        wide_b = wide_b.swapaxes(1, 2)
    exact = float(np.float32(case.alpha)) * (wide_a @ wide_b)
    if bias is not None:
        exact = exact + float(np.float32(case.beta)) * bias.astype(np.float64)
    return Setup(problem, a, b, y, bias, exact)


def _run(setup: Setup, plan: native.Plan, pack: native.Pack) -> None:
    bias = None if setup.bias is None else setup.bias.ctypes.data
    addresses = setup.a.address, setup.b.address, bias, setup.y.address
    interpreter.run(pack, setup.problem, plan, *addresses)


def _check(setup: Setup, plan: native.Plan, pack: native.Pack) -> None:
    problem, y = setup.problem, setup.y
    before = y.buffer.copy()
    _run(setup, plan, pack)
    dtype = TYPES[native.Dtype(problem.dtype)]
    precision: Precision = "ieee" if problem.precision == native.Precision.IEEE else "tf32"
    written = np.ascontiguousarray(y.view)
    # Finite operands: a NaN is poison, left standing or let in.
    assert np.isfinite(written.astype(np.float64)).all()
    limit = bound(dtype, precision, problem.k)
    assert relative_error(written, setup.exact) <= limit
    y.view[:] = np.nan
    assert y.buffer.tobytes() == before.tobytes(), "written outside of the output"


_SIZE = st.one_of(st.sampled_from([1, 16, 64, 128]), st.integers(1, 150))
_FEW = st.integers(0, 9)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    outer, inner = draw(st.sampled_from([(1, 1), (3, 1), (1, 4), (2, 3)]))
    batch = outer * inner
    maps = [(1, 1), (1, batch), (1, inner), (inner, outer)]
    return Case(
        m=draw(_SIZE),
        n=draw(_SIZE),
        k=draw(st.one_of(_SIZE, st.integers(0, 300))),
        dtype=draw(st.sampled_from(native.Dtype)),
        precision=draw(st.sampled_from(native.Precision)),
        trans=(draw(st.booleans()), draw(st.booleans())),
        batch=batch,
        a_map=draw(st.sampled_from(maps)),
        b_map=draw(st.sampled_from(maps)),
        pads=draw(st.one_of(st.just((0, 0, 0)), st.tuples(_FEW, _FEW, _FEW))),
        gaps=draw(st.one_of(st.just((0, 0, 0)), st.tuples(_FEW, _FEW, _FEW))),
        shifts=draw(st.one_of(st.just((0, 0, 0)), st.tuples(_FEW, _FEW, _FEW))),
        bias=draw(st.sampled_from(["", "scalar", "row", "column", "matrix"])),
        alpha=draw(st.sampled_from([1.0, 0.5, -1.25, 0.0])),
        beta=draw(st.sampled_from([1.0, 2.0, -0.5, 0.0])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=80)
@given(case=_cases(), gpu=st.sampled_from(GPUS))
@example(case=Case(1, 1, 1), gpu="H200")
@example(case=Case(3, 5, 0, bias="row", beta=2.0), gpu="H200")
@example(case=Case(3, 5, 0), gpu="L4")
@example(case=Case(128, 128, 64, native.Dtype.F16), gpu="H200")
def test_planned_problems_are_computed(case: Case, gpu: str) -> None:
    device = devices.lookup(gpu)
    pack, setup = _catalog(device.sm), _set_up(case)
    _check(setup, pack.plan(device, setup.problem), pack)


@settings(max_examples=80)
@given(case=_cases(), gpu=st.sampled_from(GPUS), data=st.data())
def test_any_kernel_that_takes_a_problem_computes_it(
    case: Case, gpu: str, data: st.DataObject
) -> None:
    device = devices.lookup(gpu)
    pack, setup = _catalog(device.sm), _set_up(case)
    plans = []
    for index in range(len(pack.kernels)):
        try:
            plans.append(pack.plan(device, setup.problem, kernel=index))
        except (KernelMissingError, ProblemError):
            continue  # it does not take this problem
    assume(plans)
    _check(setup, data.draw(st.sampled_from(plans)), pack)


@pytest.mark.parametrize("dtype", list(native.Dtype))
@pytest.mark.parametrize("gpu", GPUS)
def test_no_rows_no_columns_no_batch_launch_nothing(gpu: str, dtype: native.Dtype) -> None:
    device = devices.lookup(gpu)
    pack = _catalog(device.sm)
    for case in (Case(0, 5, 3, dtype), Case(5, 0, 3, dtype), Case(5, 5, 3, dtype, batch=0)):
        plan = pack.plan(device, _set_up(case).problem)
        assert (plan.region_count, plan.workspace_bytes, plan.counters) == (0, 0, 0)


@pytest.mark.parametrize(
    ("gpu", "case"),
    [
        ("H200", Case(64, 64, 2048, native.Dtype.F16)),
        ("A100-80GB", Case(17, 96, 1500, native.Dtype.BF16, bias="row")),
        ("RTX 4090", Case(8, 40, 3000, native.Dtype.F32, native.Precision.TF32)),
    ],
)
def test_long_k_is_split_and_summed_the_same_way_every_time(gpu: str, case: Case) -> None:
    device = devices.lookup(gpu)
    pack = _catalog(device.sm)
    setups = [_set_up(case) for _ in range(2)]
    plan = pack.plan(device, setups[0].problem)
    assert max(region.split for region in plan.regions) > 1
    for setup in setups:
        _run(setup, plan, pack)
    assert setups[0].y.view.tobytes() == setups[1].y.view.tobytes()
    _check(_set_up(case), plan, pack)


@pytest.mark.parametrize(
    "case",
    [
        Case(100, 120, 70, native.Dtype.F16, batch=6, a_map=(2, 3), bias="matrix", beta=0.5),
        Case(97, 90, 33, trans=(True, True), batch=5, b_map=(1, 5), bias="row", pads=(3, 0, 1)),
        Case(80, 75, 40, native.Dtype.BF16, trans=(True, False), batch=3, bias="column"),
    ],
)
def test_regions_are_problems_of_their_own(case: Case) -> None:
    """A plan cut by hand, in rows, columns and batch entries: together they make the whole."""
    device = devices.lookup("H200")
    pack, setup = _catalog(device.sm), _set_up(case)
    plan = native.Plan()
    for m0, m in _halves(case.m, 64):
        for n0, n in _halves(case.n, 64):
            for z0, z in _halves(case.batch, case.batch // 2):
                part = native.Problem.from_buffer_copy(setup.problem)
                part.m, part.n, part.batch = m, n, z
                (region,) = _without_copies(pack, device, part).regions
                region.m0, region.n0, region.z0 = m0, n0, z0
                plan._regions[plan.region_count] = region
                plan.region_count += 1
    assert plan.region_count == 8
    _check(setup, plan, pack)


F16, F32, TF32 = native.Dtype.F16, native.Dtype.F32, native.Precision.TF32


@pytest.mark.parametrize(
    ("gpu", "axis", "case"),
    [
        ("H200", "m0", Case(184, 264, 64, F16, batch=3, a_map=(1, 3), b_map=(1, 3), bias="row")),
        ("H200", "n0", Case(240, 264, 64, F16, batch=3, a_map=(1, 3), b_map=(1, 3), bias="column")),
        ("H200", "z0", Case(72, 128, 256, F16, batch=5, a_map=(1, 5), b_map=(1, 5), alpha=0.5)),
        ("H200", "m0", Case(296, 328, 64, F32, TF32, pads=(4, 8, 12))),
        ("H200", "n0", Case(184, 262, 1024, F32, TF32, bias="scalar", beta=2.0)),
        ("A100-80GB", "n0", Case(184, 262, 512, F32, TF32, bias="column")),
        ("A100-80GB", "z0", Case(72, 126, 256, F32, TF32, batch=3, a_map=(1, 3), b_map=(1, 3))),
    ],
)
def test_two_regions_of_a_plan_make_the_whole(gpu: str, axis: str, case: Case) -> None:
    """On a GPU of two SMs, where products that are quick to interpret take several waves; the first
    size that the planner cuts along the axis."""
    device = devices.lookup(gpu)
    device.sm_count = 2
    pack = one_tile_a_block(device.sm)
    for more in range(0, 400, 8):
        setup = _set_up(replace(case, m=case.m + more * (axis != "n0"), n=case.n + more))
        plan = pack.plan(device, setup.problem)
        if plan.region_count == 2 and getattr(plan.regions[1], axis) > 0:
            break
    first, second = plan.regions
    assert [name for name in ("m0", "n0", "z0") if getattr(second, name)] == [axis]
    assert first.kernel != second.kernel
    _check(setup, plan, pack)


def _without_copies(pack: native.Pack, device: native.Device, part: native.Problem) -> native.Plan:
    plan = pack.plan(device, part)
    if not plan.copies:
        return plan
    for index, kernel in enumerate(pack.kernels):
        if kernel.family == native.Family.GEMM_POINTER and not kernel.split_k:
            try:
                return pack.plan(device, part, kernel=index)
            except KernelMissingError:
                continue  # it does not take this problem
    raise AssertionError("no pointer kernel takes the problem")


def _halves(size: int, first: int) -> list[tuple[int, int]]:
    return [(0, first), (first, size - first)]
