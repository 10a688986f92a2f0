"""Masks that are gathered by all their indices: op list, equality, and what must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import attention_mask

PARTS = {
    "rows": "r0 = Range (zero, batch, one)  r1 = Unsqueeze (r0, a12)  rows = Unsqueeze (r1, a3)",
    "columns": "c0 = Range (zero, total, one)  c1 = Unsqueeze (c0, a01)"
    "  columns = Unsqueeze (c1, a2)",
    "shape": "largest = Max (rows, columns)  shape = Shape (largest)",
    "indices": "i0 = Expand (rows, shape)  i1 = Unsqueeze (i0, last)"
    "  j0 = Expand (columns, shape)  j1 = Unsqueeze (j0, last)"
    "  indices = Concat <axis = -1> (i1, j1)",
    "gather": "m = GatherND (truth, indices)",
}


def model(total: str = "own", opset: int = 18, **changes: str) -> onnx.ModelProto:
    """mask[:batch, :total] and causal, in the order of exporters.

    total: `own`, the mask's own size, or `sum`, that of the input and a cache.
    """
    parts = PARTS | changes
    sizes = "t1 = Shape <start = 1, end = 2> (mask)  total = Squeeze (t1)"
    if total == "sum":
        sizes = (
            "p1 = Shape <start = 1, end = 2> (past)  p = Squeeze (p1)"
            "  l1 = Shape <start = 1, end = 2> (x)  l = Squeeze (l1)  total = Add (p, l)"
        )
    return parse(
        f"""g (int64[rows_of_mask, columns_of_mask] mask, float[batch, length] x,
               float[batch, past] past)
        => (bool[batch, 1, length, total] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[2] a01 = {{0, 1}}, int64[2] a12 = {{1, 2}},
         int64[1] a1 = {{1}}, int64[1] a2 = {{2}}, int64[1] a3 = {{3}}, int64[1] last = {{-1}},
         int64[4] four = {{0, 2, 1, 3}}, bool yes = {{1}}, int64 two = {{2}},
         bool[rows_of_mask, columns_of_mask] truth, bool[1, 1, 1, total] seen, int64[1] b1,
         bool[batch, 1, 1, total] both, bool[batch, 1, 1, total] wide>
        {{
            b1 = Shape <start = 0, end = 1> (x)
            batch = Squeeze (b1)
            {sizes}
            truth = Cast <to = 9> (mask)
            {" ".join(parts.values())}
            all = Range (zero, total, one)
            a = Unsqueeze (all, a01)
            b = Unsqueeze (a, a2)
            seen = GreaterOrEqual (b, zero)
            true = And (yes, seen)
            both = And (true, m)
            ones = Shape (both)
            wide = Expand (both, ones)
            y = Not (wide)
        }}""",
        opset=opset,
    )


def feeds(batch: int, length: int, past: int, *, more: int = 0, sums: bool = False) -> dict:
    rng = np.random.default_rng([batch, length, past])
    columns = length + past + more if sums else length
    return {
        "mask": rng.integers(0, 2, (batch + more, columns)),
        "x": np.zeros((batch, length), np.float32),
        "past": np.zeros((batch, past), np.float32),
    }


@settings(max_examples=30, deadline=None)
@given(
    sums=st.booleans(), batch=st.integers(1, 3), length=st.integers(1, 5), past=st.integers(0, 3),
    more=st.integers(0, 2),
)  # fmt: skip
def test_results_are_equal(sums: bool, batch: int, length: int, past: int, more: int) -> None:
    proto = model("sum" if sums else "own")
    feed = feeds(batch, length, past, more=more, sums=sums)
    want = run(proto, feed)
    assert attention_mask.simplify(proto) == 3
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_array_equal(run(proto, feed)[0], want[0])


@pytest.mark.parametrize(("total", "more"), [("own", []), ("sum", ["Unsqueeze", "Concat"])])
def test_the_operators_that_are_left(total: str, more: list[str]) -> None:
    before = Counter(op_types(model(total)))
    proto = model(total)
    attention_mask.simplify(proto)
    gone = ["GatherND", "Range", "Range", *["Unsqueeze"] * 6, "Max", *["Shape"] * 2, "Concat"]
    gone += [*["Expand"] * 3, "And", "Squeeze"]
    want = before - Counter(gone) + Counter(["Slice", "Unsqueeze", *more])
    assert Counter(op_types(proto)) == want


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rows": PARTS["rows"].replace("(zero, b", "(one, b")}, id="not from 0"),
        pytest.param({"columns": PARTS["columns"].replace("one)", "two)")}, id="not every one"),
        pytest.param({"rows": PARTS["rows"].replace("a12)", "a01)")}, id="another axis"),
        pytest.param({"indices": PARTS["indices"].replace("(i1, j1)", "(j1, i1)")}, id="swapped"),
        pytest.param(
            {"shape": "shape = Shape <start = 0> (m0)", "rows": PARTS["rows"]
             + " m0 = Max (rows, a3)"}, id="another shape",
        ),
        pytest.param(
            {"gather": "m0 = GatherND (truth, indices)  m = Transpose <perm = [0, 2, 1, 3]> (m0)",
             "columns": PARTS["columns"].replace("a01)", "a12)").replace("a2)", "a3)")},
            id="rows twice",
        ),
    ],
)  # fmt: skip
def test_what_must_stay(changes: dict[str, str]) -> None:
    proto = model(**changes)  # type: ignore[arg-type]
    attention_mask.simplify(proto)
    assert "GatherND" in op_types(proto)


def test_its_opset() -> None:
    assert attention_mask.simplify(model(opset=12)) == 0


def test_a_mask_that_is_too_small_is_an_error() -> None:
    proto = model("sum")
    attention_mask.simplify(proto)
    feed = feeds(3, 2, 2, sums=True)
    feed["mask"] = feed["mask"][:, :-1]
    with pytest.raises(Exception, match="broadcast"):
        run(proto, feed)


@pytest.mark.parametrize("change", ["false", "shape", "unknown"])
def test_neighbours_that_must_stay(change: str) -> None:
    proto = model()
    if change == "false":
        next(t for t in proto.graph.initializer if t.name == "yes").CopyFrom(
            onnx.numpy_helper.from_array(np.array(False), "yes")
        )
    elif change == "shape":
        wide = next(v for v in proto.graph.value_info if v.name == "wide")
        wide.type.tensor_type.shape.dim[2].dim_value = 7
    else:
        del proto.graph.value_info[:]
    attention_mask.simplify(proto)
    kept = Counter(op_types(proto))
    assert kept["And"] == (1 if change == "shape" else 2)
    assert kept["Expand"] == {"false": 0, "shape": 1, "unknown": 3}[change]
