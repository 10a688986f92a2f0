"""Reshape(Gemm(Reshape(X))) becomes a product of all dimensions of X."""

from __future__ import annotations

import onnx
import pytest
from equivalence import check_fused, parse, random

GRAPH = """g (float[p, s, 4] x, float[4, 6] w, float[6] c, float[p, s, 6] r) => (float[p, s, 6] y)
    <int64[2] flat = {{-1, 4}}, int64[1] six = {{6}}> {{
    p0 = Shape <start = 0, end = 2> (x)  unfolded = Concat <axis = 0> (p0, six)
    a = Reshape (x, flat)  t = Gemm {} (a, w{})  u = Reshape (t, unfolded)  {} }}"""
SHAPES = ["Shape", "Concat"]
FEEDS = {"x": random(2, 3, 4), "w": random(4, 6), "c": random(6), "r": random(2, 3, 6)}


@pytest.mark.parametrize(("c", "op"), [("", "MatMul"), (", c", "MatMulBias")])
def test_with_and_without_c(c: str, op: str) -> None:
    model = parse(GRAPH.format("", c, "y = Neg (u)"))
    result = check_fused(model, FEEDS, ops=[op, "Neg"])
    node = result.model.graph.node[0]
    assert list(node.input) == ["x", "w", "c"][: 3 if c else 2]
    assert not node.attribute


def test_then_a_residual_of_the_unfolded_shape_fits() -> None:
    model = parse(GRAPH.format("", ", c", "y = Add (r, u)"))
    check_fused(model, FEEDS, ops=["MatMulBiasAdd"])


@pytest.mark.parametrize(
    ("attributes", "c", "reason"),
    [
        ("<alpha = 0.5>", "", "form-unknown"),
        ("<beta = 0.5>", ", c", "form-unknown"),
        ("<transB = 1>", "", "form-unknown"),
        ("", ", d", "broadcasts"),
        ("", ", one", "shape-unproven"),
    ],
)
def test_near_misses(attributes: str, c: str, reason: str) -> None:
    model = parse(GRAPH.format(attributes, c, "y = Neg (u)"))
    if "transB" in attributes:
        model.graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("w", 1, [6, 4]))
    for name, shape in (("d", (1, 6)), ("one", (1,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(random(*shape), name))
    ops = [*SHAPES, "Reshape", "Gemm", "Reshape", "Neg"]
    feeds = {**FEEDS, "w": random(6, 4)} if "transB" in attributes else FEEDS
    check_fused(model, feeds, ops=ops, missed=[f"flatten: {reason}"])


def test_other_dimensions_in_front_stay() -> None:
    text = GRAPH.format("", "", "y = Neg (u)").replace("float[p, s, 6] y", "float[s, p, 6] y")
    model = parse(text.replace("Concat <axis = 0> (p0, six)", "Concat <axis = 0> (s0, six)"))
    pieces = parse(
        """g (float[p, s, 4] x) => (s0) { d0 = Shape <start = 0, end = 1> (x)
            d1 = Shape <start = 1, end = 2> (x)  s0 = Concat <axis = 0> (d1, d0) }"""
    )
    for node in reversed(pieces.graph.node):
        model.graph.node.insert(0, node)
    ops = ["Shape", "Shape", "Concat", *SHAPES, "Reshape", "Gemm", "Reshape", "Neg"]
    check_fused(model, FEEDS, ops=ops, missed=["flatten: shape-unproven"])


def test_a_flattening_of_the_last_dimension_stays() -> None:
    model = parse(
        """g (float[s, 2, 2] x, float[4, 2] w) => (float[s, 1, 2] y)
            <int64[2] flat = {-1, 4}, int64[3] unfolded = {-1, 1, 2}> {
            a = Reshape (x, flat)  t = Gemm (a, w)  y = Reshape (t, unfolded) }"""
    )
    feeds = {"x": random(3, 2, 2), "w": random(4, 2)}
    check_fused(
        model, feeds, ops=["Reshape", "Gemm", "Reshape"], missed=["flatten: shape-unproven"]
    )


def test_values_with_other_readers_stay() -> None:
    model = parse(GRAPH.format("", "", "y = Neg (u)"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("t", 1, ["rows", 6]))
    ops = [*SHAPES, "Reshape", "Gemm", "Reshape", "Neg"]
    check_fused(model, FEEDS, ops=ops, missed=["flatten: other-readers"])
    model.graph.output[1].CopyFrom(onnx.helper.make_tensor_value_info("a", 1, ["rows", 4]))
    check_fused(model, FEEDS, ops=["Reshape", "MatMul", "Neg"])


def test_a_computed_shape_with_another_reader_stays_for_it() -> None:
    model = parse(GRAPH.format("", "", "y = Neg (u)"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("unfolded", 7, [3]))
    check_fused(model, FEEDS, ops=[*SHAPES, "MatMul", "Neg"])
