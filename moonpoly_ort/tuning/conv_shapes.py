"""Convolutions that are measured: random layers of each kind, over the whole range of sizes, or a
model's own layers on images of many sizes.

Weights are constants, stored anew for the kernels, as those of almost every model are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import native
from . import shapes
from .shapes import NUMBERS, Shape, element_bytes
from .spreading import farthest_first

# Kinds of layers, with how many of each are measured for a way of holding numbers.
KINDS = {"conv": 44, "first": 12, "depthwise": 16, "transposed": 10}
# Layers that fill a GPU, as residual, detection and super-resolution networks have them: images,
# channels in and out, side of the square image, side of the kernel, stride. Random layers are
# mostly small, and a kernel that only these need would be dropped.
HEAVY: tuple[tuple[int, int, int, int, int, int], ...] = (
    (16, 64, 64, 112, 3, 1), (4, 64, 192, 150, 3, 1), (8, 96, 128, 160, 3, 1),
    (8, 128, 128, 56, 3, 1), (2, 256, 256, 64, 3, 1), (8, 256, 256, 28, 3, 2),
    (2, 512, 512, 64, 3, 1), (16, 512, 512, 14, 3, 1), (4, 384, 96, 56, 3, 1),
    (1, 96, 24, 180, 9, 1), (1, 256, 256, 128, 3, 1), (32, 512, 512, 7, 3, 1),
)  # fmt: skip
FEW_CHANNELS = 8  # of X, in a first layer
# Images of a model's layers, in turn: how many, and the ratio of height to width.
VIEWS = ((1, 1.0), (1, 0.7), (4, 1.4))
LIGHT_KINDS = ("first", "depthwise", "transposed")
TRIPLE = tuple[int, int, int]
ONES: TRIPLE = (1, 1, 1)


class Layer(NamedTuple):
    """A Conv or ConvTranspose of a model: all but its images. `axes` are spatial ones, of which the
    leading ones of `kernel` and so on are 1 where there are fewer than three; `c` and `k` are
    channels of one group.
    """

    number: str
    transposed: bool
    axes: int
    groups: int
    c: int
    k: int
    kernel: TRIPLE
    stride: TRIPLE = ONES
    dilation: TRIPLE = ONES
    padded: bool = False

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.transposed:
            return "transposed"
        if self.c == 1 and self.groups > 1:
            return "depthwise"
        return "first" if self.groups == 1 and self.c <= FEW_CHANNELS else "conv"

    @property
    def is_product(self) -> bool:
        """Whether sessions multiply: one pixel of X for each pixel of Y."""
        plain = not (self.transposed or self.padded) and self.kernel == self.stride == ONES
        return plain and self.groups == 1

    def shape(self, images: int, height: int, width: int, depth: int = 1) -> ConvShape:
        """On images whose Y has about so many pixels along each axis."""
        size = [
            max(1, round(pixels / stride)) if self.transposed else pixels * stride
            for pixels, stride in zip((depth, height, width), self.stride, strict=True)
        ]
        return ConvShape(
            self.number, self.kind, images, self.groups, self.c, self.k,
            (size[0], size[1], size[2]), self.kernel, self.stride, self.dilation,
        )  # fmt: skip


@dataclass(frozen=True, order=True)
class ConvShape:
    """A convolution of dense tensors at aligned addresses; spatial sizes are depth, height, width.

    `number` is a key of `NUMBERS`, `kind` one of `KINDS`; `c` and `k` are channels of one group.
    """

    number: str
    kind: str
    n: int
    groups: int
    c: int
    k: int
    size: TRIPLE
    kernel: TRIPLE
    stride: TRIPLE = ONES
    dilation: TRIPLE = ONES

    def __str__(self) -> str:
        def sizes(values: TRIPLE) -> str:
            return "x".join(map(str, values if values[0] > 1 else values[1:]))

        extra = f" stride {sizes(self.stride)}" if self.stride != ONES else ""
        extra += f" dilation {sizes(self.dilation)}" if self.dilation != ONES else ""
        extra += f" in {self.groups} groups" if self.groups > 1 else ""
        return (
            f"{self.n} x {self.c}->{self.k} of {sizes(self.size)} by {sizes(self.kernel)}{extra} "
            f"{self.number} {self.kind}"
        )

    @property
    def group(self) -> tuple[str, str, bool]:
        """What the time for tuning is shared between: number and kind."""
        return self.number, self.kind, False

    @property
    def transposed(self) -> bool:
        return self.kind == "transposed"

    def unpacked(self) -> native.Conv:
        """The `mp_conv` for W as ONNX stores it; pads keep the size at stride 1."""
        dtype, precision = NUMBERS[self.number]
        pads = [d * (s - 1) // 2 for d, s in zip(self.dilation, self.kernel, strict=True)]
        ends = [d * (s - 1) - p for d, s, p in zip(self.dilation, self.kernel, pads, strict=True)]
        attributes = native.ConvAttributes.of_node(
            self.transposed, group=self.groups, strides=self.stride, dilations=self.dilation,
            pads=[*pads, *ends] if not self.transposed else (),
        )  # fmt: skip
        x = (self.n, self.groups * self.c, *self.size)
        w = (
            (self.groups * self.c, self.k, *self.kernel)
            if self.transposed
            else (self.groups * self.k, self.c, *self.kernel)
        )
        return native.conv_problem(x, w, attributes, dtype, precision).conv

    def problem(self) -> native.Conv:
        """The `mp_conv` with W as the kernels load it best."""
        return native.conv_packed(self.unpacked())[0]

    @property
    def operand_bytes(self) -> tuple[int, int, int]:
        """Bytes of W, X and Y."""
        conv, size = self.unpacked(), element_bytes(self.number)
        stored = native.conv_packed(conv)[1]
        weights = conv.groups * conv.k * conv.c * math.prod(conv.kernel) * size
        x = conv.n * conv.groups * conv.c * math.prod(conv.inputs) * size
        return max(stored, weights), x, conv.n * conv.groups * conv.k * math.prod(conv.out) * size

    @property
    def sizes(self) -> tuple[float, ...]:
        """The logarithms that tell shapes apart."""
        pixels = math.prod(self.size) // math.prod(self.stride)
        taps = math.prod(self.kernel)
        parts = self.n * max(pixels, 1), self.groups, self.c, self.k, taps
        return tuple(math.log2(part) for part in parts)


def _power(rng: np.random.Generator, low: float, high: float) -> int:
    return round(2 ** rng.uniform(low, high))


def _image(rng: np.random.Generator, low: float, high: float) -> TRIPLE:
    """Any height and width of about 2^low to 2^high pixels a side."""
    side = rng.uniform(low, high)
    lean = rng.uniform(-1, 1)
    return 1, max(1, round(2 ** (side + lean))), max(1, round(2 ** (side - lean)))


def _draw(number: str, kind: str, rng: np.random.Generator) -> ConvShape:
    n = int(rng.choice([1, 1, 2, 8]))
    side = int(rng.choice([3, 3, 3, 3, 1, 5, 7]))
    stride = int(rng.choice([1, 1, 1, 2]))
    if kind == "first":
        side = int(rng.choice([3, 5, 7]))
        c, k = int(rng.choice([1, 3, 3, 4, 8])), int(rng.choice([8, 16, 32, 64]))
        return ConvShape(number, kind, n, 1, c, k, _image(rng, 5, 9.5), (1, side, side),
                         (1, stride, stride))  # fmt: skip
    if kind == "depthwise":
        groups = 8 * _power(rng, 1, 7.5)
        side = int(rng.choice([3, 3, 5, 7]))
        return ConvShape(number, kind, n, groups, 1, 1, _image(rng, 2.5, 7.5), (1, side, side),
                         (1, stride, stride))  # fmt: skip
    if kind == "transposed":
        c, k = 8 * _power(rng, 1, 6), 4 * _power(rng, 1, 6)
        side = int(rng.choice([2, 2, 3, 4]))
        return ConvShape(number, kind, n, 1, c, k, _image(rng, 3, 6.5), (1, side, side), (1, 2, 2))
    c, k = 8 * _power(rng, 1, 6.5), 8 * _power(rng, 0, 6.5)
    if rng.random() < 0.15:  # sound, text: one axis
        width = int(rng.choice([3, 5, 9]))
        return ConvShape(number, kind, n, 1, c, k, (1, 1, _power(rng, 5, 11)), (1, 1, width))
    groups = int(rng.choice([2, 4, 32])) if rng.random() < 0.15 else 1
    c, k = max(2, c // groups), max(1, k // groups)
    dilation = 2 if side > 1 and stride == 1 and rng.random() < 0.1 else 1
    if side == 1:
        stride = 2  # else it is a product
    return ConvShape(number, kind, n, groups, c, k, _image(rng, 2, 7.5), (1, side, side),
                     (1, stride, stride), (1, dilation, dilation))  # fmt: skip


def _heavy(number: str) -> list[ConvShape]:
    return [
        ConvShape(number, "conv", n, 1, c, k, (1, size, size), (1, side, side), (1, stride, stride))
        for n, c, k, size, side, stride in HEAVY
    ]


def spread(shapes: list[ConvShape]) -> list[ConvShape]:
    """The same shapes, each as far as possible from those before it."""
    points = np.array([shape.sizes for shape in shapes])
    return [shapes[index] for index in farthest_first(points)]


def for_layers(
    layers: Sequence[Layer], pixels: Sequence[int]
) -> dict[tuple[str, str, bool], list[ConvShape] | list[Shape]]:
    """The shapes of a model's layers by group, each layer with about so many pixels of Y in all:
    products (of W and the pixels) of those that sessions multiply.
    """
    products: dict[tuple[str, str, bool], dict[Shape, None]] = {}
    convolutions: dict[tuple[str, str, bool], dict[ConvShape, None]] = {}
    for layer in dict.fromkeys(layers):
        for turn, count in enumerate(pixels):
            if layer.is_product:
                product = Shape(layer.number, "nn", layer.k, count, layer.c)
                products.setdefault(product.group, {})[product] = None
                continue
            images, ratio = VIEWS[turn % len(VIEWS)]
            of_image = max(1.0, count / images)
            depth = round(of_image ** (1 / 3)) if layer.axes == 3 else 1
            height = max(1, round(math.sqrt(of_image / depth * ratio))) if layer.axes > 1 else 1
            width = max(1, round(of_image / depth / height))
            shape = layer.shape(images, height, width, depth)
            convolutions.setdefault(shape.group, {})[shape] = None
    return {group: shapes.spread(list(found)) for group, found in products.items()} | {
        group: spread(list(found)) for group, found in convolutions.items()
    }


def synthetic(number: str, seed: int = 0) -> dict[tuple[str, str, bool], list[ConvShape]]:
    """The shapes of one way of holding numbers by group, the most telling first.

    Depthwise kernels add up alike in either precision of fp32, so that `f32ieee` has none.
    """
    rng = np.random.default_rng([seed, list(NUMBERS).index(number), 7])
    found = {}
    for kind, count in KINDS.items():
        if kind == "depthwise" and number == "f32ieee":
            continue
        drawn = dict.fromkeys(_draw(number, kind, rng) for _ in range(count))
        if kind == "conv":
            drawn |= dict.fromkeys(_heavy(number))
        found[number, kind, False] = spread(list(drawn))
    return found
