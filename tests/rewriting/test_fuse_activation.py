"""Activations behind a product, as one node or as exporters write them out."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.inliner
import pytest
from activation_forms import FORMS
from equivalence import check_fused, parse, random
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort.rewriting import RewriteResult

FEEDS = {"a": 2 * random(2, 3, 4), "b": random(4, 5)}
CONTRIB = ', "com.microsoft" : 1'

ALL_FORMS = [(name, form) for name, forms in FORMS.items() for form in forms]


def model_of(
    form: str, *, opset: int = 18, rank: int = 0, dtype: str = "float", imports: str = CONTRIB
) -> onnx.ModelProto:
    """A product in front of `form`, whose numbers become initializers of some rank."""
    names: dict[str, str] = {}
    words = []
    for word in form.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split():
        is_operand = word.lstrip("-").replace(".", "", 1).isdigit()
        if is_operand and "=" not in words[-1:]:
            word = names.setdefault(word, f"number_{len(names)}")
        words.append(word)
    model = parse(
        f"""g ({dtype}[p, s, k] a, {dtype}[k, 5] b) => ({dtype}[p, s, 5] y)
            {{ x = MatMul (a, b)  {" ".join(words)} }}""",
        opset=opset,
        imports=imports,
    )
    for number, name in names.items():
        value = np.full(
            (1,) * rank, float(number), np.float16 if dtype == "float16" else np.float32
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def attributes(result: RewriteResult) -> list[float]:
    return [a.f for a in result.model.graph.node[-1].attribute]


@pytest.mark.parametrize(("name", "form"), ALL_FORMS)
def test_forms_of_opset_18(name: str, form: str) -> None:
    result = check_fused(model_of(form), FEEDS, ops=[f"MatMul{name}"])
    assert not result.model.graph.initializer


@pytest.mark.parametrize(("name", "form"), ALL_FORMS)
def test_forms_in_half_precision(name: str, form: str) -> None:
    """Numbers are rounded to 11 bits, and are found all the same."""
    feeds = {key: value.astype(np.float16) for key, value in FEEDS.items()}
    check_fused(model_of(form, dtype="float16"), feeds, ops=[f"MatMul{name}"], tolerance=4e-3)


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("name", FORMS)
def test_newer_opsets(opset: int, name: str) -> None:
    check_fused(model_of(FORMS[name][0], opset=opset), FEEDS, ops=[f"MatMul{name}"])


@pytest.mark.parametrize(
    ("form", "opset", "op"),
    [
        ("y = Gelu (x)", 20, "MatMulGelu"),
        ('y = Gelu <approximate = "tanh"> (x)', 20, "MatMulGeluTanh"),
        ("y = com.microsoft.Gelu (x)", 17, "MatMulGelu"),
        ("y = com.microsoft.FastGelu (x)", 17, "MatMulGeluTanh"),
        ("y = com.microsoft.QuickGelu (x)", 17, "MatMulQuickGelu"),
        ("y = com.microsoft.QuickGelu <alpha = 1.25> (x)", 17, "MatMulQuickGelu"),
    ],
)
def test_nodes_of_newer_opsets_and_of_onnx_runtime(form: str, opset: int, op: str) -> None:
    check_fused(model_of(form, opset=opset), FEEDS, ops=[op], tolerance=1e-4)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 24, reason="onnx has no Swish yet")
@pytest.mark.parametrize(
    ("given", "op"), [("", "MatMulSilu"), ("<alpha = 1.5>", "MatMulQuickGelu")]
)
def test_swish(given: str, op: str) -> None:
    check_fused(model_of(f"y = Swish {given} (x)", opset=24), ops=[op])


def test_parameters_are_spelled_out() -> None:
    lowest, highest = np.finfo(np.float32).min, np.finfo(np.float32).max
    for form, wanted in (
        ("y = LeakyRelu (x)", [0.01]),
        ("y = HardSigmoid (x)", [0.2, 0.5]),
        ("y = Clip (x, 0.0, 6.0)", [0, 6]),
        ("y = Clip (x)", [lowest, highest]),
        ('y = Clip (x, "", 1.5)', [lowest, 1.5]),
        ("y = com.microsoft.QuickGelu (x)", [1.702]),
    ):
        result = check_fused(model_of(form), ops=[f"MatMul{form.split()[2].split('.')[-1]}"])
        np.testing.assert_allclose(attributes(result), wanted, rtol=1e-6)


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_clip_with_attributes_is_not_fused(opset: int) -> None:
    """Its bounds are attributes, but those of other operators' bodies need CastLike."""
    model = model_of("y = Clip <max = 6.0> (x)", opset=opset)
    check_fused(model, FEEDS, ops=["MatMul", "Clip"], missed=["activation: opset"])


