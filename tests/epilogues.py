"""What follows a product, by its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpoly_ort.native_structs import Activation, Residual

Array = npt.NDArray[Any]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    # Of the half that does not overflow; 1 - sigmoid(-x) elsewhere.
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small / (1 + small), 1 / (1 + small))


def activated(x: Array, activation: Activation, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """The activation of float64 values, NaN and infinities as the formula has them."""
    with np.errstate(all="ignore"):
        match activation:
            case Activation.NONE:
                return x
            case Activation.RELU:
                return np.maximum(x, 0)
            case Activation.LEAKY_RELU:
                return np.where(x < 0, alpha * x, x)
            case Activation.CLIP:
                return np.minimum(np.maximum(x, alpha), beta)
            case Activation.SIGMOID:
                return _sigmoid(x)
            case Activation.TANH:
                return np.tanh(x)
            case Activation.HARD_SIGMOID:
                return np.minimum(np.maximum(alpha * x + beta, 0), 1)
            case Activation.HARD_SWISH:
                return x * np.minimum(np.maximum(x / 6 + 0.5, 0), 1)
            case Activation.GELU:
                return x * (0.5 * (1 + _erf(x / math.sqrt(2))))
            case Activation.GELU_TANH:
                return x * (0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
            case Activation.QUICK_GELU:
                return x * _sigmoid(alpha * x)
            case Activation.SILU:
                return x * _sigmoid(x)
    raise AssertionError(activation)


def finished(
    x: Array, activation: Activation, residual: Residual, alpha: float, beta: float, r: Array | None
) -> Array:
    """`x` with its activation and with R, where `residual` says so."""
    with np.errstate(all="ignore"):
        if r is not None and residual == Residual.BEFORE:
            x = x + r
        x = activated(x, Activation(activation), alpha, beta)
        if r is not None and residual == Residual.AFTER:
            x = x + r
        if r is not None and residual == Residual.MULTIPLIED:
            x = x * r
    return x


# Operators by their names, in order of application.
ACTIVATIONS = {
    "Relu": Activation.RELU, "LeakyRelu": Activation.LEAKY_RELU, "Clip": Activation.CLIP,
    "Sigmoid": Activation.SIGMOID, "Tanh": Activation.TANH,
    "HardSigmoid": Activation.HARD_SIGMOID, "HardSwish": Activation.HARD_SWISH,
    "Gelu": Activation.GELU, "GeluTanh": Activation.GELU_TANH,
    "QuickGelu": Activation.QUICK_GELU, "Silu": Activation.SILU,
}  # fmt: skip
# What may follow each base, as (name, activation, residual).
_PLAIN = [("", Activation.NONE, Residual.NONE), ("Add", Activation.NONE, Residual.BEFORE)]
_ACTIVATED = [(name, code, Residual.NONE) for name, code in ACTIVATIONS.items()]
_ADDED = [("Add" + name, code, Residual.BEFORE) for name, code in ACTIVATIONS.items()]
AFTER_PRODUCTS = [
    *_PLAIN, ("Mul", Activation.NONE, Residual.MULTIPLIED), *_ACTIVATED, *_ADDED,
]  # fmt: skip
AFTER_CONVOLUTIONS = [
    *_PLAIN, *_ACTIVATED, *_ADDED,
    *((name + "Add", code, Residual.AFTER) for name, code in ACTIVATIONS.items()),
]  # fmt: skip
AFTER_TRANSPOSED = [*_PLAIN[:1], *_ACTIVATED]


def gated(x: Array, activation: Activation, alpha: float = 0.0, beta: float = 0.0) -> Array:
    """Of each pair of neighbouring columns the product, the even one with its activation."""
    with np.errstate(all="ignore"):
        return activated(x[..., 0::2], activation, alpha, beta) * x[..., 1::2]


# What a gated product may have for its gates.
GATES = [("", Activation.NONE), *ACTIVATIONS.items()]
# Every operator of a product by its name, and those of them that have no fp32.
TO_FLOAT = [f"{base}ToFloat" for base in ("MatMul", "MatMulBias", "Gemm")]
PRODUCTS = [
    *(
        base + name
        for base in ("MatMul", "MatMulBias", "ScaledMatMul", "ScaledMatMulBias", "Gemm")
        for name, _, _ in AFTER_PRODUCTS
    ),
    *(base + name for base in ("MatMulGated", "MatMulGatedBias") for name, _ in GATES),
    "MatMulTransposed",
    *TO_FLOAT,
]
