"""Types and shapes of every node, in graphs, subgraphs and functions.

A function has no types of its own, they come from its calls. So each function body is inferred once
for each signature that it is called with, as a graph whose inputs have the types of that call and
whose attribute references are bound to that call's attributes. A node of a function thus has as
many typed views as its function has signatures, and what must hold of it must hold of each view; a
node of the main graph or of a subgraph has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir
from google.protobuf.message import Message  # type: ignore[import-untyped]

from moonpoly_ort.errors import ModelError

from .domain import DOMAIN, is_standard
from .skeleton import ExternalData, size_name, skeleton, subgraphs

logger = logging.getLogger(__name__)

_ORIGIN = "moonpoly.origin"
"""In a skeleton node's metadata: the number of the node, in the order of `walk`."""

_RANDOM = frozenset(
    [
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ]
)

_TEXT = (str, bytes)

FunctionId = tuple[str, str, str]
CallGraph = Mapping[FunctionId, set[FunctionId]]


def walk(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.FunctionProto | None, onnx.NodeProto]]:
    """Every node with the path of its graph and the function that holds it, in a fixed order."""
    for where, node in _walk_nodes("graph", model.graph.node):
        yield where, None, node
    for function in model.functions:
        for where, node in _walk_nodes(f"function {label(function)}", function.node):
            yield where, function, node


def label(function: onnx.FunctionProto) -> str:
    """What reports call a function."""
    return ".".join(filter(None, (function.domain, function.name, function.overload)))


def _walk_nodes(
    where: str, nodes: Iterable[onnx.NodeProto]
) -> Iterator[tuple[str, onnx.NodeProto]]:
    for index, node in enumerate(nodes):
        yield where, node
        for attribute, graph in subgraphs(node):
            label = node.name or f"#{index}"
            yield from _walk_nodes(f"{where}/{node.op_type}[{label}].{attribute}", graph.node)


@dataclasses.dataclass(frozen=True)
class TypedViews:
    """The typed views of all nodes.

    Attributes:
        by_number: Those of each node, by its number in the order of `walk`. A node of a function
            that is never called has none.
        by_graph: The same for each graph that was inferred, the main one and one for each signature
            of a function, with those of subgraphs; producers come first.
    """

    by_number: Mapping[int, list[ir.Node]]
    by_graph: Sequence[Sequence[ir.Node]]


def typed_views(model: onnx.ModelProto, external_data: ExternalData | None = None) -> TypedViews:
    """Infers the types of all nodes. `external_data`: as for `skeleton`.

    Raises:
        ModelError: The graph is not valid ONNX: a tensor with two producers, a cycle, recursion,
            a name that is not UTF-8.
    """
    with _errors_of_the_graph():
        numbered = skeleton(model, external_data)
        _refuse_undecodable(numbered)
        for number, (_, _, node) in enumerate(walk(numbered)):
            node.metadata_props.add(key=_ORIGIN, value=str(number))
        calls = _calls_of_functions(numbered)
        _refuse_recursion(calls)
        ordered = _topologically_sorted(numbered)
        views = _Views(ordered, calls)
        views.visit(ordered)
        return TypedViews(views.by_origin, views.by_graph)


Values = Mapping[str, list[ir.Value]]
"""The typed values of one graph by name: one of each for each call of the function around it."""


def values_of_graphs(
    model: onnx.ModelProto, views: Mapping[int, list[ir.Node]]
) -> list[dict[str, list[ir.Value]]]:
    """What the nodes of each graph read and write; see `Values`.

    Args:
        model: The model.
        views: Those of each node, by its number.

    Returns:
        For the main graph and each function that is no operator of ours, graphs before those inside
        them: the order of `tree.forest`.
    """
    result: list[dict[str, list[ir.Value]]] = []
    numbers = itertools.count()

    def visit(nodes: Iterable[onnx.NodeProto], *, listed: bool = True) -> None:
        values: dict[str, list[ir.Value]] = {}
        if listed:
            result.append(values)
        for node in nodes:
            typed = views.get(next(numbers), [])
            for index, name in enumerate(node.input):
                _add(values, name, [view.inputs[index : index + 1] for view in typed])
            for index, name in enumerate(node.output):
                _add(values, name, [view.outputs[index : index + 1] for view in typed])
            for _, graph in subgraphs(node):
                visit(graph.node, listed=listed)

    visit(model.graph.node)
    for function in model.functions:
        visit(function.node, listed=function.domain != DOMAIN)
    return result


def _add(
    values: dict[str, list[ir.Value]], name: str, found: list[Sequence[ir.Value | None]]
) -> None:
    known = [value[0] for value in found if value and value[0] is not None]
    if name and known and len(known) == len(found):
        values.setdefault(name, known)


Recorded = Mapping[str, Sequence[str]]
"""Names that a model records for the dimensions of its values; empty for those without one."""


