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
_COPIED = 0  # in the shape of a Reshape: the size that the input has
_SAME_RANK = frozenset({"Cast", "Concat", "Identity", "Split", "Transpose"})


class TokenWise:
    """Asks nodes of a graph."""

    def __init__(self, graph: EditedGraph) -> None:
        self._graph = graph
        self._constants = set(graph.initializers)  # and what depends on constants alone
        for node in graph.nodes:
            if node.op_type == "Constant" or (
                node.input and self._constants.issuperset(filter(None, node.input))
            ):
                self._constants.update(node.output)

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
                return inputs[:1] if self._rank(inputs[1]) == 2 else []
            if node.op_type in _NORMALIZATIONS:
                return inputs[:1] if _is_along_columns(node, -1) else []
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
        constants = self._constants.intersection(inputs)
        if any(self._rank(value) not in (0, 1) for value in constants):
            return []
        return [value for value in inputs if value and value not in constants]

    def _keeps_tokens(self, node: onnx.NodeProto) -> bool:
        """Whether a Reshape takes columns apart alone, for attention."""
        shape = self._graph.numbers(node.input[1]) or []
        return (
            shape[:2] == [_COPIED, _COPIED]
            and not attributes_of(node).get("allowzero")
            and all(map(multi_head_attention.is_attention, self._graph.readers(node.output[0])))
        )

    def _rank(self, value: str) -> int | None:
        """The rank of a constant, also of one that nodes put together; None for other values."""
        if value not in self._constants:
            return None
        graph = self._graph
        dims = graph.constant_dims(value) or graph.shape(value)
        if dims is not None:
            return len(dims)
        array, node = graph.constant(value), graph.producer(value)
        if array is not None:
            return array.ndim
        if node is not None and node.op_type == "Reshape":
            shape = graph.numbers(node.input[1])
            return None if shape is None else len(shape)
        return self._rank(node.input[0]) if node and node.op_type in _SAME_RANK else None


def _is_along_columns(node: onnx.NodeProto, default: int) -> bool:
    """Whether the axis of a node, or the first of them, is behind that of the tokens."""
    axis = int(attributes_of(node).get("axis", default))
    return axis == -1 or axis > 1
