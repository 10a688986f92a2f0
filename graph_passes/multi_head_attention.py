"""MultiHeadAttention of com.microsoft: its operands by place, its attributes by name."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from .edited_graph import MICROSOFT
from .tree import attributes_of

QUERY, KEY, VALUE, BIAS, PADDING_MASK, ATTENTION_BIAS, PAST_KEY = range(7)

CAUSAL = "unidirectional"
PLAIN = frozenset({"num_heads", "mask_filter_value", "scale"})
"""Attributes that say nothing of how queries and keys lie to each other."""

MULTIPLES: dict[int, int] = {TensorProto.FLOAT16: 8, TensorProto.FLOAT: 16}
"""Of what number, by element type, the rows and columns of a mask must be for ONNX Runtime's
memory-efficient attention (1.31)."""


def may_be_padded(node: onnx.NodeProto) -> bool:
    """Whether an attention has a mask, gives nothing but its result, and counts no keys from their
    end, as a causal mask that is no operand does in ONNX Runtime's kernels for CUDA.
    """
    causal = attributes_of(node).get(CAUSAL)
    return len(node.input) == ATTENTION_BIAS + 1 and len(node.output) == 1 and not causal


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is one."""
    return node.op_type == "MultiHeadAttention" and node.domain == MICROSOFT


def operands(node: onnx.NodeProto) -> list[str]:
    """All inputs up to the cache at least, absent ones empty."""
    return [*node.input, *[""] * (PAST_KEY + 1 - len(node.input))]


def head_count(node: onnx.NodeProto) -> int:
    """How many heads the query has; 0 for a node that does not say it."""
    return next((a.i for a in node.attribute if a.name == "num_heads"), 0)
