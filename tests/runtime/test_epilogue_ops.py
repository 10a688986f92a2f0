"""Operators with a bias, an activation and a residual, in ONNX Runtime, plans run in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import interpreted
import numpy as np
import onnxruntime as ort
import pytest
import reference
from onnx import TensorProto, helper

from moonpoly_ort import native
from tests.epilogues import AFTER_PRODUCTS, GATES, finished, gated

Array = np.ndarray[Any, Any]
MATMULS = ("MatMul", "MatMulBias", "ScaledMatMul", "ScaledMatMulBias")
ELEMENT = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}
SHAPES = [
    ([3], [3, 4]),
    ([2, 3], [3, 4]),
    ([5, 3], [3, 1]),  # swapped: one row of M
    ([2, 5, 3], [3, 4]),  # A's batch is rows
    ([2, 8, 16], [2, 16, 24]),
    ([2, 1, 2, 5, 3], [1, 4, 1, 3, 2]),  # one axis is looped over
    ([3, 1, 2, 1, 5, 4], [1, 2, 1, 3, 4, 1]),  # and swapped
    ([2, 0], [0, 4]),  # nothing to sum
    ([0, 3], [3, 4]),
]
PROBLEMS: list[native.Problem] = []


def _record(*call: object) -> None:
    PROBLEMS.append(native.Problem.from_buffer_copy(call[0]))  # type: ignore[arg-type]
    reference.interpret(*call)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    PROBLEMS.clear()
    native.set_interpreter(_record)
    yield
    native.set_interpreter(None)


def session(
    pack: Path, op: str, inputs: Sequence[Array | None], **attributes: float
) -> ort.InferenceSession:
    element = ELEMENT[inputs[0].dtype]  # type: ignore[union-attr]
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], domain="ai.moonpoly", **attributes)], "g",
        [helper.make_tensor_value_info(n, element, None) for n in names if n],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT if "Float" in op else element, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return interpreted.session(model, interpreted.options(pack))


def run(s: ort.InferenceSession, inputs: Sequence[Array | None]) -> Array:
    return np.asarray(s.run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})[0])


def check(
    pack: Path, base: str, after: tuple[str, native.Activation, native.Residual],
    a_shape: Sequence[int], b_shape: Sequence[int], *, dtype: object = np.float32, c: bool = True,
) -> None:  # fmt: skip
    name, activation, residual = after
    rng = np.random.default_rng(len(name) + len(a_shape))

    def random(shape: Sequence[int]) -> Array:
        return rng.standard_normal(tuple(shape)).astype(dtype)  # type: ignore[arg-type, call-overload]

    inputs: list[Array | None] = [random(a_shape), random(b_shape)]
    exact = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)  # type: ignore[union-attr]
    scales = {"alpha": -0.375, "beta": 2.5} if "Scaled" in base or base == "Gemm" else {}
    if base == "ScaledMatMul":
        del scales["beta"]
    exact *= scales.get("alpha", 1.0)
    if base not in ("MatMul", "ScaledMatMul"):
        inputs.append(random([b_shape[-1]]) if c else None)
        if inputs[2] is not None:
            exact = exact + scales.get("beta", 1.0) * inputs[2].astype(np.float64)
    r = None
    if residual:
        r = random(exact.shape)
        inputs.append(r)
    numbers = {"activation_alpha": -0.25, "activation_beta": 0.5, **scales}
    got = run(session(pack, base + name, inputs, **numbers), inputs)
    want = finished(exact, activation, residual, -0.25, 0.5, r)
    limit = 1e-5 if got.dtype == np.float32 else 2e-3
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=limit, atol=limit)


@pytest.mark.parametrize("base", [*MATMULS, "Gemm"])
@pytest.mark.parametrize("after", AFTER_PRODUCTS, ids=lambda after: str(after[0] or "alone"))
def test_every_operator(
    catalog_path: Path, base: str, after: tuple[str, native.Activation, native.Residual]
) -> None:
    check(catalog_path, base, after, [5, 7], [7, 9])
    assert PROBLEMS


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("after", [AFTER_PRODUCTS[i] for i in (0, 1, 2, 6, 17)], ids=str)
def test_shapes_of_matmul(
    catalog_path: Path, a: list[int], b: list[int],
    after: tuple[str, native.Activation, native.Residual],
) -> None:  # fmt: skip
    for base in MATMULS:
        check(catalog_path, base, after, a, b)


def test_gemm_without_c_takes_the_residual_as_its_fourth_input(catalog_path: Path) -> None:
    for after in (AFTER_PRODUCTS[1], AFTER_PRODUCTS[2], AFTER_PRODUCTS[20]):
        check(catalog_path, "Gemm", after, [5, 7], [7, 9], c=False)
    assert {problem.bias for problem in PROBLEMS} == {native.Bias.NONE}


def test_half_precision_rounds_once(catalog_path: Path) -> None:
    check(catalog_path, "MatMulBias", AFTER_PRODUCTS[20], [40, 64], [64, 72], dtype=np.float16)
    (problem,) = PROBLEMS
    assert (problem.dtype, problem.residual) == (native.Dtype.F16, native.Residual.BEFORE)


def test_a_dot_product_takes_a_residual(catalog_path: Path) -> None:
    check(catalog_path, "MatMul", AFTER_PRODUCTS[1], [3], [3])
    check(catalog_path, "MatMul", AFTER_PRODUCTS[2], [2, 5, 3], [3])


@pytest.mark.parametrize(
    ("op", "shapes", "reason"),
    [
        ("MatMulBias", [[2, 3], [3, 4], [1, 4]], r"bias \[1, 4\] must be \[4\]"),
        ("MatMulBias", [[2, 3], [3, 4], [1]], r"bias \[1\] must be \[4\], the columns of B"),
        ("MatMulBias", [[2, 3], [3], [1]], "no columns to add a bias to"),
        ("MatMulAdd", [[2, 3], [3, 4], [4]], r"MatMulAdd: the last input \[4\].*\[2, 4\]"),
        ("MatMulMul", [[2, 3], [3, 4], [1, 4]], "it does not broadcast"),
        ("MatMulMul", [[2, 3], [3, 4], [1, 4]], r"rewrite it with disable=\[\"residual\"\]"),
        ("ScaledMatMulBias", [[2, 3], [3, 4], [1]], r"bias \[1\] must be \[4\]"),
        ("GemmAddRelu", [[2, 3], [3, 4], [4], [1, 2, 4]], r"the output's shape \[2, 4\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    catalog_path: Path, op: str, shapes: list[list[int]], reason: str
) -> None:
    inputs: list[Array | None] = [np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(Exception, match=reason):
        run(session(catalog_path, op, inputs), inputs)


@pytest.mark.parametrize(("offset", "align"), [(0, 16), (4, 4), (8, 8)])
def test_a_residual_counts_with_the_output_s_alignment(
    catalog_path: Path, offset: int, align: int
) -> None:
    rng = np.random.default_rng(offset)
    store = np.zeros(8 * 16 + 32, np.float32)  # which ONNX Runtime reads where it is
    start = (-store.ctypes.data % 64 + offset) // 4
    r = store[start : start + 8 * 16].reshape(8, 16)
    a, b, r[...] = (rng.standard_normal(shape) for shape in ((8, 12), (12, 16), (8, 16)))
    a, b = a.astype(np.float32), b.astype(np.float32)
    y = run(session(catalog_path, "MatMulAdd", [a, b, r]), [a, b, r])
    np.testing.assert_allclose(y, a @ b + r, rtol=1e-5, atol=1e-5)
    assert PROBLEMS[0].align_c == align


def test_registering_every_operator_costs_little(catalog_path: Path) -> None:
    inputs: list[Array | None] = [np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)]
    session(catalog_path, "MatMul", inputs)  # opens the pack
    times = []
    for _ in range(3):
        start = time.perf_counter()
        session(catalog_path, "MatMul", inputs)
        times.append(time.perf_counter() - start)
    print(f"{1e3 * min(times):.1f} ms")
    assert min(times) < 0.5  # 4 ms on a free core


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate[0] or "alone")
def test_every_gated_operator(
    catalog_path: Path, gate: tuple[str, native.Activation], bias: bool
) -> None:
    name, activation = gate
    rng = np.random.default_rng(len(name))
    inputs: list[Array | None] = [rng.standard_normal(shape).astype(np.float32)
                                  for shape in ([5, 7], [7, 18], [18])[: 2 + bias]]  # fmt: skip
    numbers = {"activation_alpha": -0.25, "activation_beta": 0.5}
    op = f"MatMulGated{'Bias' if bias else ''}{name}"
    got = run(session(catalog_path, op, inputs, **numbers), inputs)
    wide = [array.astype(np.float64) for array in inputs if array is not None]
    want = gated(wide[0] @ wide[1] + (wide[2] if bias else 0), activation, -0.25, 0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("a", [[3], [1, 3], [5, 3], [2, 5, 3], [2, 1, 5, 3], [2, 0], [0, 3]])
@pytest.mark.parametrize("columns", [2, 6, 32])
def test_shapes_of_gated_products(catalog_path: Path, a: list[int], columns: int) -> None:
    rng = np.random.default_rng(columns)
    inputs: list[Array | None] = [
        rng.standard_normal(shape).astype(np.float32) for shape in (a, [a[-1], columns])
    ]
    got = run(session(catalog_path, "MatMulGatedSilu", inputs), inputs)
    exact = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)  # type: ignore[union-attr]
    want = gated(exact, native.Activation.SILU)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for problem in PROBLEMS:
        assert (problem.n, problem.gated) == (columns, 1)
        # As many bytes of each row of Y, which has half the columns.
        assert problem.align_c == min(16, (columns // 2 & -(columns // 2)) * 4)


@pytest.mark.parametrize(
    "op", ["MatMulToFloat", "MatMulBiasToFloat", "GemmToFloat"]
)  # fmt: skip
def test_results_in_fp32_are_those_in_fp16(catalog_path: Path, op: str) -> None:
    rng = np.random.default_rng(3)
    inputs: list[Array | None] = [
        rng.standard_normal(shape).astype(np.float16) for shape in ([5, 40], [40, 24], [24])
    ]
    if op == "MatMulToFloat":
        inputs.pop()
    plain = run(session(catalog_path, op.removesuffix("ToFloat"), inputs), inputs)
    got = run(session(catalog_path, op, inputs), inputs)
    assert (got.dtype, plain.dtype) == (np.float32, np.float16)
    np.testing.assert_array_equal(got, plain.astype(np.float32))
    assert [problem.wide for problem in PROBLEMS] == [0, 1]


@pytest.mark.parametrize(("a", "b"), SHAPES[:6])
def test_shapes_of_results_in_fp32(catalog_path: Path, a: list[int], b: list[int]) -> None:
    """Batch axes that are looped over move Y by elements of four bytes."""
    rng = np.random.default_rng(5)
    inputs: list[Array | None] = [rng.standard_normal(shape).astype(np.float16) for shape in (a, b)]
    got = run(session(catalog_path, "MatMulToFloat", inputs), inputs)
    want = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)  # type: ignore[union-attr]
    np.testing.assert_array_equal(got, want.astype(np.float16).astype(np.float32))


def test_no_operator_casts_fp32(catalog_path: Path) -> None:
    inputs: list[Array | None] = [np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)]
    with pytest.raises(Exception, match="MatMulToFloat"):
        session(catalog_path, "MatMulToFloat", inputs)


@pytest.mark.parametrize("b", [[3, 5], [2, 3, 4], [3]])
def test_a_gated_product_takes_pairs_of_columns(catalog_path: Path, b: list[int]) -> None:
    inputs: list[Array | None] = [np.ones((2, 3), np.float32), np.ones(b, np.float32)]
    with pytest.raises(Exception, match=r"MatMulGated takes for B a matrix whose columns"):
        run(session(catalog_path, "MatMulGated", inputs), inputs)
