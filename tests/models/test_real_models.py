"""Published models: text detection and recognition, sentence embedding, voice activity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest

import moonpoly_ort
from tests.corpus import wheels
from tests.corpus.comparing import relative_error
from tests.corpus.references import Float64Reference, outputs_of, plain_session

from . import battery

# How many nodes are taken, and how many candidates are left for which reason.
EXPECTED: Mapping[str, tuple[Mapping[str, int], Mapping[tuple[str, str], int]]] = {
    "pp_ocr_v4_det": ({"Conv": 62, "ConvTranspose": 2}, {}),
    "pp_ocr_v4_rec": ({"MatMul": 13, "Conv": 38}, {}),
    "pp_ocr_v2_cls": ({"MatMul": 1, "Conv": 53}, {}),
    "minilm_int8": ({"MatMul": 48}, {}),
    "silero_vad": ({"Conv": 12}, {}),
    "silero_vad_op18": ({"Gemm": 4, "Conv": 12}, {}),
}


@pytest.fixture(scope="module", params=wheels.ALL, ids=lambda model: model.id)
def model(request: pytest.FixtureRequest) -> wheels.WheelModel:
    chosen: wheels.WheelModel = request.param
    return chosen


@pytest.fixture(scope="module")
def rewritten(
    model: wheels.WheelModel, tmp_path_factory: pytest.TempPathFactory
) -> battery.Rewritten:
    return battery.rewrite_file(model.path(), tmp_path_factory.mktemp(model.id))


def test_the_expected_nodes_are_taken(
    model: wheels.WheelModel, rewritten: battery.Rewritten, tmp_path: Path
) -> None:
    assert (rewritten.taken_types, rewritten.refused) == EXPECTED[model.id]
    battery.check_valid(rewritten)
    battery.check_idempotent(rewritten, tmp_path)
    battery.check_fixed_point(rewritten.before)


def test_results_stay_the_same_bits(model: wheels.WheelModel, rewritten: battery.Rewritten) -> None:
    battery.check_without_library(rewritten, list(model.feeds()))
    battery.check_session(rewritten, list(model.feeds()))
    # Detection amplifies the last bits: its outputs for noise are next to nothing.
    if model is not wheels.PP_OCR_DETECTION:
        battery.check_fused(rewritten, list(model.feeds()), 1e-5)


@pytest.mark.parametrize(
    ("model", "folded"),
    [
        (wheels.PP_OCR_DETECTION, 2),  # a third one is not behind a convolution
        (wheels.PP_OCR_RECOGNITION, 6),
        (wheels.PP_OCR_DIRECTION, 35),
    ],
    ids=lambda value: value.id if isinstance(value, wheels.WheelModel) else "",
)
def test_normalizations_are_folded(model: wheels.WheelModel, folded: int) -> None:
    """As far from the exact outputs as before; detection amplifies noise, so far is relative."""
    path = model.path()
    result = moonpoly_ort.rewrite(path, rules=[*battery.ALL_RULES, battery.FOLDING])
    entries = [entry for entry in result.report if entry.rule == battery.FOLDING]
    assert [entry.taken for entry in entries] == [True] * folded
    onnx.checker.check_model(result.model, full_check=True)
    before, after, exact = plain_session(path), plain_session(result.model), Float64Reference(path)
    for feed in model.feeds():
        wanted, got, own = exact(feed), outputs_of(after, feed), outputs_of(before, feed)
        for name, value in got.items():
            error = relative_error(own[name], wanted[name])
            assert relative_error(value, wanted[name]) <= 1.5 * error + 1e-6


def test_kernels_give_the_exact_values(model: wheels.WheelModel) -> None:
    """Every product, those inside branches too, in fp32's own accuracy, which is little for
    detection, whose outputs for noise are next to nothing. By TF32, to which packed weights of
    convolutions are rounded, the outputs would be off by 1e-4 to 1e-3.
    """
    path, feed = model.path(), model.inputs(*model.smallest)
    (got,) = battery.interpreted(path, [feed])
    plain, exact = outputs_of(plain_session(path), feed), Float64Reference(path)(feed)
    own = max(relative_error(plain[name], exact[name]) for name in exact)
    battery.check_outputs(got, exact, plain, max(1e-5, 1.5 * own))
