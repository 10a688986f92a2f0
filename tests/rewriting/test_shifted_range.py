"""Ranges that begin elsewhere: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import shifted_range


def model(
    *, total: str = "Add (r, s)", first: str = "0", step: str = "1", start: str = "int64 s",
    opset: int = 18,
) -> onnx.ModelProto:  # fmt: skip
    return parse(
        f"""g (int64 n, {start}) => (int64[length] y)
        <int64 first = {{{first}}}, int64 step = {{{step}}}>
        {{
            r = Range (first, n, step)
            y = {total}
        }}""",
        opset=opset,
    )


@settings(max_examples=20, deadline=None)
@given(count=st.integers(-2, 9), start=st.integers(-9, 9), swapped=st.booleans())
def test_results_are_equal(count: int, start: int, swapped: bool) -> None:
    proto = model(total="Add (s, r)" if swapped else "Add (r, s)")
    feed = {"n": np.array(count, np.int64), "s": np.array(start, np.int64)}
    (want,) = run(proto, feed)
    assert shifted_range.shift(proto) == 1
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_array_equal(run(proto, feed)[0], want)


def test_the_operators_that_are_left() -> None:
    proto = model()
    shifted_range.shift(proto)
    assert Counter(op_types(proto)) == {"Add": 1, "Range": 1}
    assert proto.graph.node[-1].op_type == "Range"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"start": "int64[1] s"}, id="a vector"),
        pytest.param({"start": "int64[length] s"}, id="one number for each"),
        pytest.param({"first": "1"}, id="another start"),
        pytest.param({"step": "2"}, id="another step"),
        pytest.param({"total": "Mul (r, s)"}, id="a product"),
        pytest.param({"opset": 12}, id="opset"),
    ],
)
def test_what_must_stay(changes: dict[str, str]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert shifted_range.shift(proto) == 0
    assert proto.SerializeToString() == before
