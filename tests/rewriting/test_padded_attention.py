"""Tokens of attention, in models written as text: what is worth it, types, names, branches."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import node_of, parse, run
from moonpoly_ort.graph_passes import padded_tokens
from onnx import TensorProto, helper, numpy_helper

HEADS, COLUMNS = 2, 8
TEXT = {"opset": 21, "ir_version": 10, "imports": ', "com.microsoft" : 1'}
ATTENTION = f"com.microsoft.MultiHeadAttention<num_heads = {HEADS}>"


def given_feeds(proto: onnx.ModelProto, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs of a model, of their types."""
    rng = np.random.default_rng(0)
    found = {}
    for info in proto.graph.input:
        kind = info.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        found[info.name] = rng.standard_normal(shape).astype(dtype)
    return found


def check_text(text: str, *, taken: int, tolerance: float = 1e-5, **sizes: int) -> onnx.ModelProto:
    """Pads a model that is given as text, and compares results."""
    proto = parse(text, **TEXT)
    read = {name for node in proto.graph.node for name in node.input}
    for name, columns in {"square": COLUMNS, "wide": COLUMNS + 1}.items():
        weight = np.eye(COLUMNS, columns, dtype=np.float32)
        proto.graph.initializer.extend([numpy_helper.from_array(weight, name)] * (name in read))
    feed = given_feeds(proto, **sizes)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == taken
    onnx.checker.check_model(proto, full_check=True)
    for one, other in zip(run(proto, feed), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    return proto


@pytest.mark.parametrize(("values", "taken"), [("k", 1), ("v", 0)])
def test_an_attention_node_for_which_too_much_would_be_padded(values: str, taken: int) -> None:
    """Three values are worth it, here two and the result, but not four."""
    others = "" if values == "k" else f", float[batch, length, {COLUMNS}] v"
    check_text(
        f"""alone (float[batch, length, {COLUMNS}] q, float[batch, length, {COLUMNS}] k{others},
            float[batch, 1, length, length] mask) => (float[batch, length, {COLUMNS}] out) {{
            out = {ATTENTION}(q, k, {values}, "", "", mask)
        }}""",
        taken=taken, batch=2, length=5,
    )  # fmt: skip


def test_a_sum_of_embeddings_is_padded_once() -> None:
    proto = check_text(
        f"""sum (float[batch, length, {COLUMNS}] x, float[1, length, {COLUMNS}] positions,
            float[batch, 1, length, length] mask) => (float[batch, length, {COLUMNS}] out)
        <float[batch, length, {COLUMNS}] y> {{
            y = Add(x, positions)
            z = Relu(y)
            out = {ATTENTION}(z, z, z, "", "", mask)
        }}""",
        taken=1, batch=2, length=5,
    )  # fmt: skip
    pads = [node.input[0] for node in proto.graph.node if node.op_type == "Pad"]
    assert pads == ["y", "mask", "mask_wider"]


def test_lengths_of_two_names() -> None:
    """An encoder, and a decoder that attends to it with tokens of its own."""
    proto = check_text(
        f"""both (float[batch, source, {COLUMNS}] x, float[batch, target, {COLUMNS}] y,
            float[batch, 1, source, source] xmask, float[batch, {HEADS}, target, target] ymask,
            float[batch, 1, target, source] across) => (float[batch, target, {COLUMNS}] out)
        <float[batch, target, {COLUMNS}] d> {{
            b = {ATTENTION}(x, x, x, "", "", xmask)
            c = {ATTENTION}(y, y, y, "", "", ymask)
            d = {ATTENTION}(c, b, b, "", "", across)
            out = {ATTENTION}(d, d, d, "", "", ymask)
        }}""",
        taken=3, batch=2, source=21, target=6,
    )  # fmt: skip
    feed = given_feeds(proto, batch=2, source=21, target=6)
    names = ["b_padded", "c_padded", "b", "c", "d"]
    for name in names:
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    assert [array.shape[1] for array in run(proto, feed)[1:]] == [32, 16, 21, 6, 6]


def test_a_mask_of_another_name_ends_the_encoder() -> None:
    """The model does not say that it is as long."""
    proto = check_text(
        f"""two (float[batch, length, {COLUMNS}] x, float[batch, 1, length, length] mask,
            float[batch, 1, other, other] after) => (float[batch, length, {COLUMNS}] out) {{
            a = {ATTENTION}(x, x, x, "", "", mask)
            out = {ATTENTION}(a, a, a, "", "", after)
        }}""",
        taken=1, batch=2, length=6, other=6,
    )  # fmt: skip
    assert node_of(proto, "out").input[0] == "a"
    assert node_of(proto, "a").op_type == "Slice"


@pytest.mark.parametrize(("weight", "cut"), [("square", "out"), ("made", "a"), ("wide", "a")])
def test_products_behind_the_last_attention(weight: str, cut: str) -> None:
    """The cut is in front of one that gives more columns, as one of unknown size may."""
    proto = check_text(
        f"""product (float[batch, length, {COLUMNS}] x, float[batch, 1, length, length] mask)
        => (float[batch, length, columns] out) {{
            a = {ATTENTION}(x, x, x, "", "", mask)
            made = Identity(square)
            out = MatMul(a, {weight})
        }}""",
        taken=1, batch=2, length=6,
    )  # fmt: skip
    assert node_of(proto, cut).op_type == "Slice"


@pytest.mark.parametrize(("behind", "multiple"), [("", 8), ("float", 16)])
def test_half_precision(behind: str, multiple: int) -> None:
    """The multiple is that of the widest type which attention has."""
    last = (
        "w = Identity(b)"
        if not behind
        else f"""
        c = Cast<to = 1>(b)
        d = {ATTENTION}(c, c, c, "", "", mask)
        w = Cast<to = 10>(d)"""
    )
    given = f", {behind}[1, {HEADS}, length, length] mask" if behind else ""
    proto = check_text(
        f"""half (float16[batch, length, {COLUMNS}] x, float16[batch, 1, length, length] seen
            {given}) => (float16[batch, length, {COLUMNS}] out) {{
            a = {ATTENTION}(x, x, x, "", "", seen)
            b = {ATTENTION}(a, a, a, "", "", seen)
            {last}
            out = Relu(w)
        }}""",
        taken=3 if behind else 2, batch=2, length=3, tolerance=2e-2,
    )  # fmt: skip
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert numpy_helper.to_array(constants["x_padded_multiple"]) == multiple


def test_a_mask_of_its_own_for_every_layer() -> None:
    proto = check_text(
        f"""masks (float[batch, length, {COLUMNS}] x, float[batch, 1, length, length] near,
            float[1, {HEADS}, length, length] far) => (float[batch, length, {COLUMNS}] out) {{
            first = Neg(near)
            a = {ATTENTION}(x, x, x, "", "", near)
            b = {ATTENTION}(a, a, a, "", "", far)
            c = {ATTENTION}(b, b, b, "", "", near)
            total = ReduceSum(first)
            out = Add(c, total)
        }}""",
        taken=3, batch=3, length=17,
    )  # fmt: skip
    assert node_of(proto, "first").input[0] == "near"


def test_what_subgraphs_read_has_the_tokens_that_were_there() -> None:
    check_text(
        f"""branch (float[batch, length, {COLUMNS}] x, bool yes,
            float[batch, 1, length, length] mask) => (float[batch, length, {COLUMNS}] out)
        <int64 axis = {{1}}> {{
            a = {ATTENTION}(x, x, x, "", "", mask)
            b = {ATTENTION}(a, a, a, "", "", mask)
            c = If(yes) <
                then_branch = then () => (float[batch, length, {COLUMNS}] t)
                    {{ t = Softmax<axis = 1>(a) }},
                else_branch = else () => (float[batch, length, {COLUMNS}] e)
                    {{ e = CumSum(a, axis) }}
            >
            out = Add(b, c)
        }}""",
        taken=2, batch=2, length=7,
    )  # fmt: skip


def test_names_that_are_taken() -> None:
    """By values, by constants, and inside a branch."""
    proto = check_text(
        f"""names (float[batch, length, {COLUMNS}] x, float[batch, 1, length, length] mask,
            bool yes)
        => (float[batch, length, {COLUMNS}] out)
        <float x_padded_multiple = {{2}}, float mask_unseen = {{3}}> {{
            x_padded = Mul(x, x_padded_multiple)
            b_padded = Add(x_padded, mask_unseen)
            a = {ATTENTION}(x, x, x, "", "", mask)
            b = {ATTENTION}(a, a, a, "", "", mask)
            c = If(yes) <
                then_branch = then () => (float[batch, length, {COLUMNS}] mask_padded)
                    {{ mask_padded = Neg(b) }},
                else_branch = else () => (float[batch, length, {COLUMNS}] mask_wider)
                    {{ mask_wider = Abs(b) }}
            >
            out = Add(c, b_padded)
        }}""",
        taken=2, batch=2, length=7,
    )  # fmt: skip
    assert node_of(proto, "b").input[0] == "b_padded_1"
