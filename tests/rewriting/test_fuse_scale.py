"""A number that a product or one of its operands is multiplied with or divided by."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check_fused, parse, random, run
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import RewriteResult

NUMBERS = "<float s = {0.3}, float z = {0}, float[2] two = {1, 2}, float[1, 1, 1, 1] wide = {2}>"
FEEDS = {"a": random(2, 3, 4), "b": random(4, 5), "c": random(5)}


def model_of(nodes: str, *, opset: int = 18, outputs: str = "y", c: str = "5") -> onnx.ModelProto:
    return parse(
        f"""g (float[p, s, k] a, float[k, 5] b, float[{c}] c) => ({outputs}) {NUMBERS}
            {{ {nodes} }}""",
        opset=opset,
    )


def factors(result: RewriteResult) -> list[float]:
    """alpha and beta of the only node of ours."""
    (node,) = [node for node in result.model.graph.node if node.domain == "ai.moonpoly"]
    return [a.f for name in ("alpha", "beta") for a in node.attribute if a.name == name]


@pytest.mark.parametrize(
    ("nodes", "op", "wanted"),
    [
        ("t = MatMul (a, b)  y = Mul (t, s)", "ScaledMatMul", [0.3]),
        ("t = MatMul (a, b)  y = Mul (s, t)", "ScaledMatMul", [0.3]),
        ("t = MatMul (a, b)  y = Div (t, s)", "ScaledMatMul", [1 / 0.3]),
        ("u = Mul (a, s)  y = MatMul (u, b)", "ScaledMatMul", [0.3]),
        ("u = Div (b, s)  y = MatMul (a, u)", "ScaledMatMul", [1 / 0.3]),
        ("u = Mul (a, s)  v = Mul (s, b)  y = MatMul (u, v)", "ScaledMatMul", [0.09]),
        ("u = Mul (a, s)  t = MatMul (u, b)  y = Div (t, s)", "ScaledMatMul", [1]),
        ("t = MatMul (a, b)  u = Mul (t, s)  y = Add (u, c)", "ScaledMatMulBias", [0.3, 1]),
        ("t = MatMul (a, b)  u = Add (t, c)  y = Mul (u, s)", "ScaledMatMulBias", [0.3, 0.3]),
        ("u = Mul (a, s)  t = MatMul (u, b)  y = Add (t, c)", "ScaledMatMulBias", [0.3, 1]),
        ("t = MatMul (a, b)  u = Mul (t, s)  y = Sigmoid (u)", "ScaledMatMulSigmoid", [0.3]),
        ("t = MatMul (a, b)  u = Mul (t, s)  v = Sigmoid (u)  y = Mul (u, v)",
         "ScaledMatMulSilu", [0.3]),
        ("t = MatMul (a, b)  u = Mul (t, s)  y = Mul (u, t2)", "ScaledMatMulMul", [0.3]),
    ],
)  # fmt: skip
def test_forms(nodes: str, op: str, wanted: list[float]) -> None:
    model = model_of(nodes)
    feeds = FEEDS
    if "t2" in nodes:
        model.graph.input.append(onnx.helper.make_tensor_value_info("t2", 1, ["p", "s", 5]))
        feeds = {**FEEDS, "t2": random(2, 3, 5)}
    result = check_fused(model, feeds, ops=[op], tolerance=1e-5)
    np.testing.assert_allclose(factors(result), wanted, rtol=1e-6)
    assert "scale" in result.model.graph.node[0].metadata_props[0].value


@pytest.mark.parametrize("c", ["", ", c"])
@pytest.mark.parametrize(
    "place", ["t = Gemm {} (a, b{})  y = Mul (t, s)", "u = Mul (a, s)  y = Gemm {} (u, b{})"]
)
def test_the_factors_of_a_gemm(c: str, place: str) -> None:
    graph = place.format("<alpha = 2.0, beta = 5.0>", c)
    model = parse(f"g (float[m, k] a, float[k, 5] b, float[5] c) => (y) {NUMBERS} {{ {graph} }}")
    result = check_fused(model, {**FEEDS, "a": random(3, 4)}, ops=["Gemm"])
    behind = "y = Mul" in place
    np.testing.assert_allclose(factors(result), [0.6, 1.5 if behind else 5.0], rtol=1e-6)


@given(st.floats(2.0**-14, 2.0**14), st.booleans(), st.booleans(), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_any_number(number: float, negative: bool, divides: bool, rank: int) -> None:
    value = np.full((1,) * rank, -number if negative else number, np.float32)
    op_type = "Div" if divides else "Mul"
    model = model_of(f"t = MatMul (a, b)  y = {op_type} (t, number)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(value, "number"))
    result = check_fused(model, FEEDS, ops=["ScaledMatMul"])
    wanted = 1 / float(value.reshape(())) if divides else float(value.reshape(()))
    np.testing.assert_allclose(factors(result), [wanted], rtol=1e-6)


def test_attention_in_half_precision() -> None:
    """Both factors are the root of the scale, as torch writes them."""
    model = parse(
        """g (float16[b, 4, s, 8] q, float16[b, 4, t, 8] k) => (y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)  u = Mul (q, r)  v = Mul (kt, r)
            y = MatMul (u, v) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float16), "r"))
    feeds = {"q": random(2, 4, 3, 8, dtype=np.float16), "k": random(2, 4, 5, 8, dtype=np.float16)}
    result = check_fused(model, feeds, ops=["MatMulTransposed"], tolerance=2e-3)
    assert factors(result) == [0.25]


