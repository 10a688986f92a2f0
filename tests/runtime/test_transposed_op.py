"""MatMulTransposed in ONNX Runtime: B with its last two axes exchanged, times alpha; plans run in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import interpreted
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import reference
from onnx import TensorProto, helper, numpy_helper

from moonpoly_ort import native

OP = "MatMulTransposed"
SHAPES = [
    ([2, 3], [4, 3]),
    ([5, 3], [1, 3]),  # swapped: one row of M
    ([3], [4, 3]),
    ([2, 5, 3], [4, 3]),  # A's batch is rows
    ([2, 8, 16], [2, 24, 16]),
    ([2, 12, 7, 64], [2, 12, 9, 64]),  # queries and keys
    ([2, 1, 7, 8], [2, 4, 9, 8]),
    ([2, 1, 2, 5, 3], [1, 4, 1, 2, 3]),  # one axis is looped over
    ([3, 1, 2, 1, 5, 4], [1, 2, 1, 3, 1, 4]),  # and swapped
    ([2, 0], [4, 0]),  # nothing to sum
    ([0, 3], [4, 3]),
]


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    native.set_interpreter(reference.interpret)
    yield
    native.set_interpreter(None)


def model(
    rank: int, *, perm: Sequence[int] | None = None, alpha: float = 1.0,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:  # fmt: skip
    axes = [*range(rank - 2), rank - 1, rank - 2] if perm is None else list(perm)
    node = helper.make_node(OP, ["a", "b"], ["y"], domain="ai.moonpoly", perm=axes, alpha=alpha)
    infos = [helper.make_tensor_value_info(name, dtype, None) for name in "aby"]
    graph = helper.make_graph([node], "g", infos[:2], infos[2:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def session(pack: Path, proto: onnx.ModelProto) -> ort.InferenceSession:
    return interpreted.session(proto, interpreted.options(pack))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_values(catalog_path: Path, a: list[int], b: list[int], dtype: type) -> None:
    rng = np.random.default_rng(len(a))
    feed = {name: rng.standard_normal(shape).astype(dtype) for name, shape in (("a", a), ("b", b))}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = model(len(b), alpha=-0.375, dtype=element)
    (got,) = session(catalog_path, proto).run(None, feed)
    exact = {name: array.astype(np.float64) for name, array in feed.items()}
    want = -0.375 * exact["a"] @ exact["b"].swapaxes(-1, -2)
    limit = 1e-5 if dtype is np.float32 else 2e-3
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    "perm", [[0, 1, 2], [0, 2, 1, 3], [1, 0, 2], [2, 1, 0], [0], [0, 2, 2]], ids=str
)
def test_other_permutations_are_refused(catalog_path: Path, perm: list[int]) -> None:
    with pytest.raises(Exception, match="perm must exchange the last two axes of B"):
        session(catalog_path, model(3, perm=perm))


@pytest.mark.parametrize(
    ("a", "b", "rank", "reason"),
    [
        ([2, 3], [4, 3], 3, r"perm has 3 axes, and B is \[4, 3\]"),
        ([2, 3], [3, 4], 2, r"A \[2, 3\] and B \[3, 4\] \(transposed\) differ: 3 and 4"),
        ([2, 5, 3], [3, 4, 3], 3, r"do not broadcast: 2 and 3"),
    ],
)
def test_what_does_not_fit_is_refused(
    catalog_path: Path, a: list[int], b: list[int], rank: int, reason: str
) -> None:
    feed = {"a": np.ones(a, np.float32), "b": np.ones(b, np.float32)}
    with pytest.raises(Exception, match=reason):
        session(catalog_path, model(rank)).run(None, feed)


def test_a_neighbour_that_is_no_number_does_not_leak(catalog_path: Path) -> None:
    """B's batch entries lie one behind the other: NaN in one stays there."""
    feed = {"a": np.ones((3, 5, 7), np.float32), "b": np.ones((3, 9, 7), np.float32)}
    feed["b"][1] = np.nan
    (got,) = session(catalog_path, model(3)).run(None, feed)
    assert np.isfinite(got[[0, 2]]).all()
    assert np.isnan(got[1]).all()


def test_a_constant_matrix_is_repacked_like_that_of_a_gemm(catalog_path: Path) -> None:
    """Tied weights: rows of 35 numbers, which no kernel reads widely as they are stored."""
    rng = np.random.default_rng(0)
    proto = model(2, alpha=0.5)
    weight = rng.standard_normal((70, 35)).astype(np.float32)
    del proto.graph.input[1]
    proto.graph.initializer.append(numpy_helper.from_array(weight, "b"))
    a = rng.standard_normal((2, 6, 35)).astype(np.float32)
    (got,) = session(catalog_path, proto).run(None, {"a": a})
    np.testing.assert_allclose(got, 0.5 * a @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_problem_of_given_shapes() -> None:
    problem, launches = native.matmul_problem(
        [2, 12, 7, 64], [2, 12, 9, 64], native.Dtype.F16, trans_b=True
    )
    assert launches == 1
    assert (problem.m, problem.n, problem.k, problem.batch) == (7, 9, 64, 24)
    assert (problem.trans_b, problem.ldb, problem.b_batch_stride) == (1, 64, 9 * 64)
    assert problem.align_b == 16  # rows of a head are aligned for every number of keys
    turned, _ = native.matmul_problem([2, 12, 7, 64], [2, 12, 64, 9], native.Dtype.F16)
    assert turned.align_b == 2


def test_onnxruntime_infers_the_shape_of_the_output(catalog_path: Path) -> None:
    proto = model(4)
    for info, shape in zip(
        proto.graph.input, (["b", 12, "s", 64], ["b", 12, "t", 64]), strict=True
    ):
        made = helper.make_tensor_value_info(info.name, TensorProto.FLOAT, shape)
        info.CopyFrom(made)
    (output,) = session(catalog_path, proto).get_outputs()
    assert output.shape == ["b", 12, "s", "t"]
