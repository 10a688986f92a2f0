"""The main graph of a model while passes over ONNX Runtime's own operators change it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .domain import imported_version
from .skeleton import size_name
from .tree import Array, names_of, reads_of

MICROSOFT = "com.microsoft"

_SMALL = 1 << 12
"""Elements; larger constants are not looked into."""


class EditedGraph:
    """Who makes and who reads a value of the main graph, kept up to date while nodes are replaced.

    Reads by subgraphs count. Nothing is final before `finish`: until then, nodes that are replaced
    stay in the list, so that passes can go through it.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self.nodes = list(model.graph.node)
        given = {value.name for value in model.graph.input}  # over which a caller may decide
        constants = [tensor for tensor in model.graph.initializer if tensor.name not in given]
        self.initializers = {tensor.name: tensor for tensor in constants}
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self._readers[name].append(node)
        self._reads = Counter(reads_of(model.graph))
        self._recorded = {
            info.name: info
            for info in (*model.graph.input, *model.graph.value_info, *model.graph.output)
        }
        self._taken = {*self._reads, *self._recorded, *names_of(model.graph)}
        self._before: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._behind: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._hoisted: dict[int, onnx.NodeProto] = {}
        self._gone: set[int] = set()
        self._released: list[str] = []

    def producer(self, value: str, *op_types: str) -> onnx.NodeProto | None:
        """The node that computes a value, if it is one of these operators (none given: any)."""
        node = self._producers.get(value)
        return node if node is not None and (not op_types or node.op_type in op_types) else None

    def readers(self, value: str) -> list[onnx.NodeProto]:
        """The nodes of the main graph that read a value, once for each time."""
        return self._readers[value]

    def is_read_only_by(self, value: str, *nodes: onnx.NodeProto) -> bool:
        """Whether nothing but these nodes reads a value, subgraphs and outputs included."""
        inside = sum(list(node.input).count(value) for node in nodes)
        return self._reads[value] == inside

    def matrix(self, value: str) -> tuple[int, int] | None:
        """The dimensions of a constant matrix, wherever its values are."""
        dims = self.constant_dims(value)
        return (dims[0], dims[1]) if dims is not None and len(dims) == 2 else None

    def constant_dims(self, value: str) -> list[int] | None:
        """The dimensions of a constant, or of one in the order that a Gather puts it in."""
        if value in self.initializers:
            return list(self.initializers[value].dims)
        node = self._ordered(value)
        if node is None:
            return None
        data, indices = (self.initializers[name].dims for name in node.input)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % len(data)
        return [*data[:axis], *indices, *data[axis + 1 :]]

    def _ordered(self, value: str) -> onnx.NodeProto | None:
        """The Gather of a constant in a constant order that makes a value."""
        node = self.producer(value, "Gather")
        constant = node is not None and all(name in self.initializers for name in node.input)
        return node if constant else None

    def constant(self, value: str) -> Array | None:
        """The values of a small constant that lies in the model itself."""
        tensor = self.initializers.get(value)
        node = self._producers.get(value)
        if tensor is None and node is not None and node.op_type == "Constant":
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(tensor) if np.prod(tensor.dims) <= _SMALL else None

    def numbers(self, value: str) -> list[int] | None:
        """The elements of a small constant of integers."""
        array = self.constant(value)
        return None if array is None or array.dtype.kind != "i" else array.reshape(-1).tolist()

    def element_type(self, value: str) -> int:
        """The type of a constant, or of a value as the model records it; 0 where it does not."""
        ordered = self._ordered(value)
        value = ordered.input[0] if ordered is not None else value
        if value in self.initializers:
            return int(self.initializers[value].data_type)
        info = self._recorded.get(value)
        return int(info.type.tensor_type.elem_type) if info is not None else 0

    def shape(self, value: str) -> list[int | str] | None:
        """Numbers and names of dimensions as the model records them; "" for an unknown one."""
        if value in self.initializers:
            return list(self.initializers[value].dims)
        info = self._recorded.get(value)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        return [
            dim.dim_value if dim.HasField("dim_value") else size_name(dim)
            for dim in info.type.tensor_type.shape.dim
        ]

    def dimension_names(self) -> set[str]:
        """The names of dimensions that the model records."""
        shapes = [self.shape(value) or [] for value in self._recorded]
        return {size for shape in shapes for size in shape if isinstance(size, str)}

    def record(self, value: str, element: int, shape: Sequence[int | str]) -> None:
        """Records the type and shape of a value that is neither given nor an output; "" stands for
        an unknown dimension.
        """
        info = helper.make_tensor_value_info(value, element, [size or None for size in shape])
        if value in self._recorded:
            self._recorded[value].CopyFrom(info)
        else:
            self._graph.value_info.append(info)
            self._recorded[value] = self._graph.value_info[-1]

    def same_sizes(self, one: str, other: str, axes: slice = slice(None)) -> bool:
        """Whether two values have, as recorded, one rank and the same sizes along some axes."""
        first, second = self.shape(one), self.shape(other)
        if first is None or second is None or len(first) != len(second):
            return False
        return all(a == b != "" for a, b in list(zip(first, second, strict=True))[axes])

    def new_name(self, stem: str) -> str:
        """A name that nothing in the graph or a subgraph has, the stem itself if it can be."""
        name, number = stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name

    def add_constant(self, values: Array, stem: str) -> str:
        """A new initializer, dropped in the end if nothing reads it; returns its name."""
        name = self.new_name(stem)
        tensor = numpy_helper.from_array(values, name)
        self._graph.initializer.append(tensor)
        self.initializers[name] = self._graph.initializer[-1]
        self._released.append(name)  # else ONNX Runtime warns of it in every session
        return name

    def insert(
        self,
        before: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        stem: str,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Makes a node of one output in front of another one; returns the output's name."""
        output = self.new_name(stem)
        self.insert_for(before, op_type, inputs, [output], domain=domain, **attributes)
        return output

    def insert_filled(
        self,
        before: onnx.NodeProto,
        parts: Sequence[str],
        number: float,
        element: int,
        stem: str,
    ) -> str:
        """Makes a value of one number everywhere, of an element type; its shape is that of vectors
        of sizes, one behind the other.
        """
        shape = self.insert(before, "Concat", parts, f"{stem}_shape", axis=0)
        filling = np.array([number], helper.tensor_dtype_to_np_dtype(element))
        value = numpy_helper.from_array(filling)
        return self.insert(before, "ConstantOfShape", [shape], stem, value=value)

    def insert_missing(self, before: onnx.NodeProto, size: str, multiple: int, stem: str) -> str:
        """Makes what a vector of one size lacks to a multiple."""
        sizes = self.add_constant(np.array([multiple], np.int64), f"{stem}_multiple")
        negative = self.insert(before, "Neg", [size], f"{stem}_negative")
        return self.insert(before, "Mod", [negative, sizes], f"{stem}_missing")

    def insert_for(
        self,
        place: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        domain: str = "",
        behind: bool = False,
        **attributes: Any,
    ) -> None:
        """Makes a node in front of another one, or behind it, for values that nothing makes now."""
        node = helper.make_node(
            op_type, inputs, outputs, f"{outputs[0]}_{op_type}", domain=domain, **attributes
        )
        (self._behind if behind else self._before)[id(place)].append(node)
        self._enter(node)

    def remove(self, node: onnx.NodeProto) -> None:
        """Takes a node out; what only it needed goes with it."""
        self._leave(node)
        self._gone.add(id(node))
        for name in node.output:
            self._producers.pop(name, None)

    def rewire(self, node: onnx.NodeProto, inputs: Iterable[str]) -> None:
        """Gives a node other inputs; empty ones at the end are left out."""
        names = list(inputs)
        while names and not names[-1]:
            names.pop()
        self._leave(node)
        del node.input[:]
        node.input.extend(names)
        self._enter(node)

    def rename_output(self, node: onnx.NodeProto, value: str, name: str) -> None:
        """Has a node make a value under another name; the old one is free for another node."""
        outputs = [name if output == value else output for output in node.output]
        del node.output[:]
        node.output.extend(outputs)
        del self._producers[value]
        self._producers[name] = node

    def become(
        self,
        node: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Makes a node another one of the same outputs; empty inputs at the end are left out."""
        self._leave(node)
        outputs = list(node.output)
        node.CopyFrom(
            helper.make_node(op_type, [], outputs, node.name, domain=domain, **attributes)
        )
        self._enter(node)
        self.rewire(node, inputs)

    def hoist(self, value: str) -> None:
        """Has a constant come before all nodes, whoever is to read it: a Gather that orders it may
        lie anywhere.
        """
        node = self._ordered(value)
        if node is not None:
            self._hoisted[id(node)] = node

    def bypass(self, value: str, source: str) -> None:
        """Has every node of the main graph read `source` in place of `value`."""
        for node in {id(node): node for node in self._readers[value]}.values():
            self.rewire(node, [source if name == value else name for name in node.input])

    def finish(self) -> None:
        """Writes the nodes back, and drops nodes and constants that only served what is gone."""
        unread = self._released
        weights = set()
        while unread:
            name = unread.pop()
            if name in self.initializers and not self._is_read(name):
                weights.add(name)
            node = self._producers.get(name)
            if node is None or id(node) in self._gone or any(map(self._is_read, node.output)):
                continue
            self._gone.add(id(node))
            self._leave(node)  # which adds to those that are not read
        nodes = [node for key, node in self._hoisted.items() if key not in self._gone]
        placed = self._gone | self._hoisted.keys()
        for node in self.nodes:
            around = (*self._before[id(node)], node, *self._behind[id(node)])
            nodes += [new for new in around if id(new) not in placed]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        for index in reversed(range(len(self._graph.initializer))):
            if self._graph.initializer[index].name in weights:
                del self._graph.initializer[index]
        gone = {name for name in self._producers if name}
        gone -= {name for node in nodes for name in node.output}
        for info in [info for info in self._graph.value_info if info.name in gone]:
            self._graph.value_info.remove(info)

    def _is_read(self, value: str) -> bool:
        return self._reads[value] > 0

    def _enter(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self._readers[name].append(node)
            self._reads[name] += 1
        for name in node.output:
            self._producers[name] = node

    def _leave(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self._readers[name] = [other for other in self._readers[name] if other is not node]
            self._reads[name] -= 1
            self._released.append(name)


def edit(
    model: onnx.ModelProto,
    begin: Callable[[EditedGraph], Callable[[onnx.NodeProto], int]],
    *,
    opset: int = 0,
) -> int:
    """Has what `begin` makes for the main graph look at each of its nodes, in order, and change the
    graph; returns the sum of what it returns. Nothing is looked at below an opset.
    """
    if (imported_version(model.opset_import) or 0) < opset:
        return 0
    graph = EditedGraph(model)
    count = sum(map(begin(graph), graph.nodes))
    if count:
        graph.finish()
    return count
