"""The custom ops inside ONNX Runtime on the CPU: the interpreter backend, with a callback that
computes each plan in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import options, session
from onnx import TensorProto, helper

from moonpoly_ort import native

Array = npt.NDArray[np.generic]
ELEMENT = {
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
}
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


def node_model(
    op: str, inputs: Sequence[Array | None], domain: str = "ai.moonpoly", **attributes: object
) -> onnx.ModelProto:
    """One node; every input of unknown shape. None is an absent input."""
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    element = ELEMENT[inputs[0].dtype]  # type: ignore[union-attr]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], domain=domain, **attributes)],
        "g",
        [helper.make_tensor_value_info(n, element, None) for n in names if n],
        [helper.make_tensor_value_info("y", element, None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(s: ort.InferenceSession, inputs: Sequence[Array | None]) -> Array:
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    return np.asarray(s.run(None, feeds)[0])


def random(shape: Sequence[int], seed: int, dtype: object = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(tuple(shape)).astype(dtype)  # type: ignore[arg-type]


def onnx_runtimes_own(op: str, inputs: Sequence[Array | None], **attributes: object) -> Array:
    return run(session(node_model(op, inputs, "", **attributes), None), inputs)


MATMULS = [
    ([3], [3]),
    ([3], [3, 4]),
    ([2, 3], [3]),
    ([2, 3], [3, 4]),
    ([1, 3], [3, 4]),
    ([5, 3], [3, 1]),
    ([1, 1], [1, 1]),
    ([7, 1], [1, 5]),
    ([2, 5, 3], [3, 4]),
    ([2, 5, 3], [3]),
    ([3], [6, 3, 2]),
    ([2, 1, 3], [2, 3, 4]),
    ([5, 3], [2, 3, 4]),
    ([2, 5, 3], [1, 3, 4]),
    ([1, 5, 3], [2, 3, 4]),
    ([2, 3, 5, 3], [2, 3, 3, 4]),
    ([2, 1, 5, 3], [1, 4, 3, 2]),
    ([2, 1, 2, 5, 3], [1, 4, 1, 3, 2]),  # three groups: one is looped over
    ([3, 1, 2, 1, 5, 4], [1, 2, 1, 3, 4, 1]),
    ([2, 3, 1, 5, 4], [2, 1, 4, 4, 6]),
    ([2, 8, 16], [2, 16, 24]),
    ([4, 40, 72], [72, 136]),
    ([4, 2, 6], [4, 6, 1]),
    ([0, 3], [3, 4]),
    ([2, 0], [0, 4]),
    ([2, 3], [3, 0]),
    ([0], [0]),
    ([0], [0, 4]),
    ([2, 0, 3], [2, 3, 4]),
    ([0, 2, 3], [1, 3, 4]),
    ([0, 2, 3], [3, 4]),
    ([2, 5, 0], [2, 0, 3]),
]


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul_equals_onnx_runtimes_own(catalog_path: Path, a: list[int], b: list[int]) -> None:
    inputs = [random(a, 1), random(b, 2)]
    expected = onnx_runtimes_own("MatMul", inputs)
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@st.composite
def matmul_shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = st.sampled_from([0, 1, 1, 2, 3, 8, 17])
    m, n, k = draw(size), draw(size), draw(size)
    a, b = [], []
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, 3))
        has = draw(st.sampled_from([(axis, axis), (1, axis), (axis, 1)]))
        a.append(has[0])
        b.append(has[1])
    a, b = a[draw(st.integers(0, len(a))) :], b[draw(st.integers(0, len(b))) :]
    vector = draw(st.sampled_from(["none", "none", "a", "b", "both"]))
    return (
        [k] if vector in ("a", "both") else [*a, m, k],
        [k] if vector in ("b", "both") else [*b, k, n],
    )


@settings(max_examples=150, deadline=None)
@given(shapes=matmul_shapes())
def test_matmul_random_shapes(catalog_path: Path, shapes: tuple[list[int], list[int]]) -> None:
    inputs = [random(shape, i) for i, shape in enumerate(shapes)]
    expected = np.matmul(inputs[0].astype(np.float64), inputs[1].astype(np.float64))
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


GEMM_C = [None, [], [1], [4], [1, 4], [5, 1], [5, 4], [1, 1]]


@pytest.mark.parametrize("c", GEMM_C, ids=str)
@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_gemm_equals_onnx_runtimes_own(
    catalog_path: Path, c: list[int] | None, trans: tuple[int, int]
) -> None:
    for m, n, k in ((5, 4, 3), (5, 4, 0), (5, 1, 3), (1, 4, 3), (1, 1, 3), (64, 72, 40)):
        shape = None if c is None else [{5: m, 4: n}.get(x, x) for x in c]
        inputs: list[Array | None] = [
            random([k, m] if trans[0] else [m, k], 1), random([n, k] if trans[1] else [k, n], 2),
        ]  # fmt: skip
        if shape is not None:
            inputs.append(random(shape, 3))
        attributes = {"transA": trans[0], "transB": trans[1], "alpha": 0.5, "beta": -2.0}
        if k == 0:  # onnxruntime 1.23 leaves the output of an empty product without C undefined
            added = 0.0 if shape is None else -2.0 * inputs[2]  # type: ignore[operator]
            expected = np.broadcast_to(added, (m, n))
        else:
            expected = onnx_runtimes_own("Gemm", inputs, **attributes)
        got = run(session(node_model("Gemm", inputs, **attributes), options(catalog_path)), inputs)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_constant_operands_may_be_empty(catalog_path: Path) -> None:
    """ONNX Runtime gives null as the address of an empty constant."""
    inputs = [random([5, 0], 1), random([0, 4], 2), random([4], 3)]
    model = node_model("Gemm", inputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(inputs[1], "x1"))
    del model.graph.input[1]
    seen = []

    def interpret(*call: object) -> None:
        seen.append(call[3])
        _record(*call)

    native.set_interpreter(interpret)
    got = run(session(model, options(catalog_path)), [inputs[0], None, inputs[2]])
    np.testing.assert_array_equal(got, np.broadcast_to(inputs[2], (5, 4)))
    assert seen == [0]


def test_gemm_defaults_and_absent_c(catalog_path: Path) -> None:
    a, b = random([5, 3], 1), random([3, 4], 2)
    expected = onnx_runtimes_own("Gemm", [a, b])
    for inputs in ([a, b], [a, b, None]):
        got = run(session(node_model("Gemm", inputs), options(catalog_path)), inputs)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_gemm_ignores_c_when_beta_is_zero(catalog_path: Path) -> None:
    inputs = [random([5, 3], 1), random([3, 4], 2), np.full([5, 4], np.nan, np.float32)]
    got = run(session(node_model("Gemm", inputs, beta=0.0), options(catalog_path)), inputs)
    np.testing.assert_allclose(got, onnx_runtimes_own("Gemm", inputs[:2]), rtol=1e-5, atol=1e-5)


def test_fp16(catalog_path: Path) -> None:
    inputs = [random([2, 5, 24], 1, np.float16), random([2, 24, 8], 2, np.float16)]
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    exact = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, exact, rtol=1e-3)


def test_bf16_between_casts(catalog_path: Path) -> None:
    """Python feeds no bfloat16, so the model casts."""
    bf16 = TensorProto.BFLOAT16
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x0"], ["a"], to=bf16),
            helper.make_node("Cast", ["x1"], ["b"], to=bf16),
            helper.make_node("MatMul", ["a", "b"], ["c"], domain="ai.moonpoly"),
            helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
        ],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x0", "x1")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    inputs = [random([6, 24], 1), random([24, 8], 2)]
    got = run(session(model, options(catalog_path)), inputs)
    exact = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 1e-2
    assert PROBLEMS[-1].dtype == native.Dtype.BF16


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT])
def test_types_pass_from_node_to_node(catalog_path: Path, element: int) -> None:
    """With known shapes, the inferred type of one product is the declared input of the next."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x0"], ["a"], to=element),
            helper.make_node("Cast", ["x1"], ["b"], to=element),
            helper.make_node("MatMul", ["a", "b"], ["c"], domain="ai.moonpoly"),
            helper.make_node("MatMul", ["c", "b"], ["d"], domain="ai.moonpoly"),
            helper.make_node("Gemm", ["d", "b"], ["e"], domain="ai.moonpoly"),
            helper.make_node("Add", ["e", "d"], ["f"]),
            helper.make_node("Cast", ["f"], ["y"], to=TensorProto.FLOAT),
        ],
        "g",
        [
            helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["rows", 8]),
            helper.make_tensor_value_info("x1", TensorProto.FLOAT, [8, 8]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    if element == TensorProto.BFLOAT16:  # ONNX Runtime adds no bfloat16 on the CPU
        graph.node[5].op_type = "Identity"
        del graph.node[5].input[1:]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    inputs = [random([6, 8], 1), random([8, 8], 2)]
    got = run(session(model, options(catalog_path)), inputs)
    x, w = (i.astype(np.float64) for i in inputs)
    exact = x @ w @ w @ w + (0 if element == TensorProto.BFLOAT16 else x @ w @ w)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 2e-2


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        ("MatMul", ([2, 3], [4, 5]), r"A \[2, 3\] and B \[4, 5\] differ: 3 and 4"),
        ("MatMul", ([2, 3, 4], [3, 4, 5]), r"A \[2, 3, 4\] and B \[3, 4, 5\] do not broadcast"),
        ("MatMul", ([], [3]), r"rank 1 and more, got A \[\] and B \[3\]"),
        ("Gemm", ([2, 3], [4, 5]), r"A \[2, 3\] and B \[4, 5\] differ"),
        ("Gemm", ([2, 3, 4], [4, 5]), r"takes matrices, got A \[2, 3, 4\]"),
        ("Gemm", ([2, 3], [3, 5], [3, 5]), r"C \[3, 5\] does not broadcast to the output \[2, 5\]"),
        ("Gemm", ([2, 3], [3, 5], [2, 2, 5]), r"C \[2, 2, 5\] does not broadcast"),
    ],
)
def test_shapes_that_do_not_fit(
    catalog_path: Path, op: str, shapes: tuple[list[int], ...], message: str
) -> None:
    inputs = [random(shape, 1) for shape in shapes]
    s = session(node_model(op, inputs), options(catalog_path))
    with pytest.raises(Exception, match=message) as caught:
        run(s, inputs)
    assert "INVALID_ARGUMENT" in str(caught.value)