@pytest.mark.parametrize("name", FORMS)
def test_activations_before_opset_15(name: str) -> None:
    needs_numbers = name in ("Clip", "Gelu", "GeluTanh", "QuickGelu")
    form = FORMS[name][0]
    model = model_of(form, opset=13)
    if needs_numbers:
        rest = [word for word in form.split() if word[0].isupper()]
        check_fused(model, FEEDS, ops=["MatMul", *rest], missed=["activation: opset"])
    else:
        check_fused(model, FEEDS, ops=[f"MatMul{name}"])


@given(
    st.sampled_from([form for _, form in ALL_FORMS if "HardSwish (x)" not in form]),
    st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_numbers_may_have_a_rank_up_to_that_of_the_product(form: str, rank: int) -> None:
    if "Clip" in form:
        return  # takes bounds of rank 0 only
    model = model_of(form, rank=rank)
    (name,) = [name for name, known in ALL_FORMS if known == form][:1]
    if rank <= 3 or not model.graph.initializer:
        check_fused(model, FEEDS, ops=[f"MatMul{name}"])
    else:
        model.graph.output[0].type.tensor_type.shape.dim.add()
        ops = [node.op_type for node in model.graph.node]
        check_fused(model, ops=["MatMulRelu", *ops[2:]] if "= Relu (x)" in form else ops)


@pytest.mark.parametrize(
    ("form", "computes"),
    [
        # off by one number, or by one operand
        ("d = Div (x, 1.5)  e = Erf (d)  f = Add (e, 1.0)  g = Mul (x, f)  y = Mul (g, 0.5)",
         "0.5 * x * Erf(0.66667 * x) + 0.5 * x"),
        ("d = Div (x, 1.41421356)  e = Erf (d)  f = Add (e, 1.0)  y = Mul (x, f)",
         "x * Erf(0.70711 * x) + x"),
        ("d = Div (x, 1.41421356)  e = Erf (d)  f = Sub (e, 1.0)  g = Mul (x, f)  y = Mul (g, 0.5)",
         "0.5 * x * Erf(0.70711 * x) + -0.5 * x"),
        ("c = Pow (x, 2.0)  m = Mul (0.044715, c)  s = Add (x, m)  y = Tanh (s)", ""),
        ("p = Add (x, 3.0)  c = Clip (p, 0.0, 5.0)  m = Mul (x, c)  y = Div (m, 6.0)",
         "0.16667 * x * Clip(x + 3)"),
        ("p = Add (x, 3.0)  y = Relu (p)", ""),
        ("e = Erf (x)  y = Neg (e)", "-1 * Erf(x)"),
        ("y = Clip (x, bound, 6.0)", ""),
    ],
)  # fmt: skip
def test_what_is_no_known_activation_stays(form: str, computes: str) -> None:
    model = model_of(form)
    if "bound" in form:
        model.graph.input.append(onnx.helper.make_tensor_value_info("bound", 1, []))
    ops = [node.op_type for node in model.graph.node]
    missed = ["activation: form-unknown"] if computes else []
    result = check_fused(model, ops=ops, missed=missed, rules=["matmul", "activation"])
    assert not computes or f"computes {computes}, no" in result.report[-1].detail


@pytest.mark.parametrize(
    ("rest", "ops"),
    [
        ("{0} = Relu (t)  y = Sigmoid ({0})", ["MatMulRelu", "Sigmoid"]),
        ("{0} = Tanh (t)  s = Sigmoid ({0})  y = Mul ({0}, s)", ["MatMulTanh", "Sigmoid", "Mul"]),
        ("{0} = Sigmoid (t)  y = Mul ({0}, t)", ["MatMulSilu"]),
    ],
)
@pytest.mark.parametrize("name", ["x", "X", "t/x", "q"])
def test_values_may_have_any_name(rest: str, ops: list[str], name: str) -> None:
    """None of them is taken for the product in the expressions behind it."""
    nodes = rest.format("named")
    model = parse(f"g (float[s, k] a, float[k, 5] b) => (y) {{ t = MatMul (a, b)  {nodes} }}")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if old == "named" else old for old in names]
    missed = ["activation: no-such-operator"] if len(ops) > 1 else []
    check_fused(model, {"a": random(3, 4), "b": random(4, 5)}, ops=ops, missed=missed)


