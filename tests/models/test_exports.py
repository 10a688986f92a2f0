"""Models exported on the spot, from opset 18 to 23, in fp32 and fp16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.corpus import exports
from tests.corpus.references import Float64Reference, outputs_of, plain_session

from . import battery

TAKEN: Mapping[str, Mapping[str, int]] = {
    "bert_op18": {"MatMul": 16, "Gemm": 1},
    "bert_op20_f16": {"MatMul": 16, "Gemm": 1},
    "vit_op18": {"MatMul": 16, "Gemm": 1, "Conv": 1},
    "resnet50_op18": {"Conv": 53},
    "mobilenet_op18": {"Conv": 52},
    "llama_op21": {"MatMul": 19},
    "llama_op23": {"MatMul": 15},
    "gpt2_op22": {"MatMul": 5, "Gemm": 8},
}


@pytest.fixture(scope="module", params=exports.ALL, ids=lambda export: export.id)
def export(request: pytest.FixtureRequest) -> exports.Export:
    chosen: exports.Export = request.param
    return chosen


@pytest.fixture(scope="module")
def rewritten(
    export: exports.Export, tmp_path_factory: pytest.TempPathFactory
) -> battery.Rewritten:
    return battery.rewrite_file(export.path(), tmp_path_factory.mktemp(export.id))


def test_every_product_is_taken(
    export: exports.Export, rewritten: battery.Rewritten, tmp_path: Path
) -> None:
    assert rewritten.taken_types == TAKEN[export.id]
    assert not rewritten.refused
    battery.check_valid(rewritten)
    battery.check_idempotent(rewritten, tmp_path)


def test_results_stay_the_same_bits(export: exports.Export, rewritten: battery.Rewritten) -> None:
    battery.check_without_library(rewritten, export.feeds())
    battery.check_session(rewritten, export.feeds())


def test_kernels_give_the_exact_values(export: exports.Export) -> None:
    """A whole model: the bound is that of one product times the products in its depth."""
    path, feed = export.path(), export.feeds()[0]
    (got,) = battery.interpreted(path, [feed])
    plain = outputs_of(plain_session(path), feed)
    limit = 5e-3 if export.half else 1e-5
    battery.check_outputs(got, Float64Reference(path)(feed), plain, limit)
