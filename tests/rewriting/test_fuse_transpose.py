"""Transpose in front of a product of rank 2 becomes a flag of a Gemm; with more axes, B is
multiplied as it is stored.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import check_fused, parse, random
from hypothesis import given, settings
from hypothesis import strategies as st


@given(
    op_type=st.sampled_from(["MatMul", "Gemm"]),
    turned=st.tuples(st.booleans(), st.booleans()),
    flags=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    perm=st.sampled_from(["", "<perm = [1, 0]>"]),
)
@settings(max_examples=40, deadline=None)
def test_every_order_of_both_operands(
    op_type: str, turned: tuple[bool, bool], flags: tuple[int, int], perm: str
) -> None:
    if op_type == "MatMul":
        flags = (0, 0)
    given = f"<transA = {flags[0]}, transB = {flags[1]}>" if op_type == "Gemm" else ""
    names = [f"t{name}" if turn else name for name, turn in zip("ab", turned, strict=True)]
    nodes = [f"t{x} = Transpose {perm} ({x})" for x, turn in zip("ab", turned, strict=True) if turn]
    sides = [["m", "k"], ["k", "n"]]
    shapes = [
        ", ".join(side[::-1] if turn != bool(flag) else side)
        for side, turn, flag in zip(sides, turned, flags, strict=True)
    ]
    model = parse(
        f"""g (float[{shapes[0]}] a, float[{shapes[1]}] b) => (float[m, n] y)
            {{ {" ".join(nodes)}  y = {op_type} {given} ({", ".join(names)}) }}"""
    )
    sizes = {"m": 3, "k": 4, "n": 5}
    feeds = {
        name: random(*(sizes[axis] for axis in shape.split(", ")))
        for name, shape in zip("ab", shapes, strict=True)
    }
    plain = op_type == "MatMul" and not any(turned)
    result = check_fused(model, feeds, ops=["MatMul" if plain else "Gemm"])
    (node,) = result.model.graph.node
    assert list(node.input) == ["a", "b"]


def test_with_a_bias_behind_it() -> None:
    model = parse(
        """g (float[s, 4] a, float[5, 4] w, float[5] c) => (float[s, 5] y)
            { t = Transpose (w)  u = MatMul (a, t)  v = Add (u, c)  y = Relu (v) }"""
    )
    feeds = {"a": random(3, 4), "w": random(5, 4), "c": random(5)}
    result = check_fused(model, feeds, ops=["GemmRelu"])
    assert [entry.into for entry in result.report] == ["", "y", "y", "y"]


def test_a_transpose_with_other_readers_stays_for_them() -> None:
    model = parse(
        """g (float[s, 4] a, float[5, 4] w) => (float[s, 5] y, float[4, 5] t)
            { t = Transpose (w)  y = MatMul (a, t) }"""
    )
    feeds = {"a": random(3, 4), "w": random(5, 4)}
    check_fused(model, feeds, ops=["Transpose", "Gemm"])


@pytest.mark.parametrize(
    ("a", "w", "perm", "reason"),
    [
        ("s, 4", "4, 5", "0, 1", "form-unknown"),
        ("t, s, 4", "5, t, 4", "1, 2, 0", "other-readers"),
        ("t, s, 4", "4, t, 5", "1, 0, 2", "form-unknown"),
        ("s, t, 4", "4, s, 5", "1, 0, 2", "form-unknown"),
    ],
)
def test_near_misses(a: str, w: str, perm: str, reason: str) -> None:
    model = parse(
        f"""g (float[{a}] a, float[{w}] w) => (y)
            {{ t = Transpose <perm = [{perm}]> (w)  y = MatMul (a, t) }}"""
    )
    if reason == "other-readers":
        model.graph.output.add(name="t")
    check_fused(model, ops=["Transpose", "MatMul"], missed=[f"transpose: {reason}"])


def test_operands_of_unknown_rank_stay() -> None:
    model = parse(
        """g (float[s, 4] a, float[5, 4] w, int64[r] shape) => (y)
            { b = Reshape (w, shape)  t = Transpose <perm = [0, 2, 1]> (b)  y = MatMul (a, t) }"""
    )
    ops = ["Reshape", "Transpose", "MatMul"]
    check_fused(
        model,
        {"a": random(3, 4), "w": random(5, 4), "shape": np.array([1, 5, 4])},
        ops=ops,
        missed=["transpose: rank-unknown"],
    )


AXES = ("b", "c", "d")


@given(
    batch=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=3),
    m=st.integers(1, 5), n=st.integers(1, 5), k=st.integers(1, 5), scaled=st.booleans(),
    shorter=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_batches_of_any_rank(
    batch: list[tuple[int, bool, bool]], m: int, n: int, k: int, scaled: bool, shorter: int
) -> None:
    """Axes that only one operand has, or that broadcast; A may have fewer than B."""
    a = [1 if one else size for size, one, _ in batch][shorter:]
    b = [1 if one else size for size, _, one in batch]
    perm = [*range(len(b)), len(b) + 1, len(b)]
    names = AXES[: len(b)]
    model = parse(
        f"""g (float[{", ".join([*(f"a{i}" for i in range(len(a))), "m", "k"])}] a,
            float[{", ".join([*names, "n", "k"])}] b) => (y)
            {{ t = Transpose <perm = {perm}> (b)
            {"u = Mul (t, r)  y = MatMul (a, u)" if scaled else "y = MatMul (a, t)"} }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "r"))
    feeds = {"a": random(*a, m, k), "b": random(*b, n, k, seed=1)}
    rank_2 = not a and not b
    result = check_fused(model, feeds, ops=["Gemm" if rank_2 else "MatMulTransposed"])
    (node,) = result.model.graph.node
    assert list(node.input) == ["a", "b"]
    alpha = next(x.f for x in node.attribute if x.name == "alpha")
    assert alpha == (0.5 if scaled else 1.0)


