"""Outer products (`gemm_shallow`) and products of few rows (`gemv`)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from gemm_case import Case, round_up
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels.compiling import compile_spec
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import (
    SHARED_LIMIT,
    Dtype,
    Family,
    KernelSpec,
    Precision,
    accepts,
    estimated_resources,
    legal,
    why_illegal,
)

NAN, INF = float("nan"), float("inf")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.usefixtures("guarded")


def shallow_of(dtype: Dtype = Dtype.F16, **changes: Any) -> KernelSpec:
    e = dtype.bytes
    spec = KernelSpec(
        Family.GEMM_SHALLOW, dtype, 16, 32, 8, 8, 1, align_a=e, align_b=e, align_c=e
    )  # fmt: skip
    return replace(spec, **changes)


def gemv_of(dtype: Dtype = Dtype.F16, **changes: Any) -> KernelSpec:
    e = dtype.bytes
    spec = KernelSpec(
        Family.GEMV, dtype, 2, 32, 16, 4, 3, bias_matrix=True, align_a=e, align_b=16, align_c=e
    )
    return replace(spec, **changes)


@st.composite
def cases(draw: st.DrawFn, family: Family) -> Case:
    dtype = draw(st.sampled_from(Dtype))
    aligns = st.sampled_from([a for a in (2, 4, 8, 16) if a >= dtype.bytes])
    precision = draw(st.sampled_from(Precision)) if dtype is Dtype.F32 else Precision.TF32
    group_m, slack = draw(st.sampled_from([1, 8])), draw(st.integers(0, 2))
    biases = ["none", "scalar", "row", "column"]
    if family is Family.GEMM_SHALLOW:
        spec = shallow_of(
            dtype, bm=draw(st.sampled_from([16, 32])), bn=draw(st.sampled_from([32, 64])),
            bk=draw(st.sampled_from([1, 4, 8])), precision=precision, group_m=group_m,
            trans_a=draw(st.booleans()), trans_b=draw(st.booleans()),
            align_a=draw(aligns), align_b=draw(aligns), align_c=draw(aligns),
        )  # fmt: skip
        m, n, k = draw(st.integers(1, 70)), draw(st.integers(1, 90)), draw(st.integers(0, spec.bk))
    else:
        biases.append("matrix")
        spec = gemv_of(
            dtype, bm=draw(st.sampled_from([1, 2, 4])), bn=draw(st.sampled_from([16, 64])),
            bk=draw(st.sampled_from([8, 16])), precision=precision, group_m=group_m,
            align_a=draw(aligns), align_c=draw(aligns), split_k=draw(st.booleans()),
        )  # fmt: skip
        m, n, k = draw(st.integers(1, 6)), draw(st.integers(1, 90)), draw(st.integers(0, 70))
    # The rows of an operand are as long as its alignment says.
    a, b, c = (align // dtype.bytes for align in (spec.align_a, spec.align_b, spec.align_c))
    m = round_up(m, a) if spec.trans_a else m
    n = round_up(n, max(c, 1 if spec.trans_b else b))
    k = round_up(k, max(1 if spec.trans_a else a, b if spec.trans_b else 1))
    if family is Family.GEMM_SHALLOW and k > spec.bk:
        spec = replace(spec, bk=8)
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    maps = st.sampled_from([(1, 1), (1, inner * outer), (inner, outer), (1, inner)])
    bias = draw(st.sampled_from(biases))
    unit = 16 // dtype.bytes
    cuts = [draw(st.integers(0, size // unit)) * unit for size in (m, n)]
    return Case(
        spec, m, n, k, batch=inner * outer, a_map=draw(maps), b_map=draw(maps),
        split=draw(st.integers(2, 5)) if spec.split_k else 1,
        alpha=draw(st.sampled_from([1.0, -0.5])), bias=bias,
        beta=draw(st.sampled_from([1.0, 0.25])) if bias != "none" else 0.0,
        slack=slack, cuts=([cuts[0]], [cuts[1]], [draw(st.integers(0, inner * outer))]),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(Family.GEMM_SHALLOW))
def test_outer_products(case: Case) -> None:
    case.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(Family.GEMV))
def test_products_of_few_rows(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("spec", [shallow_of(), gemv_of(), gemv_of(split_k=True)])
@pytest.mark.parametrize("dtype", Dtype)
def test_nan_and_inf_stay_in_their_rows_and_columns(spec: KernelSpec, dtype: Dtype) -> None:
    e = dtype.bytes
    spec = replace(spec, dtype=dtype, align_a=e, align_c=e, align_b=max(e, spec.align_b))
    case = Case(spec, 6, 40, 7, batch=2, a_map=(1, 2), b_map=(1, 2), split=2 if spec.split_k else 1)
    case.a[0, 3, 5], case.a[1, 1, 6] = NAN, INF
    case.b[0, 2, 11], case.b[1, 0, 0] = -INF, NAN
    want = case.expected()
    assert 0 < np.isnan(want).sum() < want.size / 2
    assert np.isinf(want).any()
    case.check()


@pytest.mark.parametrize("spec", [shallow_of(Dtype.F32), gemv_of(Dtype.F32)])
def test_fp32_is_not_rounded_for_a_tensor_core(spec: KernelSpec) -> None:
    """Factors of 24 bits, products of 48: exact to the last bit of an fp32 sum of one term."""
    case = Case(spec, 2, 8, 1)
    case.a[:] = 1 + 2.0**-23
    case.b[:] = 1 + 2.0**-12
    want = np.float32((1 + 2.0**-23) * (1 + 2.0**-12))
    assert (case.run().numpy() == want).all()
    assert np.float32(1 + 2.0**-12) != want


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bk": 0}, "bk = 0"),
        ({"bk": 64}, "bk = 64"),
        ({"bm": 8}, "8x32 outputs"),
        ({"bn": 48}, "16x48 outputs"),
        ({"split_k": True}, "all of K"),
        ({"bias_matrix": True}, "vector C"),
        ({"swap": True}, "upright"),
        ({"warps": 3}, "3 warps"),
    ],
)
def test_outer_products_that_are_refused(change: dict[str, Any], reason: str) -> None:
    for sm in SHARED_LIMIT:
        assert legal(shallow_of(), sm)
        assert reason in (why_illegal(replace(shallow_of(), **change), sm) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trans_b": True}, "layout nn only"),
        ({"trans_a": True}, "layout nn only"),
        ({"bias_matrix": False}, "matrix C"),
        ({"align_b": 8}, "16 bytes at a time"),
        ({"bm": 16}, "bm = 16"),
        ({"bn": 512}, "16x512 of B"),
        ({"bk": 12}, "12x32 of B"),
        ({"bm": 8, "bn": 256, "bk": 64}, "do not fit 4 warps"),
    ],
)
def test_products_of_few_rows_that_are_refused(change: dict[str, Any], reason: str) -> None:
    for sm in SHARED_LIMIT:
        assert legal(gemv_of(), sm)
        assert reason in (why_illegal(replace(gemv_of(), **change), sm) or "")


def test_outer_products_have_a_longest_k() -> None:
    for k, taken in ((0, True), (1, True), (8, True), (9, False)):
        assert accepts(shallow_of(), dtype=Dtype.F16, k=k) is taken
    assert accepts(gemv_of(), dtype=Dtype.F16, k=4096)


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.F32])
def test_outer_products_go_straight_to_and_from_registers(dtype: Dtype, tmp_path: Path) -> None:
    """16 bytes of B and of Y at a time, and no shared memory on the way: what makes them fast, and
    what the compiler does only for few enough rows and columns.
    """
    spec = next(
        s for s in specs(90)
        if (s.family, s.dtype, s.bm, s.bn, s.bk) == (Family.GEMM_SHALLOW, dtype, 64, 128, 4)
    )  # fmt: skip
    kernel = compile_spec(spec, 90)
    assert (kernel.shared_bytes, kernel.local_bytes) == (0, 0)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.cubin)
    sass = subprocess.run(
        [TOOLS / "nvdisasm", path], check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    columns = 16 // dtype.bytes
    pieces = spec.bm * spec.bn // (32 * spec.warps) // columns
    assert len(re.findall(r"\bSTG\.E\.128\b", sass)) == pieces
    # Rows of B, and R, which is read in front of an activation or behind it.
    assert len(re.findall(r"\bLDG\.E\S*\.128\b", sass)) == spec.bk + 2 * pieces
    assert not re.search(r"\b(LDS|STS)\b", sass)


def test_rows_of_b_are_under_way_while_others_are_multiplied() -> None:
    wanted = [s for s in specs(90) if s.family is Family.GEMV and s.dtype is not Dtype.BF16][::3]
    assert {s.dtype for s in wanted} == {Dtype.F16, Dtype.F32}
    for spec in wanted:
        kernel = compile_spec(spec, 90)
        assert kernel.local_bytes == 0
        ring = (spec.stages - 1) * spec.bk * spec.bn * spec.dtype.bytes
        assert ring >= 40 << 10
        assert kernel.shared_bytes >= ring
        shared, registers = estimated_resources(spec, 90)
        assert kernel.shared_bytes == pytest.approx(shared, rel=0.05)
        assert kernel.registers == pytest.approx(registers, rel=0.35)
