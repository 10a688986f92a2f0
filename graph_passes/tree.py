"""A graph or function with all its subgraphs, as rules see it that change more than one node.

Names mean the same everywhere in such a tree. It knows who reads each value, which constants every
place sees, and how a constant is added or goes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from .domain import DOMAIN, imported_version, is_standard
from .payload import is_external
from .skeleton import subgraphs
from .typed_graph import label

Array = NDArray[Any]
Body = onnx.GraphProto | onnx.FunctionProto

_MAIN = "graph"
"""Where the nodes of the main graph are."""

_NUMBERS = {"value_float": np.float32, "value_int": np.int64}


class Columns(NamedTuple):
    """Columns of a matrix, by name: all, or the part of this number of so many equal ones."""

    matrix: str
    part: int = 0
    parts: int = 1


class Initializers(Protocol):
    """Those of the main graph, by index, of which large ones may lack their payload; and the files
    that tensors of all graphs may have theirs in.
    """

    def complete(self, index: int) -> None:
        """Gives an initializer its payload."""

    def remove(self, indices: Collection[int]) -> None:
        """Deletes initializers."""

    def external_data(self, tensor: onnx.TensorProto) -> bytes:
        """The payload of a tensor, of any graph, that is in another file.

        Raises:
            UnreadableError: The file is not there, too short, or outside the model's folder.
        """

    def why_not_alternating(self, one: Columns, other: Columns) -> str:
        """Why columns cannot take turns in a new matrix; empty if they can."""

    def add_alternating(self, one: Columns, other: Columns, name: str) -> onnx.TensorProto:
        """Appends a matrix with columns of two in turn: `one` has the even ones."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A tensor: an initializer or, if `is_node`, in a Constant node.

    `index`: its place among the initializers of the main graph, where it is one of them.
    """

    tensor: onnx.TensorProto
    is_node: bool
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """A graph or function, and the constants that its nodes see."""

    body: Body
    where: str
    constants: dict[str, Constant]


class Tree:
    """A graph or function and its subgraphs.

    Attributes:
        opset: The version of ai.onnx that it imports; 0 if none.
        places: Its graphs, each before those inside it.
        readers: How often each name is read, by nodes or as an output of a graph.
        names: All names in use.
    """

    def __init__(
        self,
        root: Body,
        where: str,
        imports: Iterable[onnx.OperatorSetIdProto],
        initializers: Initializers,
    ) -> None:
        self.opset = imported_version(imports) or 0
        self._initializers = initializers
        self.places = list(self._walk(root, where, {}))
        self.readers = Counter(name for place in self.places for name in _read(place.body))
        self.names = set(self.readers)
        for place in self.places:
            self.names.update(name for node in place.body.node for name in node.output)
            self.names.update(place.constants)
            self.names.update(map(_name, place.body.input))

    def _walk(self, body: Body, where: str, outer: Mapping[str, Constant]) -> Iterator[Place]:
        constants = dict(outer)
        if isinstance(body, onnx.GraphProto):
            inputs = {value.name for value in body.input}
            main = where == _MAIN
            for index, tensor in enumerate(body.initializer):
                if tensor.name not in inputs:  # the caller of the model may override those
                    constants[tensor.name] = Constant(tensor, False, index if main else None)
        for node in body.node:
            if node.op_type == "Constant" and is_standard(node.domain):
                tensor = _constant(node)
                if tensor is not None:
                    constants[node.output[0]] = Constant(tensor, True)
        yield Place(body, where, constants)
        for index, node in enumerate(body.node):
            for name, graph in subgraphs(node):
                inside = f"{where}/{node.op_type}[{node.name or f'#{index}'}].{name}"
                yield from self._walk(graph, inside, constants)

    def array(self, constant: Constant) -> Array:
        """The values of a constant.

        Raises:
            ValueError: The tensor is malformed.
            UnreadableError: They are in another file, which cannot be read.
        """
        tensor = constant.tensor
        if constant.index is not None:
            self._initializers.complete(constant.index)
        if is_external(tensor):
            data = self._initializers.external_data(tensor)
            tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
        return onnx.numpy_helper.to_array(tensor)

    def new_name(self, wanted: str) -> str:
        """A name that nothing has yet: `wanted`, with underscores behind it where needed."""
        while wanted in self.names:
            wanted += "_"
        self.names.add(wanted)
        return wanted

    def why_not_alternating(self, one: Columns, other: Columns) -> str:
        """As of `Initializers`."""
        return self._initializers.why_not_alternating(one, other)

    def add_alternating(self, place: Place, one: Columns, other: Columns) -> str:
        """Columns of initializers of the main graph in turn, as a new one; its name."""
        name = self.new_name(f"{one.matrix}/gated")
        tensor = self._initializers.add_alternating(one, other, name)
        place.constants[name] = Constant(tensor, False)
        return name

    def remove_unread(self, released: Iterable[str]) -> None:
        """Removes those of the constants that nothing reads any more."""
        unread = {name for name in released if not self.readers[name]}
        if not unread:
            return
        for place in self.places:
            body = place.body
            for node in [n for n in body.node if n.op_type == "Constant" and n.output[0] in unread]:
                body.node.remove(node)
            if not isinstance(body, onnx.GraphProto):
                continue
            indices = [i for i, tensor in enumerate(body.initializer) if tensor.name in unread]
            if place.where == _MAIN:
                self._initializers.remove(indices)
            else:
                for index in reversed(indices):
                    del body.initializer[index]
            for info in [info for info in body.value_info if info.name in unread]:
                body.value_info.remove(info)


def forest(model: onnx.ModelProto, initializers: Initializers) -> list[Tree]:
    """The main graph and the functions of a model, but for those that are operators of ours."""
    trees = [Tree(model.graph, _MAIN, model.opset_import, initializers)]
    for function in model.functions:
        if function.domain != DOMAIN:
            where = f"function {label(function)}"
            trees.append(Tree(function, where, function.opset_import, initializers))
    return trees


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a Constant node holds, where that is a tensor or a number."""
    if len(node.attribute) != 1 or node.attribute[0].ref_attr_name:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor: onnx.TensorProto = attribute.t
        return tensor
    if attribute.name in _NUMBERS:
        value = onnx.helper.get_attribute_value(attribute)
        return onnx.numpy_helper.from_array(np.array(value, _NUMBERS[attribute.name]))
    return None


def reads_of(body: Body) -> Iterator[str]:
    """The names that a graph or function and its subgraphs read or give out.

    Branches of one node may use a name for different values; each of them is asked on its own.
    """
    yield from _read(body)
    for node in body.node:
        for _, graph in subgraphs(node):
            yield from reads_of(graph)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node, by name."""
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def names_of(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of the values that a graph and its subgraphs are given or make."""
    yield from (value.name for value in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
        for _, inner in subgraphs(node):
            yield from names_of(inner)


def _read(body: Body) -> Iterator[str]:
    """The names that a graph or function reads or gives out, without those of its subgraphs."""
    for node in body.node:
        yield from node.input
    for output in body.output:
        yield _name(output)


def _name(value: onnx.ValueInfoProto | str) -> str:
    """Of an input or output: functions list names alone."""
    return value if isinstance(value, str) else value.name