def attention(more: str = "") -> onnx.ModelProto:
    """Queries by keys as they come out of a product, [batch, length, heads, size]."""
    return parse(
        f"""g (float[b, s, 4, 8] q, float[b, t, 4, 8] k) => (y) {{
            u = Transpose <perm = [0, 2, 1, 3]> (q)  v = Transpose <perm = [0, 2, 3, 1]> (k)
            w = MatMul (u, v)  y = Softmax <axis = -1> (w) {more} }}"""
    )


QUERIES = {"q": random(2, 3, 4, 8), "k": random(2, 7, 4, 8, seed=1)}


def test_keys_are_transposed_by_rows() -> None:
    model = attention()
    info = onnx.helper.make_tensor_value_info("v", 1, ["b", 4, 8, "t"])
    model.graph.value_info.append(info)
    ops = ["Transpose", "Transpose", "MatMulTransposed", "Softmax"]
    missed = ["transpose: rank-unsupported"]  # that of the queries
    result = check_fused(model, QUERIES, ops=ops, missed=missed)
    keys = result.model.graph.node[1]
    assert list(keys.attribute[0].ints) == [0, 2, 1, 3]
    assert result.model.graph.node[2].input[1] == keys.output[0] != "v"
    assert not result.model.graph.value_info


def test_keys_that_others_read_stay() -> None:
    model = attention("z = Neg (v)")
    model.graph.output.add(name="z")
    ops = ["Transpose", "Transpose", "MatMul", "Softmax", "Neg"]
    check_fused(model, QUERIES, ops=ops, missed=["transpose: rank-unsupported"])


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_what_comes_behind_goes_first(op: str) -> None:
    """There is no MatMulTransposed with an activation or a residual."""
    model = parse(
        f"""g (float[b, s, 8] q, float[b, t, 8] k, float[b, s, t] r) => (y) {{
            v = Transpose <perm = [0, 2, 1]> (k)  w = MatMul (q, v)  y = {op} (w, r) }}"""
    )
    feeds = {"q": random(2, 3, 8), "k": random(2, 5, 8, seed=1), "r": random(2, 3, 5, seed=2)}
    missed = ["transpose: rank-unsupported"]
    check_fused(model, feeds, ops=["Transpose", f"MatMul{op}"], missed=missed)


def test_an_opset_without_castlike() -> None:
    model = parse(
        """g (float[b, s, 8] q, float[b, t, 8] k) => (y) {
            v = Transpose <perm = [0, 2, 1]> (k)  y = MatMul (q, v) }""", opset=14,
    )  # fmt: skip
    check_fused(model, ops=["Transpose", "MatMul"], missed=["transpose: opset"])


@pytest.mark.parametrize(
    ("perm", "ops"),
    [
        ([1, 2, 0], ["Transpose", "MatMul"]),
        ([0, 2, 1], ["Transpose", "MatMulTransposed"]),
    ],
)
def test_both_operands_are_the_same(perm: list[int], ops: list[str]) -> None:
    """A goes on reading what is transposed."""
    model = parse(
        f"""g (float[s, s, s] x) => (y) {{
            t = Transpose <perm = {perm}> (x)  y = MatMul (t, t) }}"""
    )
    missed = ["transpose: rank-unsupported"] if ops[-1] == "MatMul" else []
    check_fused(model, {"x": random(4, 4, 4)}, ops=ops, missed=missed)


@pytest.mark.parametrize(
    ("first", "then"), [([0, 1, 3, 2], [0, 1, 3, 2]), ([0, 3, 1, 2], [0, 2, 3, 1])]
)
def test_one_that_undoes_another_stays(first: list[int], then: list[int]) -> None:
    """ONNX Runtime removes both."""
    model = parse(
        f"""g (float[b, n, s, 8] q, float[b, n, 8, t] k) => (y) {{
            u = Transpose <perm = {first}> (k)  v = Transpose <perm = {then}> (u)
            y = MatMul (q, v) }}"""
    )
    feeds = {"q": random(2, 3, 5, 8), "k": random(2, 3, 8, 7, seed=1)}
    ops = ["Transpose", "Transpose", "MatMul"]
    check_fused(model, feeds, ops=ops, missed=["transpose: form-unknown"])