def test_canonical_products(catalog_path: Path) -> None:
    """What the op asks of the kernels: folded batches, one-row vectors, two broadcast maps."""

    def problem(a: list[int], b: list[int]) -> native.Problem:
        PROBLEMS.clear()
        inputs = [random(a, 1), random(b, 2)]
        run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
        return PROBLEMS[0]

    folded = problem([2, 5, 8], [8, 12])
    assert (folded.m, folded.batch, folded.lda) == (10, 1, 8)
    vector = problem([7, 8], [8])  # computed as one row of 7
    assert (vector.m, vector.n, vector.k, vector.trans_b, vector.align_b) == (1, 7, 8, 1, 16)
    inner = problem([2, 1, 5, 8], [1, 4, 8, 12])
    assert (inner.batch, inner.a_div, inner.a_mod, inner.b_div, inner.b_mod) == (8, 4, 2, 1, 4)
    assert (inner.a_batch_stride, inner.b_batch_stride) == (40, 96)
    shared = problem([5, 8], [4, 8, 12])
    assert (shared.batch, shared.a_mod, shared.b_mod) == (4, 1, 4)
    odd = problem([16, 9], [9, 8])
    assert (odd.align_a, odd.align_b, odd.align_c) == (4, 16, 16)
    batch = problem([3, 4, 4], [3, 4, 6])  # pitch and batch stride of B: 24 and 96 bytes
    assert (batch.align_a, batch.align_b, batch.align_c) == (16, 8, 8)


