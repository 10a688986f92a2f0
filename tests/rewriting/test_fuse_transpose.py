"""Transpose in front of a product of rank 2 becomes a flag of a Gemm."""

from __future__ import annotations

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
        ("s, t, 4", "5, 4", "1, 0", "rank-unsupported"),
        ("t, s, 4", "t, 5, 4", "0, 2, 1", "rank-unsupported"),
        ("s, 4", "4, 5", "0, 1", "form-unknown"),
    ],
)
def test_near_misses(a: str, w: str, perm: str, reason: str) -> None:
    model = parse(
        f"""g (float[{a}] a, float[{w}] w) => (y)
            {{ t = Transpose <perm = [{perm}]> (w)  y = MatMul (a, t) }}"""
    )
    check_fused(model, ops=["Transpose", "MatMul"], missed=[f"transpose: {reason}"])


def test_operands_of_unknown_rank_stay() -> None:
    model = parse(
        """g (float[s, 4] a, float[5, 4] w, int64[r] shape) => (y)
            { b = Reshape (a, shape)  t = Transpose (w)  y = MatMul (b, t) }"""
    )
    ops = ["Reshape", "Transpose", "MatMul"]
    check_fused(model, ops=ops, missed=["transpose: rank-unsupported"])
