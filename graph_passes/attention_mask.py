"""GatherND(mask, indices of all rows and columns) -> Unsqueeze(Slice(mask))

Exporters write mask[rows, columns], with rows [batch, 1, 1, 1] and columns [1, 1, 1, total] that
count from 0, as a dozen nodes that make and gather indices; each costs 4 to 10 us of the host.
With it go And(true, x), and an Expand to the shape that a value has.

A mask that is too small for its indices was an error in GatherND. It still is, wherever it is no
longer of the shape that what reads it needs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import onnx

from .edited_graph import EditedGraph, edit

_OPSET = 13  # from which Unsqueeze takes its axes as an input
_LAST = (-1, 4)  # names of the axis behind four others


class _Counted(NamedTuple):
    """0, 1, .. up to a limit, along one axis of a value of rank 4."""

    axis: int
    limit: str  # a scalar


def simplify(model: onnx.ModelProto) -> int:
    """Simplifies masks of the main graph, in place; returns how many nodes it replaced."""
    return edit(model, lambda graph: partial(_simplify, graph), opset=_OPSET)


def _simplify(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if node.domain:
        return 0
    if node.op_type == "GatherND":
        return _gather(graph, node)
    if node.op_type == "And":
        return _true(graph, node)
    return _expand(graph, node) if node.op_type == "Expand" else 0


def _gather(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if any(a.name == "batch_dims" and a.i for a in node.attribute):
        return 0
    mask, indices = node.input
    limits = _row_and_column(graph, indices)
    shape = graph.shape(mask)
    if limits is None or shape is None or len(shape) != 2:
        return 0
    stem = node.output[0]
    zero = graph.add_constant(np.array([0], np.int64), f"{stem}_zero")
    starts, ends, axes = zero, _as_vector(graph, limits[0], zero, node), zero
    if not _is_size(graph, limits[1], mask, 1):
        columns = _as_vector(graph, limits[1], zero, node)
        ends = graph.insert(node, "Concat", [ends, columns], f"{stem}_ends", axis=0)
        starts = graph.add_constant(np.array([0, 0], np.int64), f"{stem}_starts")
        axes = graph.add_constant(np.array([0, 1], np.int64), f"{stem}_axes")
    whole = graph.insert(node, "Slice", [mask, starts, ends, axes], f"{stem}_slice")
    middle = graph.add_constant(np.array([1, 2], np.int64), f"{stem}_middle")
    graph.become(node, "Unsqueeze", [whole, middle])
    return 1


def _row_and_column(graph: EditedGraph, indices: str) -> tuple[str, str] | None:
    """The limits of rows, along axis 0, and of columns, along axis 3, that indices count to."""
    pair = graph.producer(indices, "Concat")
    if pair is None or len(pair.input) != 2 or _integer(pair, "axis") not in _LAST:
        return None
    limits = []
    counted = []
    for value, axis in zip(pair.input, (0, 3), strict=True):
        unsqueeze = graph.producer(value, "Unsqueeze")
        if unsqueeze is None or len(graph.numbers(unsqueeze.input[1]) or ()) != 1:
            return None
        if (graph.numbers(unsqueeze.input[1]) or [0])[0] not in _LAST:
            return None
        expand = graph.producer(unsqueeze.input[0], "Expand")
        found = None if expand is None else _counted(graph, expand.input[0])
        if expand is None or found is None or found.axis != axis:
            return None
        shape = graph.producer(expand.input[1], "Shape")
        largest = graph.producer(shape.input[0], "Max") if shape is not None else None
        if shape is None or largest is None or _integer(shape, "start") or _has(shape, "end"):
            return None
        limits.append(found.limit)
        counted.append((expand.input[0], set(largest.input)))
    values = {value for value, _ in counted}
    if any(broadcast != values for _, broadcast in counted):
        return None
    return limits[0], limits[1]


def _counted(graph: EditedGraph, value: str) -> _Counted | None:
    """A Range from 0 by 1 with axes of one element around it, four in all."""
    inserted: list[list[int]] = []
    while (node := graph.producer(value, "Unsqueeze")) is not None and len(node.input) == 2:
        axes = graph.numbers(node.input[1])
        if axes is None or min(axes) < 0:
            return None
        inserted.insert(0, axes)
        value = node.input[0]
    count = graph.producer(value, "Range")
    if count is None or graph.numbers(count.input[0]) != [0]:
        return None
    if graph.numbers(count.input[2]) != [1]:
        return None
    is_counted = [True]
    for positions in inserted:
        for position in sorted(positions):
            is_counted.insert(position, False)
    if len(is_counted) != 4:
        return None
    return _Counted(is_counted.index(True), str(count.input[1]))


def _as_vector(graph: EditedGraph, scalar: str, zero: str, before: onnx.NodeProto) -> str:
    """A scalar as a vector of one element: what it was made of, or a new value."""
    squeeze = graph.producer(scalar, "Squeeze")
    if squeeze is not None and graph.shape(squeeze.input[0]) == [1]:
        return str(squeeze.input[0])
    return graph.insert(before, "Unsqueeze", [scalar, zero], f"{scalar}_vector")


def _is_size(graph: EditedGraph, scalar: str, value: str, axis: int) -> bool:
    """Whether a scalar is the size of a value along an axis, or of what that was cast from."""
    squeeze = graph.producer(scalar, "Squeeze")
    shape = graph.producer(squeeze.input[0], "Shape") if squeeze is not None else None
    cast = graph.producer(value, "Cast")
    if shape is None or shape.input[0] not in (value, *(cast.input if cast is not None else ())):
        return False
    return (_integer(shape, "start"), _integer(shape, "end")) == (axis, axis + 1)


def _true(graph: EditedGraph, node: onnx.NodeProto) -> int:
    for constant, other in (node.input, reversed(node.input)):
        array, shape = graph.constant(constant), graph.shape(other)
        if array is None or array.size != 1 or shape is None or len(shape) < array.ndim:
            continue
        if array.all() and _may_go(graph, node):
            graph.bypass(node.output[0], other)
            return 1
    return 0


def _expand(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if graph.same_sizes(node.input[0], node.output[0]) and _may_go(graph, node):
        graph.bypass(node.output[0], node.input[0])
        return 1
    return 0


def _may_go(graph: EditedGraph, node: onnx.NodeProto) -> bool:
    """Whether only nodes of the main graph read a node's output."""
    readers = {id(reader): reader for reader in graph.readers(node.output[0])}
    return bool(readers) and graph.is_read_only_by(node.output[0], *readers.values())


def _integer(node: onnx.NodeProto, name: str) -> int:
    return next((a.i for a in node.attribute if a.name == name), 0)


def _has(node: onnx.NodeProto, name: str) -> bool:
    return any(a.name == name for a in node.attribute)
