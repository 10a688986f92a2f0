"""Add(MatMul, bias) -> MatMulBias, and behind a Gemm without C or a convolution without B."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import check_fused, parse, random
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import rewrite

LINEAR = "g (float[s, k] a, float[k, 5] b, {} c) => ({} y) {{ t = MatMul (a, b)  y = Add ({}) }}"
FEEDS = {"a": random(3, 4), "b": random(4, 5), "c": random(5)}


@pytest.mark.parametrize("order", ["t, c", "c, t"])
def test_both_orders_of_a_vector_of_the_run(order: str) -> None:
    model = parse(LINEAR.format("float[5]", "float[s, 5]", order))
    result = check_fused(model, FEEDS, ops=["MatMulBias"])
    (node,) = result.model.graph.node
    assert (list(node.input), list(node.output)) == (["a", "b", "c"], ["y"])
    assert {p.key: p.value for p in node.metadata_props} == {"moonpoly.rule": "matmul,bias"}
    entries = [(e.op_type, e.output, e.rule, e.into) for e in result.report]
    assert entries == [("MatMul", "t", "matmul", ""), ("Add", "y", "bias", "y")]


@st.composite
def sums(draw: st.DrawFn) -> tuple[int, tuple[int, ...], bool, int]:
    """Rank of A, shape of a constant addend, whether it is a Constant node, columns."""
    columns = draw(st.sampled_from([1, 2, 5]))
    shape = draw(st.lists(st.sampled_from([1, columns]), min_size=0, max_size=4))
    return draw(st.integers(1, 4)), tuple(shape), draw(st.booleans()), columns


@given(sums())
@settings(max_examples=60, deadline=None)
def test_an_addend_is_a_bias_only_where_the_sum_cannot_grow(
    case: tuple[int, tuple[int, ...], bool, int],
) -> None:
    rank, shape, as_node, columns = case
    batch = ["p", "q", "r"][: rank - 1]
    model = parse(
        f"""g (float[{", ".join([*batch, "k"])}] a, float[k, {columns}] b) => (y) {{
            t = MatMul (a, b)  y = Add (t, c) }}"""
    )
    addend = onnx.numpy_helper.from_array(random(*shape), "c")
    if as_node:
        constant = onnx.helper.make_node("Constant", [], ["c"], value=addend)
        model.graph.node.insert(0, constant)
    else:
        model.graph.initializer.append(addend)
    fits = 0 < len(shape) <= rank and shape[-1] == columns and np.prod(shape) == columns
    feeds = {"a": random(2, 3, 1, 4)[(0,) * (4 - rank)], "b": random(4, columns)}
    rules = ["matmul", "bias"]
    result = rewrite(model, rules=rules)
    fused = any(entry.rule == "bias" and entry.taken for entry in result.report)
    assert fused == fits
    missed = [f"bias: {e.reason}" for e in result.report if e.rule == "bias" and not e.taken]
    ops = ["MatMulBias"] if fits else ["MatMul", "Add"]
    check_fused(model, *([feeds] if fits else []), ops=ops, missed=missed, rules=rules)
    if fits and len(shape) > 1:
        left = [tensor.name for tensor in result.model.graph.initializer]
        assert left == ([] if as_node else ["c/vector"])


def test_a_constant_with_another_reader_stays_for_it() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 3] b) => (y, z) <float[1, 3] c = {1, 2, 3}> {
            t = MatMul (a, b)  y = Add (t, c)  z = Neg (c) }"""
    )
    result = check_fused(model, {"a": random(2, 4), "b": random(4, 3)}, ops=["MatMulBias", "Neg"])
    assert [t.name for t in result.model.graph.initializer] == ["c", "c/vector"]


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("(float[s, k] a, float[k, n] b, float[m] c) => (y) { t = MatMul (a, b) y = Add (t, c) }",
         "broadcasts"),
        ("(float[s, k] a, float[k, 1] b, float[4] c) => (y) { t = MatMul (a, b) y = Add (t, c) }",
         "broadcasts"),
        ("(float[s, k] a, float[k] b, float[4] c) => (y) { t = MatMul (a, b) y = Add (t, c) }",
         "broadcasts"),
        ("(float[s, k] a, float[?, ?] b, float[4] c) => (y) { t = MatMul (a, b) y = Add (t, c) }",
         "broadcasts"),
        ("(float[s, k] a, float[k, n] b, float c) => (y) { t = MatMul (a, b) y = Add (t, c) }",
         "broadcasts"),
        ("(float[s, k] a, float[k, n] b, float[n] c) => (t, y) { t = MatMul (a, b) y = Add (t, c)}",
         "other-readers"),
        ("""(float[s, k] a, float[k, n] b, float[n] c) => (y, z)
            { t = MatMul (a, b) y = Add (t, c) z = Neg (t) }""", "other-readers"),
    ],
)  # fmt: skip
def test_near_misses(graph: str, reason: str) -> None:
    rest = ["Add", "Neg"] if "Neg" in graph else ["Add"]
    check_fused(parse(f"g {graph}"), ops=["MatMul", *rest], missed=[f"bias: {reason}"])