def recorded_names(
    model: onnx.ModelProto, graphs: Sequence[tuple[onnx.GraphProto, Values]]
) -> list[Recorded]:
    """Names of dimensions that the model itself records for intermediate values, if they are true.

    Exporters know sizes that shape inference cannot find, and other tools leave records behind that
    no longer hold. So records count only as long as none of them, in the whole model, contradicts
    what inference does know.

    Args:
        model: The model.
        graphs: The main graph and its subgraphs, with their values as inferred without the names.

    Returns:
        The names for each of the graphs, with those that inference found from the model's inputs;
        nothing for all of them after a contradiction.
    """
    known = {size_name(dim) for info in model.graph.input for dim in _dimensions(info)} - {""}
    result: list[Recorded] = []
    for graph, values in graphs:
        recorded = {
            info.name: [size_name(dimension) for dimension in _dimensions(info)]
            for info in (*graph.value_info, *graph.output)
        }
        names = {}
        for value, views in values.items():
            shape = views[0].shape
            if shape is None:
                continue
            inferred = [s.value or "" if isinstance(s, ir.SymbolicDim) else "" for s in shape]
            inferred = [name if name in known else "" for name in inferred]
            own = recorded.get(value, inferred)
            if len(own) != len(inferred):
                own = inferred  # of unknown rank, as the model records it
            for name, found in zip(own, inferred, strict=True):
                if name and found and found != name:
                    logger.info("records of shapes are not used: %s of %s", name, value)
                    return [{} for _ in graphs]
            names[value] = [a or b for a, b in zip(own, inferred, strict=True)]
        result.append(names)
    return result


