"""Views around attention: op list, equality, and the forms that must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import attention_views
from onnx import helper

HEADS, SIZE = 2, 4
COLUMNS = HEADS * SIZE
IMPORTS = ', "com.microsoft" : 1'

PARTS = {
    "q": "q3 = Reshape (x, whole)  q4 = Transpose <perm = [0, 2, 1, 3]> (q3)"
    "  q5 = com.microsoft.RotaryEmbedding (q4, zero, table, table)"
    "  q6 = Transpose <perm = [0, 2, 1, 3]> (q5)  q = Reshape (q6, flat)",
    "k": "k4 = Transpose <perm = [0, 2, 1, 3]> (keys)  k = Reshape (k4, flat)",
    "v": "v4 = Transpose <perm = [0, 2, 1, 3]> (values)  v = Reshape (v4, flat)",
    "y": "y3 = Reshape (y0, apart)  y4 = Reshape (y3, dims)  y = Relu (y4)",
}


def model(operands: str = "q, k, v, , , mask", **changes: str) -> onnx.ModelProto:
    """All the views at once, around one attention. changes: parts to write in another way."""
    parts = PARTS | {name: text for name, text in changes.items() if name in PARTS}
    words = {"kv": "batch, 2, total, 4", "y4": "batch, length, 8"} | changes
    return parse(
        f"""g (float[batch, length, {COLUMNS}] x, float[{words["kv"]}] keys,
               float[batch, {HEADS}, total, {SIZE}] values, float[length, {SIZE // 2}] table,
               float[batch, 1, length, total] mask, float[{3 * COLUMNS}] b)
        => (float[batch, length, {COLUMNS}] y)
        <int64[4] whole = {{0, 0, {HEADS}, {SIZE}}}, int64[3] flat = {{0, 0, -1}},
         int64[1] zero = {{0}}, int64[1] rest = {{-1}},
         int64[4] apart = {{0, 0, {HEADS}, -1}}, int64[3] other = {{-1, 1, {COLUMNS}}},
         float[batch, length, {HEADS}, {SIZE}] q3, float[batch, length, {COLUMNS}] q,
         float[{words["y4"]}] y4>
        {{
            batch = Shape <start = 0, end = 1> (x)
            length = Shape <start = 1, end = 2> (x)
            dims = Concat <axis = 0> (batch, length, rest)
            {parts["q"]} {parts["k"]} {parts["v"]}
            y0 = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> ({operands})
            {parts["y"]}
        }}""",
        imports=IMPORTS,
    )


def feeds(batch: int = 2, length: int = 3, total: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length, total])
    shapes = {
        "x": (batch, length, COLUMNS), "keys": (batch, HEADS, total, SIZE),
        "values": (batch, HEADS, total, SIZE), "table": (length, SIZE // 2),
        "mask": (batch, 1, length, total), "b": (3 * COLUMNS,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 6), total=st.integers(1, 8))
def test_results_are_equal(batch: int, length: int, total: int) -> None:
    proto = model()
    feed = feeds(batch, length, total)
    want = run(proto, feed)
    assert attention_views.remove(proto) == 3
    onnx.checker.check_model(proto)
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=2e-5, atol=2e-6)


def test_the_operators_that_are_left() -> None:
    proto = model()
    attention_views.remove(proto)
    left = ["RotaryEmbedding", "MultiHeadAttention"]
    assert Counter(op_types(proto)) == Counter([*(f"com.microsoft.{op}" for op in left), "Relu"])
    rotary, attention = proto.graph.node[:2]
    assert list(attention.input)[1:] == ["keys", "values", "", "", "mask"]
    attributes = {a.name: helper.get_attribute_value(a) for a in rotary.attribute}
    assert attributes == {"num_heads": 2}  # which its operand no longer tells


def test_attributes_of_a_rotary_embedding_are_kept() -> None:
    rotary = PARTS["q"].replace("RotaryEmbedding", "RotaryEmbedding <scale = 0.5, interleaved = 1>")
    proto = model(q=rotary)
    assert attention_views.remove(proto)
    node = next(node for node in proto.graph.node if node.op_type == "RotaryEmbedding")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"num_heads": 2, "scale": 0.5, "interleaved": 1}


@pytest.mark.parametrize(
    ("operands", "changes", "found"),
    [
        pytest.param("q, k, v, b, , mask", {}, 2, id="a bias of the projections"),
        pytest.param(
            "q, k, v, , , mask", {"k": "k4 = Transpose <perm = [0, 2, 1, 3]> (keys)"
            "  k5 = Reshape (k4, flat)  k = Neg (k5)"}, 2, id="something behind the keys",
        ),
        pytest.param(
            "q, k, v, , , mask", {"kv": "batch, 2, others, 4"}, 2, id="other keys than values"
        ),
        pytest.param(
            "q, k, v, , , mask",
            {"q": PARTS["q"].replace("[0, 2, 1, 3]> (q3)", "[0, 2, 3, 1]> (q3)")}, 2,
            id="another order of axes",
        ),
        pytest.param(
            "q, k, v, , , mask", {"y": "y3 = Reshape (y0, apart)  y4 = Reshape (y3, other)"
            "  y = Relu (y4)", "y4": "rows, 1, 8"}, 2, id="a result of another shape",
        ),
        pytest.param(
            "q, k, v, , , mask", {"y": "y3 = Reshape (y0, apart)  y = Reshape (y3, dims)"}, 2,
            id="a result that is the model's output",
        ),
    ],
)  # fmt: skip
def test_what_must_stay(operands: str, changes: dict[str, str], found: int) -> None:
    proto = model(operands, **changes)
    assert attention_views.remove(proto) == found


def _no_records(proto: onnx.ModelProto) -> None:
    del proto.graph.value_info[:]


def _another_domain(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "MultiHeadAttention":
            node.domain = "some.where"


@pytest.mark.parametrize(("change", "found"), [(_no_records, 1), (_another_domain, 0)])
def test_what_is_not_proven_stays(change: Callable[[onnx.ModelProto], None], found: int) -> None:
    proto = model()
    change(proto)
    assert attention_views.remove(proto) == found  # keys and values are inputs of known shapes
