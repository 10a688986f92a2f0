"""Sizes behind strided convolutions and poolings: proven equal where they are, for every size."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from equivalence import check_fused, op_types, parse, random, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes.symbolic_sizes import Size

from moonpoly_ort.rewriting import rewrite

SIZES = range(24, 60)
"""Inputs large enough for every chain below; all remainders of a division by up to 27 are among
them."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution or a pooling along one axis."""

    op_type: str
    kernel: int
    stride: int
    pads: tuple[int, int]
    dilation: int = 1
    auto_pad: str = "NOTSET"

    def text(self, source: str, target: str, kernels: dict[str, np.ndarray]) -> str:
        given = f"strides = [{self.stride}]"
        if self.op_type != "AveragePool":
            given += f", dilations = [{self.dilation}]"
        if self.auto_pad != "NOTSET":
            given += f', auto_pad = "{self.auto_pad}"'
        elif any(self.pads):
            given += f", pads = [{self.pads[0]}, {self.pads[1]}]"
        if self.op_type != "Conv":
            return f"{target} = {self.op_type} <kernel_shape = [{self.kernel}], {given}> ({source})"
        kernels[f"k_{target}"] = random(2, 2, self.kernel)
        return f"{target} = Conv <{given}> ({source}, k_{target})"


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    op_type = draw(st.sampled_from(["Conv", "Conv", "MaxPool", "AveragePool"]))
    kernel = draw(st.integers(1, 4))
    pad = st.integers(0, kernel // 2)
    auto_pad = draw(st.sampled_from(["NOTSET"] * 4 + ["VALID", "SAME_UPPER", "SAME_LOWER"]))
    dilation = draw(st.integers(1, 2)) if op_type == "Conv" and auto_pad == "NOTSET" else 1
    # ONNX Runtime refuses the negative pads of SAME where a stride is longer than the kernel.
    stride = draw(st.integers(1, min(kernel, 3) if auto_pad.startswith("SAME") else 3))
    return Layer(op_type, kernel, stride, (draw(pad), draw(pad)), dilation, auto_pad)


def branches(one: list[Layer], other: list[Layer]) -> onnx.ModelProto:
    """Two chains of one input; their sum goes on, and each of them is an output of `shapes`."""
    kernels: dict[str, np.ndarray] = {"k_last": random(2, 2, 1), "k_other": random(2, 2, 1)}
    nodes = []
    for name, chain in (("a", one), ("b", other)):
        source = "x"
        for index, layer in enumerate(chain):
            nodes.append(layer.text(source, f"{name}{index}", kernels))
            source = f"{name}{index}"
        nodes.append(f"{name} = Relu ({source})")
    model = parse(
        f"""g (float[n, 2, length] x) => (y) {{
            {" ".join(nodes)}  t = Conv (a, k_last)  r = Tanh (b)  y = Add (t, r) }}"""
    )
    for name, value in kernels.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def lengths(model: onnx.ModelProto, size: int) -> tuple[int, int]:
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    del probe.graph.node[-1]
    for name in ("t", "r"):
        probe.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    t, r = run(probe, {"x": np.zeros((1, 2, size), np.float32)})
    return t.shape[-1], r.shape[-1]


@given(st.lists(layers(), max_size=3), st.lists(layers(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_proven_where_equal_for_every_size(one: list[Layer], other: list[Layer]) -> None:
    """Against ONNX Runtime: no proof of what is false, and none is missing."""
    model = branches(one, other)
    fused = "ai.moonpoly.ConvNoBiasAdd" in op_types(rewrite(model).model)
    found = [lengths(model, size) for size in SIZES]
    assert fused == all(a == b for a, b in found)


@given(
    st.lists(st.tuples(st.integers(-3, 9), st.integers(1, 4)), max_size=4),
    st.integers(0, 10**6),
)
def test_a_chain_is_one_division(chain: list[tuple[int, int]], h: int) -> None:
    size, wanted = Size("h"), h
    for window, stride in chain:
        size = size.windows(window, stride)
        wanted = (wanted - window) // stride + 1
    assert (h + size.offset) // size.divisor == wanted
    assert eval(str(size).replace("/", "//"), {"floor": int, "h": h}) == wanted


DOWNSAMPLED = """g (float[n, 4, h, w] x) => (y) {
    a = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, k3)
    b = Relu (a)  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (b, k3)
    r = Conv <kernel_shape = [1, 1], strides = [2, 2]> (x, k1)
    s = Add (c, r)  y = Relu (s) }"""
KERNELS = {"k3": random(4, 4, 3, 3), "k1": random(4, 4, 1, 1)}


def with_kernels(text: str) -> onnx.ModelProto:
    model = parse(text)
    for name, value in KERNELS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def test_the_blocks_of_a_residual_network() -> None:
    """3 x 3 with pads and 1 x 1 without leave the same rows of a stride of 2."""
    feeds = [{"x": random(2, 4, *size)} for size in ((8, 9), (7, 6))]
    check_fused(
        with_kernels(DOWNSAMPLED), *feeds, ops=["ConvNoBiasRelu", "ConvNoBias", "ConvNoBiasAddRelu"]
    )
    identity = DOWNSAMPLED.replace("strides = [2, 2], ", "").replace("(c, r)", "(c, x)")
    ops = ["ConvNoBiasRelu", "ConvNoBias", "ConvNoBiasAddRelu"]
    check_fused(with_kernels(identity), feeds[0], ops=ops)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("strides = [2, 2], pads = [1, 1, 1, 1]", "strides = [2, 2]"),
        ("[1, 1], strides = [2, 2]", "[1, 1], strides = [2, 1]"),
        ("pads = [1, 1, 1, 1]> (b", "pads = [1, 1, 1, 0]> (b"),
        ("(x, k1)", "(z, k1)"),
    ],
)
def test_other_sizes_stay(old: str, new: str) -> None:
    text = DOWNSAMPLED.replace(old, new).replace("w] x)", "w] x, float[n, 4, p, q] z)")
    result = rewrite(with_kernels(text))
    (missed,) = [entry for entry in result.report if entry.rule == "residual"]
    assert str(missed.reason) == "shape-unproven"
    assert "floor((h" in missed.detail


def test_a_pooling_that_rounds_up_proves_nothing() -> None:
    text = DOWNSAMPLED.replace(
        "a = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, k3)",
        "a = MaxPool <kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1> (x)",
    )
    assert "Add" in op_types(rewrite(with_kernels(text)).model)
    even = text.replace(", ceil_mode = 1", "")
    assert "Add" not in op_types(rewrite(with_kernels(even)).model)


def test_transposed_convolutions() -> None:
    """2 h - 2 + kernel - pads + output_padding, behind whatever h is."""
    text = """g (float[n, 4, h, w] x) => (y) {
        u = ConvTranspose <strides = [2, 2]> (x, k2)
        v = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]> (x, k3)
        t = Conv (u, k1)  y = Add (t, v) }"""
    KERNELS_2 = {**KERNELS, "k2": random(4, 4, 2, 2)}
    for old, new, fused in (("", "", True), ("output_padding = [1, 1]", "group = 1", False)):
        model = parse(text.replace(old, new) if old else text)
        for name, value in KERNELS_2.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        ops = ["ConvTransposeNoBias"] * 2 + (["ConvNoBiasAdd"] if fused else ["ConvNoBias", "Add"])
        check_fused(
            model, *([{"x": random(1, 4, 5, 6)}] if fused else []), ops=ops,
            missed=[] if fused else ["residual: shape-unproven"],
        )  # fmt: skip


def test_other_names_that_a_model_records_contradict_nothing() -> None:
    model = with_kernels(
        DOWNSAMPLED.replace("y) {", "y, z) {").replace("s = Add", "z = Neg (r)  s = Add")
    )
    for name in "acr":
        info = onnx.helper.make_tensor_value_info(name, 1, ["n", 4, f"{name}_2", f"{name}_3"])
        model.graph.value_info.append(info)
    assert "Add" not in op_types(rewrite(model).model)


def test_in_functions_and_branches() -> None:
    model = parse(
        """g (bool c, float[n, 4, h, w] x) => (y) {
            y = If (c) <
                then_branch = yes () => (p) {
                    a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, k3)
                    r = MaxPool <kernel_shape = [2, 2], strides = [2, 2], pads = [0, 0, 1, 1]> (x)
                    p = Add (a, r) },
                else_branch = no () => (q) { q = f.Block (x, k3, k1) }
            > }""",
        imports=', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17]> Block (x, k3, k1) => (y) {
            a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, k3)
            r = Conv <strides = [2, 2]> (x, k1)  y = Add (a, r) }""",
    )
    for name, value in KERNELS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    result = rewrite(model)
    absorbed = [entry.where for entry in result.taken if entry.rule == "residual"]
    assert absorbed == ["graph/If[#0].then_branch", "function f.Block"]
    for condition in (True, False):
        feeds = {"c": np.array(condition), "x": random(1, 4, 6, 7)}
        np.testing.assert_allclose(run(result.model, feeds)[0], run(model, feeds)[0], atol=1e-4)
