"""Add(Mul(x, cos), Mul(Concat(-x[half:], x[:half]), sin)) -> RotaryEmbedding(x, 0, cos', sin')

Of com.microsoft: seven nodes become one. x is [batch, heads, length, size]; cos and sin are those
of Concat(angles, angles) with angles [1, length, half], one table for all of a batch. cos' and
sin', [length, half], are computed from the angles alone, once for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx

from .edited_graph import MICROSOFT, EditedGraph, edit
from .tree import attributes_of

_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_OPSET = 13  # from which Squeeze takes its axes as an input
_ELEMENTWISE = ("Cast", "Cos", "Sin", "Identity")


class _Rotation(NamedTuple):
    x: str
    cos: str
    sin: str
    half: int


def fuse(model: onnx.ModelProto) -> int:
    """Fuses the rotations of the main graph, in place; returns how many."""
    return edit(model, lambda graph: _Fusing(graph).fuse, opset=_OPSET)


class _Fusing:
    """Rotations share their tables, and the first position."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._tables = _Tables(graph)
        self._position = ""

    def fuse(self, node: onnx.NodeProto) -> int:
        graph = self._graph
        found = _rotation(graph, node)
        if found is None:
            return 0
        sides = (found.cos, found.sin)
        cos, sin = (self._tables.half_of(value, found.half, node) for value in sides)
        if cos is None or sin is None:
            return 0
        if not self._position:
            # Each row of the tables stands for its own position, so that the first one is 0.
            first = np.array([0], np.int64)
            self._position = graph.add_constant(first, "first_position")
        operands = [found.x, self._position, cos, sin]
        graph.become(node, "RotaryEmbedding", operands, domain=MICROSOFT, interleaved=0)
        return 1


def _rotation(graph: EditedGraph, node: onnx.NodeProto) -> _Rotation | None:
    if node.op_type != "Add" or node.domain:
        return None
    products = [graph.producer(value, "Mul") for value in node.input]
    for straight, turned in (products, products[::-1]):
        if straight is None or turned is None:
            continue
        for x, cos in (straight.input, straight.input[::-1]):
            for y, sin in (turned.input, turned.input[::-1]):
                half = _half_turned(graph, y, x)
                if half and graph.element_type(x) in _TYPES:
                    return _Rotation(x, cos, sin, half)
    return None


def _half_turned(graph: EditedGraph, value: str, x: str) -> int:
    """Half the size of x if `value` is Concat(-x[half:], x[:half]) along its last axis, else 0."""
    concat = graph.producer(value, "Concat")
    shape = graph.shape(x)
    if concat is None or len(concat.input) != 2 or shape is None or len(shape) != 4:
        return 0
    axis = next(a.i for a in concat.attribute if a.name == "axis")
    negated = graph.producer(concat.input[0], "Neg")
    size = shape[-1]
    if axis not in (-1, 3) or negated is None or not isinstance(size, int) or size % 2:
        return 0
    half = size // 2
    second = _is_slice(graph, negated.input[0], x, half, size)
    return half if second and _is_slice(graph, concat.input[1], x, 0, half) else 0


def _is_slice(graph: EditedGraph, value: str, x: str, start: int, end: int) -> bool:
    """Whether a value is x[..., start:end], where x ends at the latest."""
    node = graph.producer(value, "Slice")
    if node is None or len(node.input) < 4 or node.input[0] != x:
        return False
    starts, ends, axes = (graph.numbers(name) for name in node.input[1:4])
    steps = graph.numbers(node.input[4]) if len(node.input) > 4 and node.input[4] else [1]
    if starts != [start] or axes not in ([-1], [3]) or steps != [1] or not ends or len(ends) > 1:
        return False
    return ends[0] == end if start == 0 else ends[0] >= end


class _Tables:
    """Tables of half the size, made once for each one of whole size."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._made: dict[str, str] = {}

    def half_of(self, value: str, half: int, before: onnx.NodeProto) -> str | None:
        """[length, half] of a table [1, 1, length, 2 half] whose halves are the same, or None."""
        graph = self._graph
        unsqueeze = graph.producer(value, "Unsqueeze")
        if unsqueeze is None or len(unsqueeze.input) != 2:
            return None
        axes = graph.numbers(unsqueeze.input[1])
        table = graph.shape(unsqueeze.input[0])
        if axes != [1] or table is None or len(table) != 3 or table[0] != 1 or table[2] != 2 * half:
            return None
        chain = self._chain(unsqueeze.input[0])
        return self._applied(chain, before) if chain else None

    def _chain(self, value: str) -> list[onnx.NodeProto]:
        """The nodes from Concat(angles, angles) to a value, each elementwise; empty if others."""
        graph = self._graph
        nodes: list[onnx.NodeProto] = []
        while (node := graph.producer(value)) is not None and not node.domain:
            nodes.insert(0, node)
            if node.op_type == "Concat":
                axis = next(a.i for a in node.attribute if a.name == "axis")
                same = len(node.input) == 2 and node.input[0] == node.input[1]
                return nodes if same and axis in (-1, 2) else []
            if node.op_type == "Mul":  # by the factor that some models scale with
                factors = [name for name in node.input if self._is_number(name)]
                if len(factors) != 1:
                    return []
                value = next(name for name in node.input if name != factors[0])
            elif node.op_type in _ELEMENTWISE:
                value = node.input[0]
            else:
                return []
        return []

    def _is_number(self, value: str) -> bool:
        array = self._graph.constant(value)
        return array is not None and array.size == 1 and array.ndim <= 1

    def _applied(self, chain: list[onnx.NodeProto], before: onnx.NodeProto) -> str:
        """What a chain makes of one of the halves, without the axis of the batch."""
        graph = self._graph
        whole, value = chain[0].output[0], ""
        if whole not in self._made:
            axes = graph.add_constant(np.array([0], np.int64), f"{whole}_axes")
            # Squeeze fails where there are tables for several rows of a batch after all.
            self._made[whole] = graph.insert(
                before, "Squeeze", [chain[0].input[0], axes], f"{whole}_half"
            )
        value = self._made[whole]
        for node in chain[1:]:
            old = node.output[0]
            if old not in self._made:
                inputs = [name if self._is_number(name) else value for name in node.input]
                attributes = attributes_of(node)
                self._made[old] = graph.insert(
                    before, node.op_type, inputs, f"{old}_half", **attributes
                )
            value = self._made[old]
        return value
