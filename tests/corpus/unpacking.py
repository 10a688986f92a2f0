"""Packed attention in terms of what ONNX Runtime's CPU provider computes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def spelled_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose MultiHeadAttention nodes of packed operands read Q, K and V one by one.

    They are taken out of [batch, length, heads, 3, head size], as ONNX Runtime documents the packed
    form, which only its CUDA provider implements.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    flat = numpy_helper.from_array(np.array([0, 0, -1], np.int64), "flat_shape")
    copy.graph.initializer.append(flat)
    for node in model.graph.node:
        operands = list(node.input)
        if node.op_type != "MultiHeadAttention" or any(operands[1:3]):
            nodes.append(node)
            continue
        parts = [f"{operands[0]}/{part}" for part in "qkv"]
        for index, part in enumerate(parts):
            number = numpy_helper.from_array(np.array(index, np.int64), f"{part}/index")
            copy.graph.initializer.append(number)
            inputs = [operands[0], number.name]
            nodes.append(helper.make_node("Gather", inputs, [f"{part}/heads"], axis=3))
            nodes.append(helper.make_node("Reshape", [f"{part}/heads", "flat_shape"], [part]))
        unpacked = onnx.NodeProto()
        unpacked.CopyFrom(node)
        del unpacked.input[:]
        unpacked.input.extend([*parts, *operands[3:]])
        nodes.append(unpacked)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy
