"""The input shapes of chosen nodes when a model runs at given sizes.

Shape inference with all sizes put in answers most of it. What it leaves open (data-dependent
shapes, ops of other domains) is read off one run in ONNX Runtime's CPU provider with its profiler
on, which records the shapes of every node, those in subgraphs included.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, inliner

from . import dependencies
from .errors import InputError
from .graph_passes.skeleton import skeleton

Shape = tuple[int, ...]
# What a user gives: a size for a symbolic dimension, or a shape or the very values for an input.
Sizes = Mapping[str, "int | Sequence[int] | np.ndarray[Any, Any]"]

_LARGEST = 2**63 - 1  # that a dimension of a model can hold
_FLOAT = onnx.TensorProto.FLOAT
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_MARK = re.compile(r"moonpoly_node_(\d+)_end")


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes of a graph or function and of all its subgraphs, in order."""
    for node in nodes:
        yield node
        for subgraph in _subgraphs(node):
            yield from all_nodes(subgraph.node)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def mark(node: NodeProto, index: int) -> None:
    """Names a node so that it is found again after inlining, which only adds to names."""
    node.name = f"moonpoly_node_{index}_end"


def _marked(name: str) -> int | None:
    found = _MARK.search(name)
    return int(found[1]) if found else None


def feeds(model: ModelProto, sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the given sizes: seeded standard normal floats, zeros for integers, True for
    booleans.

    Raises `InputError` where a size is missing, unknown or does not fit.
    """
    generator = np.random.default_rng(seed)
    values: dict[str, np.ndarray[Any, Any]] = {}
    shapes = input_shapes(model, sizes)
    for info in _inputs(model):
        given = sizes.get(info.name)
        if isinstance(given, np.ndarray):
            values[info.name] = given
            continue
        if info.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            values[info.name] = np.full(shapes[info.name], "", dtype=object)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        floating = dtype.kind == "f" or dtype.name == "bfloat16"
        shape = shapes[info.name]
        try:
            array = generator.standard_normal(shape) if floating else np.zeros(shape)
        except (MemoryError, ValueError) as error:  # numpy's own limit is a ValueError
            raise InputError(
                f"input {info.name!r} of shape {list(shape)} does not fit into memory; "
                "give smaller sizes"
            ) from error
        values[info.name] = (array if dtype != np.bool_ else array == 0).astype(dtype)
    return values


def input_shapes(model: ModelProto, sizes: Sizes) -> dict[str, Shape]:
    """The concrete shape of every graph input. Raises `InputError`, which names what is missing."""
    inputs = _inputs(model)
    names = {info.name for info in inputs}
    symbols = {
        dim.dim_param for info in inputs for dim in info.type.tensor_type.shape.dim if dim.dim_param
    }
    if unknown := sorted(sizes.keys() - names - symbols):
        raise InputError(
            f"the model has no input and no symbolic dimension named {unknown[0]!r}. "
            f"Inputs: {', '.join(sorted(names)) or 'none'}; dimensions: "
            f"{', '.join(sorted(symbols)) or 'none'}."
        )
    for name, size in sizes.items():
        numbers = size if isinstance(size, list | tuple) else [size]
        if too_large := [n for n in numbers if isinstance(n, int) and n > _LARGEST]:
            raise InputError(f"size {too_large[0]} for {name!r} is not below 2^63")
    # A lone number for an input is the shape of a vector.
    given = {k: [v] if k in names - symbols and isinstance(v, int) else v for k, v in sizes.items()}
    return {info.name: _input_shape(info, given) for info in inputs}


def _input_shape(info: ValueInfoProto, sizes: Sizes) -> Shape:
    if not info.type.HasField("tensor_type"):
        raise InputError(f"the input {info.name!r} is no tensor; only tensors can be made up here")
    tensor = info.type.tensor_type
    declared = list(tensor.shape.dim) if tensor.HasField("shape") else None
    given = sizes.get(info.name)
    if given is not None and not isinstance(given, int):
        shape = (
            tuple(given.shape)
            if isinstance(given, np.ndarray)
            else tuple(int(size) for size in given)
        )
        if declared is not None and len(shape) != len(declared):
            raise InputError(
                f"input {info.name!r} has rank {len(declared)}, and {list(shape)} was given"
            )
        for i, dim in enumerate(declared or ()):
            if dim.HasField("dim_value") and dim.dim_value >= 0 and dim.dim_value != shape[i]:
                fixed = f"dimension {i} of input {info.name!r} is {dim.dim_value}"
                raise InputError(f"{fixed}, and {list(shape)} was given")
            named = sizes.get(dim.dim_param)
            if isinstance(named, int) and named != shape[i]:
                raise InputError(
                    f"{dim.dim_param!r} is given as {named}, and the shape {list(shape)} of input "
                    f"{info.name!r} has {shape[i]} there; give one of the two"
                )
        return shape
    if declared is None:
        raise InputError(f"input {info.name!r} has no rank in the model: give its whole shape")
    shape = ()
    for i, dim in enumerate(declared):
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0  # some exporters write -1
        size: Any = dim.dim_value if fixed else sizes.get(dim.dim_param)
        if size is None:
            name, how = repr(dim.dim_param), "a size for it or "
            if not dim.dim_param:
                name, how = str(i), ""
            raise InputError(
                f"dimension {name} of input {info.name!r} has no size: "
                f"give {how}the input's whole shape"
            )
        if not isinstance(size, int) or size < 0:
            raise InputError(f"size {size!r} for {dim.dim_param!r} is not a number of 0 or more")
        shape += (size,)
    return shape


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Graph inputs that a caller feeds; old models list their initializers as inputs too."""
    initialized = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in initialized]


