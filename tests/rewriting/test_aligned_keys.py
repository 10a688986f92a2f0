"""Keys of attention up to a multiple of 8 or 16: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equivalence import op_types, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import aligned_keys
from onnx import TensorProto, helper

HEADS, SIZE = 2, 4
MULTIPLE = 16  # of fp32


def model(
    *, layers: int = 1, keys: tuple[int | str, ...] = ("batch", HEADS, "total", SIZE),
    mask: tuple[int | str, ...] | None = ("batch", 1, "length", "total"), padding: bool = False,
    element: int = TensorProto.FLOAT, opset: int = 18,
) -> onnx.ModelProto:  # fmt: skip
    """Layers of attention to the same keys and values, the query of each what came before it."""
    info = helper.make_tensor_value_info
    inputs = [info("x0", element, ["batch", "length", HEADS * SIZE])]
    inputs += [info(name, element, keys) for name in "kv"]
    if mask is not None:
        inputs.append(info("mask", element, mask))
    if padding:
        inputs.append(info("padding", TensorProto.INT32, ["batch"]))
    operands = ["k", "v", "", "padding" if padding else "", "mask" if mask is not None else ""]
    while not operands[-1]:
        operands.pop()
    nodes = [
        helper.make_node(
            "MultiHeadAttention", [f"x{layer}", *operands], [f"x{layer + 1}"], f"layer {layer}",
            domain="com.microsoft", num_heads=HEADS,
        )
        for layer in range(layers)
    ]  # fmt: skip
    outputs = [info(f"x{layers}", element, ["batch", "length", HEADS * SIZE])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(batch: int, length: int, total: int, masked: str = "batch") -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length, total])
    rows = batch if masked == "batch" else 1
    seen = rng.random((rows, 1, length, total)) < 0.7
    seen[..., 0] = True
    lowest = np.finfo(np.float32).min
    return {
        "x0": rng.standard_normal((batch, length, HEADS * SIZE)).astype(np.float32),
        "k": rng.standard_normal((batch, HEADS, total, SIZE)).astype(np.float32),
        "v": rng.standard_normal((batch, HEADS, total, SIZE)).astype(np.float32),
        "mask": np.where(seen, 0, lowest).astype(np.float32),
    }


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 17), total=st.integers(1, 40),
    layers=st.integers(1, 2), flat=st.booleans(),
)  # fmt: skip
def test_results_are_equal(batch: int, length: int, total: int, layers: int, flat: bool) -> None:
    feed = feeds(batch, length, total)
    proto = model(layers=layers)
    if flat:
        proto = model(layers=layers, keys=("batch", "total", HEADS * SIZE))
        for name in "kv":
            feed[name] = feed[name].swapaxes(1, 2).reshape(batch, total, HEADS * SIZE)
    (want,) = run(proto, feed)
    assert aligned_keys.pad(proto) == layers
    onnx.checker.check_model(proto)
    attention = [node for node in proto.graph.node if node.op_type == "MultiHeadAttention"]
    for name in attention[-1].input[1:3]:
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    got, keys, values = run(proto, feed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for whole, name in ((keys, "k"), (values, "v")):
        assert whole.shape[-2] == -(-total // MULTIPLE) * MULTIPLE
        np.testing.assert_array_equal(whole[..., :total, :], feed[name])
        assert not whole[..., total:, :].any()


def test_a_mask_for_the_whole_batch() -> None:
    proto = model(mask=(1, 1, "length", "total"))
    feed = feeds(3, 5, 21, masked="one")
    (want,) = run(proto, feed)
    assert aligned_keys.pad(proto) == 1
    np.testing.assert_allclose(run(proto, feed)[0], want, rtol=1e-5, atol=1e-6)


def test_rows_that_see_nothing_stay_as_they_were() -> None:
    """Their keys are all masked by the lowest number alike: what is added must not join these."""
    proto = model()
    feed = feeds(1, 3, 5)
    feed["mask"][:, :, 1] = np.finfo(np.float32).min
    feed["x0"][:] = 0
    (want,) = run(proto, feed)
    aligned_keys.pad(proto)
    np.testing.assert_allclose(run(proto, feed)[0], want, rtol=1e-5, atol=1e-6)


def test_the_operators_that_are_left() -> None:
    """Layers share all that depends on lengths alone."""
    one, two = model(), model(layers=2)
    aligned_keys.pad(one)
    aligned_keys.pad(two)
    added = Counter(op_types(two))
    added.subtract(op_types(one))
    assert +added == {"com.microsoft.MultiHeadAttention": 1}
    found = Counter(op_types(one))
    assert found["ConstantOfShape"] == 2
    assert found["Concat"] == 2 + 3  # of shapes, and of keys, values and mask


def test_fp16_needs_multiples_of_8() -> None:
    proto = model(element=TensorProto.FLOAT16)
    aligned_keys.pad(proto)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert constants["mask_multiple"].tolist() == [8]


def _a_causal_mask(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("unidirectional", 1))


def _a_cache(proto: onnx.ModelProto) -> None:
    sizes = ["batch", HEADS, "past", SIZE]
    for name in ("past_k", "past_v"):
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
        proto.graph.node[0].input.append(name)


def _present_keys(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].output.extend(["present_k", "present_v"])


@pytest.mark.parametrize("change", [_a_causal_mask, _a_cache, _present_keys])
def test_what_counts_the_keys_stays_but_is_exposed(
    change: Callable[[onnx.ModelProto], None],
) -> None:
    proto = model()
    change(proto)
    before = proto.SerializeToString()
    assert aligned_keys.pad(proto) == 0
    assert proto.SerializeToString() == before
    assert aligned_keys.is_exposed(proto)


def test_what_is_padded_is_no_longer_exposed() -> None:
    proto = model()
    assert aligned_keys.is_exposed(proto)
    aligned_keys.pad(proto)
    assert not aligned_keys.is_exposed(proto)
    assert aligned_keys.pad(proto) == 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mask": None}, id="no mask"),
        pytest.param({"mask": ("batch", 1, "length", "length")}, id="as many queries as keys"),
        pytest.param(
            {"keys": ("batch", "total", HEADS * SIZE), "mask": ("batch", 1, "a", None)},
            id="rank 3, and perhaps as many queries as keys",
        ),
        pytest.param({"keys": ("batch", "heads", "total", SIZE)}, id="an unknown number of heads"),
        pytest.param({"padding": True}, id="a padding mask"),
        pytest.param({"element": TensorProto.BFLOAT16}, id="another type"),
        pytest.param({"opset": 14}, id="opset"),
    ],
)
def test_what_must_stay(changes: dict[str, object]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert aligned_keys.pad(proto) == 0
    assert proto.SerializeToString() == before