def test_loops_beyond_two_groups(catalog_path: Path) -> None:
    inputs = [random([3, 1, 2, 4, 8], 1), random([1, 5, 1, 8, 4], 2)]
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    np.testing.assert_allclose(got, np.matmul(*inputs), rtol=1e-5, atol=1e-5)
    assert [p.batch for p in PROBLEMS] == [10, 10, 10]


def test_model_local_function_and_registered_op(catalog_path: Path) -> None:
    """The library's kernel wins over the body; without the library the body runs."""
    inputs = [random([4, 3], 1), random([3, 5], 2)]
    model = node_model("MatMul", inputs)
    body = helper.make_node("MatMul", ["a", "b"], ["y"])
    opset = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("ai.moonpoly", "MatMul", ["a", "b"], ["y"], [body], opset)
    )
    plain = run(session(model, None), inputs)
    assert PROBLEMS == []
    ours = run(session(model, options(catalog_path)), inputs)
    assert len(PROBLEMS) == 1
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def infer(a: Sequence[str | int | None] | None, b: Sequence[str | int | None] | None,
          catalog_path: Path) -> object:  # fmt: skip
    """The shape that ONNX Runtime gives the result of a MatMul, seen through a graph output."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x0", "x1"], ["t"], domain="ai.moonpoly"),
            helper.make_node("Relu", ["t"], ["y"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("x0", TensorProto.FLOAT, a),
            helper.make_tensor_value_info("x1", TensorProto.FLOAT, b),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return session(model, options(catalog_path)).get_outputs()[0].shape


def test_shape_inference(catalog_path: Path) -> None:
    assert infer(["b", "s", 8], [8, 4], catalog_path) == ["b", "s", 4]
    assert infer([1, "h", "s", 8], ["b", "h", 8, "t"], catalog_path) == ["b", "h", "s", "t"]
    assert infer(["b", 2, 3], [7, 3, 4], catalog_path) == [7, 2, 4]
    assert infer([3], ["n", 3, 4], catalog_path) == ["n", 4]
    assert infer(["m", 3], [3], catalog_path) == ["m"]
    # Nothing is claimed where a dimension has no name or the rank is not known.
    assert infer(["b", None, 8], [8, 4], catalog_path) in ([], None)
    assert infer(["b", 2, 3], ["c", 3, 4], catalog_path) in ([], None)
    assert infer(None, [8, 4], catalog_path) in ([], None)


def test_scalar_result(catalog_path: Path) -> None:
    inputs = [random([9], 1), random([9], 2)]
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    assert got.shape == ()
    np.testing.assert_allclose(got, np.dot(*inputs), rtol=1e-5)


def test_registered_twice_is_onnx_runtimes_error(catalog_path: Path) -> None:
    inputs = [random([2, 3], 1), random([3, 4], 2)]
    so = options(catalog_path)
    so.register_custom_ops_library(str(native.library_path()))
    with pytest.raises(Exception, match="already"):
        session(node_model("MatMul", inputs), so)
    got = run(session(node_model("MatMul", inputs), options(catalog_path)), inputs)
    np.testing.assert_allclose(got, inputs[0] @ inputs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "gpu"}, "moonpoly.backend is 'gpu'; accepted: auto, cuda, interpreter"),
        ({"precision": "fp8"}, "moonpoly.precision is 'fp8'; accepted: tf32, ieee"),
    ],
)
def test_unknown_settings(catalog_path: Path, config: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        options(catalog_path, **config).register_custom_ops_library(str(native.library_path()))


@pytest.mark.skipif(native.device_count() > 0, reason="there is a GPU")
def test_backends_without_a_gpu(catalog_path: Path) -> None:
    with pytest.raises(Exception, match="there is no usable GPU"):
        options(catalog_path, backend="cuda").register_custom_ops_library(
            str(native.library_path())
        )
    inputs = [random([2, 3], 1), random([3, 4], 2)]
    so = options(catalog_path, backend="auto")
    assert run(session(node_model("MatMul", inputs, ""), so), inputs).shape == (2, 4)


def test_missing_pack_names_the_node_and_the_path(tmp_path: Path) -> None:
    inputs = [random([2, 3], 1), random([3, 4], 2)]
    model = node_model("MatMul", inputs)
    model.graph.node[0].name = "my_node"
    with pytest.raises(Exception, match=r"node 'my_node'.*absent\.mpk' cannot be opened"):
        session(model, options(tmp_path / "absent.mpk"))


def test_pack_is_searched_in_the_cache(
    catalog_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOONPOLY_PACK", raising=False)
    inputs = [random([2, 3], 1), random([3, 4], 2)]
    searching = options(catalog_path)
    searching.add_session_config_entry("moonpoly.pack", "")
    with pytest.raises(Exception, match=rf"no kernel pack sm_90.mpk.*{tmp_path}.*moonpoly pack"):
        session(node_model("MatMul", inputs), searching)
    folder = tmp_path / "moonpoly_ort" / "packs"
    folder.mkdir(parents=True)
    (folder / "sm_90.mpk").write_bytes(catalog_path.read_bytes())
    searching = options(catalog_path)
    searching.add_session_config_entry("moonpoly.pack", "")
    run(session(node_model("MatMul", inputs), searching), inputs)
    monkeypatch.setenv("MOONPOLY_PACK", str(tmp_path / "other.mpk"))
    searching = options(catalog_path)
    searching.add_session_config_entry("moonpoly.pack", "")
    with pytest.raises(Exception, match=r"other\.mpk"):
        session(node_model("MatMul", inputs), searching)


def test_precision_of_fp32(catalog_path: Path) -> None:
    for precision, code in (("tf32", 0), ("ieee", 1)):
        for dtype, expected in ((np.float32, code), (np.float16, 0)):
            inputs = [random([2, 3], 1, dtype), random([3, 4], 2, dtype)]
            so = options(catalog_path, precision=precision)
            run(session(node_model("MatMul", inputs), so), inputs)
            assert PROBLEMS[-1].precision == expected


def test_interpreter_errors_reach_the_caller(catalog_path: Path) -> None:
    inputs = [random([2, 3], 1), random([3, 4], 2)]
    s = session(node_model("MatMul", inputs), options(catalog_path))

    def fail(*_: object) -> None:
        raise ValueError("no such kernel")

    native.set_interpreter(fail)
    with pytest.raises(Exception, match="ValueError: no such kernel"):
        run(s, inputs)
    native.set_interpreter(None)
    with pytest.raises(Exception, match="no function to call"):
        run(s, inputs)


def test_plans_are_remembered(catalog_path: Path) -> None:
    inputs = [random([23, 31], 1), random([31, 41], 2)]
    s = session(node_model("MatMul", inputs), options(catalog_path))
    before = native.stats()
    for _ in range(5):
        run(s, inputs)
    after = native.stats()
    assert after.plan_misses - before.plan_misses <= 1
    assert after.plan_hits - before.plan_hits == 4


def test_more_shapes_than_the_memory_holds(catalog_path: Path) -> None:
    b = random([4, 3], 2)
    s = session(node_model("MatMul", [b, b]), options(catalog_path))
    for m in [*range(1, 400), *range(1, 400)]:
        a = random([m, 4], m)
        np.testing.assert_allclose(run(s, [a, b]), a @ b, rtol=1e-4, atol=1e-5)


def test_threads_share_one_session(catalog_path: Path) -> None:
    b = random([16, 8], 2)
    s = session(node_model("MatMul", [b, b]), options(catalog_path))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(100):
                a = random([1 + (seed * 31 + i * 7) % 50, 16], i)
                np.testing.assert_allclose(run(s, [a, b]), a @ b, rtol=1e-4, atol=1e-4)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
