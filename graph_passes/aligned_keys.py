"""MultiHeadAttention(q, k, v, mask) -> the same of keys, values and mask up to a multiple of 8

Of com.microsoft. ONNX Runtime's CUDA provider takes its memory-efficient attention for a mask
whenever the length of the queries is a multiple of 8 (16 in fp32), but the kernel then needs the
length of the keys to be one: with a cache, 8 tokens behind 21 others end in "check_supported(p) was
false" (onnxruntime 1.31), where no attention of cuDNN goes before it. And without it attention is
unfused: a prefill of 1501 tokens then took 29 ms, one of 2000 tokens 18.

So keys and values, [batch, heads, length, size] or [batch, length, heads * size], get up to 7 zeros
at their end, and the mask as many columns of -inf: a copy of the cache, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from . import multi_head_attention
from .edited_graph import EditedGraph, edit
from .multi_head_attention import (
    ATTENTION_BIAS,
    KEY,
    MULTIPLES,
    PADDING_MASK,
    PAST_KEY,
    VALUE,
)

_OPSET = 15  # the first whose Shape takes a part of the axes


def pad(model: onnx.ModelProto) -> int:
    """Pads keys of the main graph's attention nodes, in place; returns of how many nodes.

    A node stays if its queries are provably as many as its keys (in the form of rank 3, if they are
    not known to be others), or if it has no mask, a causal one that is no operand, a cache or a
    padding mask of its own, or keys of unknown rank or size.
    """
    return edit(model, lambda graph: _Padding(graph).pad, opset=_OPSET)


def is_exposed(model: onnx.ModelProto) -> bool:
    """Whether memory-efficient attention may fail for a node of the main graph."""
    graph = EditedGraph(model)
    return any(_is_exposed(graph, node) for node in graph.nodes)


def _is_exposed(graph: EditedGraph, node: onnx.NodeProto) -> bool:
    if not multi_head_attention.is_attention(node):
        return False
    operands = multi_head_attention.operands(node)
    if not operands[ATTENTION_BIAS] or operands[PADDING_MASK]:
        return False
    if operands[PAST_KEY]:
        return True
    if graph.element_type(operands[KEY]) not in MULTIPLES:
        return False
    keys, values = (graph.shape(operands[index]) for index in (KEY, VALUE))
    if keys is None or values is None or len(keys) != len(values) or len(keys) not in (3, 4):
        return False
    if not all(isinstance(size, int) for size in _sizes(keys) + _sizes(values)):
        return False
    mask = graph.shape(operands[ATTENTION_BIAS])
    if mask is None or len(mask) != 4 or "" in mask[2:]:
        return len(keys) == 4
    return mask[2] != mask[3]


def _sizes(shape: Sequence[int | str]) -> list[int | str]:
    """All but those of the batch and of the length."""
    return [*shape[1:-2], shape[-1]]


@dataclass
class _Padding:
    """Makes what is padded with; nodes of the same sizes share it."""

    graph: EditedGraph
    made: dict[tuple[object, ...], str] = field(default_factory=dict)

    def pad(self, node: onnx.NodeProto) -> int:
        if not _is_exposed(self.graph, node) or not multi_head_attention.may_be_padded(node):
            return 0
        operands = list(node.input)
        element = self.graph.element_type(operands[KEY])
        mask = operands[ATTENTION_BIAS]
        if (mask,) not in self.made:  # of one model run all keys are as long as its mask
            self.made[mask,] = self._columns(mask, element, node)
        for index in (KEY, VALUE):
            operands[index] = self._rows(operands[index], mask, element, node)
        operands[ATTENTION_BIAS] = self.made[mask,]
        self.graph.rewire(node, operands)
        return 1

    def _columns(self, mask: str, element: int, node: onnx.NodeProto) -> str:
        """The mask with columns of -inf."""
        graph = self.graph
        total = graph.insert(node, "Shape", [mask], f"{mask}_keys", start=3)
        left = graph.insert_missing(node, total, MULTIPLES[element], mask)
        self.made[mask, "missing"] = left
        before = graph.insert(node, "Shape", [mask], f"{mask}_before", end=3)
        stem = f"{mask}_missing_columns"
        columns = graph.insert_filled(node, [before, left], -np.inf, element, stem)
        return graph.insert(node, "Concat", [mask, columns], f"{mask}_aligned", axis=3)

    def _rows(self, value: str, mask: str, element: int, node: onnx.NodeProto) -> str:
        """Keys or values with rows of zeros."""
        graph = self.graph
        if (value, mask) in self.made:
            return self.made[value, mask]
        shape = graph.shape(value) or []
        alike = (mask, shape[0] or value, *_sizes(shape))
        if alike not in self.made:
            stem = f"{mask}_{'_'.join(map(str, _sizes(shape)))}"
            batch = graph.insert(node, "Shape", [value], f"{stem}_batch", end=1)
            *heads, size = (
                graph.add_constant(np.array([number], np.int64), f"{stem}_size")
                for number in _sizes(shape)
            )
            parts = [batch, *heads, self.made[mask, "missing"], size]
            zeros = graph.insert_filled(node, parts, 0, element, f"{stem}_zeros")
            self.made[alike] = zeros
        whole = [value, self.made[alike]]
        self.made[value, mask] = graph.insert(
            node, "Concat", whole, f"{value}_aligned", axis=len(shape) - 2
        )
        return self.made[value, mask]
