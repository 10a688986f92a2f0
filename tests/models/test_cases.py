"""The hand-written cases: rewritten, checked, run with and without the library and the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moonpoly_ort.graph_passes import pipeline
from numpy.typing import NDArray

import moonpoly_ort
from moonpoly_ort.sizing import all_nodes
from tests.corpus import cases
from tests.corpus.comparing import BFLOAT16, bound
from tests.corpus.interface import DOMAIN
from tests.corpus.references import Float64Reference, outputs_of, plain_session

from . import battery

_STATIC = tuple(case for case in cases.ALL if "static" in case.left.values())
_INTERPRETED = tuple(
    case
    for case in cases.ALL
    if case.taken
    and (case.runs if case.runs_with_library is None else case.runs_with_library)
    and case.id != "mm_flops_2e32"  # half a minute; a GPU runs it
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where rewritten models go: not beside the originals, so that data files have to move."""
    path = tmp_path / "out"
    path.mkdir()
    return path


def _id(case: cases.Case) -> str:
    return case.id


def _dtype(case: cases.Case) -> np.dtype[Any]:
    """The type that the products of a case are in, which decides how exact they are."""
    types = {_of(tensor) for tensor in case.weights.values()}
    narrow = [dtype for dtype in (BFLOAT16, np.dtype(np.float16)) if dtype in types]
    return narrow[0] if narrow else np.dtype(np.float32)


def _of(tensor: cases.Random | NDArray[np.generic]) -> np.dtype[Any]:
    return tensor.dtype


@pytest.mark.parametrize("case", cases.ALL, ids=_id)
def test_exactly_the_expected_nodes_are_taken(
    case: cases.Case, tmp_path: Path, folder: Path
) -> None:
    rewritten = battery.rewrite_file(case.save(tmp_path), folder)
    assert rewritten.taken_outputs == sorted(case.taken)
    reasons: dict[str, str] = {}
    for op_type, reason in rewritten.refused:
        assert reasons.setdefault(op_type, reason) == reason
    assert reasons == case.left
    battery.check_valid(rewritten)
    battery.check_idempotent(rewritten, folder)
    if not case.taken:
        assert rewritten.after.read_bytes() == rewritten.before.read_bytes()


@pytest.mark.parametrize("case", cases.ALL, ids=_id)
def test_one_rewrite_is_enough(case: cases.Case, tmp_path: Path) -> None:
    battery.check_fixed_point(case.save(tmp_path))


@pytest.mark.parametrize("case", [c for c in cases.ALL if c.runs], ids=_id)
def test_results_stay_the_same_bits(case: cases.Case, tmp_path: Path, folder: Path) -> None:
    rewritten = battery.rewrite_file(case.save(tmp_path), folder)
    feeds = list(case.inputs())
    battery.check_without_library(rewritten, feeds)
    battery.check_session(rewritten, feeds)


FUSED = {
    "mm_m0": ["MatMulBias"],
    "mm_add_rank3": ["MatMulBias"],
    "mm_add_second": ["MatMulBias"],
    "conv_empty_bias": ["Conv"],
    "gemm_id_transpose": ["MatMulBias"],
    "mm_scale_add_gelu": ["ScaledMatMulBiasGelu"],
    "names_dup": ["MatMul", "MatMulRelu"],
    "unsorted": ["MatMulBias"],
    "fp16_mixed": ["MatMulBiasToFloat"],
    "bf16": ["MatMulToFloat"],
}
"""Cases in which something is fused, and into what; in the others nothing may be."""

MISSED = {
    "mm_add_up": ["residual: shape-unproven"],
    "mm_add_second": ["activation: other-readers", "residual: other-readers"],
    "mm_is_output": ["bias: other-readers"],
    "gemm_id_transpose": ["transpose: form-unknown"],
    "conv_add_group": ["residual: shape-unproven"],
    "conv_relu_fanout": ["activation: other-readers", "residual: other-readers"],
}


