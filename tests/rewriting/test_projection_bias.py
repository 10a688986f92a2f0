"""Biases moved from attention to its products: op list, equality, and those that must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from equivalence import op_types, parse, run
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.graph_passes import projection_bias

from moonpoly_ort import rewrite

ROWS = 6
IMPORTS = ', "com.microsoft" : 1'
PRODUCTS = "q = MatMul (x, wq)  k = MatMul (x, wk)  v = MatMul (z, wv)"
SPLIT = "p = MatMul (x, w)  q, k, v = Split <axis = -1> (p, sizes)"


def numbers(count: int) -> str:
    return ", ".join(f"{(7 * i % 11 - 5) / 4}" for i in range(count))


def model(
    values: str,
    *,
    columns: int = 8,
    wide: int = 8,
    bias: str = "b",
    outputs: str = "",
    opset: int = 18,
) -> onnx.ModelProto:
    total = 2 * columns + wide
    weights = {"wq": columns, "wk": columns, "wv": wide, "w": total}
    constants = [
        f"float[{ROWS}, {n}] {name} = {{{numbers(ROWS * n)}}}" for name, n in weights.items()
    ]
    return parse(
        f"""g (float[batch, length, {ROWS}] x, float[batch, length, {ROWS}] z, float[{total}] own)
        => (float[batch, length, {wide}] y{outputs})
        <{", ".join(constants)}, float[{total}] b = {{{numbers(total)}}},
         int64[3] sizes = {{{columns}, {columns}, {wide}}}>
        {{
            {values}
            y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, {bias})
        }}""",
        imports=IMPORTS, opset=opset,
    )  # fmt: skip


def feeds(total: int, batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, length])
    x, z = rng.standard_normal((2, batch, length, ROWS)).astype(np.float32)
    return {"x": x, "z": z, "own": rng.standard_normal(total).astype(np.float32)}


@settings(max_examples=20, deadline=None)
@given(
    values=st.sampled_from([PRODUCTS, SPLIT]), columns=st.sampled_from([2, 8]),
    wide=st.sampled_from([2, 6]), batch=st.integers(1, 3), length=st.integers(1, 6),
)  # fmt: skip
def test_results_are_equal(values: str, columns: int, wide: int, batch: int, length: int) -> None:
    proto = model(values, columns=columns, wide=wide)
    feed = feeds(2 * columns + wide, batch, length)
    want = run(proto, feed)
    assert projection_bias.move(proto) == 1
    onnx.checker.check_model(proto)
    np.testing.assert_allclose(run(proto, feed)[0], want[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("values", "products"), [(PRODUCTS, 3), (SPLIT, 1)])
def test_the_products_take_them(values: str, products: int) -> None:
    proto = model(values)
    projection_bias.move(proto)
    found = Counter(op_types(rewrite(proto).model))
    assert found == {
        "ai.moonpoly.MatMulBias": products, "Split": 1, "com.microsoft.MultiHeadAttention": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        pytest.param(PRODUCTS, {"bias": "own"}, id="no constant"),
        pytest.param(PRODUCTS, {"bias": ""}, id="none"),
        pytest.param(PRODUCTS, {"opset": 12}, id="opset"),
        pytest.param(PRODUCTS.replace("MatMul (z, wv)", "Tanh (z)"), {"wide": 6}, id="no product"),
        pytest.param(
            "q = MatMul (x, wq) k = Identity (q) v = MatMul (x, wv)", {}, id="two readers"
        ),
        pytest.param(SPLIT.replace("q, k, v", "k, q, v"), {}, id="another order"),
        pytest.param(
            PRODUCTS, {"outputs": ", float[batch, length, 8] k"}, id="a product that is an output"
        ),
    ],
)
def test_what_must_stay(values: str, changes: dict[str, str]) -> None:
    proto = model(values, **changes)  # type: ignore[arg-type]
    before = proto.SerializeToString()
    assert projection_bias.move(proto) == 0
    assert proto.SerializeToString() == before
