"""A product whose halves are gates and values: one product whose columns alternate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from equivalence import check_fused, parse, random, run
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort import model_files
from moonpoly_ort.rewriting import rewrite

N = 6
X = {"x": random(2, 3, 4)}
CONSTANTS = {"w": random(4, 2 * N), "b": random(2 * N, seed=1)}
GATES = {
    "Silu": "s = Sigmoid (g)  t = Mul (g, s)",
    "Sigmoid": "t = Sigmoid (g)",
    "Gelu": "d = Div (g, r)  e = Erf (d)  p = Add (e, one)  q = Mul (g, p)  t = Mul (q, half)",
    "LeakyRelu": "t = LeakyRelu <alpha = 0.2> (g)",
}
NUMBERS = {"r": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}


def model_of(
    body: str, *, constants: dict[str, np.ndarray] | None = None, opset: int = 17, width: int = N
) -> onnx.ModelProto:
    model = parse(
        f"g (float[batch, length, 4] x) => (float[batch, length, {width}] y) {{ {body} }}",
        opset=opset,
    )
    for name, values in (CONSTANTS | NUMBERS | (constants or {})).items():
        if f"{name}" in {i for node in model.graph.node for i in node.input}:
            tensor = onnx.numpy_helper.from_array(np.asarray(values), name)
            model.graph.initializer.append(tensor)
    return model


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def in_turn(whole: np.ndarray, gate: int) -> np.ndarray:
    halves = np.split(whole, 2, axis=-1)
    return np.stack([halves[gate], halves[1 - gate]], axis=-1).reshape(whole.shape)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("outputs", ["g, v", "v, g"])
@pytest.mark.parametrize("operands", ["t, v", "v, t"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_order_of_halves_and_operands(
    gate: str, outputs: str, operands: str, bias: bool
) -> None:
    product = "m = MatMul (x, w)  h = Add (m, b)" if bias else "h = MatMul (x, w)"
    split = f"{outputs} = Split <axis = -1> (h)"
    model = model_of(f"{product}  {split}  {GATES[gate]}  y = Mul ({operands})")
    name = f"MatMulGated{'Bias' if bias else ''}{gate}"
    result = check_fused(model, X, ops=[name])
    (node,) = result.model.graph.node
    kept = initializers(result.model)
    assert set(node.input) == {"x", *kept}
    first = int(outputs == "v, g")
    for key, original in zip(node.input[1:], ("w", "b"), strict=False):
        np.testing.assert_array_equal(kept[key], in_turn(CONSTANTS[original], first))
    (stamp,) = (entry.value for entry in node.metadata_props)
    assert "packed_gate" in stamp.split(",")
    entries = [entry for entry in result.taken if entry.rule == "packed_gate"]
    assert {"Split", "Mul"} <= {entry.op_type for entry in entries}
    assert all(entry.into == "y" for entry in entries)


@pytest.mark.parametrize(
    ("split", "opset"),
    [
        ("g, v = Split <axis = 2> (h)", 17),
        ("g, v = Split <axis = -1> (h, sizes)", 13),
        ("g, v = Split <axis = -1, split = [6, 6]> (h)", 11),
        ("g, v = Split <axis = -1, num_outputs = 2> (h)", 18),
        ("g, v = Split <axis = -1> (h, sizes)", 20),
    ],
)
def test_every_form_of_split(split: str, opset: int) -> None:
    body = f"h = MatMul (x, w)  {split}  t = Relu (g)  y = Mul (t, v)"
    model = model_of(body, constants={"sizes": np.array([N, N])}, opset=opset)
    check_fused(model, X, ops=["MatMulGatedRelu"])


SLICES = {
    "at the end": ("zero, half_of_all, last", "half_of_all, all, last"),
    "to the largest number": ("zero, half_of_all, two", "half_of_all, most, two"),
    "from the end": ("zero, minus_half, last", "minus_half, most, last, one_step"),
}


@pytest.mark.parametrize("form", SLICES)
@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_that_are_sliced(form: str, gate_first: bool) -> None:
    numbers = {
        "zero": 0, "half_of_all": N, "all": 2 * N, "last": -1, "two": 2, "most": 2**63 - 1,
        "minus_half": -N, "one_step": 1,
    }  # fmt: skip
    constants = {name: np.array([number]) for name, number in numbers.items()}
    names = ("g", "v") if gate_first else ("v", "g")
    slices = [f"{n} = Slice (h, {bounds})" for n, bounds in zip(names, SLICES[form], strict=True)]
    body = f"h = MatMul (x, w)  {'  '.join(slices)}  {GATES['Silu']}  y = Mul (t, v)"
    result = check_fused(model_of(body, constants=constants), X, ops=["MatMulGatedSilu"])
    (node,) = result.model.graph.node
    kept = initializers(result.model)[node.input[1]]
    np.testing.assert_array_equal(kept, in_turn(CONSTANTS["w"], int(not gate_first)))


def test_without_an_activation() -> None:
    body = "h = MatMul (x, w)  g, v = Split <axis = -1> (h)  y = Mul (g, v)"
    check_fused(model_of(body), X, ops=["MatMulGated"])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), inner=st.integers(1, 9), columns=st.integers(1, 9))
def test_sizes(rows: int, inner: int, columns: int) -> None:
    model = parse(
        f"g (float[rows, {inner}] x) => (float[rows, {columns}] y) {{ h = MatMul (x, w)"
        "  g, v = Split <axis = -1> (h)  t = Tanh (g)  y = Mul (v, t) }"
    )
    weight = onnx.numpy_helper.from_array(random(inner, 2 * columns), "w")
    model.graph.initializer.append(weight)
    check_fused(model, {"x": random(rows, inner, seed=1)}, ops=["MatMulGatedTanh"])


STAYS = {
    "another axis": "h = MatMul (x, w)  g, v = Split <axis = 1> (h, three)",
    "uneven halves": "h = MatMul (x, w)  g, v = Split <axis = -1> (h, uneven)",
    "three parts": "h = MatMul (x, w)  g, v, z = Split <axis = -1> (h, thirds)",
    "slices that overlap": "h = MatMul (x, w)  g = Slice (h, zero, seven, last)  "
    "v = Slice (h, five, most, last)",
    "the same slice twice": "h = MatMul (x, w)  g = Slice (h, zero, six, last)  "
    "v = Slice (h, zero, six, last)",
    "every other column": "h = MatMul (x, w)  g = Slice (h, zero, six, last, step)  "
    "v = Slice (h, six, most, last, step)",
    "computed sizes": "h = MatMul (x, w)  n = Neg (minus)  g, v = Split <axis = -1> (h, n)",
}


@pytest.mark.parametrize("case", STAYS)
def test_what_are_no_halves_stays(case: str) -> None:
    constants = {
        "three": np.array([1, 1]), "uneven": np.array([N + 5, 1]), "thirds": np.array([4, 4, 4]),
        "minus": np.array([-N, -N]), "zero": np.array([0]), "seven": np.array([7]),
        "five": np.array([5]), "six": np.array([6]), "most": np.array([99]),
        "last": np.array([-1]), "step": np.array([2]),
    }  # fmt: skip
    body = f"{STAYS[case]}  t = Relu (g)  y = Mul (t, v)"
    x = {"x": random(2, 2, 4)}
    model = model_of(body, constants=constants, width=12)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = rewrite(model)
    assert not any("Gated" in node.op_type for node in result.model.graph.node)
    np.testing.assert_array_equal(run(result.model, x)[0], run(model, x)[0])


MISSED = {
    "other readers of the product": ("z = Neg (h)", "other-readers"),
    "other readers of the gates": ("z = Neg (g)", "other-readers"),
    "other readers of the values": ("z = Neg (v)", "other-readers"),
    "other readers of the activated": ("z = Neg (t)", "other-readers"),
}


@pytest.mark.parametrize("case", MISSED)
def test_near_misses_have_a_reason(case: str) -> None:
    more, reason = MISSED[case]
    body = f"h = MatMul (x, w)  g, v = Split <axis = -1> (h)  t = Relu (g)  y = Mul (t, v)  {more}"
    model = model_of(body)
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    result = rewrite(model)
    assert not any("Gated" in node.op_type for node in result.model.graph.node)
    found = [entry for entry in result.report if entry.rule == "packed_gate"]
    assert [entry.refusal.reason.value for entry in found if entry.refusal] == [reason]
    for one, other in zip(run(result.model, X), run(model, X), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_computed_stays() -> None:
    body = "z = Neg (w)  h = MatMul (x, z)  g, v = Split <axis = -1> (h)  t = Relu (g)"
    result = rewrite(model_of(f"{body}  y = Mul (t, v)"))
    assert not any("Gated" in node.op_type for node in result.model.graph.node)
    (entry,) = (entry for entry in result.report if entry.rule == "packed_gate")
    assert entry.refusal is not None
    assert entry.refusal.reason.value == "not-constant"


def test_the_rule_can_be_left_out() -> None:
    body = "h = MatMul (x, w)  g, v = Split <axis = -1> (h)  t = Relu (g)  y = Mul (t, v)"
    left = rewrite(model_of(body), disable=["packed_gate"])
    assert [node.op_type for node in left.model.graph.node] == ["MatMul", "Split", "Relu", "Mul"]


@pytest.mark.parametrize("rule", ["gated", "packed_gate"])
def test_weights_of_a_model_that_is_to_be_trained_stay(rule: str) -> None:
    halves = "h = MatMul (x, w)  g, v = Split <axis = -1> (h)"
    apart = "g = MatMul (x, gates)  v = MatMul (x, values)"
    body = halves if rule == "packed_gate" else apart
    constants = {"gates": random(4, N), "values": random(4, N, seed=1)}
    model = model_of(f"{body}  t = Relu (g)  y = Mul (t, v)", constants=constants)
    before = initializers(model)
    model.training_info.add()
    result = rewrite(model)
    assert not any("Gated" in node.op_type for node in result.model.graph.node)
    assert initializers(result.model).keys() == before.keys()


@pytest.mark.parametrize("kind", ["bytes", "file", "external"])
def test_weights_that_are_not_parsed(tmp_path: Path, kind: str) -> None:
    rows, columns = 64, 192
    weight = random(rows, 2 * columns)
    model = parse(
        f"g (float[batch, {rows}] x) => (float[batch, {columns}] y) {{ h = MatMul (x, w)"
        "  g, v = Split <axis = -1> (h)  t = Relu (g)  y = Mul (t, v) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(
        model, path, save_as_external_data=kind == "external", location="weights",
        size_threshold=0,
    )  # fmt: skip
    source = path.read_bytes() if kind == "bytes" else path
    result = rewrite(source, tmp_path / "out.onnx", overwrite=True)
    new = onnx.load(tmp_path / "out.onnx")
    (node,) = new.graph.node
    assert node.op_type == "MatMulGatedRelu"
    np.testing.assert_array_equal(initializers(new)[node.input[1]], in_turn(weight, 0))
    x = {"x": random(3, rows, seed=2)}
    want = run(model_files.read(path).model if kind != "external" else onnx.load(path), x)[0]
    np.testing.assert_allclose(run(new, x)[0], want, rtol=1e-5, atol=1e-4)
    assert len(result.taken) >= 2


def test_the_axis_of_a_function_is_not_known() -> None:
    model = parse(
        "g (float[s, 4] x, float[4, 12] w) => (y) { y = f.Block <e = 1> (x, w) }",
        imports=', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17]> Block <e> (x, w) => (y) {
            p = MatMul (x, w)  g, u = Split <axis: int = @e> (p)  t = Relu (g)  y = Mul (t, u) }""",
    )
    result = check_fused(model, {"x": random(3, 4), "w": random(4, 12)}, ops=["f.Block"])
    block = next(function for function in result.model.functions if function.name == "Block")
    assert [node.op_type for node in block.node] == ["MatMul", "Split", "Relu", "Mul"]
