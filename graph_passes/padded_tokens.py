"""An encoder whose attention has a mask -> the same for a multiple of 8 tokens

Where MultiHeadAttention of com.microsoft has a mask, ONNX Runtime's CUDA provider takes its
memory-efficient kernel only if the tokens are a multiple of 8 (16 in fp32). For all other lengths
attention is unfused, on rows of scores that no vector load fits, written and read three times.

Whatever else an encoder does, it does to each token alone. So tokens are added once, in front of
all that attention depends on, and taken off where something else reads a value that has them. An
added token is a copy of the last one, and so is its row of the mask: it computes what that one
does, and no number appears that was not there. And no token sees it, as its column of the mask is
-inf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from . import multi_head_attention
from .domain import imported_version
from .edited_graph import EditedGraph
from .multi_head_attention import (
    ATTENTION_BIAS,
    BIAS,
    KEY,
    MULTIPLES,
    PADDING_MASK,
    QUERY,
    VALUE,
)
from .token_wise import PACKED_RANK, TokenWise

_OPSET = 15  # the first whose Shape takes a part of the axes
_RANK = 3  # of what is padded: [batch, tokens, columns]
_MASK_RANK = 4
_PADDED = "_padded"  # how the name of the dimension ends
_DEAREST = 3  # values that are padded or cut for an attention node, at most


def pad(model: onnx.ModelProto) -> int:
    """Pads the tokens of the main graph's encoders, in place; returns of how many attention nodes.

    A node stays if it has no mask, or one that the model does not record as [.., .., tokens,
    tokens] with a name for the tokens; with a cache, a padding mask, or operands of rank 4; and if
    more than three values had to be padded or cut for each node of its encoder.
    """
    if (imported_version(model.opset_import) or 0) < _OPSET:
        return 0
    count = 0
    graph = EditedGraph(model)
    for tokens in dict.fromkeys(_tokens(graph, node) for node in graph.nodes):
        encoder = _Search(graph, tokens).encoder() if tokens else None
        if encoder is not None:
            count += _Padding(graph, encoder).pad()
            graph.finish()
            graph = EditedGraph(model)
    return count


def _tokens(graph: EditedGraph, node: onnx.NodeProto) -> str:
    """The name of the dimension that an attention node could be padded along; empty if none."""
    known = multi_head_attention.is_attention(node) and multi_head_attention.may_be_padded(node)
    if not known or node.input[PADDING_MASK]:
        return ""
    if node.input[BIAS] and node.input[BIAS] not in graph.initializers:
        return ""
    mask = node.input[ATTENTION_BIAS]
    shape = graph.shape(mask)
    if shape is None or len(shape) != _MASK_RANK or graph.element_type(mask) not in MULTIPLES:
        return ""
    rows, columns = shape[2:]
    is_name = isinstance(rows, str) and rows == columns and not rows.endswith(_PADDED)
    return str(rows) if is_name else ""


@dataclass
class _Encoder:
    """Nodes that work on each token alone, and the attention between them, in order.

    `sources`: what is to be padded, with the first node that reads it. `cut`: what else is read by
    other nodes, or an output.
    """

    tokens: str
    nodes: list[onnx.NodeProto]
    masked: list[onnx.NodeProto]
    sources: dict[str, onnx.NodeProto] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)


@dataclass
class _Search:
    """Looks for the encoder along one dimension."""

    graph: EditedGraph
    tokens: str

    def __post_init__(self) -> None:
        self._token_wise = TokenWise(self.graph)

    def encoder(self) -> _Encoder | None:
        """The encoder, if there is one that is worth it."""
        nodes = self._leading(self._reachable())
        encoder = _Encoder(self.tokens, nodes, [node for node in nodes if self._is_masked(node)])
        made = {value for node in nodes for value in node.output}
        inside = {id(node) for node in nodes}
        for node in nodes:
            for value in self._operands(node):
                if value not in made:
                    encoder.sources.setdefault(value, node)
            for value in filter(None, node.output):
                readers = {id(reader): reader for reader in self.graph.readers(value)}
                own = [reader for key, reader in readers.items() if key in inside]
                if not self.graph.is_read_only_by(value, *own):
                    encoder.cut.append(value)
        dear = len(encoder.sources) + len(encoder.cut) > _DEAREST * len(encoder.masked)
        return None if dear or not encoder.masked else encoder

    def _is_masked(self, node: onnx.NodeProto) -> bool:
        return _tokens(self.graph, node) == self.tokens

    def _operands(self, node: onnx.NodeProto) -> list[str]:
        """The inputs of a node that need tokens, if it is of the kind that an encoder has."""
        if self._is_masked(node):
            return [node.input[index] for index in (QUERY, KEY, VALUE) if node.input[index]]
        return self._token_wise.operands(node)

    def _reachable(self) -> list[onnx.NodeProto]:
        """All nodes that could work on more tokens, if values that are known to have them got more.

        A sum of embeddings is not among them: it takes one Pad behind it, two in front.
        """
        made: set[str] = set()
        nodes = []
        for node in self.graph.nodes:
            values = set(self._operands(node))
            others = values - made
            begins = len(values) == 1 or self._is_masked(node)
            if values and (begins or others < values) and all(map(self._can_be_padded, others)):
                nodes.append(node)
                made.update(filter(None, node.output))
        return nodes

    def _can_be_padded(self, value: str) -> bool:
        shape = self.graph.shape(value) or []
        known = len(shape) == _RANK and shape[1] == self.tokens
        return known and self.graph.element_type(value) in MULTIPLES

    def _leading(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Those that attention depends on, and those behind it up to where values get wider: what
        others read is cut, which costs a pass through it.
        """
        needed: set[str] = set()
        leading = set()
        for node in reversed(nodes):
            if self._is_masked(node) or not needed.isdisjoint(node.output):
                leading.add(id(node))
                needed.update(self._operands(node))
        made: set[str] = set()
        kept = []
        for node in nodes:
            behind = made.issuperset(self._operands(node))
            if id(node) in leading or (behind and not self._token_wise.widens(node)):
                kept.append(node)
                made.update(filter(None, node.output))
        return kept


