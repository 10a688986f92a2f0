"""Graphs over shapes on a GPU; `benchmarks/checks_graphs.py` checks more, and measures."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import moonpoly_ort

pytestmark = pytest.mark.gpu
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[rows, 40] x) => (float[rows, 24] y) <float[40, 24] w = {%s}> { y = MatMul(x, w) }
"""


def test_shapes_that_repeat_are_replayed() -> None:
    numbers = ", ".join(f"{x:.6f}" for x in np.random.default_rng(0).standard_normal(960))
    model = onnx.parser.parse_model(TEXT % numbers).SerializeToString()
    eager = moonpoly_ort.InferenceSession(model, providers=CUDA, backend="cuda")
    session = moonpoly_ort.InferenceSession(model, providers=CUDA, backend="cuda", cuda_graphs=2)
    kept = []
    for seed in range(6):
        for rows in (3, 70):
            x = np.random.default_rng(seed).standard_normal((rows, 40), np.float32)
            kept.append((session.run(None, {"x": x})[0], eager.run(None, {"x": x})[0]))
    assert len(session._graphs.policy.ids) == 2
    for got, want in kept:
        np.testing.assert_array_equal(got, want)


def test_memory_that_the_arena_would_give_is_refused() -> None:
    numbers = ", ".join(["0.5"] * 960)
    model = onnx.parser.parse_model(TEXT % numbers).SerializeToString()
    session = moonpoly_ort.InferenceSession(model, providers=CUDA, backend="cuda", cuda_graphs=2)
    binding = session.io_binding()
    x = ort.OrtValue.ortvalue_from_numpy(np.ones((3, 40), np.float32), "cuda", 0)
    binding.bind_ortvalue_input("x", x)
    binding.bind_output("y", "cuda")
    with pytest.raises(moonpoly_ort.ArgumentError, match="output 'y'"):
        session.run_with_iobinding(binding)
