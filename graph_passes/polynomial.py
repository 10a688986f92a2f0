"""What a small graph of elementwise nodes computes, as a polynomial.

Exporters write one activation in many ways: `0.5 * x * (1 + erf(x / sqrt(2)))` with the factors in
any order, a division or a multiplication, the 0.5 first or last. All of them are one polynomial in
x and erf(..), once products are multiplied out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

X = ""
"""The input of the activation. Atoms go by names of the model's values, of which none is empty."""

Terms = Mapping[tuple[str, ...], float]
"""A polynomial: the coefficient of each product of atoms, named in order; () is the constant 1."""

_LARGEST = 8
"""Terms; none of the known forms has more."""


@dataclasses.dataclass(frozen=True)
class Atom:
    """A function of a polynomial, which the polynomials around it treat as one variable.

    `function` is the name of the operator, in small letters, `parameters` its attributes.
    """

    function: str
    argument: Terms
    parameters: tuple[float, ...] = ()


def variable(name: str = X) -> Terms:
    return {(name,): 1.0}


def constant(value: float) -> Terms:
    return {(): value}


def add(one: Terms, other: Terms, factor: float = 1.0) -> Terms | None:
    """one + factor * other; None where that is longer than any known form."""
    result = dict(one)
    for atoms, coefficient in other.items():
        result[atoms] = result.get(atoms, 0.0) + factor * coefficient
    return result if len(result) <= _LARGEST else None


def multiply(one: Terms, other: Terms) -> Terms | None:
    """The product; None where that is longer than any known form."""
    result: dict[tuple[str, ...], float] = {}
    for a, x in one.items():
        for b, y in other.items():
            atoms = tuple(sorted((*a, *b)))
            result[atoms] = result.get(atoms, 0.0) + x * y
    return result if len(result) <= _LARGEST else None


def value_of(terms: Terms) -> float | None:
    """The number that a polynomial is, if it is one."""
    return terms.get((), 0.0) if set(terms) <= {()} else None


def close(terms: Terms, wanted: Terms, tolerance: float) -> bool:
    """Whether two polynomials have the same terms, with coefficients equal up to rounding."""
    return set(terms) == set(wanted) and all(
        math.isclose(coefficient, wanted[atoms], rel_tol=tolerance)
        for atoms, coefficient in terms.items()
    )


def written(terms: Terms, atoms: Mapping[str, Atom]) -> str:
    """A polynomial in words: 0.5 * x + 0.5 * x * Erf(0.70711 * x)."""

    def factor(name: str) -> str:
        if name == X:
            return "x"
        return f"{atoms[name].function}({written(atoms[name].argument, atoms)})"

    parts = []
    for names, coefficient in terms.items():
        is_one = coefficient == 1.0 and names
        parts.append(" * ".join([*([] if is_one else [f"{coefficient:.5g}"]), *map(factor, names)]))
    return " + ".join(parts) or "0"
