from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gemm_case import Case, round_up
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels import loading
from moonpoly_ort.custom_ops.kernels.compiling import compile_spec
from moonpoly_ort.custom_ops.kernels.spec import Dtype, Family, KernelSpec, Precision

from moonpoly_ort import interpreter
from moonpoly_ort.errors import MissingDependencyError, MoonPolyError

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("guarded")
INTERPRETED = (Family.GEMM_TMA, Family.GEMM_POINTER, Family.GEMM_TMA_MASKED)


def dot_of(dtype: Dtype = Dtype.F16, bm: int = 2, bn: int = 4, **changes: Any) -> KernelSpec:
    return spec_of(
        Family.GEMM_DOT, dtype, bm=bm, bn=bn, bk=256, trans_b=True, bias_matrix=True, **changes
    )


def spec_of(family: Family, dtype: Dtype = Dtype.F16, **changes: Any) -> KernelSpec:
    align = 16 if family.tensor_maps else dtype.bytes
    spec = KernelSpec(
        family, dtype, 16, 32, 16, 4, 2, align_a=align, align_b=align,
        align_c=16 if family is Family.GEMM_TMA else dtype.bytes,
    )  # fmt: skip
    return replace(spec, **changes)


LAYOUTS = [(a, b) for a in (False, True) for b in (False, True)]


