"""Gemm -> ai.moonpoly.Gemm: transposes, factors and every C, in each opset."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check, op_types, parse, random, refusals
from hypothesis import given, settings
from hypothesis import strategies as st

GRAPH = "g (float[m, k] a, float[k, n] b, float[] c) => (float[?, ?] y) {{ y = Gemm {} (a, b{}) }}"


def test_list_of_operators_and_attributes() -> None:
    model = parse(GRAPH.format("<alpha = 0.5, transB = 1>", ", c"))
    model.graph.node[0].name, model.graph.node[0].doc_string = "head", "the classifier"
    feeds = {"a": random(3, 4), "b": random(5, 4), "c": random(5)}
    result = check(model, feeds, taken=1)
    assert op_types(result.model) == ["ai.moonpoly.Gemm"]
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in result.model.graph.node[0].attribute
    }
    assert attributes == {"alpha": 0.5, "transB": 1, "beta": 1.0, "transA": 0}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, np.ndarray], str]:
    """Attributes (each may be absent), operands and the way in which C is given."""
    size = st.integers(0, 5)
    m, n, k = draw(size), draw(size), draw(size)
    trans_a, trans_b = (draw(st.sampled_from([None, 0, 1])) for _ in range(2))
    factor = st.sampled_from([None, 0.0, 1.0, -0.5, 3.0])
    chosen = {"transA": trans_a, "transB": trans_b, "alpha": draw(factor), "beta": draw(factor)}
    present = ", ".join(f"{name} = {value}" for name, value in chosen.items() if value is not None)
    feeds = {
        "a": random(*((k, m) if trans_a else (m, k)), seed=1),
        "b": random(*((n, k) if trans_b else (k, n)), seed=2),
        "c": random(*draw(st.sampled_from([(), (1,), (n,), (m, 1), (1, n), (m, n)])), seed=3),
    }
    return f"<{present}>" if present else "", feeds, draw(st.sampled_from(["", ", ", ", c"]))


@given(calls())
@settings(max_examples=60, deadline=None)
def test_transposes_factors_and_all_shapes_of_c(
    call: tuple[str, dict[str, np.ndarray], str],
) -> None:
    attributes, feeds, c = call
    check(parse(GRAPH.format(attributes, c)), feeds, taken=1)


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
def test_opsets(opset: int) -> None:
    model = parse(GRAPH.format("", ", c"), opset=opset, ir_version=13 if opset > 25 else 10)
    feeds = [{"a": random(2, 4), "b": random(4, 5), "c": random(5)}] if opset <= 23 else []
    check(model, *feeds, taken=1)


@pytest.mark.parametrize("opset", [7, 10])
def test_c_is_mandatory_before_opset_11(opset: int) -> None:
    assert refusals(check(parse(GRAPH.format("", ""), opset=opset))) == ["invalid"]


def test_opset_6_with_broadcast_stays() -> None:
    model = parse(GRAPH.format("<broadcast = 1>", ", c"), opset=6)
    assert refusals(check(model)) == ["opset"]


@pytest.mark.parametrize(
    ("attributes", "detail"),
    [("<broadcast = 1>", "broadcast"), ("<transA = 2>", "transA is 2"), ("<alpha = 1>", "alpha")],
)
def test_malformed_attributes_stay(attributes: str, detail: str) -> None:
    result = check(parse(GRAPH.format(attributes, ", c")))
    assert refusals(result) == ["invalid"]
    assert detail in result.report[0].detail


@pytest.mark.parametrize("a", ["float[k]", "float[z, m, k]", "float[n, 3]"])
def test_illegal_shapes_stay(a: str) -> None:
    model = parse(f"g ({a} a, float[4, 5] b) => (float[?, ?] y) {{ y = Gemm (a, b) }}")
    assert refusals(check(model)) == ["invalid"]


def test_transposed_operand_may_match() -> None:
    model = parse("g (float[4, m] a, float[5, 4] b) => (y) { y = Gemm<transA=1, transB=1>(a, b) }")
    check(model, taken=1)
    model = parse("g (float[3, m] a, float[5, 4] b) => (y) { y = Gemm<transA=1, transB=1>(a, b) }")
    assert refusals(check(model)) == ["invalid"]


def test_static_shapes_only_when_asked() -> None:
    text = "g (float[3, 4] a, float[4, 5] b, float[n] c) => (float[3, 5] y) { y = Gemm (a, b, c) }"
    assert refusals(check(parse(text))) == ["static"]
    check(parse(text), static=True, taken=1)


@pytest.mark.parametrize("dtype", ["double", "int64"])
def test_other_dtypes_stay(dtype: str) -> None:
    model = parse(GRAPH.format("", ", c").replace("float", dtype))
    assert refusals(check(model)) == ["dtype-unsupported"]
