"""Shapes of the inputs of nodes at given sizes: by inference, and read off a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from small_models import mlp

from moonpoly_ort import InputError
from moonpoly_ort.sizing import all_nodes, feeds, input_shapes, mark, node_shapes


def marked(text: str) -> onnx.ModelProto:
    """A model whose MatMul and Gemm nodes are marked, in order."""
    model = parser.parse_model(text)
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    nodes = [n for body in bodies for n in all_nodes(body) if n.op_type in ("MatMul", "Gemm")]
    for index, node in enumerate(nodes):
        mark(node, index)
    return model


def shapes(text: str, sizes: dict[str, Any]) -> dict[int, dict[tuple[Any, ...], int]]:
    result = node_shapes(marked(text), sizes)
    assert not result.why, result.why
    return {index: dict(counts) for index, counts in result.found.items()}


def test_inference_alone() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b, s, 8] x, float[b, 8, 4] y) => (float[b, s, 4] z) { z = MatMul (x, y) }"""
    assert shapes(text, {"b": 2, "s": 37}) == {0: {((2, 37, 8), (2, 8, 4)): 1}}
    assert shapes(text, {"b": 1, "s": 0}) == {0: {((1, 0, 8), (1, 8, 4)): 1}}


def test_shapes_computed_by_the_model() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b, s, 8] x) => (float[u, v] z) <float[8, 4] w = {1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4,
            1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}>
        { d = Shape <start = 2> (x) m = Constant <value_ints = [-1]> () t = Concat <axis = 0> (m, d)
          r = Reshape (x, t) z = MatMul (r, w) }"""
    assert shapes(text, {"b": 2, "s": 5}) == {0: {((10, 8), (8, 4)): 1}}


def test_shapes_that_depend_on_values_are_read_off_a_run() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 2] x) => (float[u, v] z)
        { w = Constant <value = float[2, 3] {1,2,3,4,5,6}> ()
          f = ReduceSum <keepdims = 0> (x, a) c = Greater (f, zero) y = Compress <axis = 0> (x, c)
          z = MatMul (y, w) }"""
    text = text.replace(
        "{ w =",
        "{ a = Constant <value_ints = [1]> ()\n zero = Constant <value_float = 0.0> ()\n w =",
    )
    x = np.array([[1, 1], [-1, -1], [2, 2]], np.float32)
    assert shapes(text, {"x": x}) == {0: {((2, 2), (2, 3)): 1}}


def test_nodes_in_subgraphs_and_in_functions_called_twice() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        g (float[b, 4] x, bool c) => (float[b, 4] y) {
          w = Constant <value = float[4,4] {1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}> ()
          t = own.twice (x, w)
          y = If (c) <then_branch = one () => (float[b, 4] o) { o = MatMul (t, w) },
                      else_branch = two () => (float[b, 4] p) { p = own.twice (t, w) }>
        }
        <domain: "own", opset_import: ["" : 18]>
        twice (a, b) => (z) { m = MatMul (a, b) z = MatMul (m, b) }"""
    assert shapes(text, {"b": 3}) == {
        0: {((3, 4), (4, 4)): 1},
        1: {((3, 4), (4, 4)): 2},
        2: {((3, 4), (4, 4)): 2},
    }


def test_a_loop_that_grows_its_operand_has_several_shapes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b, 2] x) => (float[r, 2] y) {
          n = Constant <value_int = 3> () go = Constant <value = bool {1}> ()
          w = Constant <value = float[2, 2] {1,0,0,1}> ()
          y = Loop (n, go, x) <body = body (int64 i, bool c, float[k, 2] s) => (bool d, float[q, 2]
          t) {
            d = Identity (c) m = MatMul (s, w) t = Concat <axis = 0> (s, m) }>
        }"""
    assert shapes(text, {"b": 1}) == {
        0: {((1, 2), (2, 2)): 1, ((2, 2), (2, 2)): 1, ((4, 2), (2, 2)): 1}
    }


