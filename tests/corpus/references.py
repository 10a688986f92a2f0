"""Outputs to compare with: those of the untouched model in ONNX Runtime, and those in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = NDArray[Any]

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
# Inputs that ONNX fixes to float32, whatever the type of the data.
_FLOAT32_INPUTS = {"Resize": (2,), "Upsample": (1,)}
# Attributes that hold an element type.
_TYPE_ATTRIBUTES = {"to", "dtype"}


def plain_session(
    model: ModelProto | Path, *, optimize: bool = False, threads: int = 1
) -> onnxruntime.InferenceSession:
    """ONNX Runtime's CPU provider, without this project's library.

    optimize: with ONNX Runtime's own graph optimizations. Off, and with one thread, the same
    kernels run on the same operands, so that equal models give equal bits.
    """
    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def outputs_of(session: Any, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a session (anything with ONNX Runtime's `get_outputs` and `run`); outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


class Float64Reference:
    """A model computed in float64 from the weights and inputs that it is given.

    ONNX Runtime's double kernels where it has them for the whole model, else ONNX's reference
    evaluator (slow). Rounding Casts between float types become no-ops, so the result is that of
    exact arithmetic on rounded weights. Raises ValueError if neither can run the model.
    """

    def __init__(self, model: ModelProto | Path) -> None:
        wide = widen(onnx.load(model) if isinstance(model, Path) else model)
        self._names = [output.name for output in wide.graph.output]
        self._runner: Any
        try:
            self._runner = plain_session(wide)
        except Exception as refusal:  # ONNX Runtime raises its own types, one per status code
            try:
                self._runner = ReferenceEvaluator(wide, new_ops=_CORRECTED)
            except Exception as second:
                raise ValueError(
                    "the model cannot be computed in float64: ONNX Runtime says "
                    f"{str(refusal)[:200]!r}, the reference evaluator {str(second)[:200]!r}"
                ) from second

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        wide = {name: _widened(array) for name, array in feed.items()}
        return dict(zip(self._names, self._runner.run(None, wide), strict=True))


class BatchNormalization(OpRun):
    """Inference only. ONNX's own evaluator takes every node below opset 14 for a training step."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array,
        mean: Array,
        variance: Array,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        training_mode: int = 0,
    ) -> tuple[Array]:
        if training_mode:
            raise NotImplementedError("BatchNormalization in training mode")
        per_channel = (-1,) + (1,) * (x.ndim - 2)
        factor = scale / np.sqrt(variance + epsilon)
        return (
            (x - mean.reshape(per_channel)) * factor.reshape(per_channel)
            + bias.reshape(per_channel),
        )


class GatherElements(OpRun):
    """ONNX's own evaluator gives up on an axis of more than 64 elements."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        return (np.take_along_axis(data, indices, axis),)


_CORRECTED = [BatchNormalization, GatherElements]


def widen(model: ModelProto) -> ModelProto:
    """A copy of the model with every float tensor, input, output and Cast turned to float64."""
    wide = ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        del function.value_info[:]
        _widen_nodes(function.node)
    return wide


def _widened(array: Array) -> Array:
    narrow = onnx.helper.np_dtype_to_tensor_dtype(array.dtype) in _FLOATS
    return array.astype(np.float64) if narrow else array


def _widen_graph(graph: GraphProto) -> None:
    del graph.value_info[:]  # recorded types of intermediate tensors no longer hold
    for value in (*graph.input, *graph.output):
        _widen_type(value.type)
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Any) -> None:
    result: list[NodeProto] = []
    for node in nodes:
        for attribute in node.attribute:
            _widen_attribute(attribute)
        result += _narrowing_casts(node)
        result.append(node)
    copies = [NodeProto.FromString(node.SerializeToString()) for node in result]
    del nodes[:]
    nodes.extend(copies)


def _narrowing_casts(node: NodeProto) -> Iterable[NodeProto]:
    for index in _FLOAT32_INPUTS.get(node.op_type, ()):
        if index < len(node.input) and node.input[index]:
            name = f"{node.output[0]}/narrow{index}"
            yield onnx.helper.make_node("Cast", [node.input[index]], [name], to=TensorProto.FLOAT)
            node.input[index] = name


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _widen_graph(attribute.g)
    elif attribute.type == AttributeProto.GRAPHS:
        for graph in attribute.graphs:
            _widen_graph(graph)
    elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
        attribute.i = TensorProto.DOUBLE
    elif attribute.name in ("value_float", "value_floats"):  # of Constant
        values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        tensor = onnx.numpy_helper.from_array(np.array(values, np.float64))
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _widen_type(value: TypeProto) -> None:
    kind = value.WhichOneof("value")
    if kind == "tensor_type" and value.tensor_type.elem_type in _FLOATS:
        value.tensor_type.elem_type = TensorProto.DOUBLE
    elif kind == "sequence_type":
        _widen_type(value.sequence_type.elem_type)
    elif kind == "optional_type":
        _widen_type(value.optional_type.elem_type)
