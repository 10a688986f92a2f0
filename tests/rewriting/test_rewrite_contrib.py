"""FusedMatMul, FusedGemm and FusedConv, as ONNX Runtime's optimizers leave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence import ALL_RULES, check_fused, parse, random, refusals

from moonpoly_ort.rewriting import rewrite

CONTRIB = ', "com.microsoft" : 1'
MATMUL = "g (float[{}] a, float[{}] b) => (y) {{ y = com.microsoft.FusedMatMul {} (a, b) }}"


@pytest.mark.parametrize(
    ("shapes", "given", "op"),
    [
        (("p, s, k", "k, 5"), "", "MatMul"),
        (("p, s, k", "k, 5"), "<alpha = 1.0, transA = 0>", "MatMul"),
        (("s, k", "k, 5"), "<alpha = 0.25>", "Gemm"),
        (("p, s, k", "k, 5"), "<alpha = 0.25>", "ScaledMatMul"),
        (("p, 2, s, k", "p, 2, k, 5"), "<alpha = 0.25, transB = 0>", "ScaledMatMul"),
        (("k", "k, 5"), "<alpha = 0.25>", "ScaledMatMul"),
        (("s, k", "5, k"), "<transB = 1>", "Gemm"),
        (("k, s", "5, k"), "<transA = 1, transB = 1, alpha = 2.0>", "Gemm"),
        (("p, s, k", "5, k"), "<transB = 1>", "MatMulTransposed"),
        (("p, s, k", "p, 5, k"), "<transB = 1, alpha = 0.5>", "MatMulTransposed"),
        (("s, k", "p, 2, 5, k"), "<transB = 1>", "MatMulTransposed"),
    ],
)
def test_matmul(shapes: tuple[str, str], given: str, op: str) -> None:
    model = parse(MATMUL.format(*shapes, given), imports=CONTRIB)
    sizes = {"p": 2, "2": 2, "s": 3, "k": 4, "5": 5}
    feeds = {
        name: random(*(sizes[axis] for axis in shape.split(", ")))
        for name, shape in zip("ab", shapes, strict=True)
    }
    result = check_fused(model, feeds, ops=[op])
    assert [(e.op_type, e.rule) for e in result.report] == [("FusedMatMul", "fused_matmul")]
    names = sorted(attribute.name for attribute in result.model.graph.node[0].attribute)
    wanted = {"Gemm": ["alpha", "beta", "transA", "transB"], "ScaledMatMul": ["alpha"]}
    wanted["MatMulTransposed"] = ["alpha", "perm"]
    assert names == wanted.get(op, [])


@pytest.mark.parametrize(
    ("shapes", "given", "reason"),
    [
        (("p, s, k", "k, 5"), "<alpha = 0.0>", "inexact"),
        (("p, k, s", "p, t, k"), "<transA = 1, transB = 1>", "rank-unsupported"),
        (("k", "t, k"), "<transB = 1>", "rank-unsupported"),
        (("p, s, k", "p, t, k"), "<transB = 1, alpha = 0.0>", "inexact"),
        (("p, s, 3", "p, t, 4"), "<transB = 1>", "invalid"),
        (("2, 3, 4", "2, 5, 4"), "<transB = 1>", "static"),
        (("s, p, k", "p, k, t"), "<transBatchA = 1>", "rank-unsupported"),
        (("s, 3", "4, 5"), "", "invalid"),
        (("2, 4", "4, 5"), "", "static"),
    ],
)
def test_matmul_that_stays(shapes: tuple[str, str], given: str, reason: str) -> None:
    model = parse(MATMUL.format(*shapes, given), imports=CONTRIB)
    result = check_fused(model, ops=["com.microsoft.FusedMatMul"])
    (entry,) = result.report
    assert str(entry.reason) == reason
    assert entry.detail


def test_matmul_of_unknown_rank_stays_only_where_it_matters() -> None:
    text = """g (float[s, 4] a, float[4, 4] b, int64[r] shape) => (y)
        {{ c = Reshape (a, shape)  y = com.microsoft.FusedMatMul {} (c, b) }}"""
    model = parse(text.format("<transB = 1>"), imports=CONTRIB)
    result = check_fused(model, ops=["Reshape", "com.microsoft.FusedMatMul"])
    assert str(result.report[0].reason) == "rank-unknown"
    for given, op in (("", "MatMul"), ("<alpha = 0.5>", "ScaledMatMul")):
        check_fused(parse(text.format(given), imports=CONTRIB), ops=["Reshape", op])


def test_a_scaled_product_of_more_dimensions_needs_opset_15() -> None:
    for opset, ops in ((14, ["com.microsoft.FusedMatMul"]), (15, ["ScaledMatMul"])):
        given = MATMUL.format("p, s, k", "k, 5", "<alpha = 0.25>")
        result = check_fused(parse(given, opset=opset, imports=CONTRIB), ops=ops)
        assert refusals(result) == (["opset"] if opset == 14 else [])
    given = MATMUL.format("s, k", "k, 5", "<alpha = 0.25>")
    check_fused(parse(given, opset=14, imports=CONTRIB), ops=["Gemm"])


def test_one_function_for_matrices_and_for_batches() -> None:
    model = parse(
        """g (float[s, 4] a, float[p, s, 4] c, float[4, 5] b) => (y, z)
            { y = f.Scores (a, b)  z = f.Scores (c, b) }""",
        imports=CONTRIB + ', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17, "com.microsoft" : 1]>
            Scores (a, b) => (y) { y = com.microsoft.FusedMatMul <alpha = 0.5> (a, b) }""",
    )
    feeds = {"a": random(3, 4), "c": random(2, 3, 4), "b": random(4, 5)}
    result = check_fused(model, feeds, ops=["f.Scores", "f.Scores"])
    scores = next(f for f in result.model.functions if f.name == "Scores")
    assert [node.op_type for node in scores.node] == ["ScaledMatMul"]


