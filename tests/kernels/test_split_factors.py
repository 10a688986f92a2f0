"""fp32 products by three TF32 products of split factors: how exact, and where NaN and Inf go.

The interpreter truncates the factors as the tensor core does, but adds in fp32 with rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gemm_case import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels.pack_format import DTYPE_CODE, PRECISION_CODE
from moonpoly_ort.custom_ops.kernels.spec import (
    Dtype,
    Family,
    KernelSpec,
    Precision,
    name,
    why_illegal,
)

from moonpoly_ort import devices, native, packs

FAMILIES = (Family.GEMM_TMA, Family.GEMM_POINTER)
WORST = 2**-20  # of |a| |b|, what is left out of one product at most
LEAST = 2**-136  # the tensor core's least TF32 number


def split_spec(family: Family = Family.GEMM_POINTER, **fields: Any) -> KernelSpec:
    align = 16 if family is Family.GEMM_TMA else 4
    defaults: dict[str, Any] = {
        "bm": 16, "bn": 32, "bk": 16, "warps": 4, "stages": 2, "precision": Precision.IEEE,
        "tf32x3": True, "align_a": align, "align_b": align, "align_c": align,
    }  # fmt: skip
    return KernelSpec(family, Dtype.F32, **{**defaults, **fields})


def shares(case: Case) -> np.ndarray[Any, Any]:
    """|error| of each element as a share of its |A| |B|."""
    got, want = case.run().double().numpy(), case.expected()
    magnitude = np.abs(case.a.double().numpy()) @ np.abs(case.b.double().numpy())
    return np.abs(got - want) / np.maximum(magnitude, 1e-300)


@given(
    family=st.sampled_from(FAMILIES), m=st.integers(1, 40), n=st.integers(1, 70),
    k=st.integers(1, 150), trans_a=st.booleans(), trans_b=st.booleans(), swap=st.booleans(),
    split=st.integers(1, 4), scale=st.integers(0, 40), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_every_element_is_within_the_bound(
    family: Family, m: int, n: int, k: int, trans_a: bool, trans_b: bool, swap: bool, split: int,
    scale: int, seed: int,
) -> None:  # fmt: skip
    spec = split_spec(
        family, trans_a=trans_a, trans_b=trans_b, swap=swap, split_k=split > 1
    )  # fmt: skip
    case = Case(spec, m, n, k, split=split, seed=seed)
    for x in (case.a, case.b):  # exponents from -scale to scale, beside those of normal numbers
        x *= torch.exp2(torch.empty_like(x).uniform_(-scale, scale))
    assert shares(case).max() <= WORST + k * 2**-24


@pytest.mark.parametrize("kind", ["random", "positive"])
def test_on_average_it_is_as_exact_as_fp32(kind: str) -> None:
    case = Case(split_spec(bk=32), 24, 32, 2048)
    if kind == "positive":
        case.a.abs_(), case.b.abs_()
    got, want = case.run().double().numpy(), case.expected()
    error = np.linalg.norm(got - want) / np.linalg.norm(want) * 2**24
    plain = (case.a @ case.b).double().numpy()
    fp32 = np.linalg.norm(plain - want) / np.linalg.norm(want) * 2**24
    assert error < 6
    assert error < 3 * fp32 + 3
    bias = np.mean((got - want) / want) * 2**24
    assert abs(bias) < 3


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_of_11_bits_are_exact(family: Family) -> None:
    case = Case(split_spec(family), 20, 36, 4)
    for x in (case.a, case.b):
        x.copy_(torch.randint(-2047, 2048, x.shape))
    np.testing.assert_array_equal(case.run().numpy(), case.expected().astype(np.float32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 3])
def test_nan_and_inf_reach_what_they_take_part_in(family: Family, swap: bool, split: int) -> None:
    case = Case(split_spec(family, swap=swap, split_k=split > 1), 20, 40, 60, split=split)
    inf, nan = float("inf"), float("nan")
    case.a[0, 2, 11], case.a[0, 3, 59], case.a[0, 5, 0] = inf, -inf, nan
    case.b[0, 30, 7], case.b[0, 0, 9], case.b[0, 41, 13] = -inf, nan, inf
    case.b[0, 11], case.b[0, 59] = 2.0, -0.5  # no lower part, which an Inf must not meet
    case.b[0, 11, 20] = 0.0  # Inf * 0 is NaN
    case.a[0, 7, 30] = 1.0
    want = case.expected()
    assert np.isposinf(want).any()
    assert np.isneginf(want).any()
    assert 0 < np.isnan(want).sum() < want.size / 2
    case.check()


def test_a_nan_of_low_bits_only_stays_one() -> None:
    case = Case(split_spec(), 3, 3, 20)
    case.a.view(torch.int32)[0, 1, 4] = 0x7F800001  # cut to 10 bits it would be Inf
    got = case.run()
    assert torch.isnan(got[0, 1]).all()
    assert torch.isfinite(got[0, [0, 2]]).all()


def test_large_numbers_do_not_overflow() -> None:
    case = Case(split_spec(), 4, 4, 8)
    case.a.fill_(3.4e38)  # to the nearest 11 bits it would be Inf
    case.a[0, :, 1:] = 0.0
    case.b.fill_(1.0)
    np.testing.assert_allclose(case.run().numpy(), 3.4e38, rtol=WORST)
    case.b.fill_(2.0)
    assert case.run().isposinf().all()


def test_tiny_numbers_lose_no_more_than_the_least_tf32_number() -> None:
    case = Case(split_spec(), 16, 32, 64)
    case.a *= 1e-38
    case.b *= 1e30
    case.b[0, 3] = 1e-42  # subnormal
    error = np.abs(case.run().double().numpy() - case.expected())
    magnitude = np.abs(case.a.double().numpy()) @ np.abs(case.b.double().numpy())
    lost = 2 * LEAST * (np.abs(case.a.double().numpy()).sum(2, keepdims=True)
                        + np.abs(case.b.double().numpy()).sum(1, keepdims=True))  # fmt: skip
    assert (error <= magnitude * 2**-18 + lost).all()


def test_the_name_and_the_refusals() -> None:
    spec = split_spec(Family.GEMM_TMA, bm=64, bn=128, trans_b=True)
    assert name(spec) == "gemm_tma_f32ieee_nt_64x128x16_w4_s2_x3"
    assert why_illegal(spec, 90) is None
    for changes, reason in (
        ({"precision": Precision.TF32}, "not to tf32"),
        ({"bm": 128}, "more than 64 registers"),
    ):
        bad = split_spec(Family.GEMM_TMA, **{"bm": 64, "bn": 128, "trans_b": True, **changes})
        assert reason in (why_illegal(bad, 90) or "")
    specialised = split_spec(Family.GEMM_WS, bm=128, bn=128, bk=32, warps=12, trans_b=True)
    assert "16 warps" in (why_illegal(specialised, 90) or "")


@pytest.mark.parametrize("gpu", ["A100-80GB", "L4", "RTX 4090", "H100", "H200", "B200"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("align", [16, 4])
def test_large_products_are_planned_on_tensor_cores(gpu: str, layout: str, align: int) -> None:
    device = devices.lookup(gpu)
    pack = native.Pack(packs.catalog(device.sm))
    size = 4096 if align == 16 else 4097

    def chosen(precision: Precision, k: int) -> native.KernelRecord:
        problem = native.Problem(
            dtype=DTYPE_CODE[Dtype.F32], precision=PRECISION_CODE[precision],
            trans_a=layout[0] == "t", trans_b=layout[1] == "t", m=size, n=size, k=k, batch=1,
            lda=size, ldb=size, ldc=size, a_div=1, a_mod=1, b_div=1, b_mod=1,
            align_a=align, align_b=align, align_c=align, alpha=1.0,
        )  # fmt: skip
        return pack.kernels[pack.plan(device, problem).regions[0].kernel]

    assert chosen(Precision.IEEE, size).tf32x3 == (device.sm in (80, 90))
    assert not chosen(Precision.TF32, size).tf32x3
