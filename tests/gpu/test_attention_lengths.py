"""Attention behind a cache on CUDA, at lengths that the memory-efficient kernel refuses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from moonpoly_ort.graph_passes import aligned_keys
from onnx import TensorProto, helper

import moonpoly_ort

pytestmark = pytest.mark.gpu
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
HEADS, SIZE = 2, 64


def model() -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    width = HEADS * SIZE
    keys = ["batch", HEADS, "total", SIZE]
    inputs = [
        info("q", TensorProto.FLOAT16, ["batch", "length", width]),
        *(info(name, TensorProto.FLOAT16, keys) for name in "kv"),
        info("mask", TensorProto.FLOAT16, ["batch", 1, "length", "total"]),
    ]
    operands = ["q", "k", "v", "", "", "mask"]
    node = helper.make_node(
        "MultiHeadAttention", operands, ["y"], domain="com.microsoft", num_heads=HEADS
    )
    outputs = [info("y", TensorProto.FLOAT16, ["batch", "length", width])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(batch: int, length: int, total: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length, total])
    masked = rng.random((batch, 1, length, total)) < 0.3
    masked[..., 0] = False
    values = {
        "q": rng.standard_normal((batch, length, HEADS * SIZE)),
        "k": rng.standard_normal((batch, HEADS, total, SIZE)),
        "v": rng.standard_normal((batch, HEADS, total, SIZE)),
        "mask": np.where(masked, -65504.0, 0.0),
    }
    return {name: value.astype(np.float16) for name, value in values.items()}


def attention(feed: dict[str, np.ndarray]) -> np.ndarray:
    """In float64."""
    q, k, v, mask = (feed[name].astype(np.float64) for name in ("q", "k", "v", "mask"))
    batch, length, width = q.shape
    q = q.reshape(batch, length, HEADS, SIZE).swapaxes(1, 2)
    scores = q @ k.swapaxes(2, 3) / np.sqrt(SIZE) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(batch, length, width)


@pytest.mark.parametrize("padded", [False, True])
def test_any_number_of_keys(padded: bool) -> None:
    proto = model()
    if padded:
        assert aligned_keys.pad(proto) == 1
    session = moonpoly_ort.InferenceSession(
        proto.SerializeToString(), providers=CUDA, backend="cuda"
    )
    for batch, length, total in ((1, 8, 21), (2, 8, 24), (3, 16, 17), (2, 1, 21), (1, 5, 8)):
        feed = feeds(batch, length, total)
        (got,) = session.run(None, feed)
        np.testing.assert_allclose(got.astype(np.float64), attention(feed), atol=4e-3)
