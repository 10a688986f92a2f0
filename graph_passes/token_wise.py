"""Which operators work on each token of [batch, tokens, columns] alone.

Such a node gives for any number of tokens what it gives for each of them; so where tokens are added
in front of it, they are behind it, and nothing else changes.
"""

from __future__ import annotations

import onnx

from . import multi_head_attention
from .domain import is_standard
from .edited_graph import MICROSOFT, EditedGraph
from .tree import attributes_of

_ELEMENTWISE = frozenset({
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Pow", "Relu", "Sigmoid", "Softplus",
    "Sqrt", "Sub", "Tanh",
})  # fmt: skip
_CONTRIB_ELEMENTWISE = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
_NORMALIZATIONS = frozenset({
    "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization",
})  # fmt: skip
_SKIPPED_NORMALIZATIONS = frozenset({
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
PACKED_RANK = 5  # of what Reshape makes: [batch, tokens, heads, 2 or 3, columns]
_COPIED = 0  # in the shape of a Reshape: the size that the input has
_CONSTANT_RANKS = {"value_float": 0, "value_int": 0, "value_floats": 1, "value_ints": 1}
_SAME_RANK = frozenset({"Cast", "Concat", "Identity", "Split", "Transpose"})


class TokenWise:
    """Asks nodes of a graph."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._ranks: dict[str, int | None] = {  # of constants, and of what depends on nothing else
            name: len(tensor.dims) for name, tensor in graph.initializers.items()
        }
        for node in graph.nodes:
            if self._ranks.keys() >= set(filter(None, node.input)):
                made = filter(None, node.output)
                self._ranks |= {value: self._made_rank(node, value) for value in made}

    def operands(self, node: onnx.NodeProto) -> list[str]:
        """The inputs of a node that have tokens if it works on each alone, else none.

        All of them need the same tokens, along axis 1, and rank 3, which is that of the results,
        too; but for Reshape, whose results only attention reads.
        """
        inputs = list(node.input)
        if is_standard(node.domain):
            if node.op_type in _ELEMENTWISE:
                return self._elementwise(inputs)
            if node.op_type == "MatMul":
                return inputs[:1] if self._ranks.get(inputs[1]) == 2 else []
            if node.op_type in _NORMALIZATIONS:
                alike = _is_along_columns(node, -1) and all(map(self._is_vector, inputs[1:]))
                return inputs[:1] if alike else []
            if node.op_type == "Split":
                return inputs[:1] if _is_along_columns(node, 0) else []
            return inputs[:1] if node.op_type == "Reshape" and self._keeps_tokens(node) else []
        if node.domain == MICROSOFT and node.op_type in _CONTRIB_ELEMENTWISE:
            return self._elementwise(inputs)
        if node.domain == MICROSOFT and node.op_type in _SKIPPED_NORMALIZATIONS:
            return inputs[:2]
        return []

    def widens(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a product that gives more columns than it takes."""
        if node.op_type != "MatMul":
            return False
        weight = self._graph.matrix(node.input[1])
        return weight is None or weight[1] > weight[0]

    def _elementwise(self, inputs: list[str]) -> list[str]:
        """Constants are the same for all tokens: numbers, or a vector along the columns."""
        constants = self._ranks.keys() & set(inputs)
        if any(self._ranks[value] not in (0, 1) for value in constants):
            return []
        return [value for value in inputs if value and value not in constants]

    def _is_vector(self, value: str) -> bool:
        """Whether a scale or bias is the same for all tokens: a constant, or what the caller gives.

        ONNX Runtime takes any that can be broadcast, also one with a row for each token.
        """
        if not value or value in self._ranks:
            return not value or self._ranks[value] in (0, 1)
        shape = self._graph.shape(value)
        return self._graph.producer(value) is None and shape is not None and len(shape) < 2

    def _keeps_tokens(self, node: onnx.NodeProto) -> bool:
        """Whether a Reshape takes columns apart alone, for packed operands of attention.

        Of rank 4, attention would take them for [batch, heads, tokens, columns].
        """
        shape = self._graph.numbers(node.input[1]) or []
        return (
            shape[:2] == [_COPIED, _COPIED]
            and len(shape) == PACKED_RANK
            and not attributes_of(node).get("allowzero")
            and all(map(multi_head_attention.is_attention, self._graph.readers(node.output[0])))
        )

    def _made_rank(self, node: onnx.NodeProto, value: str) -> int | None:
        """The rank of what a node makes of constants; None where it is not known."""
        graph = self._graph
        if is_standard(node.domain):
            if node.op_type == "Constant":
                return _constant_rank(node)
            if node.op_type in _SAME_RANK:
                return self._ranks[node.input[0]]
            shape = graph.numbers(node.input[1]) if node.op_type == "Reshape" else None
            if shape is not None:
                return len(shape)
        dims, recorded = graph.constant_dims(value), graph.shape(value)
        if dims is not None:
            return len(dims)
        return None if recorded is None else len(recorded)


def _is_along_columns(node: onnx.NodeProto, default: int) -> bool:
    """Whether the axis of a node, or the first of them, is behind that of the tokens."""
    axis = int(attributes_of(node).get("axis", default))
    return axis == -1 or axis > 1


def _constant_rank(node: onnx.NodeProto) -> int | None:
    """The rank of what a Constant makes; None for sparse tensors and strings."""
    name, value = next(iter(attributes_of(node).items()))
    return len(value.dims) if name == "value" else _CONSTANT_RANKS.get(name)
