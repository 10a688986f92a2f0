"""Conv and ConvTranspose -> ai.moonpoly: ranks, attributes, groups, operands that are unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from equivalence import LEVELS, check, op_types, parse, random, refusals, run
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import rewrite

GRAPH = "g (float[n, 4, h, w] x, float[6, 4, 3, 3] k, float[6] b) => (y) {{ y = {} }}"
UP = "g (float[n, 4, h, w] x, float[4, 6, 3, 3] k, float[6] b) => (y) {{ y = {} }}"
FEEDS = {"x": random(2, 4, 9, 8), "k": random(6, 4, 3, 3), "b": random(6)}


@dataclasses.dataclass(frozen=True)
class Call:
    """One node with its operands; `runs`: ONNX Runtime's CPU provider accepts it."""

    op_type: str
    attributes: Mapping[str, Any]
    bias: str | None
    ranked: bool
    feeds: Mapping[str, np.ndarray]
    runs: bool = True

    def model(self, dtype: str = "float", opset: int = 17) -> onnx.ModelProto:
        """X and W of unknown sizes, X of unknown rank unless `ranked`."""
        x, k = (",".join(f"{name}{i}" for i in range(self.feeds[name].ndim)) for name in "xk")
        model = parse(
            f"""g ({dtype}[{x if self.ranked else ""}] x, {dtype}[{k}] k, {dtype}[m] b) => (y)
                {{ y = {self.op_type} (x, k) }}""",
            opset=opset,
        )
        node = model.graph.node[0]
        if self.bias is not None:
            node.input.append(self.bias)
        for name, value in self.attributes.items():
            node.attribute.append(onnx.helper.make_attribute(name, value))
        return model


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any legal node: each attribute may be absent."""
    transposed = draw(st.booleans())
    rank = draw(st.integers(1, 3))
    groups, c, m = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))

    def per_axis(least: int, most: int, count: int = rank) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    kernel, strides, dilations = per_axis(1, 3), per_axis(1, 3), per_axis(1, 2)
    auto_pad = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [draw(st.integers(0, (r - 1) // 2)) for r in reach * 2]
    size = [r + draw(st.integers(0, 4)) for r in reach]
    optional: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": pads,
        "group": groups,
        "auto_pad": auto_pad,
    }
    if transposed:
        optional["output_padding"] = [draw(st.integers(0, stride - 1)) for stride in strides]
        whole = [(n - 1) * s + r for n, s, r in zip(size, strides, reach, strict=True)]
        optional["output_shape"] = [draw(st.integers(max(1, n - 2), n)) for n in whole]
    dropped = {"pads" if auto_pad != "NOTSET" else "auto_pad"}
    dropped |= draw(st.sets(st.sampled_from(["kernel_shape", "auto_pad", "pads"])))
    if transposed:
        dropped |= draw(st.sampled_from([{"output_shape"}, {"output_padding", "pads", "auto_pad"}]))
    # Leaving these out where they are not the default would be another node.
    defaults = {"strides": [1] * rank, "dilations": [1] * rank, "group": 1}
    for name in draw(st.sets(st.sampled_from(sorted(defaults)))):
        if optional[name] == defaults[name]:
            dropped.add(name)
    attributes = {name: value for name, value in optional.items() if name not in dropped}
    same = str(attributes.get("auto_pad", "")).startswith("SAME")
    weight = (groups * c, m) if transposed else (groups * m, c)
    feeds = {
        "x": random(draw(st.integers(0, 2)), groups * c, *size, seed=1),
        "k": random(*weight, *kernel, seed=2),
        "b": random(groups * m, seed=3),
    }
    return Call(
        "ConvTranspose" if transposed else "Conv",
        attributes,
        draw(st.sampled_from([None, "", "b"])),
        draw(st.booleans()),
        feeds,
        runs=not (same and max(dilations) > 1),  # which its CPU provider refuses
    )


@given(calls())
@settings(max_examples=150)
def test_all_legal_nodes(call: Call) -> None:
    model = call.model()
    feeds = [call.feeds] if call.runs else []
    node = check(model, *feeds, taken=1).model.graph.node[0]
    assert node.attribute == model.graph.node[0].attribute  # absent ones stay absent
    assert node.op_type == call.op_type + ("NoBias" if call.bias is None else "")


@given(calls())
@settings(max_examples=25)
def test_every_optimization_level_gives_the_same_bits(call: Call) -> None:
    """Weights are constants here, which ONNX Runtime folds and lays out anew."""
    model = call.model()
    for name in "kb":
        tensor = onnx.numpy_helper.from_array(call.feeds[name], name)
        model.graph.initializer.append(tensor)
    inputs = [value for value in model.graph.input if value.name == "x"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    after = check(model, taken=1).model
    feeds = {"x": call.feeds["x"]}
    for level in LEVELS if call.runs else ():
        (expected,), (actual,) = run(model, feeds, level), run(after, feeds, level)
        np.testing.assert_array_equal(actual, expected, strict=True)


@given(calls(), st.data())
@settings(max_examples=60)
def test_illegal_twins_stay(call: Call, data: st.DataObject) -> None:
    """The same node with one thing wrong."""
    attributes, feeds = dict(call.attributes), dict(call.feeds)
    rank = feeds["k"].ndim - 2
    wrong = {
        "strides": [1] * (rank - 1) + [0],
        "dilations": [1] * (rank + 1),
        "pads": [-1] + [0] * (2 * rank - 1),
        "kernel_shape": [0] * rank,
        "group": 0,
        "auto_pad": "SAME",
    }
    name = data.draw(st.sampled_from([*wrong, "both pads", "double"]))
    if name == "both pads":
        attributes |= {"pads": [0] * 2 * rank, "auto_pad": "VALID"}
    elif name in wrong:
        attributes[name] = wrong[name]
    model = dataclasses.replace(call, attributes=attributes).model(
        "double" if name == "double" else "float"
    )
    reason = "dtype-unsupported" if name == "double" else "invalid"
    assert refusals(check(model, taken=0)) == [reason]


def test_list_of_operators() -> None:
    model = parse(
        """g (float[n, 4, h, w] x, float[4, 4, 1, 1] k, float[4] b) => (y) {
            p = Conv (x, k)  q = Conv (p, k, b)  r = Conv (q, k, "")  s = ConvTranspose (r, k)
            t = ConvTranspose (s, k, b)  y = Relu (t) }"""
    )
    feeds = {"x": random(1, 4, 3, 3), "k": random(4, 4, 1, 1), "b": random(4)}
    result = check(model, feeds, taken=5)
    assert op_types(result.model) == [
        "ai.moonpoly.ConvNoBias",
        "ai.moonpoly.Conv",
        "ai.moonpoly.Conv",
        "ai.moonpoly.ConvTransposeNoBias",
        "ai.moonpoly.ConvTranspose",
        "Relu",
    ]
    assert [entry.op_type for entry in result.report] == ["Conv"] * 3 + ["ConvTranspose"] * 2
    assert [(f.name, list(f.input)) for f in result.model.functions] == [
        ("Conv", ["X", "W", "B"]),
        ("ConvNoBias", ["X", "W"]),
        ("ConvTranspose", ["X", "W", "B"]),
        ("ConvTransposeNoBias", ["X", "W"]),
    ]


def test_nodes_of_one_model_keep_their_own_attributes() -> None:
    """They share a function body, in which each node's absent attributes are absent."""
    model = parse(
        """g (float[n, 2, h, w] x, float[2, 2, 3, 3] k, float[4, 1, 3] j) => (y, z) {
            p = Conv <pads = [1, 1, 1, 1]> (x, k)
            q = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (p, k)
            r = Conv <dilations = [2, 2]> (q, k)
            y = ConvTranspose <strides = [2, 2], output_shape = [9, 9]> (r, k)
            s = Flatten <axis = 2> (p)  t = Unsqueeze (s, axes)
            u = Squeeze (t, axes)  v = Reshape (u, shape)
            z = Conv <group = 2> (v, j) }"""
    )
    for name, value in (("axes", [0]), ("shape", [1, 2, -1])):
        tensor = onnx.numpy_helper.from_array(np.array(value, np.int64), name)
        model.graph.initializer.append(tensor)
    feeds = {"x": random(1, 2, 15, 16), "k": random(2, 2, 3, 3), "j": random(4, 1, 3)}
    check(model, feeds, taken=5)


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
@pytest.mark.parametrize(
    ("graph", "op_type"), [(GRAPH, "Conv"), (UP, "ConvTranspose")], ids=["forward", "transposed"]
)
def test_opsets(graph: str, op_type: str, opset: int) -> None:
    text = graph.format(f"{op_type} <pads = [1, 0, 1, 2]> (x, k, b)")
    model = parse(text, opset=opset, ir_version=13 if opset > 25 else 10)
    weight = random(4, 6, 3, 3) if op_type == "ConvTranspose" else FEEDS["k"]
    check(model, *([{**FEEDS, "k": weight}] if opset <= 23 else []), taken=1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(call=calls())
@settings(max_examples=15)
def test_half_types(dtype: str, call: Call) -> None:
    check(call.model(dtype, opset=22), taken=1)


def test_bfloat16_before_opset_22_stays() -> None:
    model = parse(GRAPH.format("Conv (x, k, b)").replace("float", "bfloat16"), opset=21)
    assert refusals(check(model)) == ["dtype-unsupported"]


@pytest.mark.parametrize(
    "weights",
    [
        "c = Identity (k)",
        "a = Abs (k)  s = Shape (a)  c = Reshape (a, s)",
        "t = Transpose <perm = [1, 0, 2, 3]> (k)  c = Transpose <perm = [1, 0, 2, 3]> (t)",
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_computed_weights(weights: str, constant: bool) -> None:
    model = parse(
        f"g (float[n, 4, h, w] x, float[6, 4, 3, 3] k) => (y) {{ {weights}  y = Conv (x, c) }}"
    )
    feeds = {"x": FEEDS["x"], "k": FEEDS["k"]}
    if constant:
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop("k"), "k"))
        del model.graph.input[1]
    check(model, feeds, taken=1)


def test_weights_of_constant_nodes() -> None:
    model = parse(
        """g (float[n, 1, h] x) => (y) {
            k = Constant <value = float[2, 1, 3] {1, 2, 3, 4, 5, 6}> ()
            b = Constant <value_floats = [0.5, -0.5]> ()
            y = Conv (x, k, b) }"""
    )
    check(model, {"x": random(2, 1, 7)}, taken=1)


@pytest.mark.parametrize(
    "text",
    [
        "float[] x, float[6, 4, 3] k, float[6] b",  # W has a rank
        "float[?, ?, ?, ?] x, float[] k, float[] b",  # X has
        "float[] x, float[] k, float[m] b",  # strides are as many as there are axes
    ],
)
def test_rank_from_anything_that_has_it(text: str) -> None:
    strides = "<strides = [2]> " if "[6, 4, 3]" in text or "[m]" in text else ""
    model = parse(f"g ({text}) => (y) {{ y = Conv {strides}(x, k, b) }}")
    check(model, taken=1)


def test_rank_that_nothing_has_stays() -> None:
    model = parse("g (float[] x, float[] k) => (y) { y = Conv (x, k) }")
    assert refusals(check(model)) == ["rank-unknown"]


@pytest.mark.parametrize(("rank", "reason"), [(0, "rank-unsupported"), (4, "rank-unsupported")])
def test_other_ranks_stay(rank: int, reason: str) -> None:
    axes = ", ".join(["n", "4", *"abcd"[:rank]])
    model = parse(f"g (float[{axes}] x, float[{axes}] k) => (y) {{ y = Conv (x, k) }}")
    assert refusals(check(model)) == [reason]


@pytest.mark.parametrize(
    ("operands", "call", "detail"),
    [
        ("float[n, 3, h, w] x, float[6, 4, 3, 3] k", "Conv (x, k)", "X has 3 channels"),
        ("float[n, 4, h, w] x, float[6, 4, 3, 3] k", "Conv <group = 2> (x, k)", "X has 4 channels"),
        ("float[n, 4, h, w] x, float[5, 2, 3, 3] k", "Conv <group = 2> (x, k)", "5 output"),
        ("float[n, 4, h] x, float[6, 4, 3, 3] k", "Conv (x, k)", "1 by X, 2 by W"),
        (
            "float[n, 4, h, w] x, float[6, 4, 3, 3] k",
            "Conv <kernel_shape = [3, 2]> (x, k)",
            "kernel_shape is [3, 2]",
        ),
        (
            "float[n, 4, h, w] x, float[6, 4, 3, 3] k, float[5] b",
            "Conv (x, k, b)",
            "B is [5]; the output has 6 channels",
        ),
        (
            "float[n, 4, h, w] x, float[6, 4, 3, 3] k, float[6, 1] b",
            "Conv (x, k, b)",
            "B is [6,1]",
        ),
        ("float[n, 3, h, w] x, float[4, 6, 3, 3] k", "ConvTranspose (x, k)", "X has 3 channels"),
        ("float[n, 5, h] x, float[5, 6, 3] k", "ConvTranspose <group = 2> (x, k)", "X has 5"),
        (
            "float[n, 4, h] x, float[4, 6, 3] k, float[6] b",
            "ConvTranspose <group = 2> (x, k, b)",
            "the output has 12 channels",
        ),
        (
            "float[n, 4, h] x, float[4, 6, 3] k",
            "ConvTranspose <output_padding = [-1]> (x, k)",
            "output_padding is [-1]",
        ),
        (
            "float[n, 4, h, w] x, float[4, 6, 3, 3] k",
            "ConvTranspose <strides = [2, 2], output_padding = [1, 2]> (x, k)",
            "output_padding is [1, 2]; less than strides, [2, 2], or dilations, [1, 1]",
        ),
        (
            "float[n, 4, h] x, float[4, 6, 3] k",
            "ConvTranspose <output_shape = [1, 6, 9]> (x, k)",
            "3 by output_shape",
        ),
        ("float[n, 4, h] x", "Conv (x, nothing)", "W is [6,4,0]: a kernel of nothing"),
        ("float[n, 4, h] x, float[6, 4, 3] k", "Conv <pads = [1]> (x, k)", "0.5 by pads"),
    ],
)
def test_operands_that_do_not_fit_stay(operands: str, call: str, detail: str) -> None:
    model = parse(f"g ({operands}) => (y) {{ y = {call} }}")
    nothing = np.zeros((6, 4, 0), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(nothing, "nothing"))
    result = check(model)
    assert refusals(result) == ["invalid"]
    assert detail in result.report[0].detail


@pytest.mark.parametrize(
    ("call", "detail"),
    [
        ("Conv (x)", "1 inputs"),
        ('Conv ("", k)', "mandatory input"),
        ("Conv <output_padding = [0, 0]> (x, k)", "'output_padding' is unknown"),
        ("Conv <strides = 2> (x, k)", "of type INT"),
    ],
)
def test_malformed_nodes_stay(call: str, detail: str) -> None:
    result = check(parse(GRAPH.format(call)))
    assert refusals(result) == ["invalid"]
    assert detail in result.report[0].detail


def test_static_shapes_only_when_asked() -> None:
    text = GRAPH.format("Conv (x, k)").replace("n, 4, h, w", "2, 4, 9, 8")
    assert refusals(check(parse(text))) == ["static"]
    check(parse(text), FEEDS, static=True, taken=1)
    check(parse(text.replace("[2,", "[0,")), {**FEEDS, "x": FEEDS["x"][:0]}, taken=1)


def test_convolution_of_constants_stays_for_folding() -> None:
    model = parse(
        """g (float[n, 1] a) => (y) <float[1, 1, 2] x = {1, 2}, float[1, 1, 2] k = {3, 4}> {
            p = Conv (x, k)  y = Add (a, p) }"""
    )
    assert refusals(check(model, {"a": random(3, 1)}, static=True)) == ["constant"]


def test_quantized_convolutions_are_no_candidates() -> None:
    model = parse(
        "g (uint8[n, 4, h] x, uint8[6, 4, 3] k) => (int32[n, 6, l] y) { y = ConvInteger (x, k) }"
    )
    assert check(model).report == ()


def test_subgraphs_and_functions() -> None:
    model = parse(
        """g (bool c, float[n, 4, h] x, float[4, 4, 3] k, float[4] b, int64 trips) => (y) {
            s = Loop (trips, c, x) <body = body (int64 i, bool g, float[n, 4, h] v)
                => (bool again, float[n, 4, h] next) {
                again = Identity (g)  next = Conv <pads = [1, 1]> (v, k) }>
            y = If (c) <
                then_branch = yes () => (float[n, 4, l] u) { u = f.Block <step = [2]> (s, k, b) },
                else_branch = no () => (float[n, 4, l] v) { v = f.Block <step = [1]> (s, k) }
            > }""",
        imports=', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17]> Block <step> (x, w, bias) => (y) {
            t = Conv <strides: ints = @step> (x, w, bias)  y = Conv (t, w) }""",
    )
    for condition in (True, False):
        feeds = {"x": random(2, 4, 15), "k": random(4, 4, 3), "b": random(4)}
        feeds |= {"c": np.array(condition), "trips": np.array(2)}
        result = check(model, feeds, taken=3)
    assert [entry.where for entry in result.report] == [
        "graph/Loop[#0].body",
        "function f.Block",
        "function f.Block",
    ]
    block = next(f for f in result.model.functions if f.domain == "f")
    assert [node.op_type for node in block.node] == ["Conv", "ConvNoBias"]
    assert block.node[0].attribute[0].ref_attr_name == "step"


def test_second_rewrite_takes_what_the_first_left() -> None:
    model = parse(GRAPH.format("Conv (x, k)").replace("y = ", "t = Relu (x)  y = "))
    first = rewrite(model)
    second = rewrite(first.model, rules=["conv"])
    third = rewrite(second.model, rules=["conv"])
    assert [str(entry.reason) for entry in third.report] == ["already-rewritten"]
    assert (third.report[0].rule, third.report[0].op_type) == ("conv", "ConvNoBias")
    assert third.model == second.model
