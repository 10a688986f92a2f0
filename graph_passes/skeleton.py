"""A model without its weights: what type inference and onnx_ir work on.

A copy of the model in which every large tensor has lost its payload and kept name, dtype and dims.
So shape inference works on models of any size, of external data only small tensors are read, and no
weight is held twice. Nothing of a skeleton is ever written back but what a rule changed on a node,
hence it may drop what onnx_ir 1.1 cannot represent: map types, sparse tensors, training info.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator

import onnx

from . import stand_ins
from .domain import is_standard
from .payload import UnreadableError, copy_message, is_external

logger = logging.getLogger(__name__)

KEPT_ELEMENTS = 1024
"""Tensors up to this size stay: shape inference reads operands of Reshape and the like."""


ExternalData = Callable[[onnx.TensorProto], bytes]
"""Reads the payload of a tensor from another file; raises UnreadableError."""


def skeleton(model: onnx.ModelProto, external_data: ExternalData | None = None) -> onnx.ModelProto:
    """The model as described above; `model` itself is not changed.

    Args:
        model: The model.
        external_data: Where small tensors get their payload if it is in another file; without it,
            and where the file cannot be read, they lose it like large ones.
    """
    result = onnx.ModelProto()

    def copy(source: onnx.TensorProto, target: onnx.TensorProto) -> None:
        _copy_without_payload(source, target, external_data)

    copy_message(model, result, copy)
    result.ClearField("training_info")
    own = {f.name for f in model.functions if f.domain == stand_ins.CONTRIB}
    for graph in _graphs(result):
        _densify(graph)
        for info in (*graph.input, *graph.output, *graph.value_info):
            _simplify(info)
        recorded = (*graph.output, *graph.value_info)
        for info in recorded if graph is result.graph else (*graph.input, *recorded):
            _forget_names(info)
        _simplify_nodes(graph.node, own)
    _unify_standard_domain(result.opset_import)
    _unify_standard_domain(result.functions)
    for function in result.functions:
        _unify_standard_domain(function.opset_import)
        for info in function.value_info:
            _simplify(info)
            _forget_names(info)
        _simplify_nodes(function.node, own)
    bodies = (*(graph.node for graph in _graphs(result)), *(f.node for f in result.functions))
    if any(node.domain == stand_ins.DOMAIN for nodes in bodies for node in nodes):
        stand_ins.define(result)
    return result


def _copy_without_payload(
    source: onnx.TensorProto, target: onnx.TensorProto, external_data: ExternalData | None
) -> None:
    if keeps_payload(source):
        target.CopyFrom(source)
        return
    if external_data is not None and _is_small(source) and is_external(source):
        try:
            target.raw_data = external_data(source)
        except UnreadableError as error:
            logger.info("shape inference goes without a constant: %s", error)
        else:
            target.name, target.data_type = source.name, source.data_type
            target.dims.extend(source.dims)
            return
    _make_placeholder(target, source.name, source.data_type, source.dims)


def keeps_payload(tensor: onnx.TensorProto) -> bool:
    """Whether the skeleton has the tensor's data, so that what follows may depend on it."""
    return tensor.data_type == onnx.TensorProto.STRING or (
        not is_external(tensor) and _is_small(tensor)
    )


def _is_small(tensor: onnx.TensorProto) -> bool:
    return bool(math.prod(tensor.dims) <= KEPT_ELEMENTS)


def _make_placeholder(
    target: onnx.TensorProto, name: str, data_type: int, dims: Iterable[int]
) -> None:
    target.name = name
    target.data_type = data_type
    target.dims.extend(dims)
    target.data_location = onnx.TensorProto.EXTERNAL
    target.external_data.add(key="location", value="omitted")


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs among a node's attributes, each with the name of its attribute."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    pending = [model.graph]
    for function in model.functions:
        pending.extend(graph for node in function.node for _, graph in subgraphs(node))
    while pending:
        graph = pending.pop()
        yield graph
        pending.extend(inner for node in graph.node for _, inner in subgraphs(node))


def _densify(graph: onnx.GraphProto) -> None:
    """Sparse initializers are dense tensors to every operator that reads them."""
    for sparse in graph.sparse_initializer:
        values = sparse.values
        _make_placeholder(graph.initializer.add(), values.name, values.data_type, sparse.dims)
    graph.ClearField("sparse_initializer")


def _simplify(info: onnx.ValueInfoProto) -> None:
    """Drops types that onnx_ir refuses, and sizes that exporters write for "unknown"."""
    if not _representable(info.type):
        info.ClearField("type")
    elif info.type.HasField("tensor_type"):
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.HasField("dim_value") and dimension.dim_value <= 0:
                dimension.ClearField("dim_value")
            if not size_name(dimension):
                dimension.ClearField("dim_param")


def size_name(dimension: onnx.TensorShapeProto.Dimension) -> str:
    """The name of a dimension that stands for one size; empty if it has none.

    Names without a letter or digit, such as "" and "?", are what tools write for "unknown", on any
    number of dimensions that differ.
    """
    name = dimension.dim_param
    return name if any(map(str.isalnum, name)) else ""


def _forget_names(info: onnx.ValueInfoProto) -> None:
    """Drops the names of dimensions, which exporters record wrongly.

    Shape inference finds them anew from the inputs of the model, and gives names of its own to what
    it does not know, so that equal names prove equal sizes.
    """
    if info.type.HasField("tensor_type"):
        for dimension in info.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                dimension.ClearField("dim_param")


def _representable(type_: onnx.TypeProto) -> bool:
    kind = type_.WhichOneof("value")
    if kind == "sequence_type":
        return _representable(type_.sequence_type.elem_type)
    if kind == "optional_type":
        return _representable(type_.optional_type.elem_type)
    return kind in ("tensor_type", "sparse_tensor_type")


def _simplify_nodes(nodes: Iterable[onnx.NodeProto], own: Collection[str]) -> None:
    """Drops attributes that onnx_ir refuses, and replaces operators that inference does not know.

    `own`: operators of ONNX Runtime's domain that the model defines itself.
    """
    _unify_standard_domain(nodes)
    for node in nodes:
        stand_ins.replace(node, own)
        kept = [attribute for attribute in node.attribute if _supported(attribute)]
        if len(kept) != len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)


def _unify_standard_domain(
    messages: Iterable[onnx.NodeProto | onnx.FunctionProto | onnx.OperatorSetIdProto],
) -> None:
    """Shape inference knows ai.onnx by its other name alone, the empty one."""
    for message in messages:
        if message.domain and is_standard(message.domain):
            message.domain = ""


def _supported(attribute: onnx.AttributeProto) -> bool:
    kind = attribute.type
    if kind in (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS):
        return False
    if kind == onnx.AttributeProto.TYPE_PROTO:
        return attribute.HasField("ref_attr_name") or _representable(attribute.tp)
    if kind == onnx.AttributeProto.TYPE_PROTOS:
        return all(map(_representable, attribute.type_protos))
    if kind == onnx.AttributeProto.STRINGS:
        return all(map(_is_utf8, attribute.strings))
    return True


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
