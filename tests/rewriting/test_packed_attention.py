"""Attention on packed operands: op list, equality, and the forms that must stay.

ONNX Runtime's CPU provider has no packed form, so results are compared after `spelled_out`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from equivalence import make_an_input, op_types, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import packed_attention
from onnx import TensorProto, helper, numpy_helper

from moonpoly_ort import rewrite
from tests.corpus.unpacking import spelled_out

ROWS = 6
PREPARED = ["Reshape", "Transpose", "Reshape"]
"""What puts columns in order, once per session."""


def model(
    form: str, *, heads: int = 2, size: int = 4, biased: bool = True, masked: bool = False,
    opset: int = 18, dtype: int = TensorProto.FLOAT, **attributes: Any,
) -> onnx.ModelProto:  # fmt: skip
    """Attention on x of [batch, length, ROWS].

    form: `attention`, its weight one constant, `concat`, the weight packed in the graph, `products`
    with one bias, or `biased products` with a bias of their own but for that of K.
    """
    rng = np.random.default_rng([heads, size])
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    columns = heads * size
    parts = {f"w{i}": rng.standard_normal((ROWS, columns)).astype(kind) for i in range(3)}
    bias = rng.standard_normal(3 * columns).astype(kind)
    constants: dict[str, np.ndarray] = {}
    nodes = []
    tail = ["", "", "mask"] if masked else []
    if form in ("attention", "concat"):
        if form == "concat":
            constants |= parts
            nodes.append(helper.make_node("Concat", list(parts), ["w"], axis=1))
        else:
            constants["w"] = np.concatenate(list(parts.values()), axis=1)
        operands, op_type = ["x", "w", "b" if biased else "", *tail], "Attention"
        if biased:
            constants["b"] = bias
    else:
        constants |= parts
        operands, op_type = ["q", "k", "v"], "MultiHeadAttention"
        for name, weight in zip("qkv", parts, strict=True):
            own = form == "biased products" and name != "k"
            nodes.append(helper.make_node("MatMul", ["x", weight], [f"{name}0" if own else name]))
            if own:
                constants[f"b{name}"] = bias[:columns] if name == "q" else bias[-columns:]
                nodes.append(helper.make_node("Add", [f"{name}0", f"b{name}"], [name]))
        if form == "products" and biased:
            constants["b"] = bias
            operands.append("b")
        if masked:
            operands = [*[*operands, "", ""][:5], "mask"]
    attention = helper.make_node(
        op_type, operands, ["y"], "attention", domain="com.microsoft", num_heads=heads, **attributes
    )
    inputs = [helper.make_tensor_value_info("x", dtype, ["batch", "length", ROWS])]
    if masked:
        shape = ["batch", 1, "length", "length"]
        inputs.append(helper.make_tensor_value_info("mask", dtype, shape))
    graph = helper.make_graph(
        [*nodes, attention], "g", inputs,
        [helper.make_tensor_value_info("y", dtype, ["batch", "length", columns])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(batch: int, length: int, *, masked: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length])
    feed = {"x": rng.standard_normal((batch, length, ROWS)).astype(np.float32)}
    if masked:
        feed["mask"] = np.where(rng.random((batch, 1, length, length)) < 0.3, -1e4, 0).astype("f4")
    return feed


FORMS = ["attention", "concat", "products", "biased products"]


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS), heads=st.integers(1, 3), size=st.sampled_from([1, 4, 8]),
    biased=st.booleans(), masked=st.booleans(), scale=st.booleans(), batch=st.integers(1, 3),
    length=st.integers(1, 9),
)  # fmt: skip
def test_results_are_equal(
    form: str, heads: int, size: int, biased: bool, masked: bool, scale: bool, batch: int,
    length: int,
) -> None:  # fmt: skip
    attributes = {"scale": 0.3} if scale else {}
    proto = model(form, heads=heads, size=size, biased=biased, masked=masked, **attributes)
    feed = feeds(batch, length, masked=masked)
    want = run(proto, feed)
    assert packed_attention.pack(proto) == 1
    onnx.checker.check_model(proto)
    (attention,) = [n for n in proto.graph.node if n.op_type == "MultiHeadAttention"]
    assert list(attention.input)[1:] == (["", "", "", "", "mask"] if masked else [])
    got = run(spelled_out(proto), feed)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_operators_that_are_left(form: str) -> None:
    proto = model(form)
    packed_attention.pack(proto)
    prepared = {"attention": 6, "concat": 7, "products": 7, "biased products": 8}[form]
    ops = Counter(op_types(proto))
    concats = {"attention": 0, "concat": 1, "products": 1, "biased products": 2}[form]
    assert ops == Counter(
        {"Reshape": 5, "Transpose": 2, "MatMul": 1, "Add": 1}
        | ({"Concat": concats} if concats else {})
        | {"com.microsoft.MultiHeadAttention": 1}
    )
    assert sum(ops.values()) == prepared + 4
    rewritten = rewrite(proto).model  # where the bias is fused into the product
    assert "ai.moonpoly.MatMulBias" in op_types(rewritten)
    assert "Add" not in op_types(rewritten)


def test_what_only_constants_go_into_is_computed_at_creation(tmp_path: Any) -> None:
    import onnxruntime as ort

    proto = spelled_out(packed(model("biased products")))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    left = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert not left.keys() & {"Concat", "Transpose"}
    assert left["Reshape"] <= 4  # what packs the operands, and what spells them out


def packed(proto: onnx.ModelProto) -> onnx.ModelProto:
    assert packed_attention.pack(proto) == 1
    return proto


def _another_reader(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(helper.make_tensor_value_info("k", TensorProto.FLOAT, None))


def _another_input(proto: onnx.ModelProto) -> None:
    proto.graph.input.append(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["b", "l", ROWS])
    )
    proto.graph.node[2].input[0] = "z"


def _a_weight_that_varies(proto: onnx.ModelProto) -> None:
    make_an_input(proto, proto.graph.initializer[0].name)


def _a_narrower_value(proto: onnx.ModelProto) -> None:
    narrow = numpy_helper.from_array(np.zeros((ROWS, 4), np.float32), "w2")
    proto.graph.initializer[2].CopyFrom(narrow)


def _a_cache(proto: onnx.ModelProto) -> None:
    shape = ["batch", 2, "past", 4]
    for name in ("past_key", "past_value"):
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    attention = proto.graph.node[-1]
    attention.input.extend(["", "", "", "past_key", "past_value"][len(attention.input) - 3 :])


@pytest.mark.parametrize(
    ("form", "change"),
    [
        pytest.param("products", _another_reader, id="K is an output"),
        pytest.param("products", _another_input, id="V is of another input"),
        pytest.param("products", _a_weight_that_varies, id="no constant"),
        pytest.param("products", _a_narrower_value, id="V is narrower"),
        pytest.param("products", _a_cache, id="a cache"),
        pytest.param("attention", _a_weight_that_varies, id="no constant weight"),
    ],
)
def test_surroundings_that_must_stay(form: str, change: Any) -> None:
    proto = model(form, biased=False)
    change(proto)
    before = proto.SerializeToString()
    assert packed_attention.pack(proto) == 0
    assert proto.SerializeToString() == before


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"unidirectional": 1}, id="causal"),
        pytest.param({"do_rotary": 1}, id="rotary embedding"),
        pytest.param({"qkv_hidden_sizes": [8, 8, 4]}, id="other sizes"),
        pytest.param({"heads": 3, "size": 1, "num_heads": 2}, id="heads do not divide"),
        pytest.param({"opset": 12}, id="opset"),
        pytest.param({"dtype": TensorProto.BFLOAT16}, id="bf16"),
    ],
)
def test_forms_that_must_stay(changes: dict[str, Any]) -> None:
    heads = changes.pop("num_heads", None)
    proto = model("attention", **changes)
    if heads:
        next(a for a in proto.graph.node[-1].attribute if a.name == "num_heads").i = heads
    before = proto.SerializeToString()
    assert packed_attention.pack(proto) == 0
    assert proto.SerializeToString() == before
