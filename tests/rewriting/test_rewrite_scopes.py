"""Nodes in subgraphs and in model-local functions, whose types come from their calls."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check, parse, random, refusals, run

from moonpoly_ort.errors import ModelError
from moonpoly_ort.rewriting import rewrite

IMPORTS = ', "f" : 1'
LINEAR = '<domain: "f", opset_import: ["" : 17]> Linear (x, w) => (y) { y = MatMul (x, w) }'


def functions_of(model: onnx.ModelProto) -> dict[str, list[str]]:
    return {
        f"{function.domain}.{function.name}": [
            f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            for node in function.node
        ]
        for function in model.functions
        if function.domain != "ai.moonpoly"
    }


@pytest.mark.parametrize("condition", [True, False])
def test_if_branches_and_captured_values(condition: bool) -> None:
    model = parse(
        """g (bool c, float[n, 4] a) => (float[n, 4] y)
            <float[4, 4] w = {0,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6}> {
            t = MatMul (a, w)
            [gate] y = If (c) <
                then_branch = yes () => (float[n, 4] u) { u = MatMul (t, w) },
                else_branch = no () => (float[n, 4] v) {
                    [inner] v = If (c) <
                        then_branch = p () => (float[n, 4] r) { r = Identity (t) },
                        else_branch = q () => (float[n, 4] s) { s = Gemm (t, w, a) }> }> }"""
    )
    result = check(model, {"c": np.array(condition), "a": random(3, 4)}, taken=3)
    assert [entry.where for entry in result.report] == [
        "graph",
        "graph/If[gate].then_branch",
        "graph/If[gate].else_branch/If[inner].else_branch",
    ]


def test_loop_and_scan_bodies() -> None:
    model = parse(
        """g (float[n, 4] a, float[4, 4] w, int64 trips) => (float[n, 4] y, float[n, 4] z)
            <bool go = {1}, float[4] zero = {0, 0, 0, 0}> {
            y = Loop (trips, go, a) <body = body (int64 i, bool c, float[n, 4] s)
                => (bool again, float[n, 4] next) {
                again = Identity (c)  next = MatMul (s, w) }>
            last, z = Scan <num_scan_inputs = 1, body = step (float[4] carry, float[4] row)
                => (float[4] kept, float[4] out) {
                kept = Identity (carry)  out = MatMul (row, w) }> (zero, a) }"""
    )
    feeds = {"a": random(3, 4), "w": random(4, 4), "trips": np.array(2, np.int64)}
    result = check(model, feeds, taken=1)
    assert refusals(result) == ["static"]
    assert result.report[1].where == "graph/Scan[#1].body"
    check(model, feeds, static=True, taken=2)


def test_function_called_twice() -> None:
    model = parse(
        """g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) {
            t = f.Linear (a, w)  y = f.Linear (t, w) }""",
        imports=IMPORTS,
        functions=LINEAR,
    )
    result = check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=1)
    assert result.report[0].where == "function f.Linear"
    assert functions_of(result.model) == {"f.Linear": ["ai.moonpoly.MatMul"]}
    linear = next(f for f in result.model.functions if f.domain == "f")
    assert {i.domain: i.version for i in linear.opset_import} == {"": 17, "ai.moonpoly": 1}


@pytest.mark.parametrize(
    ("other", "reason"),
    [("float16", None), ("double", "dtype-unsupported"), ("int32", "dtype-unsupported")],
)
def test_every_call_must_have_a_supported_dtype(other: str, reason: str | None) -> None:
    model = parse(
        f"""g (float[n, 4] a, float[4, 4] w, {other}[n, 4] b, {other}[4, 4] v)
            => (float[n, 4] y, {other}[n, 4] z) {{ y = f.Linear (a, w)  z = f.Linear (b, v) }}""",
        imports=IMPORTS,
        functions=LINEAR,
    )
    result = check(model, taken=0 if reason else 1)
    assert refusals(result) == ([reason] if reason else [])


@pytest.mark.parametrize(("second", "taken"), [("3", 0), ("n", 1)])
def test_one_dynamic_call_is_enough(second: str, taken: int) -> None:
    model = parse(
        f"""g (float[2, 4] a, float[4, 4] w, float[{second}, 4] b) => (float[2, 4] y, float[?, 4] z)
            {{ y = f.Linear (a, w)  z = f.Linear (b, w) }}""",
        imports=IMPORTS,
        functions=LINEAR,
    )
    check(model, taken=taken)


def test_nested_functions_calls_from_subgraphs_and_bound_attributes() -> None:
    model = parse(
        """g (bool c, float[n, 4] a, float[4, 4] w) => (float[n, 4] y) {
            y = If (c) <
                then_branch = yes () => (float[n, 4] u) { u = f.Outer <scale = 2.5> (a, w) },
                else_branch = no () => (float[n, 4] v) {
                    v = f.Outer <scale = -1.0> (a, w, a) }> }""",
        imports=IMPORTS,
        functions="""
        <domain: "f", opset_import: ["" : 17, "f" : 1]> Outer <scale> (x, w, bias) => (y) {
            r = Relu (x)  y = f.Inner <factor: float = @scale> (r, w, bias) }
        <domain: "f", opset_import: ["" : 17]> Inner <factor> (x, w, bias) => (y) {
            y = Gemm <alpha: float = @factor> (x, w, bias) }""",
    )
    for condition in (True, False):
        feeds = {"c": np.array(condition), "a": random(3, 4), "w": random(4, 4)}
        result = check(model, feeds, taken=1)
    inner = next(f for f in result.model.functions if f.name == "Inner")
    alpha = next(a for a in inner.node[0].attribute if a.name == "alpha")
    assert alpha.ref_attr_name == "factor"


def test_attribute_default_of_a_function_binds() -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Scaled (a, w) }",
        imports=IMPORTS,
        ir_version=9,
        functions="""<domain: "f", opset_import: ["" : 17]>
            Scaled <factor: float = 3.0> (x, w) => (y) {
                y = Gemm <alpha: float = @factor> (x, w) }""",
    )
    check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=1)


def test_unbound_attribute_stays() -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Scaled (a, w) }",
        imports=IMPORTS,
        functions="""<domain: "f", opset_import: ["" : 17]> Scaled <factor> (x, w) => (y)
            { y = Gemm <alpha: float = @factor> (x, w) }""",
    )
    feeds = {"a": random(3, 4), "w": random(4, 4)}
    assert refusals(check(model, feeds)) == ["unbound-attribute"]


def test_attribute_reference_outside_of_a_function_stays() -> None:
    model = parse("g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = Gemm (a, w) }")
    model.graph.node[0].attribute.add(name="alpha", ref_attr_name="scale", type=1)
    assert refusals(check(model)) == ["unbound-attribute"]


def test_function_that_is_never_called() -> None:
    model = parse(
        "g (float[n, 4] a) => (float[n, 4] y) { y = Relu (a) }", imports=IMPORTS, functions=LINEAR
    )
    assert refusals(check(model, {"a": random(3, 4)})) == ["never-called"]


def test_subgraph_inside_a_function() -> None:
    model = parse(
        "g (bool c, float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Gated (c, a, w) }",
        imports=IMPORTS,
        functions="""<domain: "f", opset_import: ["" : 17]> Gated (c, x, w) => (y) {
            y = If (c) <then_branch = yes () => (u) { u = MatMul (x, w) },
                        else_branch = no () => (v) { v = Identity (x) }> }""",
    )
    for condition in (True, False):
        feeds = {"c": np.array(condition), "a": random(3, 4), "w": random(4, 4)}
        result = check(model, feeds, taken=1)
    assert result.report[0].where == "function f.Gated/If[#0].then_branch"


@pytest.mark.parametrize(("version", "taken"), [(16, 1), (13, 1), (12, 0)])
def test_function_of_another_opset(version: int, taken: int) -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Linear (a, w) }",
        imports=IMPORTS,
        functions=LINEAR.replace("17", str(version)),
    )
    result = check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=taken)
    assert refusals(result) == ([] if taken else ["function-opset"])


def test_model_that_uses_ai_onnx_only_in_functions() -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Linear (a, w) }",
        imports=IMPORTS,
        functions=LINEAR,
    )
    del model.opset_import[0]
    result = check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=1)
    assert [i.domain for i in result.model.opset_import] == ["f", "ai.moonpoly"]


def test_overloads_are_told_apart() -> None:
    model = parse(
        "g (float[n, 4] a, double[n, 4] b) => (y, z) { y = f.Square (a)  z = f.Square (b) }",
        imports=IMPORTS,
        ir_version=10,
        functions='<domain: "f", opset_import: ["" : 17]> Square (x) => (y) '
        "{ t = Transpose (x)  y = MatMul (x, t) }",
    )
    model.functions.add().CopyFrom(model.functions[0])
    model.functions[0].overload, model.graph.node[0].overload = "single", "single"
    model.functions[1].overload, model.graph.node[1].overload = "double", "double"
    result = rewrite(model)
    assert [(e.where, e.taken) for e in result.report] == [
        ("function f.Square.single", True),
        ("function f.Square.double", False),
        ("function f.Square.single", True),  # the Transpose
    ]


def test_function_that_overrides_a_standard_operator() -> None:
    model = parse(
        "g (float[n, 4] a, float[n, 4] b) => (float[n, 4] y) { y = MatMul (a, b) }",
        functions='<domain: "", opset_import: ["" : 17]> MatMul (a, b) => (y) { y = Add (a, b) }',
    )
    assert refusals(check(model)) == ["overridden"]


def test_recursion_is_refused() -> None:
    model = parse(
        "g (float[n, 4] a) => (float[n, 4] y) { y = f.Even (a) }",
        imports=IMPORTS,
        functions="""
        <domain: "f", opset_import: ["" : 17, "f" : 1]> Even (x) => (y) { y = f.Odd (x) }
        <domain: "f", opset_import: ["" : 17, "f" : 1]> Odd (x) => (y) { y = f.Even (x) }""",
    )
    with pytest.raises(ModelError, match=r"call themselves.*f\.Even, f\.Odd"):
        rewrite(model)


def test_nested_calls_share_their_signatures() -> None:
    """Eight levels that call the next one twice are 2^8 calls, but eight signatures."""
    levels = [
        f'<domain: "f", opset_import: ["" : 17, "f" : 1]> L{i} (x, w) => (y) '
        f"{{ t = f.L{i + 1} (x, w)  y = f.L{i + 1} (t, w) }}"
        for i in range(8)
    ]
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.L0 (a, w) }",
        imports=IMPORTS,
        functions="\n".join([*levels, LINEAR.replace("Linear", "L8")]),
    )
    check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=1)


def test_rewritten_function_gives_the_same_result_when_optimized() -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = f.Linear (a, w) }",
        imports=IMPORTS,
        functions=LINEAR,
    )
    feeds = {"a": random(3, 4), "w": random(4, 4)}
    np.testing.assert_array_equal(run(rewrite(model).model, feeds)[0], feeds["a"] @ feeds["w"])