@pytest.mark.parametrize(
    ("nodes", "outputs", "missed"),
    [
        ("t = MatMul (a, b)  y = Mul (t, z)", "y", ["scale: inexact"]),
        ("t = MatMul (a, b)  y = Div (t, z)", "y", ["scale: inexact"]),
        ("t = MatMul (a, b)  y = Div (s, t)", "y", []),
        ("t = MatMul (a, b)  y = Mul (t, s)", "y, t", ["scale: other-readers"]),
        ("t = MatMul (a, b)  y = Mul (t, s)  w = Neg (t)", "y, w", ["scale: other-readers"]),
        ("t = MatMul (a, b)  y = Mul (t, wide)", "y", ["residual: shape-unproven"]),
        ("u = Mul (a, wide)  y = MatMul (u, b)", "y", []),
        ("u = Mul (a, s)  y = MatMul (u, b)  w = Neg (u)", "y, w", ["scale: other-readers"]),
        ("t = MatMul (a, b)  u = Tanh (t)  y = Mul (u, s)", "y", ["scale: no-such-operator"]),
        ("t = MatMul (a, b)  y = Mul (t, c)", "y", ["residual: shape-unproven"]),
    ],
)
def test_others_stay(nodes: str, outputs: str, missed: list[str]) -> None:
    model = model_of(nodes, outputs=outputs, c="1" if "(t, c)" in nodes else "5")
    left = ["MatMulTanh" if "Tanh" in nodes else "MatMul"]
    ops = [node.op_type for node in model.graph.node if node.op_type not in ("MatMul", "Tanh")]
    ops = ops[:1] + left + ops[1:] if nodes.startswith("u = Mul") else left + ops
    check_fused(model, ops=ops, missed=missed)


def test_a_matrix_times_itself_counts_its_factor_once_for_each_operand() -> None:
    model = parse(f"g (float[m, m] a) => (y) {NUMBERS} {{ u = Mul (a, s)  y = MatMul (u, u) }}")
    missed = ["scale: form-unknown"]
    check_fused(model, {"a": random(3, 3)}, ops=["Mul", "MatMul"], missed=missed)


@pytest.mark.parametrize(
    ("rest", "op"),
    [
        ("y = Relu (t)", "ScaledMatMulRelu"),
        ("u = Add (t, c)  y = Sigmoid (u)", "ScaledMatMulBiasSigmoid"),
        ("y = Add (t, r)", "ScaledMatMulAdd"),
    ],
)
def test_in_front_of_a_product_that_has_all_else(rest: str, op: str) -> None:
    """An activation and R are looked for first, and do not hinder it."""
    model = parse(
        f"""g (float[p, s, k] a, float[k, 5] b, float[5] c, float[p, s, 5] r) => (y) {NUMBERS}
            {{ v = Mul (a, s)  t = MatMul (v, b)  {rest} }}"""
    )
    result = check_fused(model, {**FEEDS, "r": random(2, 3, 5)}, ops=[op])
    np.testing.assert_allclose(factors(result)[0], 0.3, rtol=1e-6)


