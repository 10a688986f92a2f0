"""Activations and residuals in the kernels' epilogues, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gemm_case import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels.spec import Dtype, Family, KernelSpec, Precision

from moonpoly_ort.native_structs import Activation, Residual
from tests.epilogues import activated

NUMBERS = {
    Activation.LEAKY_RELU: (0.1, 0.0),
    Activation.CLIP: (-0.75, 1.5),
    Activation.HARD_SIGMOID: (0.3, 0.4),
    Activation.QUICK_GELU: (1.702, 0.0),
}
FAMILIES = (
    Family.GEMM_TMA, Family.GEMM_TMA_MASKED, Family.GEMM_POINTER, Family.GEMM_DOT, Family.GEMM_WS,
)  # fmt: skip
SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-30, 3e38, -3e38, 88.8, -104.0]


def spec_of(family: Family, dtype: Dtype = Dtype.F32, **changes: Any) -> KernelSpec:
    e = dtype.bytes
    maps = family.tensor_maps
    aligns = {"align_a": 16 if maps else e, "align_b": 16 if maps else e}
    aligns["align_c"] = 16 if "Y" in family.maps else e
    spec = KernelSpec(family, dtype, 16, 64, 16, 1, 2, **aligns)
    if family is Family.GEMM_DOT:
        spec = replace(spec, bm=2, bn=4, bk=256, trans_b=True, bias_matrix=True)
    if family is Family.GEMM_WS:  # by its stand-in, a tile of half the rows
        spec = replace(spec, bm=64, bn=64, warps=8, trans_b=True)
    return replace(spec, **changes)


@pytest.mark.parametrize("activation", list(Activation)[1:])
def test_values_of_activations(activation: Activation) -> None:
    """Everywhere, to 2e-6 of the larger of 1 and |x|; NaN and infinities as the formula says."""
    alpha, beta = NUMBERS.get(activation, (0.0, 0.0))
    dense = np.concatenate([np.linspace(-12, 12, 9000), np.geomspace(1e-8, 1e4, 500)])
    x = np.concatenate([dense, -dense[-500:], SPECIAL]).astype(np.float32)
    # A product with one: 1 x 1 times a row is that row.
    spec = spec_of(Family.GEMM_POINTER, precision=Precision.IEEE, bn=256)
    case = Case(spec, 1, len(x), 1, activation=activation, act_alpha=alpha, act_beta=beta, slack=0)
    case.a, case.b = torch.ones(1, 1, 1), torch.from_numpy(x).reshape(1, 1, -1)
    got = case.run().numpy().ravel().astype(np.float64)
    want = activated(x.astype(np.float64), activation, np.float32(alpha), np.float32(beta))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    beyond = np.abs(want) > np.finfo(np.float32).max
    np.testing.assert_array_equal(got[beyond], np.sign(want[beyond]) * np.inf)
    finite = np.isfinite(want) & ~beyond
    error = np.abs(got[finite] - want[finite])
    assert (error <= 2e-6 * np.maximum(1, np.abs(x[finite]))).all(), error.max()
    if activation is Activation.TANH:  # which is x near 0
        small = (np.abs(x) > 0) & (np.abs(x) < 1)
        np.testing.assert_allclose(got[small], want[small], rtol=1e-5)


@pytest.mark.parametrize("activation", list(Activation)[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_activation_of_every_family(family: Family, activation: Activation) -> None:
    alpha, beta = NUMBERS.get(activation, (0.0, 0.0))
    precision = {} if family is Family.GEMM_WS else {"precision": Precision.IEEE}
    spec = spec_of(family, **precision)
    m, n = (3, 7) if family is Family.GEMM_DOT else (21, 70)
    Case(
        spec, m, n, 19, activation=activation, act_alpha=alpha, act_beta=beta, alpha=1.5,
        beta=1.0, bias="row",
    ).check()  # fmt: skip


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.TANH, Activation.RELU])
@pytest.mark.parametrize("residual", list(Residual)[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_residual_of_every_family(
    family: Family, residual: Residual, activation: Activation
) -> None:
    precision = {} if family is Family.GEMM_WS else {"precision": Precision.IEEE}
    m, n = (3, 7) if family is Family.GEMM_DOT else (21, 70)
    Case(
        spec_of(family, **precision), m, n, 19, batch=2, a_map=(1, 2), cuts=([2], [n - 6], [1]),
        activation=activation, residual=residual,
    ).check()  # fmt: skip


def drawn_spec(draw: st.DrawFn) -> KernelSpec:
    """A kernel of any family that the interpreter has."""
    family = draw(st.sampled_from(FAMILIES[:3]))
    dtype = draw(st.sampled_from(list(Dtype)))
    split_k = draw(st.booleans())
    return spec_of(
        family, dtype, split_k=split_k, swap=draw(st.booleans()),
        warps=draw(st.sampled_from([1, 2, 4])),
        bias_matrix=draw(st.booleans()) and not split_k,
    )  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_epilogues(data: st.DataObject) -> None:
    draw = data.draw
    spec = drawn_spec(draw)
    activation = draw(st.sampled_from(list(Activation)))
    alpha, beta = NUMBERS.get(activation, (0.0, 0.0))
    biases = ["none", "scalar", "row", "column", *(["matrix"] if spec.bias_matrix else [])]
    batch = draw(st.integers(1, 3))
    Case(
        spec, draw(st.integers(1, 40)), draw(st.integers(1, 140)), draw(st.integers(0, 40))
        if not spec.family.tensor_maps else draw(st.integers(1, 40)),
        batch=batch, a_map=(1, batch), split=draw(st.integers(2, 3)) if spec.split_k else 1,
        alpha=draw(st.sampled_from([1.0, -0.5])), beta=2.0, bias=draw(st.sampled_from(biases)),
        activation=activation, residual=draw(st.sampled_from(list(Residual))),
        act_alpha=alpha, act_beta=beta, slack=draw(st.integers(0, 2)),
        cuts=([draw(st.integers(1, 3)) * 16], [], []), seed=draw(st.integers(0, 99)),
    ).check()  # fmt: skip


PAIRED = (*FAMILIES, Family.GEMV)


def paired_spec(family: Family, dtype: Dtype, **changes: Any) -> KernelSpec:
    if family is Family.GEMV:
        e = dtype.bytes
        spec = KernelSpec(family, dtype, 2, 16, 16, 1, 2, align_a=e, align_b=16, align_c=e)
        return replace(spec, bias_matrix=True, **changes)
    return spec_of(family, dtype, **changes)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("family", PAIRED)
def test_gated_products_of_every_family(family: Family, activation: Activation) -> None:
    """Regions begin at even columns; the sum of K slices comes first."""
    alpha, beta = NUMBERS.get(activation, (0.0, 0.0))
    spec = paired_spec(family, Dtype.F32)
    m, n = (3, 10) if family is Family.GEMM_DOT else (21, 70)
    Case(
        spec, m, n, 19, activation=activation, act_alpha=alpha, act_beta=beta, alpha=1.5,
        beta=1.0, bias="row", gated=True, cuts=([2], [n - 6], []),
    ).check()  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_gated_and_wide_products(data: st.DataObject) -> None:
    draw = data.draw
    spec = drawn_spec(draw)
    wide = spec.dtype is not Dtype.F32 and draw(st.booleans())
    activation = draw(st.sampled_from(list(Activation)))
    alpha, beta = NUMBERS.get(activation, (0.0, 0.0))
    biases = ["none", "scalar", "row", "column", *(["matrix"] if spec.bias_matrix else [])]
    batch = draw(st.integers(1, 3))
    Case(
        spec, draw(st.integers(1, 40)), draw(st.integers(1, 70)) * 2, draw(st.integers(1, 40)),
        batch=batch, a_map=(1, batch), split=draw(st.integers(2, 3)) if spec.split_k else 1,
        alpha=draw(st.sampled_from([1.0, -0.5])), beta=2.0, bias=draw(st.sampled_from(biases)),
        activation=Activation.NONE if wide else activation, act_alpha=alpha, act_beta=beta,
        gated=not wide, wide=wide, slack=draw(st.integers(0, 2)),
        cuts=([draw(st.integers(1, 3)) * 16], [], []), seed=draw(st.integers(0, 99)),
    ).check()  # fmt: skip


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.BF16])
@pytest.mark.parametrize("family", PAIRED)
def test_wide_results_are_rounded_all_the_same(family: Family, dtype: Dtype) -> None:
    spec = paired_spec(family, dtype)
    m, n = (3, 7) if family is Family.GEMM_DOT else (21, 70)
    plain = Case(spec, m, n, 19, batch=2, a_map=(1, 2), alpha=1.5, beta=1.0, bias="row")
    wide = replace(plain, wide=True, cuts=([2], [n - 6], [1]))
    wide.check()
    got = wide.run()
    assert got.dtype == torch.float32
    assert torch.equal(got, plain.run().float())


def test_a_gated_product_differs_from_one_with_the_activation_on_the_other_column() -> None:
    case = Case(spec_of(Family.GEMM_POINTER), 5, 8, 7, activation=Activation.SILU, gated=True)
    case.b = case.b.flip(2)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            case.run().numpy(), case.expected()[..., ::-1], rtol=1e-3, atol=1e-3
        )
