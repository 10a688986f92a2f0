"""Heads that share keys and values, as rows of one: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equivalence import make_an_input, node_of, normal_feeds, op_types, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import grouped_heads, merged_products
from onnx import TensorProto, helper, numpy_helper

from moonpoly_ort import rewrite

ROWS = 6
MICROSOFT = "com.microsoft"


def model(
    *, shared: int = 2, times: int = 3, size: int = 4, bias: bool = False, rotary: bool = False,
    mask: str = "1", layers: int = 1, opset: int = 18,
) -> onnx.ModelProto:  # fmt: skip
    """Layers of attention with a cache that `times` heads of queries share each head of.

    mask: the size of its second axis, a number or a name; empty: none.
    """
    rng = np.random.default_rng([shared, times, size])
    heads = shared * times
    constants: dict[str, np.ndarray] = {
        "heads": np.array([0, 0, -1, size], np.int64),
        "second": np.array([2], np.int64),
        "repeats": np.array([1, 1, times, 1, 1], np.int64),
        "whole": np.array([0, heads, -1, size], np.int64),
        "first": np.array([0], np.int64),
        "cos": rng.standard_normal((16, size // 2)).astype(np.float32),
        "sin": rng.standard_normal((16, size // 2)).astype(np.float32),
    }
    info = helper.make_tensor_value_info
    inputs = [info("x0", TensorProto.FLOAT, ["batch", "length", ROWS])]
    outputs = [info(f"x{layers}", TensorProto.FLOAT, ["batch", "length", ROWS])]
    if mask:
        axis = int(mask) if mask.isdigit() else mask
        inputs.append(info("mask", TensorProto.FLOAT, ["batch", axis, "length", "total"]))
    recorded, nodes = [], []

    def add(op: str, operands: list[str], output: str, **attributes: object) -> None:
        nodes.append(helper.make_node(op, operands, [output], f"{op} {output}", **attributes))

    for layer in range(layers):
        x = f"x{layer}"
        widths = {"q": heads * size, "k": shared * size, "v": shared * size}
        for part, width in widths.items():
            constants[f"w{part}{layer}"] = rng.standard_normal((ROWS, width)).astype(np.float32)
            add("MatMul", [x, f"w{part}{layer}"], f"{part}0_{layer}")
            if part == "q":
                continue
            past, grown = f"past_{part}{layer}", f"new_{part}{layer}"
            add("Reshape", [f"{part}0_{layer}", "heads"], f"{part}2_{layer}")
            add("Transpose", [f"{part}2_{layer}"], f"{part}3_{layer}", perm=[0, 2, 1, 3])
            add("Concat", [past, f"{part}3_{layer}"], grown, axis=2)
            add("Unsqueeze", [grown, "second"], f"{part}5_{layer}")
            add("Expand", [f"{part}5_{layer}", "repeats"], f"{part}6_{layer}")
            add("Reshape", [f"{part}6_{layer}", "whole"], f"{part}_{layer}")
            cache = ["batch", shared, "past", size]
            inputs.append(info(past, TensorProto.FLOAT, cache))
            total = ["batch", shared, "total", size]
            outputs.append(info(grown, TensorProto.FLOAT, total))
            for name, dims in (
                (f"{part}6_{layer}", ["batch", shared, times, "total", size]),
                (f"{part}_{layer}", ["batch", heads, "total", size]),
            ):
                recorded.append(info(name, TensorProto.FLOAT, dims))
        q = f"q0_{layer}"
        if bias:
            constants[f"bq{layer}"] = rng.standard_normal(heads * size).astype(np.float32)
            add("Add", [f"bq{layer}", q], f"q1_{layer}")
            q = f"q1_{layer}"
        if rotary:
            operands = [q, "first", "cos", "sin"]
            add("RotaryEmbedding", operands, f"q2_{layer}", domain=MICROSOFT)
            q = f"q2_{layer}"
        operands = [q, f"k_{layer}", f"v_{layer}", *(["", "", "mask"] if mask else [])]
        add("MultiHeadAttention", operands, f"y{layer}", domain=MICROSOFT, num_heads=heads)
        constants[f"wo{layer}"] = rng.standard_normal((heads * size, ROWS)).astype(np.float32)
        add("MatMul", [f"y{layer}", f"wo{layer}"], f"x{layer + 1}")
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors, value_info=recorded)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(proto: onnx.ModelProto, batch: int, length: int, past: int) -> dict[str, np.ndarray]:
    sizes = {"batch": batch, "length": length, "past": past, "total": past + length}
    return normal_feeds(proto, [batch, length, past], sizes)


Results = list[np.ndarray]


def assert_close(results: Results, wanted: Results) -> None:
    for got, value in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5 * np.abs(value).max())


def assert_grouped(proto: onnx.ModelProto, feed: dict[str, np.ndarray], nodes: int) -> Results:
    """Groups the heads of so many nodes; the model gives what it did, which is returned."""
    want = run(proto, feed)
    assert grouped_heads.group(proto) == nodes
    onnx.checker.check_model(proto)
    assert_close(run(proto, feed), want)
    return want


def assert_equal(proto: onnx.ModelProto, feed: dict[str, np.ndarray], nodes: int) -> None:
    """Groups, and merges products behind it; each must give what the model did."""
    want = assert_grouped(proto, feed, nodes)
    assert merged_products.merge(proto) == nodes
    onnx.checker.check_model(proto)
    assert_close(run(proto, feed), want)
    assert merged_products.merge(proto) == 0


@settings(max_examples=40, deadline=None)
@given(
    shared=st.integers(1, 3), times=st.sampled_from([2, 3, 8]), size=st.sampled_from([2, 8]),
    bias=st.booleans(), rotary=st.booleans(), mask=st.sampled_from(["", "1"]),
    batch=st.integers(1, 3), length=st.integers(1, 5), past=st.integers(0, 5),
)  # fmt: skip
def test_results_are_equal(
    shared: int, times: int, size: int, bias: bool, rotary: bool, mask: str, batch: int,
    length: int, past: int,
) -> None:  # fmt: skip
    proto = model(
        shared=shared, times=times, size=size, bias=bias, rotary=rotary, mask=mask
    )  # fmt: skip
    assert_equal(proto, feeds(proto, batch, length, past), 1)


def test_the_operators_that_are_left() -> None:
    proto = model(layers=2, bias=True, rotary=True)
    assert_equal(proto, feeds(proto, 2, 3, 4), 2)
    assert merged_products.merge(proto) == 0  # again: all that can be
    found = Counter(op_types(proto))
    assert found["com.microsoft.MultiHeadAttention"] == 2
    # Of one mask in two layers, and with nothing else, rows are repeated.
    assert found["Expand"] == found["Unsqueeze"] == found["Shape"] == 1
    # The weights of the query and of the product behind attention, and the bias.
    assert found["Gather"] == 2 * 3
    rewritten = Counter(op_types(rewrite(proto).model))
    assert rewritten["ai.moonpoly.MatMulBias"] == rewritten["ai.moonpoly.MatMul"] == 2


@pytest.mark.parametrize("length", [1, 2, 8])
def test_a_single_token_of_8_heads_is_followed_by_a_row_of_zeros(length: int) -> None:
    """So that attention with a mask is not memory-efficient; all others are multiples of 8."""
    proto = model(layers=2, times=8)
    feed = feeds(proto, 2, length, 5)
    want = run(proto, feed)
    assert grouped_heads.group(proto) == merged_products.merge(proto) == 2
    found = Counter(op_types(proto))
    assert found["ConstantOfShape"] == 2  # for all queries, and for the mask
    attention = [node for node in proto.graph.node if node.op_type == "MultiHeadAttention"]
    for name in (attention[1].input[0], attention[1].input[5]):
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    *got, rows, mask = run(proto, feed)
    count = 9 if length == 1 else 8 * length
    assert rows.shape[1] == mask.shape[2] == count
    assert_close(got, want)


@pytest.mark.parametrize("times", [3, 8])
def test_values_keep_the_shapes_that_the_model_records(times: int) -> None:
    proto = model(times=times, bias=True, rotary=True)
    names = ["q0_0", "q1_0", "q2_0", "y0"]
    for name in names:
        dims = ["batch", "length", 2 * times * 4]
        proto.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    assert grouped_heads.group(proto) == 1
    recorded = [info for info in proto.graph.value_info if info.name in names]
    assert [info.name for info in recorded] == names
    proto.graph.output.extend(recorded)
    for value in run(proto, feeds(proto, 2, 1, 3))[-len(names) :]:
        assert value.shape == (2, 1, 2 * times * 4)


def _a_causal_mask(proto: onnx.ModelProto) -> None:
    node_of(proto, "y0").attribute.append(helper.make_attribute("unidirectional", 1))


def _values_once(proto: onnx.ModelProto) -> None:
    node_of(proto, "y0").input[2] = "k3_0"


def _a_weight_that_varies(proto: onnx.ModelProto) -> None:
    make_an_input(proto, "wq0")


def _a_result_that_is_read_elsewhere(proto: onnx.ModelProto) -> None:
    dims = ["batch", "length", 24]
    proto.graph.output.append(helper.make_tensor_value_info("y0", TensorProto.FLOAT, dims))


def _a_query_that_is_read_elsewhere(proto: onnx.ModelProto) -> None:
    dims = ["batch", "length", 24]
    proto.graph.output.append(helper.make_tensor_value_info("q0_0", TensorProto.FLOAT, dims))


def _a_result_on_the_right(proto: onnx.ModelProto) -> None:
    node = node_of(proto, "x1")
    node.input[0], node.input[1] = "wo0", "y0"


def _another_operator(proto: onnx.ModelProto) -> None:
    node = node_of(proto, "x1")
    node.op_type, node.domain = "FusedMatMul", MICROSOFT


def _a_padding_mask(proto: onnx.ModelProto) -> None:
    info = helper.make_tensor_value_info("padding", TensorProto.INT32, ["batch", "total"])
    proto.graph.input.append(info)
    node_of(proto, "y0").input[4] = "padding"


@pytest.mark.parametrize(
    "change",
    [
        _a_causal_mask, _values_once, _a_weight_that_varies, _a_result_that_is_read_elsewhere,
        _a_query_that_is_read_elsewhere, _a_result_on_the_right, _another_operator,
        _a_padding_mask,
    ],
)  # fmt: skip
def test_what_must_stay(change: Callable[[onnx.ModelProto], None]) -> None:
    proto = model()
    change(proto)
    before = proto.SerializeToString()
    assert grouped_heads.group(proto) == 0
    assert proto.SerializeToString() == before


@pytest.mark.parametrize(
    ("width", "attributes"),
    [(4, {}), (2, {"num_heads": 3, "rotary_embedding_dim": 4})],
    ids=["by the table", "by the attribute"],
)
def test_a_rotary_embedding_of_other_heads_stays(width: int, attributes: dict[str, int]) -> None:
    proto = model(rotary=True)
    for tensor in proto.graph.initializer:
        if tensor.name in ("cos", "sin"):
            tensor.CopyFrom(numpy_helper.from_array(np.ones((16, width), np.float32), tensor.name))
    rotary = node_of(proto, "q2_0")
    rotary.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
    run(proto, feeds(proto, 2, 3, 4))  # a model that works
    assert grouped_heads.group(proto) == 0


@pytest.mark.parametrize("place", ["subgraph", "record"])
def test_new_values_take_no_name_that_something_else_has(place: str) -> None:
    proto = model()
    info = helper.make_tensor_value_info("mask_rows", TensorProto.FLOAT, [7])
    if place == "record":
        proto.graph.value_info.append(info)
    else:
        made = helper.make_node("Identity", ["mask"], ["mask_rows"])  # read by nothing
        given_out = helper.make_node("Abs", ["x0"], ["absolute"])
        dims = ["batch", "length", ROWS]
        outputs = [helper.make_tensor_value_info("absolute", TensorProto.FLOAT, dims)]
        branch = helper.make_graph([made, given_out], "branch", [], outputs)
        proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "condition"))
        branches = {"then_branch": branch, "else_branch": branch}
        proto.graph.node.append(helper.make_node("If", ["condition"], ["either"], **branches))
        proto.graph.output.append(helper.make_tensor_value_info("either", TensorProto.FLOAT, dims))
    assert_grouped(proto, feeds(proto, 2, 3, 4), 1)


@pytest.mark.parametrize("bias", ["first", "between"])
def test_nodes_stay_in_order_wherever_products_lie(bias: str) -> None:
    """What orders weights lies in front of their products, and those of keys may come earlier."""
    proto = model(bias=True)
    nodes = {node.output[0]: node for node in proto.graph.node}
    late = [nodes.pop("q0_0"), nodes.pop("q1_0")]
    order = np.arange(24, dtype=np.int64)[::-1].copy()
    proto.graph.initializer.append(numpy_helper.from_array(order, "order"))
    ordered = helper.make_node("Gather", ["bq0", "order"], ["ordered"])
    late[1].input[0] = "ordered"
    late.insert(0 if bias == "first" else 1, ordered)
    attention, output = nodes.pop("y0"), nodes.pop("x1")
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes.values(), *late, attention, output])
    onnx.checker.check_model(proto)
    assert_grouped(proto, feeds(proto, 2, 3, 4), 1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"times": 1}, id="no head is shared"),
        pytest.param({"mask": "6"}, id="a mask for each head"),
        pytest.param({"mask": "heads"}, id="perhaps a mask for each head"),
        pytest.param({"opset": 14}, id="opset"),
    ],
)
def test_models_that_stay(changes: dict[str, object]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert grouped_heads.group(proto) == 0
    assert proto.SerializeToString() == before