@pytest.mark.parametrize(("more", "ops"), [("p, ", "MatMulTransposed"), ("p, q, ", "FusedMatMul")])
def test_a_function_whose_calls_transpose_operands_of_some_ranks(more: str, ops: str) -> None:
    model = parse(
        f"""g (float[p, s, 4] a, float[p, t, 4] b, float[p, s, 4] c, float[{more}t, 4] d) => (y, z)
            {{ y = f.Scores (a, b)  z = f.Scores (c, d) }}""",
        imports=CONTRIB + ', "f" : 1',
        functions="""<domain: "f", opset_import: ["" : 17, "com.microsoft" : 1]>
            Scores (a, b) => (y) { y = com.microsoft.FusedMatMul <transB = 1> (a, b) }""",
    )
    result = check_fused(model, ops=["f.Scores", "f.Scores"])
    scores = next(f for f in result.model.functions if f.name == "Scores")
    assert [node.op_type for node in scores.node] == [ops]


BEHIND = """g (float[{}] a, float[{}] b, float[5, 6] w, float[{}] r) => (y) {{
    u = com.microsoft.FusedMatMul <transB = 1> (a, b)  v = MatMul (u, w)  y = Add (v, r) }}"""


@pytest.mark.parametrize(
    ("a", "b", "r", "fused"),
    [
        ("p, s, 8", "5, 8", "p, s, 6", True),
        ("s, 8", "p, 5, 8", "p, s, 6", True),
        ("1, s, 8", "p, 5, 8", "p, s, 6", True),
        ("p, s, 8", "p, 5, 8", "p, s, 6", True),
        ("q, p, s, 8", "p, 5, 8", "q, p, s, 6", True),
        ("1, s, 8", "p, 5, 8", "1, s, 6", False),  # has a smaller batch than the product
        ("q, s, 8", "p, 5, 8", "q, s, 6", False),  # may have
    ],
)
def test_what_follows_transposed_rows(a: str, b: str, r: str, fused: bool) -> None:
    """Their batch axes broadcast: the shape of what follows is that of the numbers."""
    model = parse(BEHIND.format(a, b, r), imports=CONTRIB, ir_version=7)
    sizes = {"p": 3, "q": 1 if a.startswith("q, s") else 2, "s": 4}
    feeds = {
        name: random(*(sizes.get(d) or int(d) for d in shape.split(", ")))
        for name, shape in (("a", a), ("b", b), ("w", "5, 6"), ("r", r))
    }
    ops = ["MatMulTransposed", *(["MatMulAdd"] if fused else ["MatMul", "Add"])]
    missed = [] if fused else ["residual: shape-unproven"]
    check_fused(model, feeds, ops=ops, missed=missed)