@pytest.mark.parametrize(
    "rest",
    ["y = Relu (x)  z = Neg (x)", "s = Sigmoid (x)  y = Mul (x, s)  z = Neg (s)"],
)
def test_values_with_other_readers_stay(rest: str) -> None:
    model = model_of(rest)
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["p", "s", 5]))
    ops = [node.op_type for node in model.graph.node]
    check_fused(model, FEEDS, ops=ops, missed=["activation: other-readers"])


def test_a_product_that_is_an_output_stays() -> None:
    model = model_of("y = Relu (x)")
    model.graph.output.append(onnx.helper.make_tensor_value_info("x", 1, ["p", "s", 5]))
    check_fused(model, FEEDS, ops=["MatMul", "Relu"], missed=["activation: other-readers"])


def test_operators_that_the_model_defines_itself_stay() -> None:
    model = parse(
        "g (float[s, k] a, float[k, 5] b) => (y) { x = MatMul (a, b)  y = com.microsoft.Gelu (x) }",
        imports=CONTRIB,
        functions="""<domain: "com.microsoft", opset_import: ["" : 17]>
            Gelu (x) => (y) { y = Neg (x) }""",
    )
    ops = ["MatMul", "com.microsoft.Gelu"]
    check_fused(model, {"a": random(3, 4), "b": random(4, 5)}, ops=ops)


@pytest.mark.parametrize(
    ("base", "rest"),
    list(itertools.product(["Gemm", "Conv", "ConvTranspose"], ["Relu", "Gelu", "Silu"])),
)
def test_behind_every_kind_of_product(base: str, rest: str) -> None:
    inputs = (
        "float[s, k] a, float[k, 5] b"
        if base == "Gemm"
        else "float[n, 3, h, w] a, float[3, 3, 1, 1] b"
    )
    form = FORMS[rest][0]
    numbers = {"1.41421356": "r", "1.0": "u", "0.5": "h"}
    for number, name in numbers.items():
        form = form.replace(number, name)
    model = parse(
        f"""g ({inputs}) => (y) <float r = {{1.41421356}}, float u = {{1.0}}, float h = {{0.5}}>
            {{ x = {base} (a, b)  {form} }}"""
    )
    feeds = {"a": random(3, 4), "b": random(4, 5)}
    if base != "Gemm":
        feeds = {"a": random(2, 3, 4, 5), "b": random(3, 3, 1, 1)}
    name = base if base == "Gemm" else f"{base}NoBias"
    check_fused(model, feeds, ops=[f"{name}{rest}"])


