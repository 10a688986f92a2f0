"""Exports at reduced size through other projects' optimizers and then the rewrite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnxruntime
import pytest

import moonpoly_ort
from tests.corpus import exports
from tests.corpus.comparing import require_close
from tests.corpus.interface import DOMAIN, operators
from tests.corpus.references import outputs_of
from tests.corpus.unpacking import spelled_out

from . import battery

pytest.importorskip("onnxscript.rewriter.ort_fusions")

PRODUCTS = ("MatMul", "Gemm")
CPU = ["CPUExecutionProvider"]
EXPORTS = {export.id: export for export in exports.ALL}

# What the optimizers leave of the products, all of which the rewrite takes, and what they fuse.
ATTENTION = {"Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2}
UNPACKED = {"MultiHeadAttention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2}
ROTATED = {"MultiHeadAttention": 2, "SkipSimplifiedLayerNormalization": 4, "RotaryEmbedding": 4}
NORMALIZED = {"SkipLayerNormalization": 4, "BiasGelu": 2}
CASES: Mapping[tuple[str, str], tuple[Mapping[str, int], Mapping[str, int]]] = {
    ("bert_op18", "onnxscript"): ({"MatMul": 6, "Gemm": 1}, ATTENTION),
    ("bert_op18", "onnxscript-mha"): ({"MatMul": 8, "Gemm": 1}, UNPACKED),
    ("bert_op18", "ort"): ({"MatMul": 16, "Gemm": 1}, NORMALIZED),
    ("bert_op18", "onnxscript-packed"): ({"MatMul": 8, "Gemm": 1}, UNPACKED),
    ("bert_op18", "onnxscript-lean"): ({"MatMul": 6, "Gemm": 1}, ATTENTION),
    ("bert_op18", "ort-mha:bert"): ({"MatMul": 16, "Gemm": 1}, NORMALIZED),
    ("bert_op20_f16", "onnxscript"): ({"MatMul": 6, "Gemm": 1}, ATTENTION),
    ("bert_op20_f16", "ort"): ({"MatMul": 16, "Gemm": 1}, NORMALIZED),
    ("vit_op18", "onnxscript"): ({"MatMul": 6, "Gemm": 1}, ATTENTION),
    ("vit_op18", "auto"): ({"MatMul": 8, "Gemm": 1}, UNPACKED),
    ("vit_op18", "ort:vit"): ({"MatMul": 16, "Gemm": 1}, NORMALIZED),
    ("gpt2_op22", "ort:bert"): (
        {"MatMul": 5, "Gemm": 8},
        {"SkipLayerNormalization": 4, "FastGelu": 2},
    ),
    ("llama_op21", "onnxscript"): (
        {"MatMul": 15},
        {"MultiHeadAttention": 2, "SkipSimplifiedLayerNormalization": 4},
    ),
    ("llama_op21", "auto"): ({"MatMul": 15}, ROTATED),
    ("phi3_op21", "auto"): ({"MatMul": 9}, ROTATED),
    ("modernbert_op18", "auto"): (
        {"MatMul": 8},
        {"MultiHeadAttention": 2, "RotaryEmbedding": 4, "Gelu": 2},
    ),
    ("vit_op18", "onnxscript-packed"): ({"MatMul": 8, "Gemm": 1}, UNPACKED),
    ("llama_op21", "onnxscript-mha"): ({"MatMul": 15}, ROTATED),
    ("llama_op21", "onnxscript-packed"): ({"MatMul": 11}, ROTATED),
    ("resnet50_op18", "auto"): ({}, {}),  # nothing of it is theirs
}


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[exports.Export, str]:
    export, how = request.param
    return EXPORTS[export], how


def counted(result: moonpoly_ort.RewriteResult) -> Counter[tuple[str, str]]:
    return Counter(operators(result.model))


def test_every_product_left_is_taken(case: tuple[exports.Export, str]) -> None:
    export, how = case
    taken, fused = CASES[export.id, how]
    result = moonpoly_ort.rewrite(export.path(), optimize=how, rules=battery.ALL_RULES)
    found = counted(result)
    assert {name: found[DOMAIN, name] for name in PRODUCTS if found[DOMAIN, name]} == taken
    assert {name: n for (domain, name), n in found.items() if domain == "com.microsoft"} == fused
    assert not [e for e in result.report if not e.taken and e.op_type in PRODUCTS]


def test_what_the_optimizers_leave_behind_products_is_fused(
    case: tuple[exports.Export, str],
) -> None:
    export, how = case
    _, fused = CASES[export.id, how]
    found = counted(moonpoly_ort.rewrite(export.path(), optimize=how))
    theirs = {name: n for (domain, name), n in found.items() if domain == "com.microsoft"}
    kept = {name: n for name, n in fused.items() if name not in ("BiasGelu", "FastGelu", "Gelu")}
    assert theirs == kept
    gelus = sum(fused.values()) - sum(kept.values())
    ours = [n for (domain, name), n in found.items() if domain == DOMAIN and "Gelu" in name]
    assert sum(ours) == gelus


def test_results_and_interface_are_the_unmodified_model_s(
    case: tuple[exports.Export, str],
) -> None:
    export, how = case
    plain = onnxruntime.InferenceSession(export.path(), providers=CPU)
    if how.endswith("-packed"):  # a form that ONNX Runtime's CPU provider does not have
        packed = moonpoly_ort.rewrite(export.path(), optimize=how).model
        content = spelled_out(packed).SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=CPU)
    else:
        session = moonpoly_ort.InferenceSession(export.path(), providers=CPU, optimize=how)
    for method in ("get_inputs", "get_outputs"):
        ours = [(i.name, i.type, i.shape) for i in getattr(session, method)()]
        assert ours == [(i.name, i.type, i.shape) for i in getattr(plain, method)()]
    for feed in export.feeds():
        got, want = outputs_of(session, feed), outputs_of(plain, feed)
        require_close(got, want, 2e-3 if export.half else 1e-5)


def test_the_model_without_an_optimizer_keeps_its_own_attention() -> None:
    result = moonpoly_ort.rewrite(EXPORTS["bert_op18"].path(), rules=battery.ALL_RULES)
    found = counted(result)
    assert found[DOMAIN, "MatMul"] == 16
    assert not any(domain == "com.microsoft" for domain, _ in found)
