"""The activations by what they compute: nodes to polynomials, polynomials to activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from .fusion import Product
from .operators import ACTIVATIONS
from .polynomial import Atom, Terms, X, add, close, constant, multiply, value_of, variable
from .tree import attributes_of

_EXACT, _ROUNDED = 1e-5, 2e-3
"""How far constants may be off: exporters round sqrt(2) to fp32, or to the type of the tensor. In
fp16 that is 5e-4, and 1e-3 for a product of two."""

_LOWEST, _HIGHEST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)
_QUICK_GELU_ALPHA = 1.702
_CLIP_BOUNDS_ARE_INPUTS = 11

_CUBIC = 0.044715
_TANH_FACTOR = math.sqrt(2 / math.pi)


@dataclasses.dataclass(frozen=True)
class Form:
    """An activation and its parameters, in the order of `operators.ACTIVATIONS`."""

    activation: str
    parameters: tuple[float, ...] = ()

    @property
    def attributes(self) -> dict[str, float]:
        """The parameters as attributes of an operator."""
        names = ACTIVATIONS[self.activation].parameters
        return dict(zip(names, self.parameters, strict=True))


def evaluate(
    product: Product,
    node: onnx.NodeProto,
    operands: Sequence[Terms | None],
    atoms: Mapping[str, Atom],
) -> Terms | Atom | None:
    """What a node computes.

    Args:
        product: What the node may follow.
        node: A node.
        operands: What its inputs are; None where that is not known.
        atoms: The variables in them but for x.

    Returns:
        A polynomial, or a function that is a variable of its own; None where the node is none of
        those that activations are made of.
    """
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return None
    attributes = attributes_of(node)
    if product.is_contrib(node):
        return _contrib(node, operands, attributes)
    if not product.is_standard(node):
        return None
    if node.op_type == "Clip":
        return _joined(_clip(node, operands, attributes, product.opset), atoms)
    if not operands or None in operands:
        return None
    known = [terms for terms in operands if terms is not None]
    if len(known) == 2:
        limited = _limited(node.op_type, *known)
        return _joined(limited, atoms) if limited else _arithmetic(node.op_type, *known)
    return _function(node.op_type, known[0], attributes) if len(known) == 1 else None


def _arithmetic(op_type: str, one: Terms, other: Terms) -> Terms | None:
    if op_type in ("Add", "Sum"):
        return add(one, other)
    if op_type == "Sub":
        return add(one, other, -1.0)
    if op_type == "Mul":
        return multiply(one, other)
    if op_type == "CastLike":  # of a number, to the type of all that is computed from x
        return None if value_of(one) is None or value_of(other) is not None else one
    number = value_of(other)
    if op_type == "Div" and number:
        return multiply(one, constant(1 / number))
    if op_type == "Pow" and number in (2.0, 3.0):
        square = multiply(one, one)
        return square if number == 2.0 or square is None else multiply(square, one)
    return None


def _limited(op_type: str, one: Terms, other: Terms) -> Atom | None:
    """Max and Min with a number are a Clip of one bound, PRelu with one is a LeakyRelu."""
    number = value_of(other)
    if op_type == "PRelu":
        return None if number is None else Atom("LeakyRelu", one, (number,))
    if op_type not in ("Max", "Min"):
        return None
    if number is None:
        one, number = other, value_of(one)
    if number is None:
        return None
    return Atom("Clip", one, (number, math.inf) if op_type == "Max" else (-math.inf, number))


def _joined(clip: Atom | None, atoms: Mapping[str, Atom]) -> Atom | None:
    """A Clip of a Clip or Relu as one Clip, where its bounds say the same."""
    if clip is None or clip.function != "Clip" or len(clip.argument) != 1:
        return clip
    ((names, factor),) = clip.argument.items()
    inner = atoms.get(names[0]) if len(names) == 1 and factor == 1.0 else None
    if inner is None or inner.function not in ("Clip", "Relu"):
        return clip
    low, high = inner.parameters or (0.0, math.inf)
    lowest, highest = clip.parameters
    if max(low, lowest) > min(high, highest):
        return clip
    return Atom("Clip", inner.argument, (max(low, lowest), min(high, highest)))


def _function(op_type: str, x: Terms, attributes: Mapping[str, object]) -> Terms | Atom | None:
    def number(name: str, default: float) -> float:
        value = attributes.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    if op_type in ("Relu", "Sigmoid", "Tanh", "Erf"):
        return Atom(op_type, x)
    if op_type == "Neg":
        return multiply(x, constant(-1.0))
    if op_type == "Sqrt":
        square = value_of(x)
        return None if square is None or square < 0 else constant(math.sqrt(square))
    if op_type == "LeakyRelu":
        return Atom(op_type, x, (number("alpha", 0.01),))
    if op_type == "HardSigmoid":
        return Atom(op_type, x, (number("alpha", 0.2), number("beta", 0.5)))
    if op_type == "HardSwish":
        return Atom(op_type, x)
    if op_type == "Swish":
        alpha = number("alpha", 1.0)
        return Atom("Silu", x) if alpha == 1.0 else Atom("QuickGelu", x, (alpha,))
    if op_type == "Gelu":
        return Atom("GeluTanh" if attributes.get("approximate") == b"tanh" else "Gelu", x)
    return None


def _contrib(
    node: onnx.NodeProto, operands: Sequence[Terms | None], attributes: Mapping[str, object]
) -> Atom | None:
    if len([name for name in node.input if name]) != 1 or not operands or operands[0] is None:
        return None
    if node.op_type == "Gelu":
        return Atom("Gelu", operands[0])
    if node.op_type == "FastGelu":
        return Atom("GeluTanh", operands[0])
    if node.op_type == "QuickGelu":
        alpha = attributes.get("alpha", _QUICK_GELU_ALPHA)
        return Atom("QuickGelu", operands[0], (float(alpha),))  # type: ignore[arg-type]
    return None


def _clip(
    node: onnx.NodeProto,
    operands: Sequence[Terms | None],
    attributes: Mapping[str, object],
    opset: int,
) -> Atom | None:
    """Bounds must be numbers; one that is left out is no bound."""
    if not operands or operands[0] is None:
        return None
    bounds: list[float] = []
    for index, (name, absent) in enumerate((("min", _LOWEST), ("max", _HIGHEST)), start=1):
        if opset < _CLIP_BOUNDS_ARE_INPUTS:
            bounds.append(float(attributes.get(name, absent)))  # type: ignore[arg-type]
            continue
        if index >= len(node.input) or not node.input[index]:
            bounds.append(absent)
            continue
        terms = operands[index]
        number = None if terms is None else value_of(terms)
        if number is None:
            return None
        bounds.append(number)
    return Atom("Clip", operands[0], (bounds[0], bounds[1]))


def recognize(terms: Terms, atoms: Mapping[str, Atom], *, exact: bool) -> Form | None:
    """The activation of x that a polynomial is, if it is one.

    Args:
        terms: The polynomial.
        atoms: The variables in it but for x.
        exact: Whether constants are of fp32 precision.
    """
    tolerance = _EXACT if exact else _ROUNDED
    if len(terms) == 2:
        return _gelu(terms, atoms, tolerance)
    if len(terms) != 1:
        return None
    ((variables, factor),) = terms.items()
    names = [name for name in variables if name != X]
    if len(names) != 1 or len(variables) > 2:
        return None
    atom = atoms[names[0]]
    times_x = len(variables) == 2
    is_one = math.isclose(factor, 1.0, rel_tol=tolerance)
    is_sixth = math.isclose(factor, 1 / 6, rel_tol=tolerance)
    if _is_relu6_of_x_plus_3(atom, tolerance) and is_sixth:
        return Form("HardSwish") if times_x else Form("HardSigmoid", (1 / 6, 0.5))
    if not is_one:
        return None
    hard = _hard_sigmoid(atom)
    if not times_x:
        if atom.argument != variable() or atom.function == "Erf":
            return hard
        if atom.function == "Clip" and atom.parameters == (0.0, math.inf):
            return Form("Relu")
        return Form(atom.function, atom.parameters)
    if hard is not None:
        alpha, beta = hard.parameters
        swish = all(math.isclose(*p, rel_tol=tolerance) for p in ((alpha, 1 / 6), (beta, 0.5)))
        return Form("HardSwish") if swish else None
    if atom.function == "Sigmoid" and set(atom.argument) == {(X,)}:
        alpha = atom.argument[X,]
        return Form("Silu") if alpha == 1.0 else Form("QuickGelu", (alpha,))
    return None


def _hard_sigmoid(atom: Atom) -> Form | None:
    """As a node, or as Clip(alpha * x + beta, 0, 1)."""
    if atom.function == "HardSigmoid" and atom.argument == variable():
        return Form("HardSigmoid", atom.parameters)
    linear = atom.argument.keys() <= {(X,), ()} and (X,) in atom.argument
    if atom.function == "Clip" and atom.parameters == (0.0, 1.0) and linear:
        return Form("HardSigmoid", (atom.argument[X,], atom.argument.get((), 0.0)))
    return None


def _is_relu6_of_x_plus_3(atom: Atom, tolerance: float) -> bool:
    return (
        atom.function == "Clip"
        and atom.parameters == (0.0, 6.0)
        and close(atom.argument, {(X,): 1.0, (): 3.0}, tolerance)
    )


def _gelu(terms: Terms, atoms: Mapping[str, Atom], tolerance: float) -> Form | None:
    """0.5 * x + 0.5 * x * gate(x), the gate an erf or a tanh."""
    gates = [name for variables in terms for name in variables if name != X]
    if len(gates) != 1:
        return None
    gate = gates[0]
    if not close(terms, {(X,): 0.5, tuple(sorted((X, gate))): 0.5}, tolerance):
        return None
    atom = atoms[gate]
    if atom.function == "Erf" and close(atom.argument, {(X,): math.sqrt(0.5)}, tolerance):
        return Form("Gelu")
    cubic = {(X,): _TANH_FACTOR, (X, X, X): _TANH_FACTOR * _CUBIC}
    if atom.function == "Tanh" and close(atom.argument, cubic, tolerance):
        return Form("GeluTanh")
    return None