@pytest.mark.parametrize(
    ("node", "op"),
    [
        ("Gelu", "MatMulGelu"),
        ('Gelu <approximate = "tanh">', "MatMulGeluTanh"),
        ("HardSwish", "MatMulHardSwish"),
        # onnx 1.23 inlines no default of an attribute
        ("HardSigmoid <alpha = 0.2, beta = 0.5>", "MatMulHardSigmoid"),
        ("Relu", "MatMulRelu"),
    ],
)
def test_function_bodies_that_onnx_inlines(node: str, op: str) -> None:
    """As the installed onnx has them."""
    model = parse(
        f"""g (float[p, s, k] a, float[k, 5] b) => (float[p, s, 5] y)
            {{ x = MatMul (a, b)  y = {node} (x) }}""",
        opset=20,
    )
    inlined = onnx.inliner.inline_selected_functions(
        model, [("", node.split()[0])], exclude=False, inline_schema_functions=True
    )
    assert len(inlined.graph.node) > 2
    result = check_fused(inlined, FEEDS, ops=[op])
    assert len(result.model.graph.node) == 1


@pytest.mark.parametrize(
    ("numbers", "low", "high"),
    [
        # TorchScript's exporter: bounds in the type of the tensor, equal initializers stored once
        ("l = Cast <to = 1> (half)  h = Identity (six)", 0.5, 6.0),
        ("n = Neg (half)  l = Identity (n)  h = Mul (half, six)", -0.5, 3.0),
        ("l = Sub (half, six)  m = Add (half, six)  h = Reciprocal (m)", -5.5, 1 / 6.5),
        ("l = Div (half, six)  h = Sqrt (six)", 0.5 / 6, 6**0.5),
    ],
)
def test_numbers_computed_from_constants(numbers: str, low: float, high: float) -> None:
    model = parse(
        f"""g (float[s, k] a, float[k, 5] b) => (float[s, 5] y)
            <float half = {{0.5}}, float six = {{6.0}}>
            {{ {numbers}  x = MatMul (a, b)  y = Clip (x, l, h) }}"""
    )
    result = check_fused(model, {"a": random(3, 4), "b": random(4, 5)}, ops=["MatMulClip"])
    np.testing.assert_allclose(attributes(result), [low, high], rtol=1e-6)
    assert not result.model.graph.initializer


@pytest.mark.parametrize(
    ("numbers", "least"),
    [
        ("l = Add (given, half)", ["Add"]),
        ("l = Sqrt (minus)", ["Sqrt"]),
        ("l = Div (half, zero)", ["Div"]),
        ("q = Div (seven, two)  l = Cast <to = 1> (q)", ["Div", "Cast"]),
    ],
)
def test_numbers_that_are_not_known_stay(numbers: str, least: list[str]) -> None:
    """An input, no number, infinity, and a division of integers."""
    model = parse(
        f"""g (float[s, k] a, float[k, 5] b, float given) => (float[s, 5] y)
            <float half = {{0.5}}, float minus = {{-1.0}}, float zero = {{0.0}},
             int64 seven = {{7}}, int64 two = {{2}}>
            {{ {numbers}  x = MatMul (a, b)  y = Clip (x, l) }}"""
    )
    feeds = {"a": random(3, 4), "b": random(4, 5), "given": np.array(0.25, np.float32)}
    check_fused(model, feeds, ops=[*least, "MatMul", "Clip"])


def test_a_computed_number_with_another_reader_stays_for_it() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 5] b) => (float[s, 5] y, float r)
            <float two = {2.0}>
            { r = Sqrt (two)  x = MatMul (a, b)  d = Div (x, r)  e = Erf (d)
              o = Constant <value_float = 1.0> ()  f = Add (e, o)  g = Mul (x, f)
              h = Constant <value_float = 0.5> ()  y = Mul (g, h) }"""
    )
    check_fused(model, {"a": random(3, 4), "b": random(4, 5)}, ops=["Sqrt", "MatMulGelu"])


def test_numbers_in_constant_nodes_go() -> None:
    model = parse(
        """g (float[s, k] a, float[k, 5] b) => (y) { x = MatMul (a, b)
            c = Constant <value_float = 1.702> ()
            m = Mul (c, x)  s = Sigmoid (m)  y = Mul (s, x) }"""
    )
    result = check_fused(model, {"a": random(3, 4), "b": random(4, 5)}, ops=["MatMulQuickGelu"])
    assert len(result.model.graph.node) == 1
