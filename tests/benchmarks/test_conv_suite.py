"""The suite of convolutions: the published seed, and what every seed keeps to."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from benchmarks import conv_suite

# SHA-256 of the CSV file of the seed that results are published with.
PUBLISHED = "98257a77ab57dfe704bccf14107e15e8a7d9dfdbbf32ae6343eceb36537ef6a9"


def test_the_published_seed(tmp_path: Path) -> None:
    conv_suite.write(conv_suite.rows(), tmp_path / "conv.csv")
    assert hashlib.sha256((tmp_path / "conv.csv").read_bytes()).hexdigest() == PUBLISHED
    assert sum(row.core for row in conv_suite.rows()) == 35
    assert conv_suite.rows(1) != conv_suite.rows(2)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_seed_keeps_the_layers(seed: int) -> None:
    rows = conv_suite.rows(seed)
    layers = Counter((row.net, row.layer) for row in rows)
    assert set(layers) <= {(n, layer) for n, some in conv_suite.NETWORKS.items() for layer in some}
    assert max(layers.values()) == conv_suite.DRAWS_PER_LAYER
    assert {row.kind for row in rows} == set(conv_suite.KINDS)
    for row in rows:
        assert row.h >= max(conv_suite.LEAST_HEIGHT, row.kernel)
        assert row.w >= row.kernel
        assert row.n * max(row.c_in, row.c_out) * row.h * row.w < conv_suite.MOST_ELEMENTS
    assert len({row.id for row in rows}) == len(rows)


@pytest.mark.parametrize("number", range(0, 240, 17))
def test_sizes_are_those_of_the_runtime(number: int) -> None:
    row = conv_suite.rows()[number]
    case = row.convolution("f16")
    assert case.problem().output == row.y_shape
    assert row.depth == case.c * row.kernel**2
    assert str(row).startswith(f"conv {row.id} {row.n}x{row.c_in}x")
