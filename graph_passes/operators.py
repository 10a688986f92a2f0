"""The operators of the domain `ai.moonpoly`: a product or convolution and what follows it.

The name says what is applied, in this order:

    Base [Add] [Activation] [Add | Mul]        MatMulBiasGelu, GemmAddRelu, ConvSiluAdd, MatMulMul

Each name has one structure, and so one function body. The first Add, or the one behind the
activation, or the Mul takes the operand R, the last input, which has the shape of the output.

Two kinds of bases are special. Of a gated one, columns 2 i and 2 i + 1 of the product are the gate
and the value of output i: MatMulGatedBiasSilu is SwiGLU, with biases. Those to float have 16-bit
operands, and round to their type all the same. MatMulTransposed is A times B with its last two axes
exchanged, times alpha, as attention multiplies queries and keys.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping

import onnx

_Attributes = Mapping[str, onnx.AttributeProto.AttributeType]
_KIND = onnx.AttributeProto

ALPHA, BETA = "activation_alpha", "activation_beta"
"""Attributes of the activations that have parameters; always spelled out."""


_CAST_LIKE = 15
"""The version of ai.onnx that brought CastLike."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation of an epilogue.

    Attributes:
        name: What it is called in the names of operators.
        parameters: Its attributes, in the order of its formula.
        min_opset: The first ai.onnx version in which the function body can say it for any dtype:
            constants need CastLike, which came with 15.
    """

    name: str
    parameters: tuple[str, ...] = ()
    min_opset: int = 7


ACTIVATIONS: Mapping[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("Relu"),
        Activation("LeakyRelu", (ALPHA,)),
        Activation("Clip", (ALPHA, BETA), _CAST_LIKE),
        Activation("Sigmoid"),
        Activation("Tanh"),
        Activation("HardSigmoid", (ALPHA, BETA)),
        Activation("HardSwish"),
        Activation("Gelu", (), _CAST_LIKE),
        Activation("GeluTanh", (), _CAST_LIKE),
        Activation("QuickGelu", (ALPHA,), _CAST_LIKE),
        Activation("Silu"),
    )
}


class Residual(enum.StrEnum):
    """What becomes of the operand R."""

    NONE = ""
    BEFORE = "added before the activation"
    AFTER = "added after it"
    FACTOR = "multiplied by it"


@dataclasses.dataclass(frozen=True)
class Base:
    """A product or convolution without what follows it.

    Attributes:
        standard: The ai.onnx operator of its body.
        inputs: Of the operator, R left out.
        attributes: Of the operator, those of the activation left out.
        has_vector: Whether the last input is a vector that the body adds, as for MatMulBias.
        scaled: Whether the body multiplies the product with the attribute alpha, and the vector
            with beta.
        gated: Whether pairs of columns are multiplied, the first one with its activation.
        to_float: Whether the output is fp32, and the operands are not.
        turned: Whether B is transposed by the attribute perm, which exchanges its last two axes.
    """

    standard: str
    inputs: tuple[str, ...]
    attributes: _Attributes
    has_vector: bool = False
    scaled: bool = False
    gated: bool = False
    to_float: bool = False
    turned: bool = False


_SCALED: _Attributes = {"alpha": _KIND.FLOAT}
_SCALED_BIAS: _Attributes = {**_SCALED, "beta": _KIND.FLOAT}
_GEMM: _Attributes = {
    "transA": _KIND.INT,
    "transB": _KIND.INT,
    **_SCALED_BIAS,
}
_CONV: _Attributes = {
    "auto_pad": _KIND.STRING,
    "dilations": _KIND.INTS,
    "group": _KIND.INT,
    "kernel_shape": _KIND.INTS,
    "pads": _KIND.INTS,
    "strides": _KIND.INTS,
}
_CONV_TRANSPOSE = {**_CONV, "output_padding": _KIND.INTS, "output_shape": _KIND.INTS}

# An input that a node lacks is an empty name in the inlined body. For ONNX Runtime's CPU provider a
# Conv with such a third input is no candidate of its fusions and layouts (1.23 to 1.32), so that a
# Conv of two inputs has an operator of its own. Overloads would do, but 1.23 mixes them up.
BASES: Mapping[str, Base] = {
    "MatMul": Base("MatMul", ("A", "B"), {}),
    "MatMulBias": Base("MatMul", ("A", "B", "bias"), {}, has_vector=True),
    "ScaledMatMul": Base("MatMul", ("A", "B"), _SCALED, scaled=True),
    "ScaledMatMulBias": Base("MatMul", ("A", "B", "bias"), _SCALED_BIAS, True, scaled=True),
    "MatMulGated": Base("MatMul", ("A", "B"), {}, gated=True),
    "MatMulGatedBias": Base("MatMul", ("A", "B", "bias"), {}, has_vector=True, gated=True),
    "MatMulToFloat": Base("MatMul", ("A", "B"), {}, to_float=True),
    "MatMulBiasToFloat": Base("MatMul", ("A", "B", "bias"), {}, has_vector=True, to_float=True),
    "MatMulTransposed": Base(
        "MatMul", ("A", "B"), {"perm": _KIND.INTS, **_SCALED}, scaled=True, turned=True
    ),
    "Gemm": Base("Gemm", ("A", "B", "C"), _GEMM),
    "GemmToFloat": Base("Gemm", ("A", "B", "C"), _GEMM, to_float=True),
    "Conv": Base("Conv", ("X", "W", "B"), _CONV),
    "ConvNoBias": Base("Conv", ("X", "W"), _CONV),
    "ConvTranspose": Base("ConvTranspose", ("X", "W", "B"), _CONV_TRANSPOSE),
    "ConvTransposeNoBias": Base("ConvTranspose", ("X", "W"), _CONV_TRANSPOSE),
}


_HAS_STEPS = 11
"""The ai.onnx version in which Slice has steps, and counts axes from behind."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of the domain: its base, the activation if it has one, and the place of R."""

    base: str
    activation: str = ""
    residual: Residual = Residual.NONE

    @property
    def name(self) -> str:
        before = "Add" if self.residual is Residual.BEFORE else ""
        after = {Residual.AFTER: "Add", Residual.FACTOR: "Mul"}.get(self.residual, "")
        return f"{self.base}{before}{self.activation}{after}"

    @property
    def standard(self) -> str:
        """The ai.onnx operator that the base is."""
        return BASES[self.base].standard

    @property
    def is_base(self) -> bool:
        """Whether nothing follows the base."""
        return not self.activation and self.residual is Residual.NONE

    @property
    def inputs(self) -> tuple[str, ...]:
        own = BASES[self.base].inputs
        return own if self.residual is Residual.NONE else (*own, "R")

    @property
    def attributes(self) -> _Attributes:
        parameters = ACTIVATIONS[self.activation].parameters if self.activation else ()
        return {**BASES[self.base].attributes, **dict.fromkeys(parameters, _KIND.FLOAT)}

    @property
    def min_opset(self) -> int:
        """The first ai.onnx version in which its body can be said."""
        needs = [_CAST_LIKE] if BASES[self.base].scaled else [7]
        if BASES[self.base].gated:
            needs.append(_HAS_STEPS)
        if self.activation:
            needs.append(ACTIVATIONS[self.activation].min_opset)
        return max(needs)


def _operators() -> Iterator[Operator]:
    for base, kind in BASES.items():
        yield Operator(base)
        if kind.to_float or kind.turned:
            continue
        for activation in ACTIVATIONS:
            yield Operator(base, activation)
        if kind.gated or base.startswith("ConvTranspose"):
            continue
        for activation in ("", *ACTIVATIONS):
            yield Operator(base, activation, Residual.BEFORE)
        if base.startswith("Conv"):
            for activation in ACTIVATIONS:
                yield Operator(base, activation, Residual.AFTER)
        else:
            yield Operator(base, "", Residual.FACTOR)


OPERATORS: Mapping[str, Operator] = {operator.name: operator for operator in _operators()}
"""All operators by their names. A structure that is not here has no kernels."""