def test_transposed_batches_that_stay_are_no_matrices() -> None:
    """What follows them was taken for a product of matrices, and became a Gemm."""
    model = parse(
        """g (float[p, 8, s] a, int64[r] shape, float[8, 5] b, float[6, 5] w) => (y) {
            c = Reshape (a, shape)  u = com.microsoft.FusedMatMul <transA = 1> (c, b)
            v = Transpose (w)  y = MatMul (u, v) }""",
        imports=CONTRIB,
    )
    feeds = {"a": random(1, 8, 3), "b": random(8, 5), "w": random(6, 5)}
    for shape in ([1, 8, 3], [8, 3]):
        feed = {**feeds, "shape": np.array(shape)}
        result = check_fused(
            model, feed, ops=["Reshape", "com.microsoft.FusedMatMul", "MatMulTransposed"]
        )
        assert refusals(result) == ["rank-unknown"]


@pytest.mark.parametrize(
    ("opsets", "taken"), [((11, 17), False), ((13, 12), False), ((12, 11), True), ((17, 13), True)]
)
def test_a_function_of_another_opset(opsets: tuple[int, int], taken: bool) -> None:
    """The Gemm of the body must be the one that the function's version of ai.onnx has."""
    model = parse(
        """g (float[s, 4] a, float[5, 4] b) => (y) { y = f.Scores (a, b) }""",
        opset=opsets[0], imports=CONTRIB + ', "f" : 1',
        functions=f"""<domain: "f", opset_import: ["" : {opsets[1]}, "com.microsoft" : 1]>
            Scores (a, b) => (y) {{ y = com.microsoft.FusedMatMul <transB = 1> (a, b) }}""",
    )  # fmt: skip
    feeds = {"a": random(3, 4), "b": random(5, 4)}
    result = check_fused(model, feeds, ops=["f.Scores"])
    assert refusals(result) == ([] if taken else ["function-opset"])


def test_attention_as_onnxruntime_fuses_it() -> None:
    """What follows the transposed product is known, too."""
    model = parse(
        """g (float[b, n, s, 8] q, float[b, n, t, 8] k, float[b, n, t, 8] v) => (y) {
            w = com.microsoft.FusedMatMul <transB = 1, alpha = 0.125> (q, k)
            p = Softmax <axis = -1> (w)  y = MatMul (p, v) }""",
        imports=CONTRIB,
    )
    feeds = {"q": random(2, 3, 5, 8), "k": random(2, 3, 7, 8), "v": random(2, 3, 7, 8)}
    check_fused(model, feeds, ops=["MatMulTransposed", "Softmax", "MatMul"])


GEMM = """g (float[s, k] a, float[k, 5] b, float[5] c) => (float[s, 5] y)
    {{ y = com.microsoft.FusedGemm <{}> (a, b{}) }}"""
GEMM_FEEDS = {"a": random(3, 4), "b": random(4, 5), "c": random(5)}


