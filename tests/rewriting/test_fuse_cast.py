"""Cast of a 16-bit product to fp32: fused, and rounded all the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check_fused, parse, random
from moonpoly_ort.graph_passes.operators import OPERATORS

from moonpoly_ort.rewriting import rewrite

FEEDS = {
    "a": random(2, 3, 4).astype(np.float16), "b": random(4, 5).astype(np.float16),
    "c": random(5).astype(np.float16),
}  # fmt: skip


def model_of(body: str, *, dtype: str = "float16", out: str = "float") -> onnx.ModelProto:
    return parse(
        f"""g ({dtype}[p, s, 4] a, {dtype}[4, 5] b, {dtype}[5] c) => ({out}[p, s, 5] y)
            {{ {body} }}"""
    )


def test_a_product_and_one_with_a_bias() -> None:
    check_fused(
        model_of("t = MatMul (a, b)  y = Cast <to = 1> (t)"), FEEDS, ops=["MatMulToFloat"],
        tolerance=0,
    )  # fmt: skip
    result = check_fused(
        model_of("t = MatMul (a, b)  u = Add (t, c)  y = Cast <to = 1> (u)"), FEEDS,
        ops=["MatMulBiasToFloat"], tolerance=0,
    )  # fmt: skip
    (stamp,) = (entry.value for entry in result.model.graph.node[0].metadata_props)
    assert stamp == "matmul,bias,cast"


def test_a_gemm_keeps_its_attributes() -> None:
    model = parse(
        """g (float16[k, m] a, float16[k, 5] b, float16[5] c) => (float[m, 5] y)
            { t = Gemm <transA = 1, beta = 0.5> (a, b, c)  y = Cast <to = 1> (t) }"""
    )
    feeds = {"a": random(4, 3), "b": random(4, 5), "c": random(5)}
    feeds = {name: value.astype(np.float16) for name, value in feeds.items()}
    result = check_fused(model, feeds, ops=["GemmToFloat"], tolerance=1e-3)
    attributes = {a.name: a for a in result.model.graph.node[0].attribute}
    assert (attributes["transA"].i, attributes["beta"].f) == (1, 0.5)


@pytest.mark.parametrize(
    ("body", "ops", "dtype", "out"),
    [
        ("t = MatMul (a, b)  y = Cast <to = 1> (t)", ["MatMul", "Cast"], "float", "float"),
        ("t = MatMul (a, b)  y = Cast <to = 11> (t)", ["MatMul", "Cast"], "float16", "double"),
        ("t = MatMul (a, b)  u = Relu (t)  y = Cast <to = 1> (u)", ["MatMulRelu", "Cast"],
         "float16", "float"),
        ("t = MatMul (a, b)  u = Neg (t)  y = Cast <to = 1> (u)", ["MatMul", "Neg", "Cast"],
         "float16", "float"),
    ],
)  # fmt: skip
def test_other_casts_stay(body: str, ops: list[str], dtype: str, out: str) -> None:
    model = model_of(body, dtype=dtype, out=out)
    feeds = {name: value.astype(dtype.replace("float", "float32") if dtype == "float" else dtype)
             for name, value in FEEDS.items()}  # fmt: skip
    missed = ["cast: no-such-operator"] if ops[0] == "MatMulRelu" else []
    check_fused(model, feeds, ops=ops, missed=missed)


def test_other_readers_prevent_it() -> None:
    model = model_of("t = MatMul (a, b)  y = Cast <to = 1> (t)  z = Neg (t)")
    info = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT16, ["p", "s", 5])
    model.graph.output.append(info)
    check_fused(model, FEEDS, ops=["MatMul", "Cast", "Neg"], missed=["cast: other-readers"])


def test_nothing_goes_into_the_product_behind_the_cast() -> None:
    model = parse(
        """g (float16[s, 4] a, float16[4, 5] b, float[5] c, float[s, 5] r) => (float[s, 5] y) {
            t = MatMul (a, b)  u = Cast <to = 1> (t)  v = Add (u, c)  w = Mul (v, r)
            y = Relu (w) }"""
    )
    feeds = {"a": random(3, 4).astype(np.float16), "b": random(4, 5).astype(np.float16)}
    feeds |= {"c": random(5), "r": random(3, 5)}
    ops = ["MatMulToFloat", "Add", "Mul", "Relu"]
    check_fused(model, feeds, ops=ops, missed=["bias: no-such-operator"])


def test_it_can_be_left_out() -> None:
    model = model_of("t = MatMul (a, b)  y = Cast <to = 1> (t)")
    left = rewrite(model, disable=["cast"])
    assert [node.op_type for node in left.model.graph.node] == ["MatMul", "Cast"]
    assert not any("Float" in name and "Relu" in name for name in OPERATORS)
