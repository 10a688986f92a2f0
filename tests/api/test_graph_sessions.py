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
REFUSALS = (
    # of 1.31 and 1.32
    "This session cannot use the graph capture feature as requested by the user as the model has "
    "control flow nodes which can't be supported by CUDAExecutionProvider",
    "This session cannot use the graph capture feature as requested by the user  as all compute "
    "graph nodes have not been partitioned to the CUDAExecutionProvider",
    "This session cannot use the graph capture feature as requested by the user as all the graph "
    "nodes have not been assigned to CUDAExecutionProvider",
    # of earlier versions
    "This session cannot use the CUDA Graph feature as requested by the user as the model has "
    "control flow nodes which can't be supported by CUDA Graphs.",
)
OTHERS = (
    "CUDA failure 2: out of memory",
    "This session will use the graph capture feature as requested by the user",
    "Load model failed: this graph cannot use the operator",
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


def refusing_capture(monkeypatch: pytest.MonkeyPatch, message: str) -> list[bool]:
    """Makes onnxruntime refuse sessions that capture, and run others on the CPU; returns where it
    notes of each session that is asked for whether it captures.
    """
    asked = []
    make = ort.InferenceSession.__init__

    def init(self: Any, source: Any, options: Any, providers: Any, own: Any, **kwargs: Any) -> None:
        asked.append(any(isinstance(entry, tuple) for entry in providers))
        if asked[-1]:
            raise Refusal(f"[ONNXRuntimeError] : 1 : FAIL : {message}")
        make(self, source, options, CPU, None, **kwargs)

    monkeypatch.setattr(ort.InferenceSession, "__init__", init)
    return asked


@pytest.mark.parametrize("message", REFUSALS)
def test_a_model_that_cannot_be_captured_runs_without(
    model: Path, x: np.ndarray, message: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    (want,) = ort.InferenceSession(model, providers=CPU).run(None, {"x": x})
    asked = refusing_capture(monkeypatch, message)
    session = InferenceSession(model, providers=[CUDA, *CPU], cuda_graphs=GraphLimits(2))
    assert asked == [True, False]
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-4, atol=1e-4)
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(said) == 1
    assert "no CUDA graphs for this model" in said[0]
    assert message in said[0]


@pytest.mark.parametrize("message", OTHERS)
def test_other_errors_are_not_taken_for_that(
    model: Path, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refusing_capture(monkeypatch, message)
    with pytest.raises(Refusal, match=message):
        InferenceSession(model, providers=[CUDA, *CPU], cuda_graphs=GraphLimits(2))
    assert asked == [True]
