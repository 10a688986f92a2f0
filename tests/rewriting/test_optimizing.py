"""`optimize=`: what is accepted, what is refused, and that files and sessions are served alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import moonpoly_ort
from moonpoly_ort import ArgumentError, MissingDependencyError, OptimizerError, optimizing

fusions = pytest.importorskip("onnxscript.rewriter.ort_fusions")

CPU = ["CPUExecutionProvider"]
ROWS = 4096  # the weight is larger than what a check of the graph keeps


def model(weights: str = "inside", folder: Path | None = None) -> onnx.ModelProto:
    """gelu(x W + b) as exporters decompose it, which becomes BiasGelu behind a product."""
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.standard_normal((ROWS, 8)).astype(np.float32) / ROWS**0.5,
        "b": rng.standard_normal(8).astype(np.float32),
        "sqrt2": np.array(2**0.5, np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "product"),
        helper.make_node("Add", ["p", "b"], ["a"]),
        helper.make_node("Div", ["a", "sqrt2"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["f"]),
        helper.make_node("Mul", ["a", "f"], ["g"]),
        helper.make_node("Mul", ["half", "g"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 8])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if weights == "outside":
        assert folder is not None
        onnx.save(
            proto, folder / "m.onnx", save_as_external_data=True, location="m.bin",
            size_threshold=64,
        )  # fmt: skip
    return proto


PARTS = ["MatMul", "Add", "Div", "Erf", "Add", "Mul", "Mul"]
"""The operators of `model`, all of which become one without an optimizer too."""

X = np.random.default_rng(1).standard_normal((2, 3, ROWS)).astype(np.float32)


def wanted() -> np.ndarray:
    session = onnxruntime.InferenceSession(model().SerializeToString(), providers=CPU)
    return np.asarray(session.run(None, {"x": X})[0])


def require_fused(session: Any) -> None:
    np.testing.assert_allclose(session.run(None, {"x": X})[0], wanted(), rtol=1e-5, atol=1e-6)
    taken = [entry.op_type for entry in session.moonpoly_report if entry.taken]
    assert taken == ["MatMul", "BiasGelu", "Gelu"]  # the optimizer's node for both that follow


@pytest.mark.parametrize("how", ["onnxscript", "ort:bert", "auto"])
def test_bytes_and_files_with_their_weights_inside_and_outside(how: str, tmp_path: Path) -> None:
    inside = model().SerializeToString()
    require_fused(moonpoly_ort.InferenceSession(inside, providers=CPU, optimize=how))
    model("outside", tmp_path)
    path = tmp_path / "m.onnx"
    require_fused(moonpoly_ort.InferenceSession(path, providers=CPU, optimize=how))
    (tmp_path / "out").mkdir()
    result = moonpoly_ort.rewrite(path, tmp_path / "out" / "r.onnx", optimize=how)
    assert [node.op_type for node in result.model.graph.node] == ["MatMulBiasGelu"]
    written = onnxruntime.InferenceSession(tmp_path / "out" / "r.onnx", providers=CPU)
    np.testing.assert_allclose(written.run(None, {"x": X})[0], wanted(), rtol=1e-5, atol=1e-6)


REFUSED = [
    "",
    "ORT",
    "ort:",
    "ort:bert:2",
    "onnxscript:bert",
    "mha",
    "auto-packed",
    "onnxscript-",
    3,
]


@pytest.mark.parametrize("how", REFUSED)
def test_other_values_are_refused(how: Any) -> None:
    for use in (
        lambda: moonpoly_ort.rewrite(model(), optimize=how),
        lambda: moonpoly_ort.InferenceSession(
            model().SerializeToString(), providers=CPU, optimize=how
        ),
    ):
        with pytest.raises(ArgumentError, match="accepted: None, 'auto', 'onnxscript'"):
            use()


def test_it_belongs_to_the_rewrite() -> None:
    with pytest.raises(ArgumentError, match="rewrite=False"):
        moonpoly_ort.InferenceSession(
            model().SerializeToString(), providers=CPU, rewrite=False, optimize="auto"
        )


def test_a_model_type_must_be_known() -> None:
    with pytest.raises(ArgumentError, match=r"metadata name none.*Say 'ort:TYPE' with.* bert"):
        moonpoly_ort.rewrite(model(), optimize="ort")
    with pytest.raises(ArgumentError, match=r"Say 'ort-mha:TYPE' with"):
        moonpoly_ort.rewrite(model(), optimize="ort-mha")
    with pytest.raises(ArgumentError, match="does not know the model type 'perceiver'"):
        moonpoly_ort.rewrite(model(), optimize="ort:perceiver")


def test_a_rewritten_model_is_refused() -> None:
    rewritten = moonpoly_ort.rewrite(model()).model
    with pytest.raises(OptimizerError, match="that it was rewritten from"):
        moonpoly_ort.rewrite(rewritten, optimize="onnxscript")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = optimizing.dependencies.load

    def without(package: str, purpose: str) -> Any:
        return load("no_such_package" if package.startswith("onnxscript") else package, purpose)

    monkeypatch.setattr(optimizing.dependencies, "load", without)
    with pytest.raises(MissingDependencyError, match="optimize='onnxscript' needs"):
        moonpoly_ort.rewrite(model(), optimize="onnxscript")


def _renamed(ir_model: Any) -> None:
    ir_model.graph.outputs[0].name = "other"


def _resized(ir_model: Any) -> None:
    ir_model.graph.inputs[0].shape = onnx_ir.Shape(["batch", "seq", ROWS])


def _invalid(ir_model: Any) -> None:
    ir_model.graph[0].op_type = "Gemm"  # of a factor of rank 3


def _invalid_as_written(ir_model: Any) -> None:
    """As onnxscript 0.7.2 leaves a GPT-2: a value of rank 3 keeps the rank 2 it had before."""
    product = ir_model.graph[0]
    same = onnx_ir.node("Identity", [product.inputs[0]])
    same.outputs[0].name = "rows"
    same.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    same.outputs[0].shape = onnx_ir.Shape(["tokens", ROWS])
    ir_model.graph.insert_before(product, same)
    product.replace_input_with(0, same.outputs[0])
    product.op_type = "Gemm"


def _stumbles(ir_model: Any) -> None:
    raise IndexError("list index out of range")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_renamed, "changed the model's inputs or outputs"),
        (_resized, "changed the model's inputs or outputs"),
        (_invalid, "ONNX Runtime does not take what the optimizer made"),
        (_invalid_as_written, "ONNX Runtime does not take what the optimizer made"),
        (_stumbles, "failed with IndexError"),
    ],
)
def test_an_optimizer_that_breaks_the_model_is_refused(
    harm: Callable[[Any], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(ir_model: Any) -> Any:
        harm(ir_model)
        return ir_model, {}

    monkeypatch.setattr(fusions, "optimize_for_ort", broken)
    with pytest.raises(OptimizerError, match=said):
        moonpoly_ort.rewrite(model(), optimize="onnxscript")
    with caplog.at_level(logging.INFO, "moonpoly_ort"):
        result = moonpoly_ort.rewrite(model(), optimize="auto")  # goes on without it
    assert [entry.op_type for entry in result.taken] == PARTS
    assert "leaves out onnxscript" in caplog.text


def test_auto_says_that_it_changed_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plain = model()
    del plain.graph.node[1:]
    plain.graph.node[0].output[0] = "y"
    result = moonpoly_ort.rewrite(plain, optimize="auto")
    assert [node.op_type for node in result.model.graph.node] == ["MatMul"]
    assert "changed nothing. onnxscript-mha fuses nothing" in caplog.text
    assert "needs a model type" in caplog.text  # why the other one was left out


@pytest.mark.parametrize("how", ["onnxscript", "auto"])
def test_an_output_without_a_shape_stays_without(how: str) -> None:
    open_ended = model()
    open_ended.graph.output[0].type.tensor_type.ClearField("shape")
    result = moonpoly_ort.rewrite(open_ended, optimize=how)
    assert [node.op_type for node in result.model.graph.node] == ["MatMulBiasGelu"]
    assert result.model.graph.output == open_ended.graph.output


def test_sizes_that_are_inferred_of_an_output_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TorchScript's exporter makes up names where it knows no size; onnxscript finds the size."""
    named = model()
    dims = named.graph.output[0].type.tensor_type.shape.dim
    dims[1].dim_param, dims[2].dim_param = "Mul_dim_1", "Mul_dim_2"
    result = moonpoly_ort.rewrite(named, optimize="onnxscript")
    assert [node.op_type for node in result.model.graph.node] == ["MatMulBiasGelu"]
    assert result.model.graph.output == named.graph.output

    def fixed(ir_model: Any) -> Any:
        ir_model.graph.outputs[0].shape = onnx_ir.Shape([2, 3, 8])
        return ir_model, {}

    monkeypatch.setattr(fusions, "optimize_for_ort", fixed)
    with pytest.raises(OptimizerError, match=r'"batch".*to .*dim_value: 2'):  # the input has it
        moonpoly_ort.rewrite(named, optimize="onnxscript")


def test_an_output_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that was not declared excuses nothing else."""
    open_ended = model()
    open_ended.graph.output[0].type.tensor_type.ClearField("shape")

    def retyped(ir_model: Any) -> Any:
        ir_model.graph.outputs[0].dtype = onnx_ir.DataType.FLOAT16
        return ir_model, {}

    monkeypatch.setattr(fusions, "optimize_for_ort", retyped)
    with pytest.raises(OptimizerError, match=r"outputs from \[\('y'.*elem_type: 10"):
        moonpoly_ort.rewrite(open_ended, optimize="onnxscript")


def test_the_model_given_is_not_changed() -> None:
    given = model()
    before = given.SerializeToString()
    for how in ("onnxscript", "ort:bert"):
        moonpoly_ort.rewrite(given, optimize=how)
        assert given.SerializeToString() == before
