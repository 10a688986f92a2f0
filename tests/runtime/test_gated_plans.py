"""Plans of gated products and of results in fp32, by the kernels of the real packs."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import assert_covers_once, problem

from moonpoly_ort import devices, errors, native, packs
from moonpoly_ort.native import Activation, Dtype, Family, PlanFlag, Residual


@cache
def catalog() -> native.Pack:
    return native.Pack(packs.catalog(90))


def gated(m: int, outputs: int, k: int, **changes: int) -> native.Problem:
    return problem(
        m, 2 * outputs, k, gated=1, ldc=outputs, c_batch_stride=m * outputs,
        **{"activation": Activation.SILU, **changes},
    )  # fmt: skip


@st.composite
def products(draw: st.DrawFn) -> native.Problem:
    dtype = draw(st.sampled_from(list(Dtype)))
    multiple = draw(st.sampled_from([8, 8, 1]))
    m = draw(st.one_of(st.integers(1, 20), st.integers(1, 9000)))
    n, k = (multiple * draw(st.integers(1, 900)) for _ in range(2))
    align = 16 if multiple == 8 else 4 if dtype == Dtype.F32 else 2
    common = {
        "dtype": dtype, "precision": draw(st.integers(0, dtype == Dtype.F32)),
        "trans_a": draw(st.integers(0, 1)), "trans_b": draw(st.integers(0, 1)),
        "align_a": align, "align_b": align, "align_c": align,
    }  # fmt: skip
    if dtype != Dtype.F32 and draw(st.booleans()):
        return problem(m, n, k, wide=1, **common)
    return gated(m, n, k, **common)


@settings(max_examples=200, deadline=None)
@given(p=products(), sm_count=st.sampled_from([6, 132]))
def test_regions_begin_where_rows_of_y_are_aligned(p: native.Problem, sm_count: int) -> None:
    device = devices.lookup("H200")
    device.sm_count = sm_count
    plan = catalog().plan(device, p)
    assert_covers_once(p, plan)
    element = 4 if p.dtype == Dtype.F32 else 2
    for region in plan.regions:
        kernel = catalog().kernels[region.kernel]
        assert kernel.family != Family.GEMM_SHALLOW
        assert not (kernel.persistent and kernel.swap)
        if p.gated:
            assert kernel.bn % 2 == region.n0 % 2 == region.n % 2 == 0
            assert region.n0 // 2 * element % kernel.align_c == 0
        else:
            assert region.n0 * element % kernel.align_c == 0


def test_gated_products_are_cut_between_columns() -> None:
    """Else the property above would say little."""
    cuts = 0
    for outputs in range(808, 8192, 136):
        plan = catalog().plan(devices.lookup("H200"), gated(512, outputs, 2048))
        cuts += any(region.n0 for region in plan.regions)
    assert cuts


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_decoding_is_planned_as_a_product_of_both_weights_is(m: int, layout: int) -> None:
    """The kernels for few rows all take gated products; Y has half the bytes."""
    device = devices.lookup("H200")
    both = problem(m, 11264, 2048, trans_b=layout, activation=Activation.SILU)
    plan = catalog().plan(device, gated(m, 5632, 2048, trans_b=layout), flags=PlanFlag.NO_VENDOR)
    other = catalog().plan(device, both, flags=PlanFlag.NO_VENDOR)
    assert [r.kernel for r in plan.regions] == [r.kernel for r in other.regions]
    assert plan.predicted_us <= other.predicted_us


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gated": 2}, "gated = 2, wide = 0 must be 0 or 1"),
        ({"wide": 1}, "gated = 1, wide = 1 must be 0 or 1, and not both"),
        ({"n": 63}, "even n and no residual, got n = 63"),
        ({"residual": Residual.BEFORE}, "even n and no residual, got n = 64 and residual = 1"),
        ({"ldc": 31}, "ldc = 31 are shorter than the rows of 64, 64 and 32"),
        ({"gated": 0, "wide": 1, "ldc": 64}, "without activation and residual"),
        ({"gated": 0, "wide": 1, "ldc": 64, "activation": 0, "dtype": 2}, "of fp16 or bf16"),
    ],
)
def test_illegal_problems(changes: dict[str, int], message: str) -> None:
    p = gated(64, 32, 64)
    for field, value in changes.items():
        setattr(p, field, value)
    with pytest.raises(errors.ProblemError, match=message):
        catalog().plan(devices.lookup("H200"), p)


def test_kernels_that_cannot_say_why() -> None:
    device = devices.lookup("H200")
    names = [kernel.name for kernel in catalog().kernels]
    single = next(i for i, name in enumerate(names) if name.startswith("gemm_dot_f16_nt_1x1"))
    outer = next(i for i, name in enumerate(names) if name.startswith("gemm_shallow_f16_nn"))
    with pytest.raises(errors.KernelMissingError, match="not both columns of a gated output"):
        catalog().plan(device, gated(1, 32, 64, trans_b=1), kernel=single)
    with pytest.raises(errors.KernelMissingError, match="one way only"):
        catalog().plan(device, gated(8, 32, 4), kernel=outer)
    with pytest.raises(errors.KernelMissingError, match="gated, or of another type"):
        catalog().plan(device, gated(8, 32, 64, activation=0), kernel=native.VENDOR)
    with pytest.raises(errors.KernelMissingError, match="gated, or of another type"):
        catalog().plan(device, problem(8, 32, 64, wide=1), kernel=native.VENDOR)