@dataclass(frozen=True)
class _Value:
    """What inference knows of a value: ONNX element type (0: unknown), shape, whether it is a
    constant.
    """

    element: int = 0
    shape: Shape | None = None
    constant: bool = False


@dataclass
class NodeShapes:
    """Shapes of the inputs of marked nodes, by mark; a missing optional input has shape None. All
    inputs of such a node are of one element type.
    """

    found: dict[int, Counter[tuple[Shape | None, ...]]] = field(
        default_factory=dict
    )  # and how often
    elements: dict[int, int] = field(default_factory=dict)  # ONNX element type; 0: unknown
    why: dict[int, str] = field(default_factory=dict)  # the reason for those that stay unknown
    operands: dict[int, list[_Value | None]] = field(default_factory=dict)


def node_shapes(model: ModelProto, sizes: Sizes, folder: Path | None = None) -> NodeShapes:
    """Input shapes of every marked node of standard ops, and how often the node runs with them.

    `folder` holds the external data. The model is not changed. Raises `InputError` for sizes that
    do not fit the model.
    """
    shapes = input_shapes(model, sizes)
    flat = _flat(skeleton(model), shapes)  # inference copies a model more than once
    result = NodeShapes()
    try:
        inferred = onnx.shape_inference.infer_shapes(flat, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError):
        inferred = flat  # nothing is known then, and the run below gives the shapes
    _read_inference(inferred.graph, {}, result)
    if result.why:
        _read_run(_flat(model, shapes), feeds(model, sizes), folder, result)
    return result


def _flat(model: ModelProto, shapes: Mapping[str, Shape]) -> ModelProto:
    """A copy with inputs of these shapes and without functions."""
    flat = ModelProto()
    flat.CopyFrom(model)
    if flat.functions:
        flat = inliner.inline_local_functions(flat)
    for info in flat.graph.input:
        if info.name in shapes:
            info.type.tensor_type.shape.CopyFrom(
                onnx.TensorShapeProto(
                    dim=[onnx.TensorShapeProto.Dimension(dim_value=n) for n in shapes[info.name]]
                )
            )
    for graph in _graphs(flat.graph):
        del graph.value_info[:]  # symbolic names of the export, useless or wrong at these sizes
    return flat


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for subgraph in _subgraphs(node):
            yield from _graphs(subgraph)


