"""Attention of com.microsoft, unpacked: op list, equality, and the forms that must stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import unpacked_attention
from onnx import TensorProto, helper, numpy_helper

HEADS, COLUMNS = 2, 8


def model(
    *, concat: bool, biased: bool = True, masked: bool = True, opset: int = 18, **attributes: Any
) -> onnx.ModelProto:
    """One Attention on x of [batch, length, 6]; its weight packed by a Concat, or for good."""
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal((6, COLUMNS)).astype(np.float32) for _ in range(3)]
    bias = rng.standard_normal(3 * COLUMNS).astype(np.float32)
    nodes = []
    if concat:
        weights = {f"w{i}": part for i, part in enumerate(parts)}
        nodes.append(helper.make_node("Concat", list(weights), ["w"], axis=1))
    else:
        weights = {"w": np.concatenate(parts, axis=1)}
    if biased:
        weights["b"] = bias
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 6])]
    operands = ["x", "w", "b" if biased else ""]
    if masked:
        shape = ["batch", 1, "length", "length"]
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, shape))
        operands += ["", "", "mask"]
    nodes.append(
        helper.make_node(
            "Attention", operands, ["y"], "attention", domain="com.microsoft", num_heads=HEADS,
            **attributes,
        )
    )  # fmt: skip
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", COLUMNS])
    graph = helper.make_graph(
        nodes, "g", inputs, [output], [numpy_helper.from_array(v, k) for k, v in weights.items()]
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def result(proto: onnx.ModelProto, batch: int, length: int, masked: bool) -> np.ndarray:
    rng = np.random.default_rng([batch, length])
    feed = {"x": rng.standard_normal((batch, length, 6)).astype(np.float32)}
    if masked:
        feed["mask"] = np.where(rng.random((batch, 1, length, length)) < 0.3, -1e4, 0).astype("f4")
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


@settings(max_examples=30, deadline=None)
@given(
    concat=st.booleans(), biased=st.booleans(), masked=st.booleans(), scale=st.booleans(),
    causal=st.booleans(), batch=st.integers(1, 3), length=st.integers(1, 9),
)  # fmt: skip
def test_results_are_equal(
    concat: bool, biased: bool, masked: bool, scale: bool, causal: bool, batch: int, length: int
) -> None:
    attributes = {"unidirectional": int(causal)} | ({"scale": 0.3} if scale else {})
    proto = model(concat=concat, biased=biased, masked=masked, **attributes)
    want = result(proto, batch, length, masked)
    assert unpacked_attention.unpack(proto) == 1
    ops = Counter(node.op_type for node in proto.graph.node)
    products = {"MatMul": 3} if concat else {"MatMul": 1, "Split": 1}
    assert ops == {**products, "MultiHeadAttention": 1}
    onnx.checker.check_model(proto)
    np.testing.assert_allclose(result(proto, batch, length, masked), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"concat": False, "opset": 12}, id="Split takes no sizes yet"),
        pytest.param({"concat": False, "qkv_hidden_sizes": [8, 8, 4]}, id="other sizes"),
        pytest.param({"concat": True, "do_rotary": 1}, id="rotary embedding"),
    ],
)
def test_what_must_stay(change: dict[str, Any]) -> None:
    proto = model(**change)
    before = proto.SerializeToString()
    assert unpacked_attention.unpack(proto) == 0
    assert proto.SerializeToString() == before


def test_a_mask_of_lengths_stays() -> None:
    proto = model(concat=True, masked=False)
    proto.graph.node[-1].input.append("lengths")
    proto.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["batch"]))
    assert unpacked_attention.unpack(proto) == 0
