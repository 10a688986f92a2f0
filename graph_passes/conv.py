"""Conv(X, W, B?) -> ai.moonpoly.Conv(X, W, B?)

One to three spatial dimensions, any strides, dilations, pads and groups. Attributes stay as they
are: one that is absent stays absent in the function body too.
"""

from __future__ import annotations

import onnx_ir as ir

from .convolution import ConvolutionRule, differ, invalid, refuse_bias, sizes
from .report import Refusal


class ConvRule(ConvolutionRule):
    name = "conv"
    op_type = "Conv"
    transformation = "Conv(X, W, B?) -> ai.moonpoly.Conv(X, W, B?)"

    def refuse_channels(self, node: ir.Node) -> Refusal | None:
        """X is [N, C, ...], W is [M, C / group, ...], B is [M]."""
        groups = node.attributes.get_int("group", 1)
        _, channels = sizes(node.inputs[0], 2)
        outputs, per_group = sizes(node.inputs[1], 2)
        if per_group is not None and differ(channels, per_group * groups):
            return invalid(
                f"X has {channels} channels; W has {per_group} for each of {groups} groups"
            )
        if outputs is not None and outputs % groups:
            return invalid(f"W has {outputs} output channels, which {groups} groups cannot share")
        return refuse_bias(node, outputs)
