"""ResNet-50 and MobileNetV2 as torch modules with random weights, for exports of any image size."""

from __future__ import annotations

import torch
from torch import nn

# MobileNetV2 (Sandler et al. 2018, table 2): expansion, channels, blocks, stride of the first.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution with its normalization, padded to keep the size at stride 1."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Bottleneck(nn.Module):
    """relu(x + 1x1(3x3(1x1(x)))), the stride in the 3x3; a projection where shapes differ."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.branch = nn.Sequential(
            *_conv(inputs, middle, 1), nn.ReLU(), *_conv(middle, middle, 3, stride), nn.ReLU(),
            *_conv(middle, outputs, 1),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """x + 1x1(relu6(depthwise 3x3(relu6(1x1(x)))))."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = inputs * expansion
        wide = [] if expansion == 1 else [*_conv(inputs, middle, 1), nn.ReLU6()]
        self.branch = nn.Sequential(
            *wide, *_conv(middle, middle, 3, stride, middle), nn.ReLU6(), *_conv(middle, outputs, 1)
        )
        self.adds = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.branch(x)
        return x + y if self.adds else y


def resnet50(width: float = 1.0, classes: int = 1000) -> nn.Module:
    """He et al. 2016 with stages of 3, 4, 6 and 3 blocks; `width` scales the channels."""
    first = max(8, int(64 * width))
    layers = [*_conv(3, first, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = first
    for stage, blocks in enumerate((3, 4, 6, 3)):
        middle = first << stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, middle, 2 if stage and not block else 1))
            inputs = 4 * middle
    return _classifier(layers, inputs, classes)


def mobilenet_v2(width: float = 1.0, classes: int = 1000) -> nn.Module:
    """Sandler et al. 2018; `width` scales the channels, to multiples of 8."""

    def scaled(channels: int) -> int:
        return max(8, int(channels * width) // 8 * 8)

    inputs = scaled(32)
    layers: list[nn.Module] = [*_conv(3, inputs, 3, 2), nn.ReLU6()]
    for expansion, channels, blocks, stride in INVERTED:
        for block in range(blocks):
            outputs = scaled(channels)
            layers.append(InvertedResidual(inputs, outputs, 1 if block else stride, expansion))
            inputs = outputs
    layers += [*_conv(inputs, scaled(1280), 1), nn.ReLU6()]
    return _classifier(layers, scaled(1280), classes)


def _classifier(layers: list[nn.Module], features: int, classes: int) -> nn.Module:
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)
    )
