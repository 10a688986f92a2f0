"""MultiHeadAttention(Reshape(Transpose(q)), ..) -> MultiHeadAttention(q, k, v), without the copies

Of com.microsoft. Exporters have queries, keys and values as [batch, heads, length, size];
optimizers bring them back to [batch, length, heads * size], which MultiHeadAttention takes. But it
takes keys and values in the first form as well, and RotaryEmbedding takes and gives both. What
stands between then does nothing, and each Transpose costs a pass through memory:

    keys, values    Reshape(Transpose(k), [0, 0, -1]) -> k, both or none
    queries         Reshape(Transpose(RotaryEmbedding(Transpose(Reshape(q))))) -> RotaryEmbedding(q)
    results         Reshape(Reshape(y)) to the shape that y has -> y

Shapes are proven by numbers and names of dimensions that the model records.
"""

from __future__ import annotations

from functools import partial

import onnx

from .edited_graph import MICROSOFT, EditedGraph, edit
from .multi_head_attention import (
    ATTENTION_BIAS,
    BIAS,
    KEY,
    QUERY,
    VALUE,
    head_count,
    is_attention,
)
from .tree import attributes_of

_HEADS_INWARD = [0, 2, 1, 3]  # its own inverse
_FIRST_TWO = slice(0, 2)


def remove(model: onnx.ModelProto) -> int:
    """Removes views around attention of the main graph, in place; returns how many it found.

    Keys and values change their form only for attention without cache, bias of the projections and
    padding mask, and with one output.
    """
    return edit(model, lambda graph: partial(_remove, graph))


def _remove(graph: EditedGraph, node: onnx.NodeProto) -> int:
    if not is_attention(node):
        return 0
    # The results first: they need the shape that is recorded for the query.
    return _results(graph, node) + _keys_and_values(graph, node) + _queries(graph, node)


def _with_heads(graph: EditedGraph, value: str) -> str:
    """The x of a value Reshape(Transpose(x), [0, 0, -1]) with the heads of x moved inward."""
    flat = graph.producer(value, "Reshape")
    if flat is None or graph.numbers(flat.input[1]) != [0, 0, -1]:
        return ""
    transpose = graph.producer(flat.input[0], "Transpose")
    return transpose.input[0] if transpose is not None and _moves_heads(transpose) else ""


def _moves_heads(transpose: onnx.NodeProto) -> bool:
    return any(a.name == "perm" and list(a.ints) == _HEADS_INWARD for a in transpose.attribute)


def _keys_and_values(graph: EditedGraph, node: onnx.NodeProto) -> int:
    operands = list(node.input)
    others = [operands[index] for index in range(BIAS, len(operands)) if index != ATTENTION_BIAS]
    if len(operands) <= VALUE or any(others) or len(node.output) != 1:
        return 0
    key, value = (_with_heads(graph, operands[index]) for index in (KEY, VALUE))
    shape = graph.shape(key) if key else None
    if not value or shape is None or len(shape) != 4 or shape[1] != head_count(node):
        return 0
    if not isinstance(shape[3], int) or not graph.same_sizes(key, value):
        return 0
    operands[KEY], operands[VALUE] = key, value
    graph.rewire(node, operands)
    return 1


def _queries(graph: EditedGraph, node: onnx.NodeProto) -> int:
    rotated = _with_heads(graph, node.input[QUERY])
    rotary = graph.producer(rotated, "RotaryEmbedding") if rotated else None
    if rotary is None or rotary.domain != MICROSOFT:
        return 0
    transpose = graph.producer(rotary.input[0], "Transpose")
    if transpose is None or not _moves_heads(transpose):
        return 0
    view = graph.producer(transpose.input[0], "Reshape")
    source = view.input[0] if view is not None else ""
    flat, heads = graph.shape(source), graph.shape(transpose.input[0])
    if view is None or flat is None or heads is None or len(flat) != 3 or len(heads) != 4:
        return 0
    whole = [size for size in (flat[2], heads[2], heads[3]) if isinstance(size, int)]
    kept = all(a == b != "" for a, b in zip(flat[_FIRST_TWO], heads[_FIRST_TWO], strict=True))
    if (
        not kept
        or len(whole) != 3
        or whole[0] != whole[1] * whole[2]
        or whole[1] != head_count(node)
    ):
        return 0
    operands = list(node.input)
    rotating = attributes_of(rotary)
    rotating["num_heads"] = whole[1]  # which the form of rank 3 does not tell
    operands[QUERY] = graph.insert(
        node, "RotaryEmbedding", [source, *rotary.input[1:]], f"{rotated}_flat", domain=MICROSOFT,
        **rotating,
    )  # fmt: skip
    graph.rewire(node, operands)
    return 1


def _results(graph: EditedGraph, node: onnx.NodeProto) -> int:
    """y is [batch, length, N], the first two as of a query of rank 3."""
    result = node.output[0]
    query = graph.shape(node.input[QUERY])
    readers = graph.readers(result)
    if query is None or len(query) != 3 or len(readers) != 1:
        return 0
    (apart,) = readers
    if apart.op_type != "Reshape" or not graph.is_read_only_by(result, apart):
        return 0
    split = graph.numbers(apart.input[1])
    if split != [0, 0, head_count(node), -1]:
        return 0
    again = graph.readers(apart.output[0])
    if len(again) != 1 or again[0].op_type != "Reshape":
        return 0
    whole = again[0].output[0]
    shape = graph.shape(whole)
    if not graph.is_read_only_by(apart.output[0], again[0]) or shape is None or len(shape) != 3:
        return 0
    if not all(a == b != "" for a, b in zip(query[_FIRST_TWO], shape[_FIRST_TWO], strict=True)):
        return 0
    if not graph.is_read_only_by(whole, *_distinct(graph.readers(whole))):
        return 0  # an output of the model, whose name stays
    graph.bypass(whole, result)
    return 1


def _distinct(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return list({id(node): node for node in nodes}.values())
