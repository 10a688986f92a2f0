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
from onnx import TensorProto, helper, numpy_helper

from .domain import imported_version
from .edited_graph import MICROSOFT, EditedGraph

_OPSET = 15  # the first whose Shape takes a part of the axes
_QUERY, _KEY, _VALUE, _BIAS, _PADDING_MASK, _ATTENTION_BIAS, _PAST_KEY = range(7)
_MULTIPLES: dict[int, int] = {TensorProto.FLOAT16: 8, TensorProto.FLOAT: 16}


def pad(model: onnx.ModelProto) -> int:
    """Pads keys of the main graph's attention nodes, in place; returns of how many nodes.

    A node stays if its queries are provably as many as its keys (in the form of rank 3, if they are
    not known to be others), or if it has no mask, a causal one that is no operand, a cache or a
    padding mask of its own, or keys of unknown rank or size.
    """
    if (imported_version(model.opset_import) or 0) < _OPSET:
        return 0
    graph = EditedGraph(model)
    padding = _Padding(graph)
    count = 0
    for node in graph.nodes:
        if _is_exposed(graph, node) and _may_be_padded(node):
            padding.apply(node)
            count += 1
    if count:
        graph.finish()
    return count


def is_exposed(model: onnx.ModelProto) -> bool:
    """Whether memory-efficient attention may fail for a node of the main graph."""
    graph = EditedGraph(model)
    return any(_is_exposed(graph, node) for node in graph.nodes)


def _may_be_padded(node: onnx.NodeProto) -> bool:
    """Whether a node gives nothing but its result, and counts no keys from their end.

    As a causal mask that is no operand does, in ONNX Runtime's kernels for CUDA.
    """
    causal = any(a.name == "unidirectional" and a.i for a in node.attribute)
    return len(node.input) == _ATTENTION_BIAS + 1 and len(node.output) == 1 and not causal


def _is_exposed(graph: EditedGraph, node: onnx.NodeProto) -> bool:
    if node.op_type != "MultiHeadAttention" or node.domain != MICROSOFT:
        return False
    operands = [*node.input, *[""] * (_PAST_KEY + 1 - len(node.input))]
    if not operands[_ATTENTION_BIAS] or operands[_PADDING_MASK]:
        return False
    if operands[_PAST_KEY]:
        return True
    if graph.element_type(operands[_KEY]) not in _MULTIPLES:
        return False
    keys, values = (graph.shape(operands[index]) for index in (_KEY, _VALUE))
    if keys is None or values is None or len(keys) != len(values) or len(keys) not in (3, 4):
        return False
    if not all(isinstance(size, int) for size in _sizes(keys) + _sizes(values)):
        return False
    mask = graph.shape(operands[_ATTENTION_BIAS])
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

    def apply(self, node: onnx.NodeProto) -> None:
        operands = list(node.input)
        element = self.graph.element_type(operands[_KEY])
        mask = operands[_ATTENTION_BIAS]
        if (mask,) not in self.made:  # of one model run all keys are as long as its mask
            self.made[mask,] = self._columns(mask, element, node)
        for index in (_KEY, _VALUE):
            operands[index] = self._rows(operands[index], mask, element, node)
        operands[_ATTENTION_BIAS] = self.made[mask,]
        self.graph.rewire(node, operands)

    def _columns(self, mask: str, element: int, node: onnx.NodeProto) -> str:
        """The mask with columns of -inf."""
        graph = self.graph
        multiple = graph.add_constant(np.array([_MULTIPLES[element]], np.int64), f"{mask}_multiple")
        total = graph.insert(node, "Shape", [mask], f"{mask}_keys", start=3)
        negative = graph.insert(node, "Neg", [total], f"{mask}_keys_negative")
        left = graph.insert(node, "Mod", [negative, multiple], f"{mask}_missing")
        self.made[mask, "missing"] = left
        before = graph.insert(node, "Shape", [mask], f"{mask}_before", end=3)
        shape = graph.insert(node, "Concat", [before, left], f"{mask}_missing_shape", axis=0)
        columns = self._filled(shape, element, -np.inf, f"{mask}_missing_columns", node)
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
            missing = graph.insert(node, "Concat", parts, f"{stem}_shape", axis=0)
            self.made[alike] = self._filled(missing, element, 0.0, f"{stem}_zeros", node)
        whole = [value, self.made[alike]]
        self.made[value, mask] = graph.insert(
            node, "Concat", whole, f"{value}_aligned", axis=len(shape) - 2
        )
        return self.made[value, mask]

    def _filled(
        self, shape: str, element: int, number: float, stem: str, node: onnx.NodeProto
    ) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(element)
        value = numpy_helper.from_array(np.array([number], dtype))
        return self.graph.insert(node, "ConstantOfShape", [shape], stem, value=value)
