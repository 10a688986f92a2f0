"""Reshape(Expand(Unsqueeze(x))) -> Gather(x, 0, .., 0, 1, .., 1, ..)

Each of the heads of x, [batch, heads, length, size], several times in a row: exporters write it out
where several heads of queries share one of keys and values. Three nodes become one, with as many
passes through memory; a node costs a decoder's step 3 to 5 us of the host.
"""

from __future__ import annotations

import numpy as np
import onnx

from .edited_graph import EditedGraph, edit

_OPSET = 13  # from which Unsqueeze takes its axes as an input
_HEADS = 1


def gather(model: onnx.ModelProto) -> int:
    """Replaces repetitions of heads of the main graph, in place; returns how many."""
    return edit(model, lambda graph: _Gathering(graph).gather, opset=_OPSET)


class _Gathering:
    """Nodes with the same heads share the indices."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._indices: dict[tuple[int, int], str] = {}

    def gather(self, node: onnx.NodeProto) -> int:
        found = repetition(self._graph, node)
        if found is None:
            return 0
        x, heads, times = found
        if (heads, times) not in self._indices:
            numbers = np.repeat(np.arange(heads, dtype=np.int64), times)
            name = self._graph.add_constant(numbers, f"{heads}_heads_{times}_times")
            self._indices[heads, times] = name
        self._graph.become(node, "Gather", [x, self._indices[heads, times]], axis=_HEADS)
        return 1


def repetition(graph: EditedGraph, node: onnx.NodeProto | None) -> tuple[str, int, int] | None:
    """What a node repeats: x, how many heads that has, and how often each comes."""
    if node is None or node.op_type != "Reshape" or node.domain:
        return None
    expand = graph.producer(node.input[0], "Expand")
    unsqueeze = graph.producer(expand.input[0], "Unsqueeze") if expand is not None else None
    if expand is None or unsqueeze is None or len(unsqueeze.input) != 2:
        return None
    x = unsqueeze.input[0]
    before, repeated, after = (
        graph.shape(value) for value in (x, expand.output[0], node.output[0])
    )
    if graph.numbers(unsqueeze.input[1]) != [_HEADS + 1]:
        return None
    if before is None or repeated is None or after is None or len(before) != 4:
        return None
    batch, heads, *rest = before
    times = repeated[_HEADS + 1] if len(repeated) == 5 else ""
    if not isinstance(heads, int) or not isinstance(times, int) or "" in before:
        return None
    if repeated != [batch, heads, times, *rest] or after != [batch, heads * times, *rest]:
        return None
    return x, heads, times
