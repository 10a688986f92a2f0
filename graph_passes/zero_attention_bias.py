"""MultiHeadAttention(.., attention_bias = 0) -> MultiHeadAttention(..); the same for Attention

Of com.microsoft. Exporters of models without a mask leave one behind that hides nothing, such as
Where(Expand(True), 0, -65504) of a ViT. ONNX Runtime's flash attention takes no bias, and its
memory-efficient one none for lengths that are no multiple of 16 bytes: such a zero costs its
quickest kernels.
"""

from __future__ import annotations

from functools import partial

import onnx

from .edited_graph import MICROSOFT, EditedGraph, edit

_ATTENTION_BIAS = 5  # the same input of both
_MOVING = ("Expand", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity")
_DEEPEST = 32


def remove(model: onnx.ModelProto) -> int:
    """Removes biases of zeros from attention nodes of the main graph, in place; returns how many.

    A bias counts as zero if constants alone say so, whatever its shape depends on.
    """
    return edit(model, lambda graph: partial(_remove, graph))


def _remove(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if node.domain != MICROSOFT or node.op_type not in ("Attention", "MultiHeadAttention"):
        return 0
    operands = list(node.input)
    bias = operands[_ATTENTION_BIAS] if len(operands) > _ATTENTION_BIAS else ""
    if not bias or _only_number(graph, bias) != 0:
        return 0
    operands[_ATTENTION_BIAS] = ""
    graph.rewire(node, operands)
    return 1


def _only_number(graph: EditedGraph, value: str, depth: int = 0) -> float | None:
    """The number that all elements of a value are, if constants say so; truth counts as 1."""
    array = graph.constant(value)
    if array is not None:
        first = array.reshape(-1)[:1]
        return float(first[0]) if first.size and (array == first[0]).all() else None
    node = graph.producer(value)
    if node is None or node.domain or depth > _DEEPEST:
        return None

    def operand(index: int) -> float | None:
        return _only_number(graph, node.input[index], depth + 1)

    if node.op_type in _MOVING:
        return operand(0)
    if node.op_type == "And":
        known = (operand(0), operand(1))
        return None if None in known else float(all(known))
    if node.op_type == "Where":
        condition = operand(0)
        return None if condition is None else operand(1 if condition else 2)
    return None
