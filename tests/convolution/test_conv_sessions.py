"""Conv and ConvTranspose as custom ops inside ONNX Runtime on the CPU: the kernels in Triton's
interpreter, against ONNX Runtime's own and against float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from moonpoly_ort.custom_ops.kernels import compiling, pack_format
from onnx import TensorProto, helper

import moonpoly_ort
from moonpoly_ort import interpreter, native
from tests.convolution.conv_case import Array, ConvCase, exact
from tests.convolution.test_conv_kernels import cases
from tests.corpus.comparing import bound, relative_error

ELEMENT = {
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel list, in a file that no other checkout on this machine writes."""
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    kernels = compiling.catalog_kernels(90)
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return path


@pytest.fixture(autouse=True, scope="module")
def interpreted(pack: Path) -> Iterator[None]:
    interpreter.install(pack)
    yield
    native.set_interpreter(None)


def model_of(
    op: str, inputs: Sequence[Array | None], domain: str, constant_w: bool, **attributes: Any
) -> onnx.ModelProto:
    """One node, inputs of unknown shape. bf16, which Python does not feed, is cast in the model."""
    names = [name if x is not None else "" for name, x in zip("xwb", inputs, strict=False)]
    if domain and len(names) == 2:
        op += "NoBias"
    element = ELEMENT[inputs[0].dtype]  # type: ignore[union-attr]
    fed = TensorProto.FLOAT if element == TensorProto.BFLOAT16 else element
    initializers, casts = [], []
    for name in filter(None, names):
        if name == "w" and constant_w:
            w = inputs[1]
            assert w is not None
            initializers = [helper.make_tensor("w_", element, w.shape, w.tobytes(), raw=True)]
        else:
            casts.append(helper.make_node("Cast", [name], [f"{name}_"], to=element))
    node = helper.make_node(
        op, [name and f"{name}_" for name in names], ["y_"], domain=domain, name="node",
        **attributes,
    )  # fmt: skip
    graph = helper.make_graph(
        [*casts, node, helper.make_node("Cast", ["y_"], ["y"], to=fed)], "g",
        [
            helper.make_tensor_value_info(n, fed, None)
            for n in names
            if n and not (n == "w" and constant_w)
        ],
        [helper.make_tensor_value_info("y", fed, None)],
        initializers,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(
    op: str, inputs: Sequence[Array | None], pack: Path | None, *, constant_w: bool = False,
    precision: str = "ieee", **attributes: Any,
) -> Array:  # fmt: skip
    """By our op where `pack` is given, else by ONNX Runtime's own."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if pack is not None:
        for key, value in (
            ("backend", "interpreter"), ("pack", str(pack)), ("precision", precision),
        ):  # fmt: skip
            options.add_session_config_entry(f"moonpoly.{key}", value)
        options.register_custom_ops_library(str(native.library_path()))
    model = model_of(op, inputs, "ai.moonpoly" if pack else "", constant_w, **attributes)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = dict(zip("xwb", inputs, strict=False))
    return np.asarray(
        session.run(None, {i.name: _fed(feeds[i.name]) for i in session.get_inputs()})[0]
    )


def _fed(values: Array | None) -> Array:
    assert values is not None
    return values.astype(np.float32) if values.dtype == ml_dtypes.bfloat16 else values


def op_of(case: ConvCase) -> str:
    return "ConvTranspose" if case.transposed else "Conv"


@settings(max_examples=40)
@given(case=cases(most_taps=9))
def test_any_convolution_equals_onnx_runtimes_own(pack: Path, case: ConvCase) -> None:
    case = replace(case, dtype=native.Dtype.F32)
    inputs = case.operands()
    try:
        expected = run(op_of(case), inputs, None, **case.attributes)
    except Exception:
        assume(False)
    got = run(op_of(case), inputs, pack, constant_w=case.packed, **case.attributes)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [native.Dtype.F16, native.Dtype.BF16])
@pytest.mark.parametrize("constant_w", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ConvCase((7, 9), (3, 3), c=20, k=24, n=2, pads=(1, 1, 1, 1), bias=True),
        ConvCase((9, 9), (7, 7), c=3, k=8, strides=(2, 2), pads=(3, 3, 3, 3)),
        ConvCase((7, 9), (3, 3), k=2, groups=6, strides=(2, 1), pads=(1, 1, 0, 0), bias=True),
        ConvCase((5, 5), (2, 2), c=8, k=6, strides=(2, 2), transposed=True, bias=True),
        ConvCase((7, 9), (1, 1), c=20, k=24, n=2, bias=True),
        ConvCase((7, 9), (1, 1), c=64, k=72, n=2, bias=True),
        ConvCase((4, 8), (1, 1), c=24, k=24, n=2, bias=True),
        ConvCase((1, 1), (1, 1), c=20, k=24, n=3, bias=True),
        ConvCase((6,), (1,), c=4, k=5, n=2, groups=3),
        ConvCase((6,), (1,), c=4, k=5, n=2, groups=3, bias=True),
        ConvCase((6, 7), (1, 1), c=9, k=5, strides=(2, 2), bias=True),
    ],
    ids=[
        "3x3",
        "7x7",
        "depthwise",
        "transposed",
        "1x1",
        "1x1odd",
        "1x1even",
        "vector",
        "groups1",
        "groups1b",
        "1x1s2",
    ],
)
def test_half_precision_against_float64(
    pack: Path, case: ConvCase, constant_w: bool, dtype: native.Dtype
) -> None:
    case = replace(case, dtype=dtype)
    inputs = case.operands()
    got = run(op_of(case), inputs, pack, constant_w=constant_w, **case.attributes)
    want = exact(case, *inputs)
    assert relative_error(got, want) <= bound(inputs[0].dtype)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize(
    "case",
    [
        ConvCase((7, 9), (1, 1), c=20, k=24, n=2),
        ConvCase((7, 9), (1, 1), c=9, k=5, n=2),
        ConvCase((1, 1), (1, 1), c=20, k=24, n=3),
        ConvCase((1, 1), (1, 1), c=9, k=1, n=3),
        ConvCase((3, 4), (1, 1), c=9, k=1),
    ],
    ids=["even", "odd", "rows", "vector", "one"],
)
def test_a_constant_pointwise_weight_is_rounded_for_tf32_alone(
    pack: Path, case: ConvCase, precision: str
) -> None:
    """The interpreter cuts nothing off, so that the result tells which W was read. It scales X as
    kernels do for whom the tensor core will: the scale is free.
    """
    x, w, _ = replace(case, dtype=native.Dtype.F32).operands()
    assert w is not None
    rounded = ((w.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    got = run("Conv", [x, w, None], pack, constant_w=True, precision=precision, **case.attributes)
    off = {}
    for name, factor in (("tf32", rounded), ("ieee", w)):
        product = exact(case, x, factor, None)
        scale = np.vdot(got, product) / np.vdot(product, product)
        off[name] = relative_error(got, scale * product)
    assert off.pop(precision) < 1e-6 < 1e-5 < min(off.values())


AUTO = [
    ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("Conv", {"auto_pad": "VALID", "dilations": [2, 1]}),
    ("ConvTranspose", {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ("ConvTranspose", {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("ConvTranspose", {"auto_pad": "SAME_UPPER", "strides": [2, 3], "output_padding": [1, 2]}),
    ("ConvTranspose", {"auto_pad": "SAME_LOWER", "strides": [4, 5]}),
    ("ConvTranspose", {"auto_pad": "VALID", "strides": [2, 3]}),
    ("ConvTranspose", {"output_shape": [13, 20], "strides": [2, 3]}),
    ("ConvTranspose", {"output_shape": [12, 19], "strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", {"output_shape": [14, 21], "strides": [2, 3], "output_padding": [1, 2]}),
]


@pytest.mark.parametrize(("op", "attributes"), AUTO, ids=str)
def test_auto_pad_and_output_shape(pack: Path, op: str, attributes: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal((3, 3, *s), np.float32) for s in ((6, 7), (3, 2)))
    expected = run(op, [x, w], None, **attributes)
    for constant_w in (False, True):
        got = run(op, [x, w], pack, constant_w=constant_w, **attributes)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_no_images_and_no_pixels(pack: Path) -> None:
    w = np.ones((4, 3, 3, 3), np.float32)
    for shape, out in (((0, 3, 5, 6), (0, 4, 3, 4)), ((2, 3, 2, 6), (2, 4, 0, 4))):
        assert run("Conv", [np.ones(shape, np.float32), w], pack).shape == out


def test_an_empty_input_padded_gives_the_bias(pack: Path) -> None:
    w, b = np.ones((4, 3, 3), np.float32), np.arange(4, dtype=np.float32)
    got = run("Conv", [np.ones((2, 3, 0), np.float32), w, b], pack, pads=[2, 2])
    np.testing.assert_array_equal(got, np.broadcast_to(b[:, None], (2, 4, 2)))


def test_an_absent_bias_may_be_named(pack: Path) -> None:
    """As a trailing empty name, which exporters write."""
    x, w = np.ones((1, 2, 5), np.float32), np.ones((3, 2, 3), np.float32)
    np.testing.assert_array_equal(run("Conv", [x, w, None], pack), np.full((1, 3, 3), 6))


@pytest.mark.parametrize(
    ("x", "w", "b", "attributes", "message"),
    [
        ((1, 4, 5, 5), (4, 3, 3, 3), None, {}, "do not fit each other in 1 groups"),
        ((1, 3, 5), (4, 3, 3, 3), None, {}, "must have the same rank"),
        ((1, 3, 5, 5), (4, 3, 3, 3), (3,), {}, r"B \[3\] must be \[4\]"),
        ((1, 3, 2, 2), (4, 3, 5, 3), None, {}, "does not fit 2 pixels"),
    ],
)
def test_what_does_not_fit_fails_the_run(
    pack: Path, x: tuple[int, ...], w: tuple[int, ...], b: tuple[int, ...] | None,
    attributes: dict[str, Any], message: str,
) -> None:  # fmt: skip
    inputs = [None if s is None else np.ones(s, np.float32) for s in (x, w, b)]
    with pytest.raises(Exception, match=message):
        run("Conv", inputs, pack, **attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"auto_pad": "SAME"}, "node 'node': auto_pad is 'SAME'"),
        ({"group": 0}, "group is 0"),
        ({"strides": [1, 1, 1, 1]}, "strides has 4 values"),
    ],
)
def test_bad_attributes_fail_the_session(
    pack: Path, attributes: dict[str, Any], message: str
) -> None:
    x, w = np.ones((1, 3, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32)
    with pytest.raises(Exception, match=message):
        run("Conv", [x, w], pack, **attributes)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_rewritten_model_runs_with_the_kernels_that_the_pack_has(
    pack: Path, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias or not; where a pack has none for convolutions, ONNX Runtime inlines the nodes."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 3, 7, 9] x, float[4, 3, 3, 3] w, float[4, 5, 2, 2] v, float[5] b,
           float[16, 2] m) => (float[1, 5, 6, 2] y) {
          first = Conv<pads = [1, 1, 1, 1], strides = [3, 1]>(x, w)
          second = ConvTranspose<strides = [2, 2], pads = [0, 1, 0, 1]>(first, v, b)
          y = MatMul(second, m)
        }"""
    )
    rules = ["conv", "conv_transpose", "matmul"]
    found = moonpoly_ort.rewrite(model, rules=rules, static=True).model
    assert {n.op_type for n in found.graph.node} == {"ConvNoBias", "ConvTranspose", "MatMul"}
    calls = []
    run_conv_plan = interpreter.run_conv_plan

    def counted(specs: Any, conv: native.Conv, *rest: Any) -> None:
        calls.append((conv.transposed, conv.bias))
        run_conv_plan(specs, conv, *rest)

    monkeypatch.setattr(interpreter, "run_conv_plan", counted)
    if not has_kernels:
        pack = tmp_path / "sm_90.mpk"
        kernels = [k for k in compiling.catalog_kernels(90) if not k.spec.family.convolves]
        pack_format.write_pack(pack, 90, kernels, key="0" * 64, triton="none")
    rng = np.random.default_rng(0)
    feeds = {
        i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32)
        for i in model.graph.input
    }
    results = []
    for form, library in ((model, False), (found, True)):
        options = ort.SessionOptions()
        if library:
            for key, value in (
                ("backend", "interpreter"), ("pack", str(pack)), ("precision", "ieee"),
            ):  # fmt: skip
                options.add_session_config_entry(f"moonpoly.{key}", value)
            options.register_custom_ops_library(str(native.library_path()))
        session = ort.InferenceSession(
            form.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results.append(session.run(None, feeds)[0])
    assert calls == ([(0, 0), (1, 1)] if has_kernels else [])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_a_weight_serves_every_size(pack: Path) -> None:
    """One session, constant W, sizes and batches that change."""
    generator = np.random.default_rng(1)
    w = generator.standard_normal((8, 4, 3, 3)).astype(np.float32)
    first = generator.standard_normal((1, 4, 5, 5)).astype(np.float32)
    options = ort.SessionOptions()
    for key, value in (("backend", "interpreter"), ("pack", str(pack)), ("precision", "ieee")):
        options.add_session_config_entry(f"moonpoly.{key}", value)
    options.register_custom_ops_library(str(native.library_path()))
    model = model_of("Conv", [first, w], "ai.moonpoly", True, pads=[1, 1, 1, 1])
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for shape in ((1, 4, 5, 5), (2, 4, 3, 9), (0, 4, 3, 9), (1, 4, 1, 1)):
        x = generator.standard_normal(shape).astype(np.float32)
        case = ConvCase(shape[2:], (3, 3), c=4, k=8, n=shape[0], pads=(1, 1, 1, 1))
        (got,) = session.run(None, {"x": x})
        np.testing.assert_allclose(got, exact(case, x, w, None), rtol=1e-4, atol=1e-4)
