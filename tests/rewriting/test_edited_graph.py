"""The graph that passes change: outputs that get other names, and what is recorded of values."""

from __future__ import annotations

import numpy as np
from equivalence import parse
from moonpoly_ort.graph_passes.edited_graph import EditedGraph
from onnx import TensorProto

TEXT = """renamed (float[batch, 4] x) => (float[batch, 2] y) {
    a, b = Split<axis = 1, num_outputs = 2>(x)
    y = Add(a, b)
}"""


def test_an_output_of_another_name() -> None:
    proto = parse(TEXT, opset=18)
    graph = EditedGraph(proto)
    split = graph.nodes[0]
    graph.rename_output(split, "b", "c")
    assert list(split.output) == ["a", "c"]
    assert graph.producer("c") is split
    assert graph.producer("b") is None
    graph.insert_for(split, "Neg", ["c"], ["b"], behind=True)
    graph.finish()
    assert [list(node.output) for node in proto.graph.node] == [["a", "c"], ["b"], ["y"]]


def test_constants_that_nothing_came_to_read_are_dropped() -> None:
    proto = parse(TEXT, opset=18)
    graph = EditedGraph(proto)
    used, _ = (graph.add_constant(np.ones(2, np.float32), stem) for stem in ("used", "unused"))
    graph.rewire(graph.nodes[1], ["a", used])
    graph.finish()
    assert [tensor.name for tensor in proto.graph.initializer] == ["used"]
    assert list(proto.graph.node[1].input) == ["a", "used"]


def test_what_is_recorded_twice() -> None:
    proto = parse(TEXT, opset=18)
    graph = EditedGraph(proto)
    assert graph.shape("b") is None
    graph.record("b", TensorProto.FLOAT, ["batch", ""])
    assert (graph.element_type("b"), graph.shape("b")) == (TensorProto.FLOAT, ["batch", ""])
    graph.record("b", TensorProto.DOUBLE, ["batch", 2])
    assert (graph.element_type("b"), graph.shape("b")) == (TensorProto.DOUBLE, ["batch", 2])
    assert [info.name for info in proto.graph.value_info] == ["b"]