def test_one_name_of_a_dimension_proves_a_vector_to_fit() -> None:
    text = "g (float[s, k] a, float[k, n] b, float[n] c) => (y) { t = MatMul (a, b) y = Add (t, c)}"
    check_fused(parse(text), {**FEEDS}, ops=["MatMulBias"])


def test_what_a_branch_reads_is_read() -> None:
    model = parse(
        """g (bool p, float[s, k] a, float[k, n] b, float[n] c) => (y, z) {
            t = MatMul (a, b)  y = Add (t, c)
            z = If (p) < then_branch = g1 () => (u) { u = Neg (t) },
                         else_branch = g2 () => (v) { v = Identity (a) }> }"""
    )
    ops = ["MatMul", "Add", "If", "Neg", "Identity"]
    check_fused(model, ops=ops, missed=["bias: other-readers"])


@pytest.mark.parametrize("condition", [True, False])
def test_in_branches_that_share_names(condition: bool) -> None:
    model = parse(
        """g (bool p, float[s, 4] a, float[4, 5] b, float[5] c) => (float[s, 5] y) {
            y = If (p) <
                then_branch = g1 () => (float[s, 5] u) { t = MatMul (a, b)  u = Add (t, c) },
                else_branch = g2 () => (float[s, 5] v) { t = MatMul (a, b)  v = Sub (t, c) }> }"""
    )
    feeds = {**FEEDS, "p": np.array(condition)}
    check_fused(model, feeds, ops=["If", "MatMulBias", "MatMul", "Sub"])


def test_in_a_function_every_call_must_allow_it() -> None:
    function = """<domain: "f", opset_import: ["" : 17]>
        Linear (x, w, b) => (y) { t = MatMul (x, w)  y = Add (t, b) }"""
    text = """g (float[n, 4] a, float[4, 4] w, float[4] b, float[{}] c) => (y)
        {{ t = f.Linear (a, w, b)  y = f.Linear (t, w, c) }}"""
    calls = ["Linear", "Linear"]
    for size, fused in (("4", True), ("1", False)):
        model = parse(text.format(size), imports=', "f" : 1', functions=function)
        feeds = {"a": random(3, 4), "w": random(4, 4), "b": random(4), "c": random(int(size))}
        missed = [] if fused else ["bias: broadcasts"]
        result = check_fused(model, feeds, ops=[f"f.{c}" for c in calls], missed=missed)
        linear = next(f for f in result.model.functions if f.domain == "f")
        assert [n.op_type for n in linear.node] == (["MatMulBias"] if fused else ["MatMul", "Add"])


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("", ()), ("[1]", (1,)), ("[5]", (5,)), ("[1, 5]", (1, 5)), ("[s, 1]", (3, 1))],
)
def test_behind_a_gemm_without_c(shape: str, sizes: tuple[int, ...]) -> None:
    model = parse(
        f"""g (float[s, k] a, float[k, 5] b, float{shape} c) => (float[s, 5] y)
            {{ t = Gemm <alpha = 0.5, beta = 3.0> (a, b)  y = Add (c, t) }}"""
    )
    result = check_fused(model, FEEDS | {"c": np.array(random(*sizes))}, ops=["Gemm"])
    assert {a.name: a.f for a in result.model.graph.node[0].attribute}["beta"] == 1.0


def test_behind_a_gemm_that_would_grow() -> None:
    text = (
        "g (float[s, k] a, float[k, 1] b, float[{}] c) => (y) {{ t = Gemm (a, b) y = Add (t, c) }}"
    )
    for shape in ("5", "m, 1"):
        model = parse(text.format(shape))
        missed = ["bias: broadcasts"]
        check_fused(model, ops=["Gemm", "Add"], missed=missed, rules=["gemm", "bias"])


def test_behind_a_gemm_with_c() -> None:
    model = parse(
        "g (float[s, k] a, float[k, n] b, float[n] c) => (y) {t = Gemm (a, b, c) y = Add (t, c)}"
    )
    check_fused(model, FEEDS, ops=["Gemm", "Add"], missed=["bias: no-such-operator"])


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("shape", ["6, 1, 1", "1, 6, 1, 1"])
def test_behind_a_convolution(op_type: str, shape: str) -> None:
    model = parse(
        f"""g (float[n, 6, h, w] x, float[6, 6, 1, 1] k) => (float[n, 6, h, w] y)
            <float[{shape}] c = {{1, 2, 3, 4, 5, 6}}> {{ t = {op_type} (x, k)  y = Add (t, c) }}"""
    )
    feeds = {"x": random(2, 6, 3, 4), "k": random(6, 6, 1, 1)}
    result = check_fused(model, feeds, ops=[op_type])
    (vector,) = result.model.graph.initializer
    assert list(vector.dims) == [6]