@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swap", [False, True])
def test_every_kind_of_kernel_computes_the_product(
    family: Family, dtype: Dtype, layout: tuple[bool, bool], swap: bool
) -> None:
    spec = spec_of(family, dtype, trans_a=layout[0], trans_b=layout[1], swap=swap)
    Case(spec, 37, 45, 53, alpha=0.5, beta=2.0, bias="row").check()
    Case(replace(spec, split_k=True), 20, 33, 50, split=3, beta=1.0, bias="column").check()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(INTERPRETED))
    dtype = draw(st.sampled_from(Dtype))
    aligns = [a for a in (2, 4, 8, 16) if a >= dtype.bytes]
    least = 16 if family.tensor_maps else draw(st.sampled_from(aligns))
    split_k = draw(st.booleans())
    bias = draw(st.sampled_from(["none", "scalar", "row", "column", "matrix"]))
    spec = spec_of(
        family, dtype, bm=draw(st.sampled_from([16, 32])), bn=draw(st.sampled_from([16, 32, 64])),
        bk=draw(st.sampled_from([16, 32])),
        trans_a=draw(st.booleans()), trans_b=draw(st.booleans()),
        split_k=split_k, swap=draw(st.booleans()), group_m=draw(st.sampled_from([1, 2, 8])),
        bias_matrix=bias == "matrix" or draw(st.booleans()),
        align_a=least, align_b=least,
        align_c=dtype.bytes if family is Family.GEMM_TMA_MASKED else least,
        precision=draw(st.sampled_from(Precision)) if dtype is Dtype.F32 else Precision.TF32,
    )  # fmt: skip
    m, n, k = (draw(st.integers(1, 70)) for _ in range(3))
    unit = least // dtype.bytes
    if family is Family.GEMM_POINTER:  # its rows are whole units
        m, n, k = (round_up(size, unit) for size in (m, n, k))
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    maps = [(1, 1), (1, inner * outer), (inner, outer), (1, inner)]
    cuts = (
        [draw(st.integers(0, m // unit)) * unit],
        [draw(st.integers(0, n // unit)) * unit],
        [draw(st.integers(0, inner * outer))],
    )
    return Case(
        spec, m, n, k, batch=inner * outer, a_map=draw(st.sampled_from(maps)),
        b_map=draw(st.sampled_from(maps)), split=draw(st.integers(2, 5)) if split_k else 1,
        alpha=draw(st.sampled_from([1.0, -0.5])), bias=bias,
        beta=draw(st.sampled_from([1.0, 0.25])) if bias != "none" else 0.0,
        slack=draw(st.integers(0, 2)), cuts=cuts, seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_case_is_computed(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize("dtype", Dtype)
def test_nan_and_inf_stay_in_their_rows_and_columns(family: Family, dtype: Dtype) -> None:
    case = Case(spec_of(family, dtype), 20, 40, 40, batch=2, a_map=(1, 2), b_map=(1, 2))
    case.a[0, 3, 5], case.a[1, 7, 39] = NAN, INF
    case.b[0, 2, 11], case.b[1, 0, 0] = -INF, NAN
    want = case.expected()
    assert 0 < np.isnan(want).sum() < want.size / 2
    assert np.isinf(want).any()
    case.check()


@pytest.mark.parametrize("split", [1, 2, 7])
@pytest.mark.parametrize("swap", [False, True])
def test_without_k_the_result_is_beta_c(split: int, swap: bool) -> None:
    spec = spec_of(Family.GEMM_POINTER, split_k=split > 1, swap=swap)
    Case(spec, 19, 35, 0, split=split, beta=0.5, bias="row").check()
    case = Case(spec, 19, 35, 0, split=split)
    assert not case.run().any()


@pytest.mark.parametrize("family", INTERPRETED)
def test_more_slices_than_k_steps(family: Family) -> None:
    spec = spec_of(family, Dtype.F32, split_k=True)
    for k in (1, 16, 17, 40):
        Case(spec, 18, 33, k, split=6).check()


@pytest.mark.parametrize("family", INTERPRETED)
def test_slices_are_summed_in_their_order(family: Family) -> None:
    # 1e8 + 1 - 1e8 in fp32 is 0 from the left and 1 in any order that meets 1 last.
    spec = spec_of(family, Dtype.F32, split_k=True, precision=Precision.IEEE)
    case = Case(spec, 1, 1, 48, split=3)
    case.a[:], case.b[:] = 0.0, 1.0
    case.a[0, 0, 0], case.a[0, 0, 16], case.a[0, 0, 32] = 1e8, 1.0, -1e8
    assert case.run().item() == 0.0
    case.a[0, 0, 0], case.a[0, 0, 16], case.a[0, 0, 32] = 1e8, -1e8, 1.0
    assert case.run().item() == 1.0


@pytest.mark.parametrize("family", INTERPRETED)
def test_regions_are_problems_of_their_own(family: Family) -> None:
    case = Case(
        spec_of(family, trans_b=True), 70, 64, 24, batch=6, a_map=(3, 2), b_map=(1, 3),
        bias="column", beta=1.0, cuts=([8, 40], [16, 48], [1, 4]),
    )  # fmt: skip
    assert len(case._regions()) == 27
    case.check()


@pytest.mark.parametrize("bias", ["scalar", "row", "column", "matrix"])
def test_a_bias_of_beta_0_is_not_read(bias: str) -> None:
    spec = spec_of(Family.GEMM_POINTER, bias_matrix=bias == "matrix")
    case = Case(spec, 20, 33, 8, bias=bias, beta=0.0)
    assert case.c is not None
    case.c.fill_(NAN)
    assert torch.isfinite(case.run()).all()


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("tile", [(1, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("bias", ["none", "scalar", "row", "column", "matrix"])
def test_dot_products(dtype: Dtype, tile: tuple[int, int], bias: str) -> None:
    spec = dot_of(dtype, *tile)
    beta = 0.5 if bias != "none" else 0.0
    Case(spec, 5, 7, 301, bias=bias, beta=beta, batch=2, b_map=(1, 2), cuts=([2], [3], [1])).check()
    Case(spec, 1, 9, 1, bias=bias, beta=beta, alpha=-2.0).check()
    Case(spec, 3, 2, 256, bias=bias, beta=beta).check()


def test_dot_products_without_k_are_beta_c() -> None:
    Case(dot_of(), 3, 5, 0, beta=0.5, bias="row").check()


def test_dot_products_keep_nan_and_inf_in_their_rows_and_columns() -> None:
    case = Case(dot_of(Dtype.BF16), 5, 6, 300)
    case.a[0, 3, 299], case.a[0, 1, 0], case.b[0, 7, 2] = NAN, INF, -INF
    assert 0 < np.isnan(case.expected()).sum() < case.expected().size / 2
    case.check()


@pytest.mark.parametrize("split", [2, 13, 29])
def test_any_number_of_slices_is_added_up(split: int) -> None:
    Case(spec_of(Family.GEMM_POINTER, split_k=True), 9, 20, 16 * 30 + 5, split=split).check()


def test_results_beyond_f16_are_infinite() -> None:
    case = Case(spec_of(Family.GEMM_POINTER), 3, 3, 64)
    case.a[:], case.b[:] = 100.0, -100.0
    assert case.run().isneginf().all()


def test_the_guard_sees_an_access_out_of_bounds(
    guarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "shrink", 2)  # as if every buffer were one element shorter
    with pytest.raises(MoonPolyError, match=r"gemm_pointer_f16_nn_16x32x16.*access out of bounds"):
        Case(spec_of(Family.GEMM_POINTER), 5, 5, 5).run()


def test_a_failing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(loading, "kernel", broken)
    with pytest.raises(MoonPolyError, match=r"gemm_pointer_f16_nn_16x32x16.*no such kernel"):
        Case(spec_of(Family.GEMM_POINTER), 3, 3, 3).run()


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_a_missing_dependency_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(spec_of(Family.GEMM_POINTER), 3, 3, 3)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=f"{missing} is not installed: pip install"):
        interpreter._torch()
    monkeypatch.undo()
    case.check()


def test_one_process_interprets_and_compiles() -> None:
    spec = spec_of(Family.GEMM_TMA, Dtype.BF16, split_k=True, swap=True)
    case = Case(spec, 20, 40, 70, split=2)
    case.check()
    assert compile_spec(replace(spec, bm=64, bn=64), 90).cubin
    case.check()


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "layout"), [(Dtype.F16, (False, False)), (Dtype.F32, (False, True))]
)
def test_a_kernel_without_an_interpreter_has_a_stand_in(
    dtype: Dtype, layout: tuple[bool, bool], split: int
) -> None:
    spec = KernelSpec(
        Family.GEMM_WS, dtype, 128, 64, 32, 12, 2, *layout, split_k=split > 1
    )  # fmt: skip
    Case(
        spec, 150, 70, 90, batch=2, a_map=(1, 2), split=split, alpha=0.5, beta=2.0, bias="row",
        cuts=([64], [], [1]),
    ).check()  # fmt: skip
