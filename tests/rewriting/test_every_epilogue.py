"""Every epilogue behind every kind of product, one by one: it is fused, and computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from activation_forms import FORMS
from equivalence import check_fused, parse, random

BASES = {
    "MatMul": ("float[rows, columns, inner] a, float[inner, 6] b", "MatMul (a, b)"),
    "Gemm": ("float[p, k] a, float[6, k] b", "Gemm <transB = 1, alpha = 0.5> (a, b)"),
    "GemmC": ("float[p, k] a, float[k, 6] b", "Gemm <beta = 0.5> (a, b, c0)"),
    "ConvNoBias": ("float[n, 4, h, w] a", 'Conv <auto_pad = "SAME_UPPER"> (a, k0)'),
    "Conv": ("float[n, 4, h, w] a", "Conv <strides = [2, 2]> (a, k0, c0)"),
    "ConvTransposeNoBias": ("float[n, 4, h, w] a", "ConvTranspose <strides = [2, 2]> (a, k1)"),
}
"""Inputs and the node. The output has 6 columns or channels."""

FEEDS = {
    "MatMul": {"a": random(2, 3, 4), "b": random(4, 6)},
    "Gemm": {"a": random(3, 4), "b": random(6, 4)},
    "GemmC": {"a": random(3, 4), "b": random(4, 6)},
}
IMAGE = {"a": random(2, 4, 5, 7)}

CONSTANTS = {
    "c0": random(6), "k0": random(6, 4, 3, 3), "k1": random(4, 6, 2, 2),
    "vector": random(6), "channel": random(6, 1, 1), "scale": np.array(0.3, np.float32),
}  # fmt: skip

SCALES = {"Mul by a number": "y = Mul (x, scale)", "Div by a number": "y = Div (x, scale)"}
BIASES = {"vector": "y = Add (x, vector)", "channel": "y = Add (channel, x)"}
ACTIVATIONS = [
    pytest.param(name, form, id=f"{name}-{i}")
    for name, forms in FORMS.items()
    for i, form in enumerate(forms)
]


def model_of(base: str, rest: str, *, opset: int = 18, product: str = "x") -> onnx.ModelProto:
    """`rest` behind a product of that name, with the numbers in it as initializers."""
    inputs, node = BASES[base]
    words = []
    numbers: dict[str, str] = {}
    for word in rest.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split():
        is_number = word.lstrip("-").replace(".", "", 1).isdigit() and words[-1:] != ["="]
        words.append(numbers.setdefault(word, f"number{len(numbers)}") if is_number else word)
    model = parse(f"g ({inputs}) => (y) {{ {product} = {node}  {' '.join(words)} }}", opset=opset)
    values = {name: np.array(float(text), np.float32) for text, name in numbers.items()}
    read = {name for node in model.graph.node for name in node.input}
    for name, value in {**CONSTANTS, **values}.items():
        if name in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def check(base: str, rest: str, op: str, *, opset: int = 18) -> None:
    check_fused(model_of(base, rest, opset=opset), FEEDS.get(base, IMAGE), ops=[op], tolerance=3e-5)


def plain(base: str) -> str:
    return "Gemm" if base == "GemmC" else base


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("scale", SCALES)
def test_scales(base: str, scale: str) -> None:
    check(base, SCALES[scale], "ScaledMatMul" if base == "MatMul" else plain(base))


@pytest.mark.parametrize("base", ["MatMul", "Gemm", "ConvNoBias", "ConvTransposeNoBias"])
def test_biases(base: str) -> None:
    """One for each column or channel."""
    op = {"MatMul": "MatMulBias"}.get(base, base.removesuffix("NoBias"))
    check(base, BIASES["channel" if base.startswith("Conv") else "vector"], op)


@pytest.mark.parametrize("base", [base for base in BASES if base != "ConvTransposeNoBias"])
@pytest.mark.parametrize("order", ["y = Add (x, r)", "y = Add (r, x)"])
def test_a_whole_matrix_or_image(base: str, order: str) -> None:
    """r has the product's shape, and comes from another product like it."""
    model = model_of(base, f"z = {BASES[base][1].replace('(a,', '(a2,')}  r = Neg (z)  {order}")
    twin = onnx.ValueInfoProto()
    twin.CopyFrom(model.graph.input[0])
    twin.name = "a2"
    model.graph.input.append(twin)
    feeds = FEEDS.get(base, IMAGE)
    feeds = {**feeds, "a2": feeds["a"][..., ::-1].copy()}
    own = plain(base)
    check_fused(model, feeds, ops=[own, "Neg", f"{own}Add"], tolerance=3e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("name", "form"), ACTIVATIONS)
def test_activations(base: str, name: str, form: str) -> None:
    check(base, form, f"{plain(base)}{name}")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("form", "name"),
    [("y = Gelu (x)", "Gelu"), ('y = Gelu <approximate = "tanh"> (x)', "GeluTanh")],
)
def test_gelu_as_one_node(base: str, form: str, name: str) -> None:
    check(base, form, f"{plain(base)}{name}", opset=20)


@pytest.mark.parametrize("base", ["MatMul", "Gemm", "ConvNoBias"])
@pytest.mark.parametrize("name", FORMS)
def test_all_in_one(base: str, name: str) -> None:
    """Scale, bias and activation."""
    vector = "channel" if base == "ConvNoBias" else "vector"
    rest = f"scaled = Mul (product, scale)  x = Add (scaled, {vector})  {FORMS[name][0]}"
    op = {"MatMul": "ScaledMatMulBias", "ConvNoBias": "Conv"}.get(base, base)
    model = model_of(base, rest, product="product")
    check_fused(model, FEEDS.get(base, IMAGE), ops=[f"{op}{name}"], tolerance=3e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "rest", ["y = Softplus (x)", "y = Exp (x)", "y = Elu (x)", "y = Mul (x, vector)"]
)
def test_others_stay(base: str, rest: str) -> None:
    rest = rest.replace("vector", "channel" if base.startswith("Conv") else "vector")
    model = model_of(base, rest)
    node = model.graph.node[1]
    missed = ["residual: shape-unproven"] if node.op_type == "Mul" else []
    check_fused(model, FEEDS.get(base, IMAGE), ops=[plain(base), node.op_type], missed=missed)