@pytest.mark.parametrize("case", cases.ALL, ids=_id)
def test_exactly_the_expected_nodes_are_fused(
    case: cases.Case, tmp_path: Path, folder: Path
) -> None:
    path, after = case.save(tmp_path), folder / "fused.onnx"
    result = moonpoly_ort.rewrite(path, after, rules=battery.FUSING_RULES)
    fusing = {fusion.name for fusion in pipeline.FUSIONS}
    entries = [entry for entry in result.report if entry.rule in fusing]
    missed = [f"{entry.rule}: {entry.reason}" for entry in entries if not entry.taken]
    assert missed == MISSED.get(case.id, [])
    ours = sorted(n.op_type for n in all_nodes(result.model.graph.node) if n.domain == DOMAIN)
    if case.id in FUSED:
        assert ours == FUSED[case.id]
    inside = [entry for entry in entries if entry.taken and entry.where.startswith("function")]
    assert bool(inside) == (case.id == "functions")
    assert any(entry.taken for entry in entries) == (case.id in FUSED or bool(inside))
    again = moonpoly_ort.rewrite(after, folder / "again.onnx", rules=battery.FUSING_RULES)
    assert not again.taken
    assert (folder / "again.onnx").read_bytes() == after.read_bytes()
    if not case.runs:
        return
    before, fused = plain_session(path), plain_session(after)
    for feed in case.inputs():
        wanted = outputs_of(before, feed)
        limit = 2e-2 if _dtype(case) == BFLOAT16 else 1e-2 if _dtype(case) == np.float16 else 1e-5
        battery.check_outputs(outputs_of(fused, feed), wanted, wanted, limit)


@pytest.mark.parametrize("case", _INTERPRETED, ids=_id)
def test_kernels_give_the_exact_values(case: cases.Case, tmp_path: Path) -> None:
    path, feeds = case.save(tmp_path), list(case.inputs())
    k = battery.largest_k(case.model(), feeds)
    limit = bound(_dtype(case), "ieee", k) * len(case.taken)
    exact = Float64Reference(path)
    plain = plain_session(path) if case.runs else None
    for feed, got in zip(feeds, battery.interpreted(path, feeds), strict=True):
        battery.check_outputs(got, exact(feed), plain and outputs_of(plain, feed), limit)


@pytest.mark.parametrize("case", _STATIC, ids=_id)
def test_static_nodes_are_taken_on_demand(case: cases.Case, tmp_path: Path, folder: Path) -> None:
    rewritten = battery.rewrite_file(case.save(tmp_path), folder, static=True)
    products = [node for node in rewritten.original.graph.node if node.op_type in case.left]
    assert rewritten.taken_outputs == sorted(node.output[0] for node in products)
    assert not rewritten.refused
    battery.check_valid(rewritten)
    battery.check_idempotent(rewritten, folder, static=True)
    battery.check_without_library(rewritten, list(case.inputs()))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"disable": ["matmul"]}, []),
        ({"rules": ["gemm"]}, []),
        ({"rules": ["matmul"]}, ["o1", "t"]),
    ],
)
def test_rules_can_be_chosen(
    options: Mapping[str, list[str]], taken: list[str], tmp_path: Path, folder: Path
) -> None:
    path = cases.get("if_capture").save(tmp_path)
    rewritten = battery.rewrite_file(path, folder, **{"rules": None, **options})
    assert rewritten.taken_outputs == taken
    assert rewritten.refused == ({} if taken else {("MatMul", "disabled"): 2})


def test_external_data_moves_with_the_model(tmp_path: Path, folder: Path) -> None:
    case = cases.get("external")
    rewritten = battery.rewrite_file(case.save(tmp_path), folder)
    feed = next(case.inputs())
    want = outputs_of(plain_session(rewritten.before), feed)
    (tmp_path / "external.data").unlink()
    got = outputs_of(plain_session(rewritten.after), feed)
    assert np.array_equal(got["y"], want["y"])
    assert np.isfinite(got["y"]).all()


def test_missing_external_data_is_named(tmp_path: Path, folder: Path) -> None:
    path = cases.get("external").save(tmp_path)
    (tmp_path / "external.data").unlink()
    with pytest.raises(moonpoly_ort.ModelError, match=r"external\.data"):
        moonpoly_ort.rewrite(path, folder / "rewritten.onnx")
    assert not list(folder.iterdir())
