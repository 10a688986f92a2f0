"""The suites are the same everywhere, and what they promise holds for any seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import suites

# SHA-256 of the CSV files of the seed that results are published with.
PUBLISHED = {
    "gemm": "d519dbf0ffa23dd1635735afad0573f34d7fb57564bced874a54d5e542199786",
    "bmm": "937a98e9514384869188039f802efd91f9606d28d8b36403560796e1ad8910f8",
}


@pytest.mark.parametrize("op", suites.OPS)
def test_the_published_seed(op: str, tmp_path: Path) -> None:
    suites.write(suites.rows(op), tmp_path / "suite.csv")
    assert hashlib.sha256((tmp_path / "suite.csv").read_bytes()).hexdigest() == PUBLISHED[op]


def test_some_rows() -> None:
    gemm, bmm = suites.rows("gemm"), suites.rows("bmm")
    assert (len(gemm), sum(row.core for row in gemm)) == (1631, 280)
    assert (len(bmm), sum(row.core for row in bmm)) == (160, 28)
    assert gemm[4] == suites.Row("gemm", "4", "deepbench", 1, 848, 14976, 6032, True)
    assert bmm[20] == suites.Row("bmm", "20", "scores-d32", 8, 335, 335, 32, True)
    assert str(gemm[4]) == "gemm 4 848x14976x6032"
    assert str(bmm[20]) == "bmm 20 8x335x335x32"


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_seed_keeps_the_classes(seed: int) -> None:
    rows = suites.rows("gemm", seed)
    counts = Counter(row.kind for row in rows)
    for shapes in suites.CLASSES:
        assert counts[shapes.name] == shapes.rows
        for row in (row for row in rows if row.kind == shapes.name):
            for size, (low, high) in (
                (row.m, shapes.m), (row.n, shapes.n), (row.k, shapes.k),
            ):  # fmt: skip
                assert low <= size <= high
    for model, weights in suites.WEIGHTS.items():
        assert {(row.n, row.k) for row in rows if row.kind == model} == set(weights)
        assert counts[model] == len(weights) * len(suites.ROW_COUNTS)
    drawn = [row for row in rows if row.kind not in suites.WEIGHTS]
    assert all(row.flops <= suites.MOST_FLOPS for row in drawn)
    assert all(4 * row.elements <= suites.MOST_BYTES for row in drawn)
    assert 0.1 < sum(row.core for row in rows) / len(rows) < 0.25
    assert len({row.id for row in rows}) == len(rows)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_attention_products_come_in_pairs(seed: int) -> None:
    rows = suites.rows("bmm", seed)
    for scores, context in zip(rows[::2], rows[1::2], strict=True):
        assert (scores.batch, scores.m) == (context.batch, context.m)
        assert (scores.n, scores.k) == (context.k, context.n)
        assert scores.k in suites.HEAD_DIMS
        assert scores.n >= scores.m


def test_seeds_differ_and_unknown_suites_are_refused() -> None:
    assert suites.rows("gemm", 1) != suites.rows("gemm", 2)
    with pytest.raises(ValueError, match="no suite 'conv'"):
        suites.rows("conv")