@pytest.mark.parametrize("c", ["", ", c"])
@pytest.mark.parametrize(
    ("given", "op", "parameters"),
    [
        ('activation = "Relu"', "GemmRelu", {}),
        ('activation = "Sigmoid", alpha = 0.5, beta = 2.0', "GemmSigmoid", {}),
        ('activation = "Tanh"', "GemmTanh", {}),
        ('activation = "LeakyRelu", activation_alpha = 0.25', "GemmLeakyRelu", {"alpha": 0.25}),
    ],
)
def test_gemm(given: str, op: str, parameters: dict[str, float], c: str) -> None:
    result = check_fused(parse(GEMM.format(given, c), imports=CONTRIB), GEMM_FEEDS, ops=[op])
    found = {a.name: a.f for a in result.model.graph.node[0].attribute if "activation" in a.name}
    assert found == {f"activation_{name}": value for name, value in parameters.items()}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('activation = "Elu", activation_alpha = 1.0', "no-such-operator"),
        ('activation = "LeakyRelu"', "invalid"),
        ('activation = "Relu", transA = 2', "invalid"),
    ],
)
def test_gemm_that_stays(given: str, reason: str) -> None:
    model = parse(GEMM.format(given, ", c"), imports=CONTRIB)
    result = check_fused(model, ops=["com.microsoft.FusedGemm"])
    assert [str(entry.reason) for entry in result.report] == [reason]


CONV = """g (float[n, 3, h, w] x, float[4, 3, 3, 3] k, float[4] b, float[n, 4, h, w] z)
    => (float[n, 4, h, w] y)
    {{ y = com.microsoft.FusedConv <pads = [1, 1, 1, 1], kernel_shape = [3, 3], {}> (x, k{}) }}"""
CONV_FEEDS = {"x": random(2, 3, 4, 5), "k": random(4, 3, 3, 3), "b": random(4)}
CONV_FEEDS["z"] = random(2, 4, 4, 5, seed=2)


@pytest.mark.parametrize(
    ("given", "inputs", "op"),
    [
        ('activation = "Relu"', ", b", "ConvRelu"),
        ('activation = "Relu"', "", "ConvNoBiasRelu"),
        ('activation = "Relu"', ", b, z", "ConvAddRelu"),
        ('activation = "Sigmoid"', ', "", z', "ConvNoBiasAddSigmoid"),
        ('activation = "Clip", activation_params = [0.0, 0.5]', ", b", "ConvClip"),
        ('activation = "HardSigmoid", activation_params = [0.3, 0.4]', ", b", "ConvHardSigmoid"),
        ('activation = "LeakyRelu", activation_params = [0.3]', ", b", "ConvLeakyRelu"),
    ],
)
def test_conv(given: str, inputs: str, op: str) -> None:
    model = parse(CONV.format(given, inputs), imports=CONTRIB)
    result = check_fused(model, CONV_FEEDS, ops=[op])
    stamps = {entry.key: entry.value for entry in result.model.graph.node[0].metadata_props}
    assert stamps == {"moonpoly.rule": "fused_conv"}


def test_conv_below_opset_15_with_bounds_stays() -> None:
    given = 'activation = "Clip", activation_params = [0.0, 0.5]'
    model = parse(CONV.format(given, ", b"), opset=13, imports=CONTRIB)
    result = check_fused(model, CONV_FEEDS, ops=["com.microsoft.FusedConv"])
    assert [str(entry.reason) for entry in result.report] == ["opset"]


def test_operators_that_the_model_defines_itself_stay() -> None:
    model = parse(
        MATMUL.format("s, k", "k, 5", ""),
        imports=CONTRIB,
        functions="""<domain: "com.microsoft", opset_import: ["" : 17]>
            FusedMatMul (a, b) => (y) { t = MatMul (a, b)  y = Neg (t) }""",
    )
    feeds = {"a": random(3, 4), "b": random(4, 5)}
    ops = ["com.microsoft.FusedMatMul"]
    result = check_fused(model, feeds, ops=ops)
    assert [entry.where for entry in result.report] == ["function com.microsoft.FusedMatMul"]


