"""A number, or a value for each channel, that is added behind a convolution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from equivalence import check_fused, make_an_input, parse, random

from moonpoly_ort.rewriting import rewrite

X = {"x": random(2, 3, 5, 6)}
CONV, TRANSPOSED = "Conv <pads = [1, 1, 1, 1]>", "ConvTranspose <strides = [2, 2]>"
CONSTANTS = {
    "k": random(4, 3, 3, 3), "kt": random(3, 4, 3, 3), "b": random(4), "s": random(1)[0] + 1,
    "one": random(1), "wide": random(1, 1, 1, 1), "channel": random(1, 4, 1, 1),
    "wider": random(1, 1, 1, 1, 1), "rows": random(5, 1),
}  # fmt: skip


def model_of(nodes: str, *, dtype: type = np.float32, outputs: str = "y") -> onnx.ModelProto:
    name = {np.float32: "float", np.float16: "float16"}[dtype]
    model = parse(f"g ({name}[n, 3, h, w] x) => ({outputs}) {{ {nodes} }}")
    read = {name for node in model.graph.node for name in node.input}
    for name, value in CONSTANTS.items():
        if name in read:
            array = np.asarray(value).astype(dtype)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def biases(model: onnx.ModelProto) -> Sequence[np.ndarray]:
    return [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if len(t.dims) == 1]


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("add", ["Add (t, {})", "Add ({}, t)"])
@pytest.mark.parametrize("addend", ["s", "one", "wide", "channel"])
@pytest.mark.parametrize(("op", "weight"), [(CONV, "k"), (TRANSPOSED, "kt")])
def test_numbers_and_values_of_channels(
    op: str, weight: str, addend: str, add: str, bias: str
) -> None:
    model = model_of(f"t = {op} (x, {weight}{bias})  y = {add.format(addend)}")
    result = check_fused(model, X, ops=[op.split()[0]])
    wanted = np.zeros(4) + np.asarray(CONSTANTS[addend]).reshape(-1)
    wanted = wanted + (CONSTANTS["b"] if bias else 0)
    (new,) = biases(result.model)
    np.testing.assert_allclose(new, wanted, rtol=1e-6)
    rule = "bias" if addend == "channel" and not bias else "offset"
    assert result.report[-1].rule == rule
    (stamp,) = (entry.value for entry in result.model.graph.node[-1].metadata_props)
    assert stamp.split(",")[-1] == rule


def test_in_half_precision() -> None:
    feeds = {"x": X["x"].astype(np.float16)}
    model = model_of(f"t = {CONV} (x, k, b)  y = Add (t, s)", dtype=np.float16)
    check_fused(model, feeds, ops=["Conv"], tolerance=4e-3)


def test_the_learned_factors_and_offsets_of_ppocr() -> None:
    """A factor and an offset, and a HardSwish whose x + 3 is one of its own."""
    model = model_of(
        f"""t = {CONV} (x, k, b)  u = Mul (t, s)  v = Add (u, one)
            three = Constant <value = float {{3.0}}> ()  p = Add (v, three)
            z = Constant <value = float {{0.0}}> ()  six = Constant <value = float {{6.0}}> ()
            c = Clip (p, z, six)  m = Mul (v, c)  y = Div (m, six)"""
    )
    result = check_fused(model, X, ops=["ConvHardSwish"])
    (stamp,) = (entry.value for entry in result.model.graph.node[-1].metadata_props)
    assert stamp == "conv,scale,offset,activation"
    left = rewrite(model, disable=["offset"]).model
    assert "Add" in [node.op_type for node in left.graph.node]


def test_a_bias_with_another_reader_stays_for_it() -> None:
    model = model_of(f"t = {CONV} (x, k, b)  y = Add (t, s)  z = Identity (b)", outputs="y, z")
    result = check_fused(model, X, ops=["Conv", "Identity"])
    assert len(biases(result.model)) == 2


@pytest.mark.parametrize(
    ("nodes", "outputs", "op", "missed"),
    [
        ("t = {} (x, k, b)  y = Add (t, s)  z = Neg (t)", "y, z", "Conv", "offset: other-readers"),
        ("t = {} (x, k, b)  y = Add (t, s)", "y, t", "Conv", "offset: other-readers"),
        ("t = {} (x, k)  y = Add (t, wider)", "y", "ConvNoBias", "residual: shape-unproven"),
        ("t = {} (x, k)  y = Add (t, rows)", "y", "ConvNoBias", "residual: shape-unproven"),
        ("t = {} (x, k)  y = Sub (s, t)", "y", "ConvNoBias", ""),
    ],
)
def test_others_stay(nodes: str, outputs: str, op: str, missed: str) -> None:
    model = model_of(nodes.format(CONV), outputs=outputs)
    ops = [op, *(node.op_type for node in model.graph.node[1:])]
    check_fused(model, X, ops=ops, missed=[missed] if missed else [])


def test_a_bias_that_the_caller_gives_stays() -> None:
    model = model_of(f"t = {CONV} (x, k, b)  y = Add (t, s)")
    make_an_input(model, "b")
    feeds = {**X, "b": random(4)}
    check_fused(model, feeds, ops=["Conv", "Add"], missed=["offset: not-constant"])


def test_a_sum_that_overflows_stays() -> None:
    model = model_of(f"t = {CONV} (x, k, b)  y = Add (t, s)", dtype=np.float16)
    for tensor in model.graph.initializer:
        if tensor.name in "bs":
            values = np.full(tensor.dims, 6e4, np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    check_fused(model, ops=["Conv", "Add"], missed=["offset: inexact"])


def test_a_model_that_is_to_be_trained_keeps_its_weights() -> None:
    model = model_of(f"t = {CONV} (x, k, b)  y = Add (t, s)")
    model.training_info.add()
    result = rewrite(model)
    assert [node.op_type for node in result.model.graph.node] == ["Conv", "Add"]
