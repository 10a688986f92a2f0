"""MatMul -> ai.moonpoly.MatMul: every rank, broadcast, opset and dtype that ONNX allows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check, op_types, parse, random, refusals
from hypothesis import given, settings
from hypothesis import strategies as st

LINEAR = "g (float[n, 4] a, float[4, 5] w) => (float[n, 5] y) { y = MatMul (a, w) }"


def test_list_of_operators() -> None:
    model = parse(
        """g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) {
            t = MatMul (a, w)  r = Relu (t)  y = MatMul (r, w) }"""
    )
    result = check(model, {"a": random(3, 4), "w": random(4, 4)}, taken=2)
    assert op_types(result.model) == ["ai.moonpoly.MatMul", "Relu", "ai.moonpoly.MatMul"]
    assert [entry.where for entry in result.report] == ["graph", "graph"]
    assert [entry.output for entry in result.report] == ["t", "y"]


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Shapes of A and B: 1-D to 5-D, batch dimensions that broadcast, sizes from zero."""
    size = st.integers(0, 4)
    k = draw(size)
    batch = draw(st.lists(size, max_size=3))
    shapes = []
    for matrix in ([draw(size), k], [k, draw(size)]):
        own = [draw(st.sampled_from([n, 1])) for n in batch]
        own = own[draw(st.integers(0, len(own))) :]
        shapes.append([k] if draw(st.integers(0, 5)) == 0 else own + matrix)
    return shapes[0], shapes[1]


@given(operands(), st.booleans(), st.sampled_from(["float", "float16"]))
@settings(max_examples=60, deadline=None)
def test_all_ranks_and_broadcasts(
    shapes: tuple[list[int], list[int]], named: bool, dtype: str
) -> None:
    a, b = (
        [f"{x}{i}" if named else "?" for i in range(len(s))]
        for x, s in zip("ab", shapes, strict=True)
    )
    rank = np.matmul(np.zeros(shapes[0]), np.zeros(shapes[1])).ndim
    y = f"{dtype}[{','.join('?' * rank)}]"
    model = parse(
        f"g ({dtype}[{','.join(a)}] a, {dtype}[{','.join(b)}] b) => ({y} y) {{ y = MatMul (a, b) }}"
    )
    numpy_type = np.float32 if dtype == "float" else np.float16
    a_value, b_value = (random(*shape, dtype=numpy_type) for shape in shapes)
    check(model, {"a": a_value, "b": b_value}, taken=1)


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
def test_opsets(opset: int) -> None:
    model = parse(LINEAR, opset=opset, ir_version=13 if opset > 25 else 10)
    feeds = [{"a": random(2, 4), "w": random(4, 5)}] if opset <= 23 else []
    result = check(model, *feeds, taken=1)
    assert {f.opset_import[0].version for f in result.model.functions} == {opset}


@pytest.mark.parametrize("a", ["float[n, 4]", "float[?, 4]", "float[0, 4]", "float[]"])
def test_unknown_dimensions(a: str) -> None:
    check(parse(LINEAR.replace("float[n, 4]", a)), taken=1)


def test_rank_0_stays() -> None:
    assert refusals(check(parse(LINEAR.replace("float[n, 4]", "float")))) == ["invalid"]


def test_negative_dimension_is_unknown() -> None:
    model = parse(LINEAR)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    check(model, taken=1)


def test_static_shapes_only_when_asked() -> None:
    model = parse(LINEAR.replace("n,", "3,"))
    result = check(model, taken=0)
    assert refusals(result) == ["static"]
    assert "[3,4]" in result.report[0].detail
    check(model, {"a": random(3, 4), "w": random(4, 5)}, static=True, taken=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(dtype: str) -> None:
    check(parse(LINEAR.replace("float", dtype)), taken=1)


@pytest.mark.parametrize("dtype", ["double", "int32", "uint64"])
def test_other_dtypes_stay(dtype: str) -> None:
    assert refusals(check(parse(LINEAR.replace("float", dtype)))) == ["dtype-unsupported"]


def test_bfloat16_before_opset_13_stays() -> None:
    model = parse(LINEAR.replace("float", "bfloat16"), opset=12)
    assert refusals(check(model)) == ["dtype-unsupported"]


def test_one_known_operand_proves_the_dtype() -> None:
    graph = """g (float[n, 4] x, float[4, 5] w) => (y)
        {{ a = some.Unknown (x)  t = MatMul (a, {b})  y = other.Unknown (t) }}"""
    imports = ', "some" : 1, "other" : 1'
    check(parse(graph.format(b="w"), imports=imports), taken=1)
    assert refusals(check(parse(graph.format(b="a"), imports=imports))) == ["dtype-unknown"]


def test_conflicting_dtypes_stay() -> None:
    model = parse(LINEAR.replace("float[4, 5]", "float16[4, 5]"))
    assert refusals(check(model)) == ["invalid"]


@pytest.mark.parametrize("opset", [1, 6])
def test_old_opsets_stay(opset: int) -> None:
    assert refusals(check(parse(LINEAR, opset=opset))) == ["opset"]


def test_future_opset_stays() -> None:
    model = parse(LINEAR, opset=onnx.defs.onnx_opset_version() + 1)
    assert refusals(check(model)) == ["opset"]


@pytest.mark.parametrize(
    "call", ["MatMul (a)", "MatMul (a, w, a)", "MatMul <alpha = 2.0> (a, w)", "MatMul (a, v)"]
)
def test_malformed_nodes_stay(call: str) -> None:
    model = parse(
        f"""g (float[n, 4] a, float[4, 5] w, float[3, 5] v) => (float[n, 5] y) {{ y = {call} }}"""
    )
    assert refusals(check(model)) == ["invalid"]


def test_constant_product_stays_for_folding() -> None:
    model = parse(
        """g (float[n, 2] a) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
            s = Shape (w)  v = ConstantOfShape (s)  p = MatMul (w, v)  y = MatMul (a, p) }"""
    )
    result = check(model, {"a": random(3, 2)}, static=True, taken=1)
    assert refusals(result) == ["constant"]
    assert op_types(result.model)[-2:] == ["MatMul", "ai.moonpoly.MatMul"]


@pytest.mark.parametrize("domain", ["ai.onnx", ""])
def test_both_names_of_the_standard_domain(domain: str) -> None:
    model = parse(LINEAR)
    model.opset_import[0].domain = domain
    model.graph.node[0].domain = domain
    check(model, {"a": random(2, 4), "w": random(4, 5)}, taken=1)


def test_matmul_of_another_domain_is_no_candidate() -> None:
    model = parse(LINEAR.replace("MatMul", "other.MatMul"), imports=', "other" : 1')
    assert check(model).report == ()


def test_integer_product_is_no_candidate() -> None:
    model = parse("g (int8[n, 4] a, int8[4, 5] w) => (int32[n, 5] y) { y = MatMulInteger (a, w) }")
    assert check(model, taken=0).report == ()


def test_nan_and_infinity() -> None:
    a = random(3, 4)
    a[0, 1], a[1, 2] = np.nan, np.inf
    check(parse(LINEAR), {"a": a, "w": np.zeros((4, 5), np.float32)}, taken=1)
