"""The suite of convolutions: layers of six published networks on images of random sizes.

    python -m benchmarks.conv_suite FOLDER [--seed 2026]     # writes conv.csv

Batch and height are spread evenly over the logarithm, the width is half to twice the height. Every
layer has pads of half its kernel, as the networks do. About one row in six is marked as core.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.convolutions import Convolution
from benchmarks.operands import NUMBERS
from benchmarks.suites import CORE_SHARE, SEED, Draw

# (input channels, output channels, kernel, stride, groups)
Layer = tuple[int, int, int, int, int]

NETWORKS: dict[str, tuple[Layer, ...]] = {
    "resnet50": (
        (3, 64, 7, 2, 1), (64, 64, 3, 1, 1), (256, 64, 1, 1, 1), (128, 128, 3, 2, 1),
        (256, 1024, 1, 1, 1), (512, 512, 3, 1, 1),
    ),
    "vgg11": ((3, 64, 3, 1, 1), (64, 128, 3, 1, 1), (256, 256, 3, 1, 1), (512, 512, 3, 1, 1)),
    "googlenet": (
        (64, 192, 3, 1, 1), (192, 96, 1, 1, 1), (96, 128, 3, 1, 1), (16, 32, 5, 1, 1),
        (480, 192, 1, 1, 1),
    ),
    "mobilenet": (
        (16, 16, 3, 1, 16), (72, 72, 3, 2, 72), (120, 120, 5, 1, 120), (40, 240, 1, 1, 1),
        (480, 112, 1, 1, 1),
    ),
    "ocr-det": (
        (3, 16, 3, 2, 1), (32, 32, 3, 1, 32), (96, 24, 1, 1, 1), (384, 96, 3, 1, 1),
        (96, 24, 9, 1, 1),
    ),
    "yolo": (
        (3, 16, 3, 2, 1), (32, 64, 3, 2, 1), (64, 64, 3, 1, 1), (128, 64, 1, 1, 1),
        (256, 256, 3, 2, 1),
    ),
}  # fmt: skip
DRAWS_PER_LAYER = 8
LEAST_HEIGHT, MOST_IMAGES = 7, 32
MOST_ELEMENTS = 3e8  # of the larger of X and Y at stride 1: 0.6 GB in fp16

COLUMNS = ("id", "net", "N", "C_in", "H", "W", "C_out", "kernel", "stride", "group", "core")
KINDS = ("few channels", "dense", "pointwise", "depthwise")


@dataclass(frozen=True)
class ConvRow:
    """A Conv of `n` images (c_in, h, w) to c_out channels with a constant square kernel."""

    id: str
    net: str
    n: int
    c_in: int
    h: int
    w: int
    c_out: int
    kernel: int
    stride: int
    groups: int
    core: bool
    seed: int = SEED

    @property
    def layer(self) -> Layer:
        return self.c_in, self.c_out, self.kernel, self.stride, self.groups

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.groups == self.c_in and self.groups > 1:
            return "depthwise"
        if self.kernel == 1:
            return "pointwise"
        return "few channels" if self.c_in < 8 else "dense"

    @property
    def depth(self) -> int:
        """Products that are summed for an output."""
        return self.c_in // self.groups * self.kernel**2

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        reach = 2 * (self.kernel // 2) - self.kernel
        height, width = ((size + reach) // self.stride + 1 for size in (self.h, self.w))
        return self.n, self.c_out, height, width

    @property
    def flops(self) -> int:
        n, k, height, width = self.y_shape
        return 2 * n * k * height * width * self.depth

    @property
    def elements(self) -> int:
        """Of X, W and Y together: what has to be moved at least."""
        n, k, height, width = self.y_shape
        return n * self.c_in * self.h * self.w + self.c_out * self.depth + n * k * height * width

    def convolution(self, dtype: str) -> Convolution:
        """`dtype` is a name of `NUMBERS`."""
        name, precision = NUMBERS[dtype]
        pad, groups = self.kernel // 2, self.groups
        return Convolution(
            (self.h, self.w), (self.kernel, self.kernel), self.c_in // groups,
            self.c_out // groups, self.n, groups, (self.stride, self.stride), pads=(pad,) * 4,
            dtype=name, precision=precision,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"conv {self.id} {self.n}x{self.c_in}x{self.h}x{self.w} to {self.c_out}, "
            f"{self.kernel}x{self.kernel}/{self.stride}, {self.groups} groups"
        )


def _sizes(draw: Draw) -> Iterator[tuple[str, int, int, int, Layer]]:
    """(network, images, height, width, layer)."""
    for net, layers in NETWORKS.items():
        for layer in layers:
            c_in, c_out, kernel, _, _ = layer
            most = 640 if c_in < 32 else 224 if c_in < 128 else 64
            for _ in range(DRAWS_PER_LAYER):
                height = draw.size((max(LEAST_HEIGHT, kernel), most))
                width = max(kernel, int(height * draw.between(0.5, 2)))
                images = draw.size((1, MOST_IMAGES))
                if images * max(c_in, c_out) * height * width < MOST_ELEMENTS:
                    yield net, images, height, width, layer


def rows(seed: int = SEED) -> list[ConvRow]:
    """The suite; the same seed gives the same rows everywhere."""
    core = Draw(f"core-conv-{seed}")
    return [
        ConvRow(
            str(number), net, n, c_in, height, width, c_out, kernel, stride, groups,
            core.chance() < CORE_SHARE, seed,
        )
        for number, (net, n, height, width, (c_in, c_out, kernel, stride, groups)) in enumerate(
            _sizes(Draw(f"conv-{seed}"))
        )
    ]  # fmt: skip


def write(suite: list[ConvRow], path: Path) -> None:
    """One line a row: id, net, N, C_in, H, W, C_out, kernel, stride, group, core."""
    with path.open("w", newline="") as target:
        out = csv.writer(target, lineterminator="\n")
        out.writerow(
            ["id", "net", "N", "C_in", "H", "W", "C_out", "kernel", "stride", "group", "core"]
        )
        for row in suite:
            sizes = [row.n, row.c_in, row.h, row.w, row.c_out, row.kernel, row.stride, row.groups]
            out.writerow([row.id, row.net, *sizes, int(row.core)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    suite = rows(arguments.seed)
    write(suite, arguments.folder / "conv.csv")
    print(f"conv.csv: {len(suite)} rows, {sum(row.core for row in suite)} of them core")


if __name__ == "__main__":
    main()
