"""The CUDA provider with the library registered; `benchmarks/validate_gpu.py` checks far more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import moonpoly_ort

pytestmark = pytest.mark.gpu
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
MLP = """
<ir_version: 8, opset_import: ["" : 17]>
mlp (float[rows, 40] x) => (float[rows, 24] y)
<float[40, 72] v = {%s}, float[72, 24] w = {%s}, float[24] c = {%s}>
{
    h = MatMul(x, v)
    g = Relu(h)
    y = Gemm <alpha = 0.5> (g, w, c)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(n) / 8 for n in (40 * 72, 72 * 24, 24))
    text = MLP % tuple(", ".join(f"{x:.6f}" for x in values) for values in weights)
    path = tmp_path / "mlp.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.parametrize(("precision", "limit"), [("tf32", 2e-3), ("ieee", 1e-5)])
def test_every_size_equals_the_cpu(model: Path, precision: str, limit: float) -> None:
    ours = moonpoly_ort.InferenceSession(model, providers=CUDA, backend="cuda", precision=precision)  # type: ignore[arg-type]
    assert ours.moonpoly_backend == "cuda"
    assert [entry.taken for entry in ours.moonpoly_report or ()] == [True, True]
    plain = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    for rows in (1, 7, 64, 333, 0):
        x = np.random.default_rng(rows).standard_normal((rows, 40), np.float32)
        (want,), (got,) = plain.run(None, {"x": x}), ours.run(None, {"x": x})
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


def test_a_graph_is_captured_and_replayed(model: Path) -> None:
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    session = moonpoly_ort.InferenceSession(model, providers=providers, backend="cuda")
    binding = session.io_binding()
    x = ort.OrtValue.ortvalue_from_numpy(np.zeros((5, 40), np.float32), "cuda", 0)
    y = ort.OrtValue.ortvalue_from_numpy(np.zeros((5, 24), np.float32), "cuda", 0)
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    plain = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    for seed in range(4):  # warm-up, capture, replays with other contents
        values = np.random.default_rng(seed).standard_normal((5, 40), np.float32)
        x.update_inplace(values)
        session.run_with_iobinding(binding)
        (want,) = plain.run(None, {"x": values})
        assert np.linalg.norm(y.numpy() - want) <= 2e-3 * np.linalg.norm(want)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[a, b] x, float[c, d] w) => (float[e, f] y) { y = MatMul(x, w) }
    """
    path = tmp_path / "g.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    session = moonpoly_ort.InferenceSession(path, providers=CUDA, backend="cuda")
    x, w = np.zeros((2, 3), np.float32), np.zeros((4, 5), np.float32)
    with pytest.raises(Exception, match="3 and 4"):
        session.run(None, {"x": x, "w": w})