def test_gemm_without_c_and_half_precision() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float16[b, 2] x, float16[2, 3] w) => (float16[b, 3] y) { y = Gemm (x, w) }"""
    result = node_shapes(marked(text), {"b": 4})
    assert dict(result.found[0]) == {((4, 2), (2, 3)): 1}
    assert result.elements[0] == onnx.TensorProto.FLOAT16


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_behind_operators_of_onnx_runtime(dtype: str) -> None:
    """Their results' shapes only the run tells, in which weights must not be lost to packed copies;
    it computes fp16 in fp32.
    """
    text = f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g ({dtype}[b, 2] x) => ({dtype}[b, 3] y, {dtype}[b, 4] z, {dtype}[2, 2] p)
        <{dtype}[2] g = {{1, 2}},
         {dtype}[2, 3] w = {{1, 2, 3, 4, 5, 6}}, {dtype}[3] c = {{1, 2, 3}},
         {dtype}[2, 4] v = {{1, 2, 3, 4, 5, 6, 7, 8}}>
        {{
            t = com.microsoft.SkipLayerNormalization (x, x, g)
            y = Gemm (t, w, c)
            z = MatMul (t, v)
            u = Transpose (t)
            p = MatMul (u, t)
        }}"""
    result = node_shapes(marked(text), {"b": 4})
    assert not result.why
    assert {index: dict(counts) for index, counts in result.found.items()} == {
        0: {((4, 2), (2, 3), (3,)): 1},
        1: {((4, 2), (2, 4)): 1},
        2: {((2, 4), (4, 2)): 1},
    }
    element = getattr(onnx.TensorProto, dtype.upper())
    # Nothing tells the type of a product of two such values in fp16.
    assert result.elements == {0: element, 1: element, 2: element if dtype == "float" else 0}


def test_what_cannot_be_known_has_a_reason() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "unheard.of" : 1]>
        g (float[b, 2] x, float[2, 3] w) => (float[b, 3] y) { t = unheard.of.Op (x) y = MatMul (t,
        w) }"""
    result = node_shapes(marked(text), {"b": 4})
    assert not result.found
    assert "does not run here" in result.why[0]


def test_the_model_is_not_changed() -> None:
    model = mlp()
    before = model.SerializeToString(deterministic=True)
    node_shapes(model, {"batch": 3})
    feeds(model, {"batch": 3})
    assert model.SerializeToString(deterministic=True) == before


def inputs(text: str) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]>g ({text}) => (float[n] y) {{ y = Identity (x) }}'
    )


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("float[b, 3] x", {"b": 2}, (2, 3)),
        ("float[b, 3] x", {"x": [2, 3]}, (2, 3)),
        ("float[b, 3] x", {"x": np.zeros((4, 3))}, (4, 3)),
        ("float[?, 3] x", {"x": [2, 3]}, (2, 3)),
        ("float x", {}, ()),
        ("float[?] x", {"x": 7}, (7,)),
        ("float[x] x", {"x": 7}, (7,)),
        ("float[] x", {"x": [2, 3]}, (2, 3)),
    ],
)
def test_input_shapes(text: str, sizes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert input_shapes(inputs(text), sizes)["x"] == expected


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("float[b, 3] x", {}, "'b' of input 'x' has no size"),
        ("float[?, 3] x", {}, "dimension 0 of input 'x'"),
        ("float[b, 3] x", {"b": 1, "c": 2}, "no symbolic dimension named 'c'"),
        ("float[b, 3] x", {"x": [1, 4]}, "dimension 1 of input 'x' is 3"),
        ("float[b, 3] x", {"x": [1, 3, 3]}, "has rank 2"),
        ("float[b, 3] x", {"b": -1}, "size -1"),
        ("float[b, 3] x", {"b": 1.5}, "size 1.5"),
        ("float[] x", {}, "has no rank"),
        ("seq(float[b]) x", {}, "is no tensor"),
    ],
)
def test_sizes_that_do_not_fit(text: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        input_shapes(inputs(text), sizes)


def test_feeds_have_the_models_types() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]>'
        "g (float16[b] h, int64[b] i, bool[b] t, bfloat16[b] f, string[b] s) => (float16[b] y)"
        "{ y = Identity (h) }"
    )
    values = feeds(model, {"b": 4})
    assert {name: value.dtype.name for name, value in values.items()} == {
        "h": "float16",
        "i": "int64",
        "t": "bool",
        "f": "bfloat16",
        "s": "object",
    }
    assert not values["i"].any()
    assert values["t"].all()
    assert np.array_equal(values["h"], feeds(model, {"b": 4})["h"])
    assert not np.array_equal(values["h"], feeds(model, {"b": 4}, seed=1)["h"])
