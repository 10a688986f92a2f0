"""The float64 reference against results known otherwise, and the cases against what they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from . import cases, node_tests
from .comparing import require_close
from .references import Float64Reference, outputs_of, plain_session


@pytest.mark.parametrize("test", node_tests.collect(), ids=lambda test: test.id)
def test_reference_agrees_with_the_node_tests(test: node_tests.NodeTest) -> None:
    for model in (test.model, test.dynamic()):
        outputs = Float64Reference(model)(test.feed)
        require_close(outputs, test.expected, 1e-6)
        assert {value.dtype for value in outputs.values()} == {np.dtype(np.float64)}


def test_all_node_tests_are_there() -> None:
    found = [test.operator for test in node_tests.collect()]
    assert found.count("MatMul") >= 7
    assert found.count("Gemm") >= 11


@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_cases_are_what_they_claim(case: cases.Case, tmp_path: Path) -> None:
    path = case.save(tmp_path)
    if case.checker:
        onnx.checker.check_model(path)
    else:
        with pytest.raises(onnx.checker.ValidationError):
            onnx.checker.check_model(path)
    feeds = list(case.inputs())
    if not case.runs:
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            [outputs_of(plain_session(path), feed) for feed in feeds]
        return
    session, reference = plain_session(path), Float64Reference(path)
    for feed in feeds:
        require_close(outputs_of(session, feed), reference(feed), 2e-3)


def test_cases_have_ids_of_their_own() -> None:
    assert len({case.id for case in cases.ALL}) == len(cases.ALL) == 45


def test_reference_of_old_batch_normalization_is_inference() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 12]>
        g (float[N,2,L] x) => (float[N,2,L] y) <float[2] s = {2.0, 3.0}, float[2] b = {1.0, 0.0},
            float[2] mean = {0.5, 0.0}, float[2] var = {4.0, 1.0}> {
            y = BatchNormalization <epsilon = 0.0> (x, s, b, mean, var)
        }""")
    x = np.array([[[1, 2], [3, 4]]], np.float32)
    assert Float64Reference(model)({"x": x})["y"].tolist() == [[[1.5, 2.5], [9, 12]]]