def _read_inference(graph: GraphProto, outer: dict[str, _Value], result: NodeShapes) -> None:
    """What shape inference knows of the marked nodes; those not fully known enter `why`."""
    scope = dict(outer)
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
        known = tensor.HasField("shape") and min(dims, default=0) >= 0
        scope[info.name] = _Value(tensor.elem_type, dims if known else None)
    for tensor in graph.initializer:
        scope[tensor.name] = _Value(tensor.data_type, tuple(tensor.dims), constant=True)
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            scope[node.output[0]] = replace(scope.get(node.output[0], _Value()), constant=True)
        for subgraph in _subgraphs(node):
            _read_inference(subgraph, scope, result)
        index = _marked(node.name)
        if index is None:
            continue
        operands = [scope.get(name, _Value()) if name else None for name in node.input]
        result.operands[index] = operands
        result.elements[index] = next((v.element for v in operands if v and v.element), 0)
        if all(value is None or value.shape is not None for value in operands):
            shapes = tuple(value.shape if value else None for value in operands)
            result.found.setdefault(index, Counter())[shapes] += 1
        else:
            result.why[index] = (
                "shape inference leaves its shapes open, and it did not run at these sizes"
            )


def _read_run(
    flat: ModelProto,
    values: dict[str, np.ndarray[Any, Any]],
    folder: Path | None,
    result: NodeShapes,
) -> None:
    """Runs the model once and reads the shapes of the nodes in `result.why` off the profile."""
    ort = dependencies.load("onnxruntime", "finding shapes that depend on values")
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as scratch:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        # Packed weights are gone when the profiler looks for the shapes of a node's inputs.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch) / "run")
        if folder is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(folder)
            )
        try:
            session = ort.InferenceSession(
                flat.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            session.run(None, values)
            events = json.loads(Path(session.end_profiling()).read_text())
        except Exception as error:  # onnxruntime has no common base for its errors
            why = f"its shapes depend on values, and the model does not run here: {error}"
            result.why = dict.fromkeys(result.why, why)
            return
    # The CPU provider computes nodes of 16-bit types in fp32, and the profiler says so of them.
    given = (info.type.tensor_type.elem_type for info in flat.graph.input)
    only_fp32 = not {*given, *(t.data_type for t in flat.graph.initializer)}.intersection(_HALVES)
    ran: dict[int, Counter[tuple[Shape | None, ...]]] = {}
    for event in events:
        index = _marked(event["name"])
        if index is None or index not in result.why or not event["name"].endswith("_kernel_time"):
            continue
        entries = event["args"]["input_type_shape"]  # [{"float": [1, 37, 768]}, ...]
        recorded = [tuple(shape) for entry in entries for shape in entry.values()]
        shapes = _complete(result.operands[index], recorded)
        if shapes is None:
            result.why[index] = (
                f"the shapes {recorded} that its run recorded are not all its inputs"
            )
            continue
        ran.setdefault(index, Counter())[shapes] += 1
        if only_fp32 and not result.elements[index] and "float" in entries[0]:
            result.elements[index] = _FLOAT
    for index, counts in ran.items():
        result.found[index] = counts
        del result.why[index]


def _complete(
    operands: list[_Value | None], recorded: list[Shape]
) -> tuple[Shape | None, ...] | None:
    """Recorded shapes in the places of the inputs. The profiler leaves constants out, unless it
    sees them through a Cast; inference knows the shapes of those."""
    places = [i for i, value in enumerate(operands) if value]
    if len(recorded) != len(places):
        places = [i for i, value in enumerate(operands) if value and not value.constant]
    if len(recorded) != len(places):
        return None
    shapes = [value.shape if value else None for value in operands]
    for place, shape in zip(places, recorded, strict=True):
        shapes[place] = shape
    unknown = any(value and shape is None for shape, value in zip(shapes, operands, strict=True))
    return None if unknown else tuple(shapes)