def test_behind_a_convolution_of_one_channel_in_several_images() -> None:
    """The addend has a value for each image, or is added along another axis."""
    for shape, ops in (("2, 2, 1, 1", "near"), ("2", "near"), ("2, 1", "")):
        count = 4 if shape.startswith("2, 2") else 2
        values = ", ".join(map(str, range(count)))
        model = parse(
            f"""g (float[n, 3, h, 2] x, float[2, 3, 1, 1] k) => (y)
                <float[{shape}] c = {{{values}}}> {{ t = Conv (x, k)  y = Add (t, c) }}"""
        )
        missed = ["bias: broadcasts"] if ops else []
        feeds = {"x": random(2, 3, 2, 2), "k": random(2, 3, 1, 1)}
        check_fused(model, feeds, ops=["ConvNoBias", "Add"], missed=missed, rules=["conv", "bias"])


def test_nodes_out_of_order_stay_legal() -> None:
    model = parse(LINEAR.format("float[5]", "float[s, 5]", "t, c"))
    model.graph.node.insert(0, model.graph.node.pop(1))
    check_fused(model, FEEDS, ops=["MatMulBias"])


@pytest.mark.parametrize(("op_type", "rest"), [("BiasGelu", "Gelu"), ("FastGelu", "FastGelu")])
def test_gelus_with_a_bias_lose_it(op_type: str, rest: str) -> None:
    model = parse(
        f"""g (float[s, k] a, float[k, 3] b) => (float[s, 3] y) <float[3] c = {{1, 2, 3}}>
            {{ t = MatMul (a, b)  y = com.microsoft.{op_type} (t, c) }}""",
        imports=', "com.microsoft" : 1',
    )
    feeds = {"a": random(2, 4), "b": random(4, 3)}
    ops = ["MatMulBias", f"com.microsoft.{rest}"]
    check_fused(model, feeds, ops=ops, rules=["matmul", "bias"])
    fused = "MatMulBiasGelu" if op_type == "BiasGelu" else "MatMulBiasGeluTanh"
    check_fused(model, feeds, ops=[fused])


def test_of_gelus_a_bias_in_another_file_goes_into_the_product(tmp_path: Path) -> None:
    model = parse(
        """g (float[s, k] a, float[k, 3] b) => (float[s, 3] y) <float[3] c = {1, 2, 3}>
            { t = MatMul (a, b)  y = com.microsoft.BiasGelu (t, c) }""",
        imports=', "com.microsoft" : 1',
    )
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0
    )
    result = rewrite(tmp_path / "m.onnx")
    assert [node.op_type for node in result.model.graph.node] == ["MatMulBiasGelu"]


@pytest.mark.parametrize("disable", [[], ["activation"]])
def test_a_constant_behind_the_product_comes_in_front(disable: list[str]) -> None:
    model = parse(
        """g (float[s, k] a, float[k, 3] b) => (float[s, 3] y) {
            t = MatMul (a, b)
            c = Constant <value = float[3] {1.0, 2.0, 3.0}> ()
            y = com.microsoft.BiasGelu (t, c)
        }""",
        imports=', "com.microsoft" : 1',
    )
    result = rewrite(model, disable=disable).model
    rest = ["MatMulBias", "Gelu"] if disable else ["MatMulBiasGelu"]
    assert [node.op_type for node in result.graph.node] == ["Constant", *rest]
    onnx.checker.check_model(result)


def test_a_constant_that_became_a_vector_follows_the_product() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 3] b) => (float[s, 3] y) {
            t = MatMul (a, b)
            c = Constant <value = float[1, 3] {1.0, 2.0, 3.0}> ()
            u = Add (t, c)
            y = Relu (u)
        }"""
    )
    check_fused(model, {"a": random(2, 4), "b": random(4, 3)}, ops=["MatMulBiasRelu"])


def test_of_gelus_a_bias_of_the_run_stays() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 3] b, float[3] c) => (float[s, 3] y)
            { t = MatMul (a, b)  y = com.microsoft.BiasGelu (t, c) }""",
        imports=', "com.microsoft" : 1',
    )
    ops = ["MatMul", "com.microsoft.BiasGelu"]
    check_fused(
        model, FEEDS | {"c": random(3), "b": random(4, 3)}, ops=ops, missed=["bias: not-constant"]
    )
