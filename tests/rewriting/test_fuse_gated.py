"""Two products of one input, one activated, multiplied with each other: one product whose weights'
columns alternate.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from equivalence import check_fused, parse, random, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes.detached_weights import LARGE

from moonpoly_ort import model_files
from moonpoly_ort.rewriting import rewrite

X = {"x": random(2, 3, 4)}
WEIGHTS = {"g": random(4, 6), "u": random(4, 6, seed=1)}
BIASES = {"gb": random(6, seed=2), "ub": random(6, seed=3)}
GATES = {
    "Silu": "s = Sigmoid (a)  t = Mul (a, s)",
    "Sigmoid": "t = Sigmoid (a)",
    "Relu": "t = Relu (a)",
    "Tanh": "t = Tanh (a)",
    "": "t = Identity (a)",
    "LeakyRelu": "t = LeakyRelu <alpha = 0.2> (a)",
}


def model_of(
    body: str, *, constants: dict[str, np.ndarray] | None = None, opset: int = 17, out: str = "y"
) -> onnx.ModelProto:
    model = parse(
        f"g (float[batch, length, 4] x) => (float[batch, length, 6] {out}) {{ {body} }}",
        opset=opset,
    )
    for name, values in (constants or WEIGHTS).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def alternating(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.stack([one, other], axis=-1).reshape(*one.shape[:-1], -1)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("order", ["t, v", "v, t"])
@pytest.mark.parametrize("gate", [gate for gate in GATES if gate])
def test_every_order_of_nodes_and_operands(gate: str, order: str, gate_first: bool) -> None:
    gates, values = f"a = MatMul (x, g)  {GATES[gate]}", "v = MatMul (x, u)"
    body = f"{gates} {values}" if gate_first else f"{values} {gates}"
    result = check_fused(model_of(f"{body} y = Mul ({order})"), X, ops=[f"MatMulGated{gate}"])
    (node,) = result.model.graph.node
    assert node.input[0] == "x"
    assert list(initializers(result.model)) == [node.input[1]]
    np.testing.assert_array_equal(
        initializers(result.model)[node.input[1]], alternating(WEIGHTS["g"], WEIGHTS["u"])
    )
    (stamp,) = (entry.value for entry in node.metadata_props)
    assert set(stamp.split(",")) == {"matmul", "activation", "gated"}
    assert all(entry.into == "y" for entry in result.taken if entry.rule != "matmul")


def test_without_an_activation_the_first_operand_has_the_even_columns() -> None:
    body = "v = MatMul (x, u)  a = MatMul (x, g)  y = Mul (a, v)"
    result = check_fused(model_of(body), X, ops=["MatMulGated"])
    assert result.model.graph.node[0].output[0] == "y"


@pytest.mark.parametrize("gate", ["Silu", "Relu", "LeakyRelu"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_biases_alternate_too(gate: str, gate_first: bool) -> None:
    gates = f"m = MatMul (x, g)  a = Add (m, gb)  {GATES[gate]}"
    values = "w = MatMul (x, u)  v = Add (ub, w)"
    body = f"{gates} {values}" if gate_first else f"{values} {gates}"
    model = model_of(f"{body} y = Mul (t, v)", constants=WEIGHTS | BIASES)
    result = check_fused(model, X, ops=[f"MatMulGatedBias{gate}"])
    node = result.model.graph.node[0]
    kept = initializers(result.model)
    assert set(kept) == set(node.input[1:])
    np.testing.assert_array_equal(kept[node.input[2]], alternating(BIASES["gb"], BIASES["ub"]))


def test_geglu_as_exporters_write_it() -> None:
    body = """a = MatMul (x, g)  d = Div (a, r)  e = Erf (d)  p = Add (e, one)  q = Mul (a, p)
              t = Mul (q, half)  v = MatMul (x, u)  y = Mul (t, v)"""
    numbers = {"r": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}
    constants = WEIGHTS | {name: np.array(value) for name, value in numbers.items()}
    check_fused(model_of(body, constants=constants), X, ops=["MatMulGatedGelu"])


def test_each_rule_can_be_left_out() -> None:
    model = model_of(f"a = MatMul (x, g)  {GATES['Silu']}  v = MatMul (x, u)  y = Mul (t, v)")
    every = {"matmul", "activation", "gated", "residual"}
    for rule, ops in (
        ("gated", ["MatMulSilu", "MatMulMul"]),
        ("activation", ["MatMul", "Sigmoid", "Mul", "MatMulMul"]),
    ):
        left = rewrite(model, rules=every - {rule})
        assert [node.op_type for node in left.model.graph.node] == ops


REFUSED = {
    "another input": "z = Neg (x)  a = MatMul (x, g)  t = Relu (a)  v = MatMul (z, u)",
    "both are activated": "a = MatMul (x, g)  t = Relu (a)  b = MatMul (x, u)  v = Tanh (b)",
    "one has a bias": "a = MatMul (x, g)  t = Relu (a)  w = MatMul (x, u)  v = Add (w, ub)",
    "no product": "a = MatMul (x, g)  t = Relu (a)  v = Expand (u, size)",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pair_stays(case: str) -> None:
    constants = WEIGHTS | BIASES
    if case == "no product":
        constants = {**constants, "u": random(2, 3, 6), "size": np.array([2, 3, 6])}
    model = model_of(f"{REFUSED[case]}  y = Mul (t, v)", constants=constants)
    result = rewrite(model)
    assert not any("Gated" in node.op_type for node in result.model.graph.node)
    np.testing.assert_allclose(run(result.model, X)[0], run(model, X)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", ["t", "v"])
def test_other_readers_of_either_product_prevent_it(other: str) -> None:
    body = f"a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v)  z = Neg ({other})"
    model = model_of(body)
    info = onnx.helper.make_tensor_value_info("z", 1, ["batch", "length", 6])
    model.graph.output.append(info)
    ops = ["MatMulRelu", "MatMulMul" if other == "t" else "MatMul", "Neg"]
    missed = []
    if other == "v":
        ops.insert(2, "Mul")
        missed = ["gated: other-readers", "residual: other-readers"]
    else:
        ops = ["MatMulRelu", "MatMulMul", "Neg"]
    check_fused(model, X, ops=ops, missed=missed)


def test_an_output_stays_one() -> None:
    model = model_of("a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v)")
    info = onnx.helper.make_tensor_value_info("v", 1, ["batch", "length", 6])
    model.graph.output.append(info)
    missed = ["gated: other-readers", "residual: other-readers"]
    check_fused(model, X, ops=["MatMulRelu", "MatMul", "Mul"], missed=missed)


def test_weights_that_are_no_constants_stay_two_products() -> None:
    model = parse(
        """g (float[p, s, 4] x, float[4, n] g, float[4, n] u) => (float[p, s, n] y) {
            a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v) }"""
    )
    result = check_fused(model, X | WEIGHTS, ops=["MatMulRelu", "MatMulMul"])
    assert len(result.model.graph.initializer) == 0


def test_the_report_names_weights_that_are_no_initializers() -> None:
    """Where no other rule takes the multiplication either."""
    model = parse(
        """g (float[p, s, 4] x, float[4, n] g, float[4, m] u) => (float[p, s, n] y) {
            a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v) }"""
    )
    missed = ["gated: not-constant", "residual: shape-unproven"]
    check_fused(model, X | WEIGHTS, ops=["MatMulRelu", "MatMul", "Mul"], missed=missed)


def test_weights_of_different_widths_stay() -> None:
    model = model_of(
        "a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v)",
        constants={"g": random(4, 6), "u": random(4, 1, seed=1)},
    )
    missed = ["gated: broadcasts", "residual: shape-unproven"]
    check_fused(model, X, ops=["MatMulRelu", "MatMul", "Mul"], missed=missed)


def test_tied_weights_are_kept_for_their_other_readers() -> None:
    body = """a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  h = Mul (t, v)
              w = Transpose (g)  y0 = MatMul (h, w)  y = MatMul (y0, u)"""
    result = check_fused(model_of(body), X, ops=["MatMulGatedRelu", "MatMulTransposed", "MatMul"])
    kept = initializers(result.model)
    assert {"g", "u"} < set(kept)
    np.testing.assert_array_equal(kept["g"], WEIGHTS["g"])


def test_a_branch_that_reads_a_product_prevents_it() -> None:
    body = """a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v)
        z = If (c) <then_branch = p () => (float[batch, length, 6] p0) { p0 = Neg (v) },
                    else_branch = q () => (float[batch, length, 6] q0) { q0 = Abs (v) }>"""
    model = model_of(body)
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["batch", "length", 6]))
    assert not any("Gated" in node.op_type for node in rewrite(model).model.graph.node)


def test_a_branch_has_its_pair_from_the_main_graph() -> None:
    pair = "a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)"
    body = f"""y = If (c) <then_branch = p () => (float[batch, length, 6] p0) {{
        {pair} p0 = Mul (t, v) }}, else_branch = q () => (float[batch, length, 6] q0) {{
        q0 = MatMul (x, g) }}>"""
    model = model_of(body)
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    feeds = [X | {"c": np.array(value)} for value in (True, False)]
    result = check_fused(model, *feeds, ops=["If", "MatMulGatedRelu", "MatMul"])
    assert len(initializers(result.model)) == 2  # u is gone


def test_activations_behind_a_gated_product_stay_behind_it() -> None:
    body = "a = MatMul (x, g)  v = MatMul (x, u)  h = Mul (a, v)  y = Relu (h)"
    missed = ["activation: no-such-operator"]
    check_fused(model_of(body), X, ops=["MatMulGated", "Relu"], missed=missed)


@pytest.mark.parametrize("add", [False, True])
def test_a_factor_behind_or_in_front_of_a_gated_product_stays(add: bool) -> None:
    """Behind it there is no place for one, and in front of it the factor would count twice."""
    pair = "a = MatMul ({0}, g)  v = MatMul ({0}, u)"
    if add:
        pair = "a0 = MatMul ({0}, g)  a = Add (a0, h)  v0 = MatMul ({0}, u)  v = Add (v0, h)"
    number = "s = Constant <value_float = 3.0> ()"
    missed = ["scale: no-such-operator"]
    for body, ops in (
        (f"{number} {pair.format('x')} t = Mul (a, v)  y = Mul (t, s)", ["", "Mul"]),
        (f"{number} t = Mul (x, s) {pair.format('t')} y = Mul (a, v)", ["Mul", ""]),
    ):
        model = model_of(body)
        if add:
            model.graph.initializer.append(onnx.numpy_helper.from_array(random(6), "h"))
        ops = [op or f"MatMulGated{'Bias' if add else ''}" for op in ops]
        check_fused(model, X, ops=ops, missed=missed)


def test_an_opset_without_steps_has_no_body_for_it() -> None:
    model = model_of("a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v)", opset=9)
    check_fused(model, X, ops=["MatMulRelu", "MatMulMul"])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 300),
    dtype=st.sampled_from([np.float16, np.float32]), pairs=st.integers(1, 3),
)  # fmt: skip
def test_large_weights_pass_protobuf_by(rows: int, columns: int, dtype: type, pairs: int) -> None:
    """From bytes to bytes, where weights from `LARGE` bytes on are never parsed."""
    body, constants, last = "", {}, "x0"
    for i in range(pairs):
        constants |= {f"g{i}": random(rows, columns, seed=i).astype(dtype),
                      f"u{i}": random(rows, columns, seed=i + 9).astype(dtype),
                      f"d{i}": random(columns, rows, seed=i + 18).astype(dtype)}  # fmt: skip
        body += f"""a{i} = MatMul ({last}, g{i})  t{i} = Relu (a{i})  v{i} = MatMul ({last}, u{i})
            h{i} = Mul (t{i}, v{i})  x{i + 1} = MatMul (h{i}, d{i}) """
        last = f"x{i + 1}"
    kind = "float16" if dtype is np.float16 else "float"
    model = parse(f"g ({kind}[n, {rows}] x0) => ({kind}[n, {rows}] {last}) {{ {body} }}")
    for name, values in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    result = rewrite(model.SerializeToString())
    kept = initializers(result.model)
    gated = [node for node in result.model.graph.node if node.op_type == "MatMulGatedRelu"]
    assert len(gated) == pairs
    for i, node in enumerate(gated):
        np.testing.assert_array_equal(
            kept[node.input[1]], alternating(constants[f"g{i}"], constants[f"u{i}"])
        )
    assert len(kept) == 2 * pairs


def test_the_new_weight_is_not_parsed() -> None:
    constants = {"g": random(64, 128), "u": random(64, 128, seed=1)}
    model = parse(
        """g (float[n, 64] x) => (float[n, 128] y)
            { a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v) }"""
    )
    for name, values in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    assert constants["g"].nbytes > LARGE
    result = rewrite(model.SerializeToString())
    light = result._source.light
    assert all(not tensor.raw_data for tensor in light.graph.initializer)
    written = onnx.load_from_string(b"".join(result._source.serialized()))
    (new,) = initializers(written).values()
    np.testing.assert_array_equal(new, alternating(constants["g"], constants["u"]))


def external(folder: Path) -> Path:
    model = parse(
        """g (float[n, 64] x) => (float[n, 128] y)
            { a = MatMul (x, g)  t = Relu (a)  v = MatMul (x, u)  y = Mul (t, v) }"""
    )
    for seed, name in enumerate("gu"):
        tensor = onnx.numpy_helper.from_array(random(64, 128, seed=seed), name)
        model.graph.initializer.append(tensor)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    return path


def test_weights_in_another_file(tmp_path: Path) -> None:
    path = external(tmp_path)
    feeds = {"x": random(3, 64)}
    want = run(onnx.load(path), feeds)
    result = rewrite(path, tmp_path / "new.onnx")
    assert [node.op_type for node in result.model.graph.node] == ["MatMulGatedRelu"]
    got = run(onnx.load(tmp_path / "new.onnx"), feeds)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["missing", "short", "too large"])
def test_weights_that_cannot_be_moved_stay(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path)
    if fault == "missing":
        (tmp_path / "weights").unlink()
    elif fault == "short":
        (tmp_path / "weights").write_bytes(b"1234")
    else:
        monkeypatch.setattr(model_files, "PROTOBUF_LIMIT", 4 * 64 * 256 - 1)
    result = rewrite(path)
    assert [node.op_type for node in result.model.graph.node] == ["MatMulRelu", "MatMulMul"]


def test_the_counts_of_readers_stay_right() -> None:
    """Two pairs of the same weights: the second one finds them still there."""
    pairs = ""
    for i in range(2):
        pairs += f"a{i} = MatMul (x, g)  t{i} = Relu (a{i})  v{i} = MatMul (x, u) "
        pairs += f"h{i} = Mul (t{i}, v{i}) "
    ops = ["MatMulGatedRelu", "MatMulGatedRelu", "Add"]
    missed = ["residual: no-such-operator"]
    result = check_fused(model_of(pairs + "y = Add (h0, h1)"), X, ops=ops, missed=missed)
    names = list(initializers(result.model))
    assert len(names) == len(set(names)) == 2
    assert all(a != b for a, b in itertools.pairwise(names))
