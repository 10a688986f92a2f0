"""Add(Range(0, n, 1), s) -> Range(s, s + n, 1)

The positions of tokens behind a cache of s. Range takes its limits from the host, where sizes are,
but a sum of a vector on the GPU and a number on the host needs a copy, for which ONNX Runtime
refuses CUDA graphs of the whole model.
"""

from __future__ import annotations

from functools import partial

import onnx

from .edited_graph import EditedGraph, edit

_OPSET = 13  # the first whose Add takes all types of Range; older ones are not looked at


def shift(model: onnx.ModelProto) -> int:
    """Shifts ranges of the main graph, in place; returns how many sums it replaced."""
    return edit(model, lambda graph: partial(_shift, graph), opset=_OPSET)


def _shift(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if node.op_type != "Add" or node.domain:
        return 0
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
