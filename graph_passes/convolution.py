"""What the rules for Conv and ConvTranspose share: what must hold of attributes and shapes.

The rank may come from X, from W or from any attribute that has a value for each axis: exporters
leave kernel_shape out, and X has no rank behind a Reshape to a shape of the run.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from .domain import DOMAIN
from .report import Reason, Refusal
from .rule import (
    Rule,
    Scope,
    refuse_dtype,
    refuse_malformed,
    refuse_opset,
    refuse_static,
)

RANKS = (1, 2, 3)
"""Spatial dimensions that the kernels have."""

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")

PER_AXIS: Mapping[str, tuple[int, int]] = {
    "kernel_shape": (1, 1),
    "strides": (1, 1),
    "dilations": (1, 1),
    "pads": (2, 0),
    "output_padding": (1, 0),
    "output_shape": (1, 1),
}
"""Attributes that list numbers: how many of them for a spatial axis, and the least legal one."""


class ConvolutionRule(Rule):
    """The checks in their order; what the dimensions of W stand for is up to the rules."""

    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        return (
            refuse_opset(node, scope)
            or refuse_malformed(node, scope)
            or refuse_dtype(node, scope)
            or _refuse_attributes(node)
            or _refuse_rank(node)
            or _refuse_kernel(node)
            or self.refuse_padding(node)
            or self.refuse_channels(node)
            or refuse_static(node, scope)
        )

    def rewrite(self, node: ir.Node) -> None:
        """An empty name as B stays a third input."""
        node.domain = DOMAIN
        if len(node.inputs) == 2:
            node.op_type += "NoBias"

    @abc.abstractmethod
    def refuse_channels(self, node: ir.Node) -> Refusal | None:
        """Channels of X, W and B, and groups, that do not fit each other."""

    def refuse_padding(self, node: ir.Node) -> Refusal | None:
        """Padding of the output that strides and dilations do not allow; all ranks agree."""
        return None


def sizes(value: ir.Value | None, rank: int) -> tuple[int | None, ...]:
    """The first `rank` dimensions of an operand, None where they are not known."""
    shape = None if value is None else value.shape
    if shape is None:
        return (None,) * rank
    return tuple(size if isinstance(size, int) else None for size in shape[:rank])


def differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def invalid(detail: str) -> Refusal:
    return Refusal(Reason.INVALID, detail)


def refuse_bias(node: ir.Node, channels: int | None) -> Refusal | None:
    """B, if there is one, has one value for each of the output channels."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None or bias.shape is None:
        return None
    if len(bias.shape) != 1 or differ(sizes(bias, 1)[0], channels):
        return invalid(f"B is {bias.shape}; the output has {channels or 'several'} channels")
    return None


def _refuse_attributes(node: ir.Node) -> Refusal | None:
    for name, (_, least) in PER_AXIS.items():
        values = node.attributes.get_ints(name, ())
        if any(value < least for value in values):
            return invalid(f"{name} is {list(values)}; {least} and more are legal")
    groups = node.attributes.get_int("group", 1)
    if groups < 1:
        return invalid(f"group is {groups}; 1 and more are legal")
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad not in AUTO_PADS:
        return invalid(f"auto_pad is {auto_pad!r}; legal are {', '.join(AUTO_PADS)}")
    if auto_pad != "NOTSET" and "pads" in node.attributes:
        return invalid(f"both pads and auto_pad = {auto_pad} are given; ONNX allows one of them")
    return None


def _refuse_rank(node: ir.Node) -> Refusal | None:
    found = dict(_ranks(node))
    if not found:
        return Refusal(
            Reason.RANK_UNKNOWN, "neither X nor W nor an attribute says how many axes there are"
        )
    if len(set(found.values())) > 1:
        said = ", ".join(f"{rank:g} by {name}" for name, rank in found.items())
        return invalid(f"spatial dimensions differ: {said}")
    rank = next(iter(found.values()))
    if rank not in RANKS:
        return Refusal(
            Reason.RANK_UNSUPPORTED, f"{rank:g} spatial dimensions; {RANKS[0]} to {RANKS[-1]} are"
        )
    return None


def _ranks(node: ir.Node) -> Iterator[tuple[str, float]]:
    """The number of spatial dimensions by all that tells it."""
    for name, operand in zip("XW", node.inputs, strict=False):
        if operand is not None and operand.shape is not None:
            yield name, len(operand.shape) - 2
    for name, (count, _) in PER_AXIS.items():
        if name in node.attributes:
            yield name, len(node.attributes.get_ints(name, ())) / count


def _refuse_kernel(node: ir.Node) -> Refusal | None:
    weight = node.inputs[1]
    if weight is None or weight.shape is None:
        return None
    known = sizes(weight, len(weight.shape))[2:]
    if 0 in known:
        return invalid(f"W is {weight.shape}: a kernel of nothing")
    kernel = node.attributes.get_ints("kernel_shape", ())
    if any(map(differ, known, kernel)):
        return invalid(f"kernel_shape is {list(kernel)} and W is {weight.shape}")
    return None