def test_types_are_known_behind_them() -> None:
    """A residual needs the shape behind operators that onnx does not know."""
    model = parse(
        """g (float[p, s, 4] a, float[4, 4] b, float[4] c) => (float[p, s, 4] y) {
            t = com.microsoft.FusedMatMul (a, b)  u = com.microsoft.BiasGelu (t, c)
            v = MatMul (u, b)  w = com.microsoft.QuickGelu (u)  y = Add (v, w) }""",
        imports=CONTRIB,
    )
    feeds = {"a": random(2, 3, 4), "b": random(4, 4), "c": random(4)}
    ops = ["MatMul", "com.microsoft.BiasGelu", "com.microsoft.QuickGelu", "MatMulAdd"]
    check_fused(model, feeds, ops=ops, missed=["bias: not-constant"], tolerance=1e-4)


def test_a_model_that_onnx_runtime_has_optimized(tmp_path: Path) -> None:
    """What its optimizer fused stays fused, as nodes of ours."""
    model = parse(
        """g (float[n, 3, h, w] x, float[s, 4] a, float[5, 4] v) => (y, z) {
            t = Conv (x, k, b)  y = Relu (t)
            r = Transpose (v)  u = MatMul (a, r)  o = Gemm (u, g)  z = Relu (o) }"""
    )
    shapes = {"k": (4, 3, 3, 3), "b": (4,), "g": (5, 6)}
    for name, shape in shapes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(random(*shape), name))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert {node.op_type for node in optimized.graph.node} >= {"FusedConv", "FusedMatMul"}
    result = rewrite(optimized, rules=ALL_RULES)
    assert {node.op_type for node in result.model.graph.node} == {"ConvRelu", "Gemm", "GemmRelu"}
    feeds = {"x": random(2, 3, 5, 6), "a": random(3, 4), "v": random(5, 4)}
    sessions = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
        for m in (model, result.model)
    ]
    for expected, actual in zip(*(s.run(None, feeds) for s in sessions), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


IMAGE = "float[n, 3, h, w] a, float[4, 3, 3, 3] b"


@pytest.mark.parametrize(
    ("inputs", "node", "given", "reason"),
    [
        ("", "FusedMatMul <alpha: float = @e> (a, b)", "0.5", "unbound-attribute"),
        ("", "FusedMatMul <transB: int = @e> (a, b)", "0", "unbound-attribute"),
        ("", 'FusedGemm <activation: string = @e> (a, b)', '"Relu"', "unbound-attribute"),
        ("", 'FusedGemm <activation = "Relu", alpha: float = @e> (a, b)', "0.5", ""),
        (IMAGE, 'FusedConv <activation = "Relu", pads: ints = @e> (a, b)', "[1, 1, 1, 1]", ""),
        (IMAGE, 'FusedConv <activation = "LeakyRelu", activation_params: floats = @e> (a, b)',
         "[0.3]", "unbound-attribute"),
    ],
)  # fmt: skip
def test_attributes_of_a_function(inputs: str, node: str, given: str, reason: str) -> None:
    """Those that our operators have may refer to it; what is decided by others must be known."""
    inputs = inputs or "float[s, 4] a, float[4, 5] b"
    model = parse(
        f"g ({inputs}) => (y) {{ y = f.Block <e = {given}> (a, b) }}",
        imports=CONTRIB + ', "f" : 1',
        functions=f"""<domain: "f", opset_import: ["" : 17, "com.microsoft" : 1]>
            Block <e> (a, b) => (y) {{ y = com.microsoft.{node} }}""",
    )
    feeds = {"a": random(3, 4), "b": random(4, 5)}
    if inputs == IMAGE:
        feeds = {"a": random(2, 3, 5, 6), "b": random(4, 3, 3, 3)}
    result = check_fused(model, feeds, ops=["f.Block"])
    assert refusals(result) == ([reason] if reason else [])
    block = next(function for function in result.model.functions if function.name == "Block")
    assert (block.node[0].domain == "ai.moonpoly") is not bool(reason)