def _dimensions(info: onnx.ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    dimensions: Sequence[onnx.TensorShapeProto.Dimension] = info.type.tensor_type.shape.dim
    return dimensions


@contextlib.contextmanager
def _errors_of_the_graph() -> Iterator[None]:
    """What onnx_ir and protobuf raise for invalid graphs, and for names that are not UTF-8."""
    try:
        yield
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # onnx_ir wraps once for each level of the graph
            cause = cause.__cause__
        raise ModelError(f"The model's graph is not valid ONNX: {cause}") from error


class _Views:
    """Collects the views: walks a typed graph and enters each function that it calls."""

    def __init__(self, model: onnx.ModelProto, calls: CallGraph) -> None:
        self.by_origin: dict[int, list[ir.Node]] = defaultdict(list)
        self.by_graph: list[list[ir.Node]] = []
        self._functions = {_function_id(function): function for function in model.functions}
        self._calls = calls
        self._seen: set[tuple[object, ...]] = set()

    def visit(self, model: onnx.ModelProto) -> None:
        nodes = list(ir.from_proto(_infer(model)).graph.all_nodes())
        self.by_graph.append(nodes)
        for node in nodes:
            origin = node.metadata_props.pop(_ORIGIN, None)
            if origin is not None:
                self.by_origin[int(origin)].append(node)
            function = self._functions.get((node.domain, node.op_type, node.overload))
            if function is not None:
                self._call(function, node)

    def _call(self, function: onnx.FunctionProto, call: ir.Node) -> None:
        declared = {*function.attribute, *(default.name for default in function.attribute_proto)}
        bound = {default.name: default for default in function.attribute_proto}
        for name, attribute in call.attributes.items():
            if name in declared and not attribute.is_ref():
                bound[name] = ir.to_proto(attribute)
        inputs = [
            None if value is None else _anonymous_type(value)
            for value in (*call.inputs, *[None] * (len(function.input) - len(call.inputs)))
        ]
        signature = (
            _function_id(function),
            tuple(None if type_ is None else type_.SerializeToString() for type_ in inputs),
            tuple((name, bound[name].SerializeToString()) for name in sorted(bound)),
        )
        if signature not in self._seen:
            self._seen.add(signature)
            self.visit(self._instance(function, inputs, bound))

    def _instance(
        self,
        function: onnx.FunctionProto,
        inputs: list[onnx.TypeProto | None],
        bound: Mapping[str, onnx.AttributeProto],
    ) -> onnx.ModelProto:
        """The function's body as a model of its own."""
        model = onnx.ModelProto(
            ir_version=onnx.IR_VERSION,
            opset_import=function.opset_import,
            functions=[self._functions[name] for name in self._callees(_function_id(function))],
        )
        graph = model.graph
        graph.name = function.name
        absent = set()
        for name, type_ in zip(function.input, inputs, strict=False):
            if type_ is None:
                absent.add(name)
            else:
                _name_sizes(graph.input.add(name=name, type=type_))
        graph.node.extend(function.node)
        graph.value_info.extend(
            info for info in function.value_info if info.name not in function.input
        )
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
        for node in graph.node:
            _bind(node, absent, bound)
        return model

    def _callees(self, caller: FunctionId) -> set[FunctionId]:
        """All functions that `caller` needs: a model with hundreds has few below each."""
        found: set[FunctionId] = set()
        pending = [*self._calls[caller]]
        while pending:
            callee = pending.pop()
            if callee not in found:
                found.add(callee)
                pending.extend(self._calls[callee])
        return found


def _bind(node: onnx.NodeProto, absent: set[str], bound: Mapping[str, onnx.AttributeProto]) -> None:
    """Replaces attribute references by the call's attributes and absent inputs by empty names."""
    attributes = []
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            attributes.append(attribute)
        elif attribute.ref_attr_name in bound:
            value = onnx.AttributeProto()
            value.CopyFrom(bound[attribute.ref_attr_name])
            value.name = attribute.name
            attributes.append(value)
    if any(attribute.ref_attr_name for attribute in node.attribute):
        del node.attribute[:]
        node.attribute.extend(attributes)
    for index, name in enumerate(node.input):
        if name in absent:
            node.input[index] = ""
    for _, graph in subgraphs(node):
        for inner in graph.node:
            _bind(inner, absent, bound)


def _anonymous_type(value: ir.Value) -> onnx.TypeProto:
    """The type without names of symbolic dimensions, so that equal signatures compare equal."""
    type_: onnx.TypeProto = ir.to_proto(value).type
    if type_.HasField("tensor_type"):
        for dimension in type_.tensor_type.shape.dim:
            dimension.ClearField("dim_param")
    return type_


def _name_sizes(info: onnx.ValueInfoProto) -> None:
    """Names what has none, so that sizes of the values behind it can be told by it."""
    if info.type.HasField("tensor_type"):
        for axis, dimension in enumerate(info.type.tensor_type.shape.dim):
            if not dimension.HasField("dim_value"):
                dimension.dim_param = f"{info.name}.{axis}"


def _topologically_sorted(model: onnx.ModelProto) -> onnx.ModelProto:
    """ONNX Runtime accepts nodes in any order, shape inference does not."""
    if all(map(_is_sorted, (model.graph, *model.functions))):
        return model  # as most are; to sort takes as long as all the rest
    sorted_model = ir.from_proto(model)
    sorted_model.graph.sort()
    for function in sorted_model.functions.values():
        function.sort()
    return ir.to_proto(sorted_model)


def _is_sorted(graph: onnx.GraphProto | onnx.FunctionProto) -> bool:
    """Whether each node, in subgraphs too, comes after those whose outputs it or they use.

    A subgraph that reuses a name of the graph around it, which ONNX forbids, may pass for unsorted.
    """
    pending = {output for node in graph.node for output in node.output if output}
    for node in graph.node:
        inner = [subgraph for _, subgraph in subgraphs(node)]
        if not pending.isdisjoint(_used(node)) or not all(map(_is_sorted, inner)):
            return False
        pending.difference_update(node.output)
    return True


def _used(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node and its subgraphs read."""
    yield from node.input
    for _, graph in subgraphs(node):
        yield from (output.name for output in graph.output)
        for inner in graph.node:
            yield from _used(inner)


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Shape inference as far as it gets; a model that it rejects keeps the types it declares."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError) as e:
        logger.info("shape inference of %s failed: %s", model.graph.name or "the model", e)
        return model


def _refuse_undecodable(message: Message) -> None:
    """Protobuf accepts any bytes as strings, and returns those that are not UTF-8 as bytes."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in (value,) if isinstance(value, Message) else value:
                _refuse_undecodable(item)
        elif field.type == field.TYPE_STRING:
            for text in (value,) if isinstance(value, _TEXT) else value:
                if isinstance(text, bytes):
                    text.decode()


def _calls_of_functions(model: onnx.ModelProto) -> CallGraph:
    calls: dict[FunctionId, set[FunctionId]] = {
        _function_id(function): set() for function in model.functions
    }
    for _, function, node in walk(model):
        callee = (node.domain, node.op_type, node.overload)
        if function is not None and callee in calls:
            calls[_function_id(function)].add(callee)
    return calls


def _refuse_recursion(calls: CallGraph) -> None:
    """Functions may not call themselves: inlining and inference would never end."""
    try:
        tuple(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        names = ", ".join(sorted({f"{domain}.{name}" for domain, name, _ in error.args[1]}))
        raise ModelError(
            f"Functions of the model call themselves, which ONNX forbids: {names}"
        ) from error


def _function_id(function: onnx.FunctionProto) -> FunctionId:
    domain = "" if is_standard(function.domain) else function.domain
    return domain, function.name, function.overload


def is_constant(value: ir.Value) -> bool:
    """Whether a value is computed from initializers and constants alone.

    An initializer that is also a graph input may be overridden, so it is not constant.
    """
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        producer = current.producer()
        if producer is None:
            if not current.is_initializer() or current.is_graph_input():
                return False
        elif not _is_foldable(producer):
            return False
        else:
            pending.extend(operand for operand in producer.inputs if operand is not None)
    return True


def _is_foldable(node: ir.Node) -> bool:
    """Whether the outputs follow from the inputs, and ai.onnx says how."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return (
        not node.domain
        and node.op_type not in _RANDOM
        and all(attribute.type not in graphs for attribute in node.attributes.values())
    )
