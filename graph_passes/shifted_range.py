"""Add(Range(0, n, 1), s) -> Range(s, s + n, 1)

The positions of tokens behind a cache of s. Range takes its limits from the host, where sizes are,
but a sum of a vector on the GPU and a number on the host needs a copy, for which ONNX Runtime
refuses CUDA graphs of the whole model.
"""

from __future__ import annotations

import onnx

from .domain import imported_version
from .edited_graph import EditedGraph

_OPSET = 13  # the first whose Add takes all types of Range; older ones are not looked at


def shift(model: onnx.ModelProto) -> int:
    """Shifts ranges of the main graph, in place; returns how many sums it replaced."""
    if (imported_version(model.opset_import) or 0) < _OPSET:
        return 0
    graph = EditedGraph(model)
    count = 0
    for node in graph.nodes:
        if node.op_type == "Add" and not node.domain:
            count += _shift(graph, node)
    if count:
        graph.finish()
    return count


def _shift(graph: EditedGraph, node: onnx.NodeProto) -> int:
    for counted, start in (node.input, reversed(node.input)):
        source = graph.producer(counted, "Range")
        if source is None or source.domain or graph.shape(start) != []:
            continue
        first, count, step = source.input
        if graph.numbers(first) != [0] or graph.numbers(step) != [1]:
            continue
        end = graph.insert(node, "Add", [start, count], f"{node.output[0]}_end")
        graph.become(node, "Range", [start, end, step])
        return 1
    return 0