@dataclass
class _Padding:
    """Changes the graph for one encoder."""

    graph: EditedGraph
    encoder: _Encoder
    padded: dict[str, str] = field(default_factory=dict)

    def pad(self) -> int:
        encoder, graph = self.encoder, self.graph
        masks = {node.input[ATTENTION_BIAS]: node for node in reversed(encoder.masked)}
        first = encoder.nodes[0]
        source = next(iter(encoder.sources))
        multiple = max(MULTIPLES[graph.element_type(mask)] for mask in masks)
        stem = f"{source}{_PADDED}"
        length = graph.insert(first, "Shape", [source], f"{stem}_length", start=1, end=2)
        missing = graph.insert_missing(first, length, multiple, stem)
        pads = self._pads(first, missing, 1, _RANK, stem)
        name = self._new_dimension()
        for value, reader in encoder.sources.items():
            self.padded[value] = graph.insert(
                reader, "Pad", [value, pads], f"{value}{_PADDED}", mode="edge"
            )
        for mask, reader in masks.items():
            self.padded[mask] = self._mask(reader, mask, missing)
        for value in encoder.cut:
            self.padded[value] = graph.new_name(f"{value}{_PADDED}")
        for value in encoder.sources:
            self._record(value, self.padded[value], name, [1], _RANK)
        for mask in masks:
            self._record(mask, self.padded[mask], name, [2, 3], _MASK_RANK)
        self._rewire(length, name, stem)
        return len(encoder.masked)

    def _new_dimension(self) -> str:
        stem = re.sub(r"\W+", "_", self.encoder.tokens)
        name, number = f"{stem}{_PADDED}", 0
        while name in self.graph.dimension_names():
            number += 1
            name = f"{stem}_{number}{_PADDED}"
        return name

    def _pads(self, before: onnx.NodeProto, missing: str, axis: int, rank: int, stem: str) -> str:
        """The operand of a Pad that adds so many at the end of an axis."""
        parts = [np.zeros(rank + axis, np.int64), np.zeros(rank - axis - 1, np.int64)]
        names = [self.graph.add_constant(part, f"{stem}_none") for part in parts if part.size]
        whole = [names[0], missing, *names[1:]]
        return self.graph.insert(before, "Concat", whole, f"{stem}_pads", axis=0)

    def _mask(self, before: onnx.NodeProto, mask: str, missing: str) -> str:
        graph = self.graph
        dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(mask))
        unseen = graph.add_constant(np.array(-np.inf, dtype), f"{mask}_unseen")
        columns = self._pads(before, missing, 3, _MASK_RANK, f"{mask}_columns")
        rows = self._pads(before, missing, 2, _MASK_RANK, f"{mask}_rows")
        wider = graph.insert(before, "Pad", [mask, columns, unseen], f"{mask}_wider")
        return graph.insert(before, "Pad", [wider, rows], f"{mask}{_PADDED}", mode="edge")

    def _rewire(self, length: str, name: str, stem: str) -> None:
        graph = self.graph
        start = graph.add_constant(np.array([0], np.int64), f"{stem}_start")
        axis = graph.add_constant(np.array([1], np.int64), f"{stem}_axis")
        for node in self.encoder.nodes:
            graph.rewire(node, [self.padded.get(value, value) for value in node.input])
            rank = PACKED_RANK if node.op_type == "Reshape" else _RANK
            for value in filter(None, list(node.output)):
                other = self.padded.get(value, value)
                self._record(value, other, name, [1], rank)
                if other != value:
                    graph.rename_output(node, value, other)
                    whole = [other, start, length, axis]
                    graph.insert_for(node, "Slice", whole, [value], behind=True)

    def _record(self, value: str, other: str, name: str, axes: list[int], rank: int) -> None:
        """Records of a value what is recorded of another one, with padded axes.

        A record of another rank is wrong. Where ONNX Runtime finds the shape itself it goes by
        that, and is not to find the record confirmed by what is made here.
        """
        shape = self.graph.shape(value)
        if shape is not None and len(shape) == rank:
            for axis in axes:
                shape[axis] = name
            self.graph.record(other, self.graph.element_type(value), shape)
