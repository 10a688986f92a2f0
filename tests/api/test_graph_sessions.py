"""`InferenceSession(cuda_graphs=...)` where graphs are not to be had, and what asks for them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from moonpoly_ort import ArgumentError, GraphLimits, InferenceSession
from moonpoly_ort.graph_runs import capturing

CPU = ["CPUExecutionProvider"]
CUDA = "CUDAExecutionProvider"
REFUSAL = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the CUDA Graph feature as requested "
    "by the user as the model has control flow nodes which can't be supported by CUDA Graphs."
)


class Refusal(Exception):
    pass


def test_without_cuda_it_runs_and_says_so(model: Path, x: np.ndarray, caplog) -> None:
    with caplog.at_level(logging.WARNING, "moonpoly_ort"):
        session = InferenceSession(model, providers=CPU, cuda_graphs=4)
    (want,) = ort.InferenceSession(model, providers=CPU).run(None, {"x": x})
    for _ in range(3):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], want)
    assert any("no CUDA graphs" in record.message for record in caplog.records)
    session.io_binding().bind_output("y")  # onnxruntime's own, which takes everything


def test_a_number_of_graphs_is_wanted(model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cuda_graphs = -3; accepted: 0"):
        InferenceSession(model, providers=CPU, cuda_graphs=-3)


@pytest.mark.parametrize(
    ("providers", "provider_options"),
    [
        ([CUDA, *CPU], None),
        ([(CUDA, {"device_id": 1}), *CPU], None),
        ([CUDA, *CPU], [{"device_id": 1}, {}]),
    ],
)
def test_capture_is_turned_on_for_cuda_alone(providers: Any, provider_options: Any) -> None:
    cuda, cpu = capturing(providers, provider_options)
    assert cuda[0] == CUDA
    assert cuda[1].pop("enable_cuda_graph") == "1"
    assert cuda[1] in ({}, {"device_id": 1})
    assert cpu == (CPU[0], {})
    if isinstance(providers[0], tuple):
        assert providers[0][1] == {"device_id": 1}  # the caller's own stays as it was


@pytest.mark.parametrize("message", [REFUSAL, "out of memory"])
def test_a_model_that_cannot_be_captured_runs_without(
    model: Path, x: np.ndarray, message: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    asked = []
    make = ort.InferenceSession.__init__

    def init(self: Any, source: Any, options: Any, providers: Any, own: Any, **kwargs: Any) -> None:
        asked.append([entry for entry in providers if isinstance(entry, tuple)])
        if asked[-1]:
            raise Refusal(message)
        make(self, source, options, CPU, None, **kwargs)

    monkeypatch.setattr(ort.InferenceSession, "__init__", init)
    if message != REFUSAL:
        with pytest.raises(Refusal):
            InferenceSession(model, providers=[CUDA, *CPU], cuda_graphs=GraphLimits(2))
        return
    session = InferenceSession(model, providers=[CUDA, *CPU], cuda_graphs=GraphLimits(2))
    assert [bool(tuples) for tuples in asked] == [True, False]
    assert "no CUDA graphs for this model" in caplog.text
    assert session.run(None, {"x": x})[0].shape[0] == x.shape[0]
