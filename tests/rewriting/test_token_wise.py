"""Operators between two attention nodes: which of them see tokens that were added, and equality."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import node_of, parse, passes_checker, run
from moonpoly_ort.graph_passes import padded_tokens
from onnx import TensorProto, helper, numpy_helper

HEADS, COLUMNS, LENGTH = 2, 8, 8  # as many tokens as columns: what is along the wrong axis fits
ROWS = 16
ATTENTION = f"com.microsoft.MultiHeadAttention<num_heads = {HEADS}>"

FLOATS = {
    "number": (),
    "one": (1,),
    "vector": (COLUMNS,),
    "thrice": (3 * COLUMNS,),
    "row": (1, COLUMNS),
    "rows": (LENGTH, COLUMNS),
    "layer": (1, LENGTH, COLUMNS),
    "weight": (COLUMNS, COLUMNS),
    "half": (COLUMNS, COLUMNS // 2),
    "wide": (COLUMNS, 2 * COLUMNS),
    "deep": (1, COLUMNS, COLUMNS),
    "long": (COLUMNS * COLUMNS,),
    "column": (COLUMNS, 1),
}
INTEGERS = {
    "axis": 1,
    "axes": [1],
    "halves": [COLUMNS, COLUMNS],
    "thirds": [COLUMNS] * 3,
    "tokens": [3, LENGTH - 3],
    "square": [COLUMNS, COLUMNS],
    "order": [3, 1, 0, 2, 7, 6, 5, 4],
    "whole": [0, 0, COLUMNS],
    "across": [-1, LENGTH // 2, 2 * COLUMNS],
    "back": [-1, LENGTH, COLUMNS],
}
UNARY = [
    "Abs", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Neg",
    "Relu", "Sigmoid", "Softplus", "Tanh", "com.microsoft.FastGelu", "com.microsoft.Gelu",
    "com.microsoft.QuickGelu",
]  # fmt: skip

ALONE = [
    *(f"y = {op_type}(a)" for op_type in UNARY),
    "b = Abs(a)\n y = Sqrt(b)",
    *(f"y = {op_type}(a, number)" for op_type in ("Add", "Div", "Max", "Min", "Mul", "Sub")),
    "y = Add(a, one)",
    "y = Add(vector, a)",
    "y = Add(a, a)",
    "y = Max(a, vector, number, x)",
    "y = Clip(a, low, high)",
    'y = Clip(a, "", high)',
    "b = Abs(a)\n y = Pow(b, high)",
    "b = Cast<to = 11>(a)\n c = Abs(b)\n y = Cast<to = 1>(c)",
    "y = com.microsoft.BiasGelu(a, vector)",
    "y = com.microsoft.FastGelu(a, vector)",
    "y = LayerNormalization(a, vector, vector)",
    "y = LayerNormalization<axis = 2>(a, number, one)",
    "y = LayerNormalization(a, given)",
    "b, mean, inverse = LayerNormalization(a, vector)\n c = Sub(a, mean)\n d = Mul(c, inverse)\n"
    "y = Add(b, d)",
    "y = RMSNormalization(a, vector)",
    "y = SimplifiedLayerNormalization(a, vector)",
    "y = com.microsoft.SkipLayerNormalization(a, x, vector, vector, vector)",
    'b, "", "", sum = com.microsoft.SkipLayerNormalization(x, a, vector)\n y = Sub(b, sum)',
    "y = com.microsoft.SkipSimplifiedLayerNormalization(a, x, vector, vector)",
    "y = MatMul(a, weight)",
    "w = Transpose(weight)\n y = MatMul(a, w)",
    "w = Identity(weight)\n y = MatMul(a, w)",
    "w = Concat<axis = 1>(half, half)\n y = MatMul(a, w)",
    "w = Reshape(long, square)\n y = MatMul(a, w)",
    "w = Gather<axis = 1>(weight, order)\n y = MatMul(a, w)",
    "w = Constant<value_floats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]>()\n y = Mul(a, w)",
    "w = Mul(weight, number)\n y = MatMul(a, w)",  # whose rank is recorded
    "v, w, z = Split<axis = 0>(thrice, thirds)\n y = Add(a, z)",
    "b = MatMul(a, wide)\n c, d = Split<axis = 2>(b, halves)\n y = Mul(c, d)",
    "b = MatMul(a, wide)\n c, d = Split<axis = -1>(b, halves)\n y = Mul(c, d)",
]
"""What makes `y` of `a`, and works on each token alone."""

TOGETHER = [
    "y = Softmax<axis = 1>(a)",
    "y = CumSum(a, axis)",
    "y = Add(a, row)",  # as it could be [tokens, columns]
    "y = Add(a, rows)",
    "y = Mul(rows, a)",
    "y = Add(a, layer)",
    "y = Max(a, vector, rows)",
    "y = Add(a, lengthwise)",
    "y = LayerNormalization<axis = 1>(a, rows)",
    "y = LayerNormalization<axis = -2>(a, rows)",
    "y = LayerNormalization<axis = 1>(a, vector)",
    "y = LayerNormalization(a, rows)",
    "y = LayerNormalization(a, vector, layer)",
    "y = LayerNormalization(a, a)",
    "y = LayerNormalization(a, x, vector)",
    "y = LayerNormalization(a, grid)",
    "z = Relu(given)\n y = LayerNormalization(a, z)",  # of which nothing says the rank for sure
    "y = com.microsoft.SkipLayerNormalization(a, rows, vector)",
    "y = MatMul(a, deep)",
    "w = Identity(deep)\n y = MatMul(a, w)",
    "b = Transpose<perm = [0, 2, 1]>(a)\n y = MatMul(a, b)",
    "b, c = Split<axis = 1>(a, tokens)\n y = Concat<axis = 1>(c, b)",
    "b, c = Split<axis = -2>(a, tokens)\n y = Concat<axis = 1>(c, b)",
    "b, c = Split(a, halves)\n y = Concat<axis = 0>(c, b)",
    "y = Reshape(a, whole)",
    "b = Reshape(a, across)\n c = Relu(b)\n y = Reshape(c, back)",
    "b = ReduceMean<keepdims = 1>(a, axes)\n y = Mul(a, b)",
    "b = Transpose<perm = [0, 2, 1]>(a)\n c = Relu(b)\n y = Transpose<perm = [0, 2, 1]>(c)",
    "y = Where(yes, a, x)",
]
"""What does not, or is not known to."""


def model(body: str) -> onnx.ModelProto:
    """Attention -> `a` -> body -> `y` -> attention."""
    proto = parse(
        f"""encoder (float[batch, length, {COLUMNS}] x, float[batch, 1, length, length] mask,
            float[{COLUMNS}] given, float[length, {COLUMNS}] grid, float[1, length] lengthwise)
        => (float[batch, length, {COLUMNS}] out)
        <float[batch, length, {COLUMNS}] y> {{
            a = {ATTENTION}(x, x, x, "", "", mask)
            {body}
            out = {ATTENTION}(y, y, y, "", "", mask)
        }}""",
        opset=23, ir_version=10, imports=', "com.microsoft" : 1',
    )  # fmt: skip
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in FLOATS.items()
    }
    values |= {name: np.array(numbers, np.int64) for name, numbers in INTEGERS.items()}
    values |= {"low": np.array(-1, np.float32), "high": np.array(2, np.float32)}
    values |= {"yes": np.array(True)}
    tensors = [numpy_helper.from_array(array, name) for name, array in values.items()]
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(tensor for tensor in tensors if tensor.name in read)
    if "Mul(weight" in body:
        weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, [COLUMNS, COLUMNS])
        proto.graph.value_info.append(weight)
    return proto


def feeds(batch: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    shapes = {
        "x": (batch, LENGTH, COLUMNS), "mask": (batch, 1, LENGTH, LENGTH), "given": (COLUMNS,),
        "grid": (LENGTH, COLUMNS), "lengthwise": (1, LENGTH),
    }  # fmt: skip
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def padded(body: str, batch: int = 2) -> int:
    """How many rows `y` has, after the check of the results."""
    proto = model(body)
    sound = passes_checker(proto)
    feed = feeds(batch)
    want = run(proto, feed)
    assert padded_tokens.pad(proto) == 2
    if sound:
        onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=1e-4, atol=1e-5)
    shown = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    proto.graph.output.append(shown)
    return int(run(proto, feed)[1].shape[1])


@pytest.mark.parametrize("body", ALONE)
def test_it_sees_the_added_tokens(body: str) -> None:
    assert padded(body) == ROWS


@pytest.mark.parametrize("body", TOGETHER)
def test_it_sees_the_tokens_that_were_there(body: str) -> None:
    assert padded(body, batch=2 * COLUMNS) == LENGTH


def test_a_scale_that_is_recorded_as_a_vector_and_is_none() -> None:
    proto = model("z = Identity(grid)\n y = LayerNormalization(a, z)")
    wrong = helper.make_tensor_value_info("z", TensorProto.FLOAT, [COLUMNS])
    proto.graph.value_info.append(wrong)
    want = run(proto, feeds())
    assert padded_tokens.pad(proto) == 2
    np.testing.assert_allclose(run(proto, feeds())[0], want[0], rtol=1e-4, atol=1e-5)


def test_a_weight_behind_thousands_of_nodes() -> None:
    """Without recursion, and in time."""
    count = 3000
    chain = "\n".join(f"w{i + 1} = Identity(w{i})" for i in range(count))
    proto = model(f"w0 = Identity(weight)\n{chain}\n y = MatMul(a, w{count})")
    assert padded_tokens.pad(proto) == 2
    assert node_of(proto, "y").input[0] == "a"


@pytest.mark.parametrize(
    "body",
    [
        "w = mine.Constant<value_float = 1.0>()\n y = Add(a, w)",
        "w = mine.Transpose(weight)\n y = MatMul(a, w)",
        "y = mine.Gelu(a)",
        "y = mine.SkipLayerNormalization(a, x, vector)",
        "y = mine.Relu(a)",
    ],
)
def test_operators_of_other_domains(body: str) -> None:
    """They only look like those that are known."""
    proto = model(body)
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    assert padded_tokens.pad(proto) == 2
    assert node_of(proto, "a").op_type == "Slice"
