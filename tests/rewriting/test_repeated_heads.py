"""Heads that are repeated: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import repeated_heads


def model(heads: int = 2, times: int = 3, *, opset: int = 18, **changes: str) -> onnx.ModelProto:
    """Two values whose heads are repeated alike; the first one is an output as well."""
    words = {
        "axis": "2", "expanded": f"batch, {heads}, {times}, length, 4",
        "result": f"batch, {heads * times}, length, 4", "given": f"batch, {heads}, length, 4",
        "whole": f"0, {heads * times}, -1, 4",
    } | changes  # fmt: skip
    repeated = [
        f"{x}1 = Unsqueeze ({x}, axis)  {x}2 = Expand ({x}1, shape)  {x}3 = Reshape ({x}2, whole)"
        f"  {x}4 = Neg ({x}3)"
        for x in "kv"
    ]
    return parse(
        f"""g (float[{words["given"]}] k0, float[{words["given"]}] v)
        => (float[batch, every, length, 4] k4, float[batch, every, length, 4] v4,
            float[{words["given"]}] k)
        <int64[1] axis = {{{words["axis"]}}}, int64[4] whole = {{{words["whole"]}}},
         int64[5] shape = {{1, 1, {times}, 1, 1}}, float[{words["expanded"]}] k2,
         float[{words["expanded"]}] v2, float[{words["result"]}] k3, float[{words["result"]}] v3>
        {{
            k = Abs (k0)
            {"  ".join(repeated)}
        }}""",
        opset=opset,
    )


def feeds(heads: int, batch: int = 2, length: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([heads, batch, length])
    k, v = rng.standard_normal((2, batch, heads, length, 4)).astype(np.float32)
    return {"k0": k, "v": v}


@settings(max_examples=20, deadline=None)
@given(
    heads=st.integers(1, 4), times=st.integers(1, 5), batch=st.integers(1, 3),
    length=st.integers(1, 5),
)  # fmt: skip
def test_results_are_equal(heads: int, times: int, batch: int, length: int) -> None:
    proto = model(heads, times)
    feed = feeds(heads, batch, length)
    want = run(proto, feed)
    assert repeated_heads.gather(proto) == 2
    onnx.checker.check_model(proto, full_check=True)
    for got, value in zip(run(proto, feed), want, strict=True):
        np.testing.assert_array_equal(got, value)


def test_the_operators_that_are_left() -> None:
    proto = model()
    repeated_heads.gather(proto)
    assert Counter(op_types(proto)) == {"Abs": 1, "Gather": 2, "Neg": 2}
    (indices,) = proto.graph.initializer
    assert onnx.numpy_helper.to_array(indices).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"axis": "1"}, id="whole sequences of heads"),
        pytest.param({"expanded": "batch, 2, 3, total, 4"}, id="another length"),
        pytest.param({"expanded": "batch, 2, times, length, 4"}, id="an unknown number of times"),
        pytest.param({"result": "batch, 2, total, 4", "whole": "0, 2, -1, 4"}, id="along lengths"),
        pytest.param({"given": "batch, heads, length, 4"}, id="an unknown number of heads"),
        pytest.param({"opset": 12}, id="opset"),
    ],
)
def test_what_must_stay(changes: dict[str, str]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert repeated_heads.gather(proto) == 0
    assert proto.SerializeToString() == before
