"""The passes over ONNX Runtime's attention that run behind an optimizer where its name asks for it
(`optimize="onnxscript-packed"`), in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import onnx

from . import (
    aligned_keys,
    attention_mask,
    attention_views,
    grouped_heads,
    merged_products,
    packed_attention,
    padded_tokens,
    projection_bias,
    repeated_heads,
    rotary_embedding,
    shifted_range,
    unpacked_attention,
    zero_attention_bias,
)
from .domain import stamp

log = logging.getLogger("moonpoly_ort")

Pass = tuple[str, Callable[[onnx.ModelProto], int]]
"""A name, and what changes the main graph in place and returns how often it found something."""

_MASKS: tuple[Pass, ...] = (
    ("zero_attention_bias", zero_attention_bias.remove),
    ("attention_mask", attention_mask.simplify),
    ("shifted_range", shifted_range.shift),
)
_NEIGHBOURS: tuple[Pass, ...] = (
    ("projection_bias", projection_bias.move),
    ("rotary_embedding", rotary_embedding.fuse),
    ("attention_views", attention_views.remove),  # which look through RotaryEmbedding
    ("grouped_heads", grouped_heads.group),  # which looks for keys as the views leave them
    ("repeated_heads", repeated_heads.gather),
)
_LENGTHS: tuple[Pass, ...] = (  # of what attention reads in the end
    ("padded_tokens", padded_tokens.pad),
    ("aligned_keys", aligned_keys.pad),
)

LEAN: tuple[Pass, ...] = (*_MASKS, *_NEIGHBOURS, *_LENGTHS)
"""Attention stays as it was fused."""

UNPACKED: tuple[Pass, ...] = (
    *_MASKS,
    ("unpacked_attention", unpacked_attention.unpack),
    *_NEIGHBOURS,
    *_LENGTHS,
)
"""Q, K and V are products of their own."""

PACKED: tuple[Pass, ...] = (
    *_MASKS,
    ("packed_attention", packed_attention.pack),
    *_NEIGHBOURS,
    ("merged_products", merged_products.merge),  # those that could not be packed
    *_LENGTHS,
)
"""Q, K and V are one product."""


NAMES = tuple(dict.fromkeys(name for passes in (UNPACKED, PACKED) for name, _ in passes))
"""Of all passes; each can be left out."""


def apply(
    model: onnx.ModelProto, passes: tuple[Pass, ...], disable: Collection[str] = ()
) -> dict[str, int]:
    """Runs passes on a model, in place; returns how often each found something.

    The nodes that a pass made name it, as those of ours name their rules.

    Args:
        model: The model, as an optimizer left it.
        passes: `LEAN`, `UNPACKED` or `PACKED`.
        disable: The names of passes to leave out.
    """
    counts = {}
    before = set(map(_identity, model.graph.node))
    for name, run in passes:
        if name in disable:
            continue
        counts[name] = run(model)
        if counts[name]:
            after = [(_identity(node), node) for node in model.graph.node]
            for identity, node in after:
                if identity not in before:
                    stamp(node, name)
            before = {identity for identity, _ in after}
    log.info("passes over attention: %s", counts)
    return counts


def _identity(node: onnx.NodeProto) -> tuple[object, ...]:
    """What tells a node that was made or changed; the names of its inputs may follow others."""
    is_constant = node.op_type == "Constant"  # which may be large, and is never changed
    attributes = () if is_constant else (a.SerializeToString() for a in node.attribute)
    return (node.domain, node.op_type, *node.output, *sorted(attributes))
