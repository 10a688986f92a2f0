"""ConvTranspose(X, W, B?) -> ai.moonpoly.ConvTranspose(X, W, B?)

One to three spatial dimensions, any strides, dilations, pads and groups, output_padding and
output_shape. Attributes stay as they are, as those of Conv.
"""

from __future__ import annotations

import onnx_ir as ir

from .convolution import ConvolutionRule, differ, invalid, refuse_bias, sizes
from .report import Refusal


class ConvTransposeRule(ConvolutionRule):
    name = "conv_transpose"
    op_type = "ConvTranspose"
    transformation = "ConvTranspose(X, W, B?) -> ai.moonpoly.ConvTranspose(X, W, B?)"

    def refuse_channels(self, node: ir.Node) -> Refusal | None:
        """X is [N, C, ...], W is [C, M / group, ...], B is [M]."""
        groups = node.attributes.get_int("group", 1)
        _, of_x = sizes(node.inputs[0], 2)
        of_w, per_group = sizes(node.inputs[1], 2)
        if differ(of_x, of_w):
            return invalid(f"X has {of_x} channels, W has {of_w}")
        channels = of_x if of_w is None else of_w
        if channels is not None and channels % groups:
            return invalid(f"X has {channels} channels, which {groups} groups cannot share")
        return refuse_bias(node, None if per_group is None else per_group * groups)

    def refuse_padding(self, node: ir.Node) -> Refusal | None:
        """ONNX Runtime fails where output_padding reaches the stride and the dilation."""
        added = node.attributes.get_ints("output_padding", ())
        if not added:
            return None
        ones = [1] * len(added)
        strides, dilations = (node.attributes.get_ints(n, ones) for n in ("strides", "dilations"))
        if any(a >= max(s, d) for a, s, d in zip(added, strides, dilations, strict=True)):
            return invalid(
                f"output_padding is {list(added)}; less than strides, {list(strides)}, or "
                f"dilations, {list(dilations)}, is legal"
            )
        return None
