"""Rotations written out: op list, equality, and the forms that must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import rotary_embedding

IMPORTS = ', "com.microsoft" : 1'
END = 2**63 - 1


def model(half: int = 2, *, layers: int = 2, scaled: bool = False, opset: int = 18,
          **changes: str) -> onnx.ModelProto:  # fmt: skip
    """Rotations of x, one after the other, by angles [1, length, half]."""
    size = 2 * half
    words = {
        "batch": "1", "half": str(half), "end": str(END), "axis": "-1", "turn": "neg, first",
        "halves": "angles, angles", "unsqueezed": "1", "sum": "straight, turned",
    } | changes  # fmt: skip
    scale = (
        "c1 = Mul (c0, two)  s1 = Mul (two, s0)"
        if scaled
        else "c1 = Identity (c0)  s1 = Identity (s0)"
    )
    nodes = []
    for layer in range(layers):
        x, y = ("x" if layer == 0 else f"y{layer - 1}"), f"y{layer}"
        nodes.append(
            f"straight{layer} = Mul ({x}, cos)"
            f"  first{layer} = Slice ({x}, n0, middle, last, n1)"
            f"  second{layer} = Slice ({x}, middle, end, last, n1)"
            f"  neg{layer} = Neg (second{layer})"
            f"  whole{layer} = Concat <axis: int = {words['axis']}> ("
            + ", ".join(f"{name}{layer}" for name in words["turn"].split(", "))
            + f")  turned{layer} = Mul (sin, whole{layer})"
            f"  {y} = Add ({', '.join(f'{name}{layer}' for name in words['sum'].split(', '))})"
        )
    recorded = "".join(f", float[b, h, length, {size}] y{layer}" for layer in range(layers - 1))
    return parse(
        f"""g (float[b, h, length, {size}] x, float[{words['batch']}, length, {half}] angles,
               float[1, length, {half}] others)
        => (float[b, h, length, {size}] y{layers - 1})
        <int64[1] n0 = {{0}}, int64[1] n1 = {{1}}, int64[1] middle = {{{words['half']}}},
         int64[1] end = {{{words['end']}}}, int64[1] last = {{3}}, float two = {{2}},
         int64[1] one = {{{words['unsqueezed']}}},
         float[{words['batch']}, length, {size}] c2, float[{words['batch']}, length, {size}] s2
         {recorded}>
        {{
            both = Concat <axis: int = -1> ({words['halves']})
            c0 = Cos (both)
            s0 = Sin (both)
            {scale}
            c2 = Cast <to: int = 1> (c1)
            s2 = Cast <to: int = 1> (s1)
            cos = Unsqueeze (c2, one)
            sin = Unsqueeze (s2, one)
            {" ".join(nodes)}
        }}""",
        imports=IMPORTS, opset=opset,
    )  # fmt: skip


def feeds(half: int, batch: int = 2, heads: int = 3, length: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([half, batch, heads, length])
    return {
        "x": rng.standard_normal((batch, heads, length, 2 * half)).astype(np.float32),
        "angles": rng.standard_normal((1, length, half)).astype(np.float32),
        "others": rng.standard_normal((1, length, half)).astype(np.float32),
    }


@settings(max_examples=30, deadline=None)
@given(
    half=st.integers(1, 16), batch=st.integers(1, 3), heads=st.integers(1, 4),
    length=st.integers(1, 9), scaled=st.booleans(), swapped=st.booleans(),
)  # fmt: skip
def test_results_are_equal(
    half: int, batch: int, heads: int, length: int, scaled: bool, swapped: bool
) -> None:
    changes = {"sum": "turned, straight"} if swapped else {}
    proto = model(half, scaled=scaled, **changes)
    feed = feeds(half, batch, heads, length)
    want = run(proto, feed)
    assert rotary_embedding.fuse(proto) == 2
    onnx.checker.check_model(proto)
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-5, atol=1e-6)


def test_one_pair_of_tables_serves_all_layers() -> None:
    proto = model(layers=3)
    assert rotary_embedding.fuse(proto) == 3
    tables = {"Squeeze": 1, "Cos": 1, "Sin": 1, "Identity": 2, "Cast": 2}
    assert Counter(op_types(proto)) == {**tables, "com.microsoft.RotaryEmbedding": 3}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"half": "1"}, id="not in the middle"),
        pytest.param({"end": "3"}, id="not to the end"),
        pytest.param({"axis": "2"}, id="another axis"),
        pytest.param({"turn": "first, neg"}, id="the other way"),
        pytest.param({"halves": "angles, others"}, id="halves differ"),
        pytest.param({"batch": "b"}, id="a table for each row of the batch"),
        pytest.param({"unsqueezed": "0"}, id="length in place of heads"),
        pytest.param({"opset": 12}, id="opset"),
    ],
)
def test_what_must_stay(changes: dict[str, str]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert rotary_embedding.fuse(proto) == 0
    assert proto.SerializeToString() == before


def test_a_batch_of_tables_that_is_recorded_wrongly_is_an_error() -> None:
    proto = model()
    proto.graph.input[1].type.tensor_type.shape.dim[0].ClearField("dim_value")
    assert rotary_embedding.fuse(proto) == 2
    feed = feeds(2)
    feed["angles"] = np.concatenate([feed["angles"]] * 2)
    with pytest.raises(Exception, match="Squeeze"):
        run(proto, feed)
