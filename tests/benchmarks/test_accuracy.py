"""What is right passes, and one term or one output that is missing does not."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import accuracy
from benchmarks.operands import DTYPES, NUMBERS

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 3000))


def _operands(sizes: tuple[int, int, int, int], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    batch, m, n, k = sizes
    generator = torch.Generator().manual_seed(m * n + k)
    element = DTYPES[NUMBERS[dtype][0]]
    return (
        torch.randn(batch, m, k, generator=generator).to(element),
        torch.randn(batch, k, n, generator=generator).to(element),
    )


def _product(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """As tensor cores do it: fp32 sums, TF32 operands cut to ten bits."""
    left, right = a.float(), b.float()
    if dtype == "f32":
        left, right = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (left, right))
    return torch.matmul(left, right).to(a.dtype)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, dtype=st.sampled_from(sorted(NUMBERS)))
def test_right_products_pass(sizes: tuple[int, int, int, int], dtype: str) -> None:
    a, b = _operands(sizes, dtype)
    judged = accuracy.judge(a, b, _product(a, b, dtype), dtype)
    assert judged.right, judged
    assert judged.outputs == math.prod(sizes[:3])


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
@pytest.mark.parametrize("k", [1, 2, 100, 4096])
def test_a_missing_term_is_seen(dtype: str, k: int) -> None:
    a, b = _operands((1, 40, 50, k), dtype)
    assert not accuracy.judge(a, b, _product(a[..., :-1], b[:, :-1], dtype), dtype).right


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_single_wrong_output_is_seen(value: float) -> None:
    a, b = _operands((2, 30, 31, 500), "bf16")
    y = _product(a, b, "bf16")
    y[1, 17, 30] = value
    judged = accuracy.judge(a, b, y, "bf16")
    assert not judged.right
    assert math.isinf(judged.excess) == (not math.isfinite(value))


def test_tf32_is_not_ieee() -> None:
    a, b = _operands((1, 40, 50, 300), "f32")
    y = _product(a, b, "f32")
    assert accuracy.judge(a, b, y, "f32").right
    assert not accuracy.judge(a, b, y, "f32ieee").right


def test_large_products_are_judged_by_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _operands((1, 500, 20, 30), "f16")
    y = _product(a, b, "f16")
    whole = accuracy.judge(a, b, y, "f16")
    monkeypatch.setattr(accuracy, "CHUNK", 64)  # in many steps, to the same end
    stepwise = accuracy.judge(a, b, y, "f16")
    assert stepwise.outputs == whole.outputs
    assert stepwise.error == pytest.approx(whole.error)
    assert stepwise.excess == pytest.approx(whole.excess)
    part = accuracy.judge(a, b, y, "f16", most_flops=100 * 2 * 20 * 30)
    assert part.outputs == 100 * 20
    for row in (0, 7, 492, 499):
        broken = y.clone()
        broken[0, row] = 0
        assert not accuracy.judge(a, b, broken, "f16", most_flops=1).right


def test_sampled_rows() -> None:
    assert accuracy.sampled_rows(20, 5).tolist() == list(range(20))
    picked = accuracy.sampled_rows(1000, 64).tolist()
    assert picked == sorted(set(picked))
    assert len(picked) == 64
    assert picked[:8] == list(range(8))
    assert picked[-8:] == list(range(992, 1000))
