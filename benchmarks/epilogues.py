"""What follows a product in its kernel, by its definition, on torch tensors of float64."""

from __future__ import annotations

import math

import torch

from moonpoly_ort.native import Activation, Residual

# No activation makes a difference between two values greater than by this: HardSwish's slope at 3.
STEEPEST = 1.5
# For the activations that have such numbers.
ALPHA, BETA = 0.25, 0.75


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation with ALPHA and BETA; NaN stays NaN."""
    match activation:
        case Activation.NONE:
            return x
        case Activation.RELU:
            return x.clamp(min=0)
        case Activation.LEAKY_RELU:
            return torch.where(x < 0, ALPHA * x, x)
        case Activation.CLIP:
            return x.clamp(ALPHA, BETA)
        case Activation.SIGMOID:
            return torch.sigmoid(x)
        case Activation.TANH:
            return torch.tanh(x)
        case Activation.HARD_SIGMOID:
            return (ALPHA * x + BETA).clamp(0, 1)
        case Activation.HARD_SWISH:
            return x * (x / 6 + 0.5).clamp(0, 1)
        case Activation.GELU:
            return x * (0.5 * (1 + torch.erf(x / math.sqrt(2))))
        case Activation.GELU_TANH:
            return x * (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
        case Activation.QUICK_GELU:
            return x * torch.sigmoid(ALPHA * x)
        case Activation.SILU:
            return x * torch.sigmoid(x)


def finished(
    x: torch.Tensor, activation: Activation, residual: Residual, r: torch.Tensor | None
) -> torch.Tensor:
    """`x` with its activation and with `r`, where `residual` says so."""
    if r is not None and residual == Residual.BEFORE:
        x = x + r
    x = activated(x, activation)
    if r is not None and residual == Residual.AFTER:
        x = x + r
    if r is not None and residual == Residual.MULTIPLIED:
        x = x * r
    return x


def gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Of each pair of neighbouring columns the product, the even one with its activation."""
    return activated(x[..., 0::2], activation) * x[..., 1::2]
