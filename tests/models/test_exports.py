"""Models exported on the spot, from opset 18 to 23, in fp32 and fp16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest

import moonpoly_ort
from tests.corpus import exports
from tests.corpus.interface import DOMAIN
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
    "modernbert_op18": {"MatMul": 12},
    "phi3_op21": {"MatMul": 13},
    "gpt2_op22": {"MatMul": 5, "Gemm": 8},
}

_BERT = {
    "MatMul": 2, "MatMulTransposed": 2, "MatMulBias": 6, "MatMulBiasAdd": 4, "MatMulBiasGelu": 2,
    "GemmTanh": 1,
}  # fmt: skip

FUSED: Mapping[str, Mapping[str, int]] = {
    "bert_op18": _BERT,
    "bert_op20_f16": _BERT,
    "vit_op18": {**_BERT, "ConvNoBias": 1},
    "resnet50_op18": {"ConvNoBiasRelu": 33, "ConvNoBiasAddRelu": 16, "ConvNoBias": 4},
    "mobilenet_op18": {"ConvNoBiasClip": 35, "ConvNoBiasAdd": 10, "ConvNoBias": 7},
    "llama_op21": {
        "MatMul": 9, "ScaledMatMul": 2, "MatMulAdd": 4, "MatMulGatedSilu": 2,
    },
    "llama_op23": {"MatMul": 7, "MatMulAdd": 4, "MatMulGatedSilu": 2},
    "modernbert_op18": {
        "MatMul": 4, "MatMulTransposed": 2, "MatMulAdd": 4, "MatMulGatedGelu": 2,
    },
    "phi3_op21": {"MatMul": 5, "ScaledMatMul": 2, "MatMulAdd": 4, "MatMulGatedSilu": 2},
    "gpt2_op22": {
        "MatMul": 5, "MatMulTransposed": 2, "MatMulGeluTanh": 2, "MatMulAdd": 2, "Gemm": 2,
    },
}  # fmt: skip
"""The operators of the nodes that the fusing rules make. A new GPT-2 has biases of 0, left out."""


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
    battery.check_fixed_point(export.path())


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


@pytest.mark.parametrize("name", ["resnet50_op18", "mobilenet_op18"])
def test_residual_blocks_need_no_recorded_shapes(name: str) -> None:
    (export,) = [export for export in exports.ALL if export.id == name]
    model = onnx.load(export.path())
    del model.graph.value_info[:]
    result = moonpoly_ort.rewrite(model, rules=battery.FUSING_RULES)
    ours = [node for node in result.model.graph.node if node.domain == DOMAIN]
    assert Counter(node.op_type for node in ours) == FUSED[name]


def test_what_follows_a_product_is_fused_into_it(export: exports.Export, tmp_path: Path) -> None:
    path = tmp_path / "fused.onnx"
    result = moonpoly_ort.rewrite(export.path(), path, rules=battery.FUSING_RULES)
    ours = [node for node in result.model.graph.node if node.domain == DOMAIN]
    assert Counter(node.op_type for node in ours) == FUSED[export.id]
    onnx.checker.check_model(path, full_check=True)
    assert not moonpoly_ort.rewrite(path, rules=battery.FUSING_RULES).taken
    before, after = plain_session(export.path()), plain_session(path)
    for feed in export.feeds():
        wanted, got = outputs_of(before, feed), outputs_of(after, feed)
        battery.check_outputs(got, wanted, wanted, 5e-3 if export.half else 1e-5)
