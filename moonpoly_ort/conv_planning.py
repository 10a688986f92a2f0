"""The plan of a Conv or ConvTranspose node at given shapes, as the custom ops make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from . import native

NAMES = (
    "auto_pad", "group", "kernel_shape", "strides", "dilations", "pads", "output_padding",
    "output_shape",
)  # fmt: skip
HUGE_PIXELS = 1 << 24  # images so large are multiplied without asking


@dataclass(frozen=True)
class ConvPlan:
    """What is launched for one node: a convolution, or a matrix product where each output pixel has
    one input pixel. `repacked`: W is stored anew when the session is created.
    """

    work: native.Conv | native.Problem
    plan: native.Plan
    repacked: bool

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """(m, n, k, batch) of the product that it is, implicit or not: output channels of a group,
        output pixels of all images, input channels of a group times taps, groups.
        """
        work = self.work
        if isinstance(work, native.Problem):
            return work.m, work.n, work.k, work.batch
        return work.k, work.n * prod(work.out), work.c * prod(work.kernel), work.groups


def attributes_of(op: str, attributes: Mapping[str, Any]) -> native.ConvAttributes:
    """Those of a node of type `Conv` or `ConvTranspose`, as `onnx.helper` reads them.

    Raises ValueError or KeyError for values that are not legal.
    """
    named: dict[str, Any] = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in attributes.items()
        if name in NAMES
    }
    return native.ConvAttributes.of_node(op == "ConvTranspose", **named)


def plan(
    pack: native.Pack, device: native.Device, attributes: native.ConvAttributes,
    x: Sequence[int], w: Sequence[int], dtype: native.Dtype, precision: native.Precision,
    *, bias: bool, constant_w: bool,
) -> ConvPlan:  # fmt: skip
    """Raises ProblemError for shapes that do not fit, KernelMissingError where the pack has no
    kernel for them.
    """
    found = native.conv_problem(x, w, attributes, dtype, precision, bias=bias)
    conv, repacked = found.conv, False
    if constant_w and not _always_a_product(conv, attributes):
        conv, size = native.conv_packed(conv)
        repacked = size > 0
    product = found.product
    if product is None:
        return ConvPlan(conv, pack.plan_conv(device, conv), repacked)
    # cuBLASLt was not measured on products of pixels.
    multiplied = pack.plan(device, product, flags=native.PlanFlag.NO_VENDOR)
    # Kernels of products load rows of an odd number of pixels element by element, as those of
    # convolutions always do.
    if product.align_b < 16 and found.w_is_a and prod(conv.out) <= HUGE_PIXELS:
        convolved = pack.plan_conv(device, conv)
        if convolved.predicted_us < multiplied.predicted_us:
            return ConvPlan(conv, convolved, repacked)
    return ConvPlan(product, multiplied, False)


def _always_a_product(conv: native.Conv, attributes: native.ConvAttributes) -> bool:
    """Whether that is so at any size: then W stays as it is."""
    return (
        prod(conv.kernel) == 1
        and conv.groups == 1
        and not conv.transposed
        and all(stride == 1 for stride in attributes.stride[: attributes.stride_count])
        and not any(attributes.pad[: attributes.pad_count])
    )
