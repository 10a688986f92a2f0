"""Biases of zeros in front of attention: op list, equality, and those that must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import zero_attention_bias

HEADS, COLUMNS = 2, 8
IMPORTS = ', "com.microsoft" : 1'

# What a model computes the bias from, given true and false [1, 1, 1, 1], shape [4], and the mask.
ZEROS = {
    "where": "c = Expand (yes, shape)  bias = Where (c, zero, low)",
    "and": "a = And (yes, yes)  c = Expand (a, shape)  bias = Where (c, zero, low)",
    "other branch": "c = Expand (no, shape)  bias = Where (c, low, zero)",
    "zeros expanded": "bias = Expand (zero, shape)",
    "both branches through a mask": "i = Identity (yes)  c = Expand (i, shape)"
    "  bias = Where (c, zero, low)",
}
OTHERS = {
    "a mask": "c = Expand (mask, shape)  bias = Where (c, zero, low)",
    "a mask and true": "a = And (yes, mask)  c = Expand (a, shape)  bias = Where (c, zero, low)",
    "no zero": "c = Expand (no, shape)  bias = Where (c, zero, low)",
    "some zeros": "bias = Expand (mixed, shape)",
}


def model(bias: str, op_type: str, *, shared: bool = False) -> onnx.ModelProto:
    operands = "x, x, x, , , bias" if op_type == "MultiHeadAttention" else "x, w, , , , bias"
    sums = "t = ReduceSum (bias)  y = Add (y0, t)" if shared else "y = Identity (y0)"
    return parse(
        f"""g (float[batch, length, {COLUMNS}] x, bool[1, 1, 1, 1] mask)
        => (float[batch, length, {COLUMNS}] y)
        <bool[1, 1, 1, 1] yes = {{1}}, bool[1, 1, 1, 1] no = {{0}}, float zero = {{0}},
         float low = {{-1000}}, float[2, 1, 1] mixed = {{0, 1}}, int64[2] ones = {{1, 1}},
         float[{COLUMNS}, {3 * COLUMNS}] w = {{{", ".join(["0.5", "-0.25"] * 12 * COLUMNS)}}}>
        {{
            b = Shape <start: int = 0, end: int = 1> (x)
            l = Shape <start: int = 1, end: int = 2> (x)
            one = Shape <start: int = 0, end: int = 1> (ones)
            h = Constant <value_ints: ints = [{HEADS}]> ()
            shape = Concat <axis: int = 0> (b, h, l, l)
            {bias}
            y0 = com.microsoft.{op_type} <num_heads: int = {HEADS}> ({operands})
            {sums}
        }}""",
        imports=IMPORTS,
    )


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length])
    x = rng.standard_normal((batch, length, COLUMNS)).astype(np.float32)
    return {"x": x, "mask": np.zeros((1, 1, 1, 1), bool)}


@settings(max_examples=20, deadline=None)
@given(
    bias=st.sampled_from(sorted(ZEROS)), batch=st.integers(1, 3), length=st.integers(1, 7),
    op_type=st.sampled_from(["Attention", "MultiHeadAttention"]),
)  # fmt: skip
def test_a_zero_goes(bias: str, op_type: str, batch: int, length: int) -> None:
    proto = model(ZEROS[bias], op_type)
    want = run(proto, feeds(batch, length))
    assert zero_attention_bias.remove(proto) == 1
    onnx.checker.check_model(proto)
    kept = {f"com.microsoft.{op_type}": 1, "Identity": 1}
    unread = {"Shape": 1, "Constant": 0}  # of the model's own, which served nothing before either
    assert Counter(op_types(proto)) == Counter(kept) + Counter(unread)
    np.testing.assert_allclose(run(proto, feeds(batch, length))[0], want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", OTHERS)
def test_what_is_not_known_to_be_zero_stays(bias: str) -> None:
    proto = model(OTHERS[bias], "MultiHeadAttention")
    before = proto.SerializeToString()
    assert zero_attention_bias.remove(proto) == 0
    assert proto.SerializeToString() == before


def test_another_reader_keeps_its_zeros() -> None:
    proto = model(ZEROS["where"], "MultiHeadAttention", shared=True)
    want = run(proto, feeds(2, 3))
    assert zero_attention_bias.remove(proto) == 1
    assert "Where" in op_types(proto)
    np.testing.assert_allclose(run(proto, feeds(2, 3))[0], want[0], rtol=1e-5, atol=1e-6)