@pytest.mark.parametrize("add", ["", "  t = Add (t0, c)"])
@pytest.mark.parametrize("factor", ["Mul (f, s)", "Mul (s, f)", "Div (f, s)"])
def test_behind_a_cast_there_is_no_factor(add: str, factor: str) -> None:
    """The product is rounded to 16 bits in front of it."""
    model = parse(
        f"""g (float16[p, s, k] a, float16[k, 5] b, float16[5] c) => (float[p, s, 5] y) {NUMBERS}
            {{ {"t0" if add else "t"} = MatMul (a, b) {add}  f = Cast <to = 1> (t)
               y = {factor} }}"""
    )
    feeds = {name: value.astype(np.float16) for name, value in FEEDS.items()}
    ops = ["MatMulBiasToFloat" if add else "MatMulToFloat", factor[:3]]
    check_fused(model, feeds, ops=ops, missed=["scale: no-such-operator"], tolerance=2e-3)


def test_behind_the_cast_of_a_gemm_there_is_none_either() -> None:
    """1e-6 times its results are no normal numbers of fp16."""
    model = parse(
        """g (float16[m, k] a, float16[k, 5] b) => (float[m, 5] y) <float tiny = {1e-6}>
            { t = Gemm (a, b)  f = Cast <to = 1> (t)  y = Mul (f, tiny) }"""
    )
    feeds = {"a": random(3, 4, dtype=np.float16), "b": random(4, 5, dtype=np.float16)}
    missed = ["scale: no-such-operator"]
    result = check_fused(model, feeds, ops=["GemmToFloat", "Mul"], missed=missed)
    (wanted,), (got,) = run(model, feeds), run(result.model, feeds)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=0)


def test_before_opset_15_there_is_no_body() -> None:
    model = model_of("t = MatMul (a, b)  y = Mul (t, s)", opset=13)
    check_fused(model, FEEDS, ops=["MatMul", "Mul"], missed=["scale: opset"])


def test_the_attribute_of_a_function_stays() -> None:
    model = parse(
        "g (float[m, k] a, float[k, 5] b) => (y) { y = f.Block <e = 0.5> (a, b) }",
        imports=', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17]> Block <e> (a, b) => (y) {
            t = Gemm <alpha: float = @e> (a, b)
            s = Constant <value_float = 0.5> ()  y = Mul (t, s) }""",
    )
    feeds = {"a": random(3, 4), "b": random(4, 5)}
    check_fused(model, feeds, ops=["f.Block"], missed=["scale: unbound-attribute"])


def test_a_transpose_behind_a_scale_that_came_first() -> None:
    """A Gemm takes the factor over."""
    model = parse(
        f"""g (float[m, k] a, float[5, k] b) => (y) {NUMBERS} {{
            bt = Transpose (b)  t = MatMul (a, bt)  y = Mul (t, s) }}"""
    )
    feeds = {"a": random(3, 4), "b": random(5, 4)}
    rules = ["matmul", "scale"]
    first = check_fused(model, feeds, ops=["Transpose", "ScaledMatMul"], rules=rules)
    result = check_fused(first.model, feeds, ops=["Gemm"])
    np.testing.assert_allclose(factors(result), [0.3, 1.0], rtol=1e-6)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_takes_it_into_its_weights(op_type: str, bias: bool) -> None:
    model = parse(
        f"""g (float[n, 4, h, w] x) => (y) {NUMBERS} {{
            t = {op_type} (x, k{", c" * bias})  u = Div (t, s)  y = Relu (u) }}"""
    )
    for name, value in {"k": random(4, 4, 2, 2), "c": random(4)}.items():
        if bias or name == "k":
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    name = op_type if bias else f"{op_type}NoBias"
    result = check_fused(model, {"x": random(2, 4, 5, 6)}, ops=[f"{name}Relu"])
    wanted = ["u/weight", "u/bias"] if bias else ["u/weight"]
    names = [tensor.name for tensor in result.model.graph.initializer]
    assert [name for name in names if name not in ("two", "wide", "z")] == wanted


def test_a_convolution_of_computed_weights_stays() -> None:
    model = parse(
        f"""g (float[n, 4, h, w] x, float[4, 4, 1, 1] k) => (y) {NUMBERS} {{
            t = Conv (x, k)  y = Mul (t, s) }}"""
    )
    feeds = {"x": random(2, 4, 5, 6), "k": random(4, 4, 1, 1)}
    check_fused(model, feeds, ops=["ConvNoBias", "Mul"], missed=["scale: not-constant"])
