"""Add(product, R) and Mul(product, gate): fused where R is proven to have the product's shape."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check_fused, parse, random
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import rewrite

FEEDS = {"a": random(2, 3, 4), "b": random(4, 5), "r": random(2, 3, 5, seed=1)}


@pytest.mark.parametrize("order", ["t, r", "r, t"])
@pytest.mark.parametrize(("op_type", "fused"), [("Add", "MatMulAdd"), ("Mul", "MatMulMul")])
def test_both_orders(order: str, op_type: str, fused: str) -> None:
    model = parse(
        f"""g (float[p, s, k] a, float[k, 5] b, float[p, s, 5] r) => (float[p, s, 5] y)
            {{ t = MatMul (a, b)  y = {op_type} ({order}) }}"""
    )
    result = check_fused(model, FEEDS, ops=[fused])
    assert list(result.model.graph.node[0].input) == ["a", "b", "r"]


@given(
    st.lists(st.sampled_from(["p", "s", "3", "1", "z"]), min_size=3, max_size=3),
    st.sampled_from(["5", "1", "n"]),
)
@settings(max_examples=60, deadline=None)
def test_only_equal_numbers_and_names_are_a_proof(batch: list[str], columns: str) -> None:
    """The product is [p, s, 3, 5]."""
    shape = ", ".join([*batch, columns])
    model = parse(
        f"""g (float[p, s, 3, k] a, float[k, 5] b, float[{shape}] r) => (y)
            {{ t = MatMul (a, b)  y = Add (r, t) }}"""
    )
    fits = batch == ["p", "s", "3"] and columns == "5"
    check_fused(
        model,
        ops=["MatMulAdd"] if fits else ["MatMul", "Add"],
        missed=[] if fits else ["residual: shape-unproven"],
    )


@pytest.mark.parametrize("rank", [2, 4])
def test_a_residual_of_another_rank_stays(rank: int) -> None:
    shape = ", ".join(["1", "p", "s", "5"][4 - rank :])
    model = parse(
        f"""g (float[p, s, k] a, float[k, 5] b, float[{shape}] r) => (y)
            {{ t = MatMul (a, b)  y = Add (r, t) }}"""
    )
    check_fused(model, ops=["MatMul", "Add"], missed=["residual: shape-unproven"])


def test_the_node_moves_behind_its_residual() -> None:
    """R is computed behind the product; the fused node takes the place of the Add."""
    model = parse(
        """g (float[s, 4] a, float[4, 4] b) => (float[s, 4] y)
            { t = MatMul (a, b)  r = Neg (a)  y = Add (t, r)  }"""
    )
    result = check_fused(model, {"a": random(3, 4), "b": random(4, 4)}, ops=["Neg", "MatMulAdd"])
    assert [node.output[0] for node in result.model.graph.node] == ["r", "y"]


def test_behind_bias_and_in_front_of_an_activation() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 5] b, float[5] c, float[s, 5] r) => (float[s, 5] y)
            { [lin] t = MatMul (a, b)  u = Add (c, t)  v = Add (r, u)  y = Relu (v) }"""
    )
    feeds = {"a": random(3, 4), "b": random(4, 5), "c": random(5), "r": random(3, 5)}
    result = check_fused(model, feeds, ops=["MatMulBiasAddRelu"])
    (node,) = result.model.graph.node
    assert (node.name, list(node.input)) == ("lin", ["a", "b", "c", "r"])
    stamps = {entry.key: entry.value for entry in node.metadata_props}
    assert stamps == {"moonpoly.rule": "matmul,bias,residual,activation"}
    assert [(e.op_type, e.into) for e in result.report] == [
        ("MatMul", ""),
        ("Add", "y"),
        ("Add", "y"),
        ("Relu", "y"),
    ]
    for rule, ops in (
        ("bias", ["MatMul", "Add", "Add", "Relu"]),
        ("residual", ["MatMulBias", "Add", "Relu"]),
        ("activation", ["MatMulBiasAdd", "Relu"]),
    ):
        left = rewrite(model, rules={"matmul", "bias", "residual", "activation"} - {rule})
        assert [node.op_type for node in left.model.graph.node] == ops


def test_convolutions_add_before_or_behind_an_activation() -> None:
    text = """g (float[n, 3, h, w] x, float[3, 3, 3, 3] k, float[3] b, float[n, 3, h, w] r)
        => (float[n, 3, h, w] y) {{ t = Conv <pads = [1, 1, 1, 1]> (x, k, b)  {} }}"""
    feeds = {"x": random(2, 3, 4, 5), "k": random(3, 3, 3, 3), "b": random(3)}
    feeds["r"] = random(2, 3, 4, 5, seed=3)
    for rest, op in (
        ("u = Add (t, r)  y = Relu (u)", "ConvAddRelu"),
        ("s = Sigmoid (t)  u = Mul (t, s)  y = Add (u, r)", "ConvSiluAdd"),
    ):
        check_fused(parse(text.format(rest)), feeds, ops=[op])
        model = parse(text.format(rest).replace("3, 3] k", "i, j] k"))
        # A height behind a kernel of any size is known only if the model records it.
        missed = ["residual: shape-unproven"]
        left = ["Conv", "Add", "Relu"] if "Relu" in op else ["ConvSilu", "Add"]
        check_fused(model, feeds, ops=left, missed=missed)
        for name in ("t", "u"):
            info = onnx.helper.make_tensor_value_info(name, 1, ["n", 3, "h", "w"])
            model.graph.value_info.append(info)
        check_fused(model, feeds, ops=[op])


