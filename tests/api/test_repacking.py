"""Constant weights with unaligned rows: sessions with and without repacking, and `explain`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

import moonpoly_ort
from moonpoly_ort import explain

pytest.importorskip("torch")


def product(n: int, k: int, element: str = "float", trans_b: int = 0) -> ModelProto:
    """y = x @ w, x of any height, w a constant of K x N, or N x K for Gemm with transB."""
    op = f"Gemm<transB = {trans_b}>(x, w)" if trans_b else "MatMul(x, w)"
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({element}[m, {k}] x) => ({element}[m, {n}] y)'
        f"{{ y = {op} }}"
    )
    dtype = np.float32 if element == "float" else np.float16
    weight = np.random.default_rng(n + k).standard_normal((n, k) if trans_b else (k, n))
    model.graph.initializer.append(numpy_helper.from_array(weight.astype(dtype), "w"))
    return model


def run(model: ModelProto, x: np.ndarray[Any, Any], repack: str) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.add_session_config_entry("moonpoly.repack", repack)
    session = moonpoly_ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"],
        backend="interpreter",
    )  # fmt: skip
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize("element", ["float", "float16"])
@pytest.mark.parametrize(
    ("m", "n", "k", "trans_b"),
    [(33, 75, 200, 0), (5, 3, 1001, 0), (70, 30, 77, 1), (1, 45, 64, 0), (9, 1, 50, 0)],
)
def test_a_repacked_weight_gives_what_the_stored_one_does(
    element: str, m: int, n: int, k: int, trans_b: int
) -> None:
    model = product(n, k, element, trans_b)
    x = np.random.default_rng(m).standard_normal((m, k))
    x = x.astype(np.float32 if element == "float" else np.float16)
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = plain.run(None, {"x": x})
    for repack in "01":
        got = run(model, x, repack).astype(np.float64)
        error = np.linalg.norm(got - np.asarray(want).astype(np.float64))
        assert error <= 2e-3 * np.linalg.norm(np.asarray(want).astype(np.float64))


def test_explain_says_what_is_repacked_and_copied() -> None:
    (plan,) = explain(product(1001, 2048, "float16"), {"m": 64}, gpu="H200")
    assert (plan.repacked, plan.copies) == (True, ())
    assert "b repacked" in str(explain(product(1001, 2048, "float16"), {"m": 64}, gpu="H200"))
    (plan,) = explain(product(1000, 2047, "float16"), {"m": 4096}, gpu="H200")
    assert (plan.repacked, plan.copies) == (False, ("a",))
    (plan,) = explain(product(1024, 2048, "float16"), {"m": 64}, gpu="H200")
    assert (plan.repacked, plan.copies) == (False, ())
    # Aligned, but rows of B end within a line of 128 bytes.
    (plan,) = explain(product(1000, 2048, "float16"), {"m": 1160}, gpu="H200")
    assert (plan.repacked, plan.copies) == (True, ())
