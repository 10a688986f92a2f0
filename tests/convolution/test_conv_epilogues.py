"""Convolutions with an activation and a residual, in sessions of the interpreter backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from moonpoly_ort.custom_ops.kernels import compiling, pack_format
from onnx import TensorProto, helper

from moonpoly_ort import interpreter, native
from tests.epilogues import AFTER_CONVOLUTIONS, AFTER_TRANSPOSED, finished

Array = np.ndarray[Any, Any]
After = tuple[str, native.Activation, native.Residual]

# shapes of X and W, attributes: gathered, one for each path
CASES: list[tuple[list[int], list[int], dict[str, Any]]] = [
    ([2, 5, 6, 7], [4, 5, 3, 3], {"pads": [1, 1, 1, 1]}),
    ([1, 6, 6, 7], [4, 3, 3, 3], {"group": 2, "strides": [2, 1]}),
    ([2, 8, 5, 5], [12, 8, 1, 1], {}),  # a product
    ([3, 8, 1, 1], [12, 8, 1, 1], {}),  # whose rows are images
    ([1, 8, 5, 5], [1, 8, 1, 1], {}),  # of one row
    ([2, 6, 5, 6], [6, 1, 3, 3], {"group": 6}),  # depthwise
    ([1, 40, 3, 3], [4, 40, 3, 3], {"pads": [1, 1, 1, 1]}),
]
TRANSPOSED: list[tuple[list[int], list[int], dict[str, Any]]] = [
    ([2, 5, 4, 5], [5, 3, 2, 2], {"strides": [2, 2]}),
    ([1, 6, 4, 5], [6, 1, 3, 3], {"group": 6, "strides": [2, 1]}),
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    kernels = compiling.catalog_kernels(90)
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    interpreter.install(path)
    yield path
    native.set_interpreter(None)


def run(
    op: str,
    inputs: dict[str, Array],
    pack: Path | None,
    domain: str = "ai.moonpoly",
    **attributes: Any,
) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if pack is not None:
        for key, value in (("backend", "interpreter"), ("pack", str(pack)), ("precision", "ieee")):
            options.add_session_config_entry(f"moonpoly.{key}", value)
        options.register_custom_ops_library(str(native.library_path()))
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y"], domain=domain, **attributes)], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moonpoly", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, inputs)[0])


def check(
    pack: Path, op: str, after: After, case: tuple[list[int], list[int], dict[str, Any]], bias: bool
) -> None:
    x_shape, w_shape, attributes = case
    name, activation, residual = after
    rng = np.random.default_rng(len(name) + sum(w_shape))
    inputs = {
        "x": rng.standard_normal(x_shape).astype(np.float32),
        "w": rng.standard_normal(w_shape).astype(np.float32),
    }
    channels = w_shape[1] * attributes.get("group", 1) if op == "ConvTranspose" else w_shape[0]
    if bias:
        inputs["b"] = rng.standard_normal(channels).astype(np.float32)
    plain = run(op, inputs, None, "", **attributes).astype(np.float64)
    r = None
    if residual:
        r = inputs["r"] = rng.standard_normal(plain.shape).astype(np.float32)
    ours = op + ("" if bias else "NoBias") + name
    numbers = {"activation_alpha": -0.25, "activation_beta": 0.5}
    got = run(ours, inputs, pack, **attributes, **numbers)
    want = finished(plain, activation, residual, -0.25, 0.5, r)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", AFTER_CONVOLUTIONS, ids=lambda after: str(after[0] or "alone"))
def test_every_operator(pack: Path, after: After) -> None:
    case = CASES[len(after[0]) % len(CASES)]
    for bias in (False, True):
        check(pack, "Conv", after, case, bias)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("after", [AFTER_CONVOLUTIONS[i] for i in (1, 2, 13, 24, 34)], ids=str)
def test_every_path(
    pack: Path, after: After, case: tuple[list[int], list[int], dict[str, Any]]
) -> None:
    check(pack, "Conv", after, case, bias=True)


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
@pytest.mark.parametrize("after", AFTER_TRANSPOSED, ids=lambda after: str(after[0] or "alone"))
def test_transposed(
    pack: Path, after: After, case: tuple[list[int], list[int], dict[str, Any]]
) -> None:
    check(pack, "ConvTranspose", after, case, bias=len(after[0]) % 2 == 0)


def test_a_residual_of_another_shape_is_refused(pack: Path) -> None:
    inputs = {
        "x": np.ones((1, 2, 5, 5), np.float32), "w": np.ones((3, 2, 3, 3), np.float32),
        "r": np.ones((1, 3, 1, 1), np.float32),
    }  # fmt: skip
    with pytest.raises(
        Exception, match=r"\[1, 3, 1, 1\] must have the output's shape \[1, 3, 3, 3\]"
    ):
        run("ConvNoBiasAdd", inputs, pack)
