"""Products of Q, K and V that become one: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equivalence import make_an_input, node_of, normal_feeds, op_types, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import merged_products
from onnx import TensorProto, helper, numpy_helper

from moonpoly_ort import rewrite

ROWS = 6


def model(
    *, heads: int = 4, shared: int = 2, size: int = 4, biases: str = "", opset: int = 18
) -> onnx.ModelProto:
    """Attention with a cache, of which `shared` heads serve all `heads`.

    biases: which of q, k and v have one.
    """
    rng = np.random.default_rng([heads, shared, size])
    widths = {"q": heads * size, "k": shared * size, "v": shared * size}
    constants: dict[str, np.ndarray] = {
        "heads": np.array([0, 0, -1, size], np.int64),
        "flat": np.array([0, 0, -1], np.int64),
        "second": np.array([2], np.int64),
        "repeats": np.array([1, 1, heads // shared, 1, 1], np.int64),
        "whole": np.array([0, heads, -1, size], np.int64),
    }
    nodes = []
    for part, width in widths.items():
        constants[f"w{part}"] = rng.standard_normal((ROWS, width)).astype(np.float32)
        nodes.append(helper.make_node("MatMul", ["x", f"w{part}"], [f"{part}0"], f"product {part}"))
        if part in biases:
            constants[f"b{part}"] = rng.standard_normal(width).astype(np.float32)
            nodes.append(helper.make_node("Add", [f"b{part}", f"{part}0"], [f"{part}1"]))
        value = f"{part}1" if part in biases else f"{part}0"
        if part == "q":
            nodes.append(helper.make_node("Identity", [value], ["q"]))
            continue
        nodes += [
            helper.make_node("Reshape", [value, "heads"], [f"{part}2"]),
            helper.make_node("Transpose", [f"{part}2"], [f"{part}3"], perm=[0, 2, 1, 3]),
            helper.make_node("Concat", [f"past_{part}", f"{part}3"], [f"new_{part}"], axis=2),
            helper.make_node("Unsqueeze", [f"new_{part}", "second"], [f"{part}5"]),
            helper.make_node("Expand", [f"{part}5", "repeats"], [f"{part}6"]),
            helper.make_node("Reshape", [f"{part}6", "whole"], [part]),
        ]
    nodes.append(
        helper.make_node(
            "MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=heads
        )
    )
    info = helper.make_tensor_value_info
    cache = ["batch", shared, "past", size]
    grown = ["batch", shared, "total", size]
    graph = helper.make_graph(
        nodes, "g",
        [info("x", TensorProto.FLOAT, ["batch", "length", ROWS]),
         *(info(f"past_{part}", TensorProto.FLOAT, cache) for part in "kv")],
        [info("y", TensorProto.FLOAT, ["batch", "length", heads * size]),
         *(info(f"new_{part}", TensorProto.FLOAT, grown) for part in "kv")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(proto: onnx.ModelProto, batch: int, length: int, past: int) -> dict[str, np.ndarray]:
    sizes = {"batch": batch, "length": length, "past": past}
    return normal_feeds(proto, [batch, length, past], sizes)


@settings(max_examples=30, deadline=None)
@given(
    shared=st.sampled_from([1, 2, 4]), size=st.sampled_from([2, 8]),
    biases=st.sampled_from(["", "q", "kv", "qkv"]), batch=st.integers(1, 3),
    length=st.integers(1, 6), past=st.integers(0, 5),
)  # fmt: skip
def test_results_are_equal(
    shared: int, size: int, biases: str, batch: int, length: int, past: int
) -> None:
    proto = model(shared=shared, size=size, biases=biases)
    feed = feeds(proto, batch, length, past)
    want = run(proto, feed)
    assert merged_products.merge(proto) == 1
    onnx.checker.check_model(proto)
    for got, value in zip(run(proto, feed), want, strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("part", "qkv")
def test_weights_and_biases_in_another_order_wherever_that_is_made(part: str) -> None:
    """The merged product lies where the first one did, but Gathers may come behind it."""
    proto = model(biases="qkv")
    nodes = {node.output[0]: node for node in proto.graph.node}
    product, total = nodes[f"{part}0"], nodes[f"{part}1"]
    columns = next(t.dims[1] for t in proto.graph.initializer if t.name == f"w{part}")
    order = np.arange(columns, dtype=np.int64)[::-1].copy()
    proto.graph.initializer.append(numpy_helper.from_array(order, "order"))
    late = [
        helper.make_node("Gather", [f"w{part}", "order"], ["weight"], axis=1),
        product,
        helper.make_node("Gather", [f"b{part}", "order"], ["bias"]),
        total,
    ]
    product.input[1], total.input[0] = "weight", "bias"
    first = [node for name, node in nodes.items() if name[1:] in ("0", "1") and name[0] != part]
    others = [node for name, node in nodes.items() if name[1:] not in ("0", "1")]
    del proto.graph.node[:]
    proto.graph.node.extend([*first, *late, *others])
    onnx.checker.check_model(proto)
    feed = feeds(proto, 2, 3, 4)
    want = run(proto, feed)
    assert merged_products.merge(proto) == 1
    onnx.checker.check_model(proto)
    for got, value in zip(run(proto, feed), want, strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("biases", ["", "qk"])
def test_the_operators_that_are_left(biases: str) -> None:
    proto = model(biases=biases)
    others = Counter(op_types(proto))
    others.subtract(["MatMul"] * 3 + ["Add"] * len(biases))
    merged_products.merge(proto)
    new = ["Concat", "MatMul", "Split", *(["Concat", "Add"] if biases else [])]
    assert Counter(op_types(proto)) == +others + Counter(new)
    rewritten = Counter(op_types(rewrite(proto).model))
    assert rewritten["ai.moonpoly.MatMulBias" if biases else "ai.moonpoly.MatMul"] == 1
    assert not rewritten.keys() & {"MatMul", "Add"}


def _another_input(proto: onnx.ModelProto) -> None:
    other = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", "length", ROWS])
    proto.graph.input.append(other)
    node_of(proto, "v0").input[0] = "z"


def _a_weight_that_varies(proto: onnx.ModelProto) -> None:
    make_an_input(proto, "wk")


def _another_operator(proto: onnx.ModelProto) -> None:
    node_of(proto, "q").op_type = "Tanh"


def _no_attention(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].domain = "some.where"


def _one_product_twice(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].input[1] = "v"


@pytest.mark.parametrize(
    "change",
    [_another_input, _a_weight_that_varies, _another_operator, _no_attention, _one_product_twice],
)
def test_what_must_stay(change: Callable[[onnx.ModelProto], None]) -> None:
    proto = model()
    change(proto)
    before = proto.SerializeToString()
    assert merged_products.merge(proto) == 0
    assert proto.SerializeToString() == before


def test_split_needs_its_opset() -> None:
    assert merged_products.merge(model(opset=12)) == 0


def test_a_product_that_is_read_elsewhere_is_merged_as_well() -> None:
    proto = model()
    columns = ["batch", "length", 8]
    proto.graph.output.append(helper.make_tensor_value_info("k0", TensorProto.FLOAT, columns))
    feed = feeds(proto, 2, 3, 1)
    want = run(proto, feed)
    assert merged_products.merge(proto) == 1
    for got, value in zip(run(proto, feed), want, strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-6)