def test_no_operator_adds_behind_a_products_activation() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 5] b, float[s, 5] r) => (float[s, 5] y)
            { t = MatMul (a, b)  u = Tanh (t)  y = Add (u, r) }"""
    )
    check_fused(model, {"a": random(3, 4), "b": random(4, 5), "r": random(3, 5)},
                ops=["MatMulTanh", "Add"], missed=["residual: no-such-operator"])  # fmt: skip


def test_swiglu_is_two_nodes() -> None:
    model = parse(
        """g (float[p, s, 4] a, float[4, 6] w, float[4, 6] v) => (float[p, s, 6] y) {
            g0 = MatMul (a, w)  s0 = Sigmoid (g0)  g1 = Mul (g0, s0)
            u = MatMul (a, v)  y = Mul (g1, u) }"""
    )
    feeds = {"a": random(2, 3, 4), "w": random(4, 6), "v": random(4, 6, seed=1)}
    result = check_fused(model, feeds, ops=["MatMulSilu", "MatMulMul"])
    assert list(result.model.graph.node[1].input) == ["a", "v", "g1"]


def test_two_products_added() -> None:
    model = parse(
        """g (float[s, 4] a, float[4, 6] w, float[4, 6] v) => (float[s, 6] y) {
            t = MatMul (a, w)  u = MatMul (a, v)  y = Add (t, u) }"""
    )
    feeds = {"a": random(3, 4), "w": random(4, 6), "v": random(4, 6, seed=1)}
    check_fused(model, feeds, ops=["MatMul", "MatMulAdd"])


def test_a_sum_of_a_product_with_itself_stays() -> None:
    model = parse(
        "g (float[s, 4] a, float[4, 6] w) => (float[s, 6] y) { t = MatMul (a, w)  y = Add (t, t) }"
    )
    feeds = {"a": random(3, 4), "w": random(4, 6)}
    check_fused(model, feeds, ops=["MatMul", "Add"], missed=["residual: form-unknown"])


LOOKUP = """g (float[batch, length, 4] a, float[4, 4] w, float[1, 8, 4] table, int64[1] end)
    => (float[batch, length, 4] y) <int64[1] zero = {0}, int64[1] one = {1}> {
    p = Slice (table, zero, end, one)  e = Add (a, p)  t = MatMul (a, w)  y = Add (t, e) }"""
ROWS = {"a": random(2, 3, 4), "w": random(4, 4), "table": random(1, 8, 4), "end": np.array([3])}


def test_recorded_names_fill_in_what_inference_does_not_know() -> None:
    """How many rows of a table are added follows from values."""
    model = parse(LOOKUP)
    rest = ["Slice", "Add"]
    check_fused(model, ROWS, ops=[*rest, "MatMul", "Add"], missed=["residual: shape-unproven"])
    info = onnx.helper.make_tensor_value_info("e", 1, ["batch", "length", 4])
    model.graph.value_info.append(info)
    check_fused(model, ROWS, ops=[*rest, "MatMulAdd"])


def test_no_record_counts_where_one_contradicts_inference() -> None:
    model = parse(LOOKUP)
    for name, shape in (("e", ["batch", "length", 4]), ("t", ["length", "length", 4])):
        info = onnx.helper.make_tensor_value_info(name, 1, shape)
        model.graph.value_info.append(info)
    ops = ["Slice", "Add", "MatMul", "Add"]
    check_fused(model, ops=ops, missed=["residual: shape-unproven"])


def test_names_that_tools_invented_prove_nothing() -> None:
    """onnx writes unk__0 for a size it does not know; a later inference uses the name anew."""
    model = parse(
        """g (float[?, 4] a, float[?, 4] c, float[4, 4] w) => (y)
            { r = Neg (c)  t = MatMul (a, w)  y = Add (t, r) }"""
    )
    for name in ("r", "t"):
        info = onnx.helper.make_tensor_value_info(
            name, 1, ["unk__0" if name == "r" else "unk__1", 4]
        )
        model.graph.value_info.append(info)
    check_fused(model, ops=["Neg", "MatMul", "Add"], missed=["residual: shape-unproven"])


@pytest.mark.parametrize("name", ["", "?", "-", "s"])
@pytest.mark.parametrize("recorded", [False, True])
def test_names_that_mean_unknown_prove_nothing(name: str, recorded: bool) -> None:
    """Some tools write one such name on every dimension that they do not know."""
    model = parse(
        """g (float[s, 4] a, float[s, 4] c, float[4, 4] w) => (y)
            { r = Neg (c)  t = MatMul (a, w)  y = Add (t, r) }"""
    )
    for value in model.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_param = name
    if recorded:
        for value in ("r", "t"):
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(value, 1, [name, 4]))
    feeds = {"a": random(3, 4), "w": random(4, 4)}
    if name == "s":
        check_fused(model, {**feeds, "c": random(3, 4)}, ops=["Neg", "MatMulAdd"])
        return
    missed = ["residual: shape-unproven"]
    check_fused(model, {**feeds, "c": random(1, 4)}, ops=["Neg", "MatMul", "Add"], missed=missed)


def test_a_vector_of_unknown_length_is_no_bias() -> None:
    model = parse(
        "g (float[s, 4] a, float[4, n] w, float[n] c) => (y) { t = MatMul (a, w)  y = Add (t, c) }"
    )
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = ""
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_param = ""
    feeds = {"a": random(3, 4), "w": random(4, 5), "c": random(1)}
    check_fused(model, feeds, ops=["MatMul", "Add"], missed=["bias: broadcasts"])
