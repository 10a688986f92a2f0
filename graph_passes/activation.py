"""Gelu(MatMul(A, B)) -> ai.moonpoly.MatMulGelu(A, B)

Relu, LeakyRelu, Clip, Sigmoid, Tanh, HardSigmoid, HardSwish, Gelu, QuickGelu and Silu, as one node
or as the several nodes that exporters write for them (`known_forms.py`), and ONNX Runtime's own
Gelu, FastGelu and QuickGelu.

The nodes are found from the product on: what only it and numbers go into belongs to the expression.
The longest expression of a known form is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from . import polynomial
from .fusion import Fused, Fusion, NearMiss, Product
from .known_forms import Form, evaluate, recognize
from .operators import ACTIVATIONS, BASES
from .polynomial import Atom, Terms, X
from .report import Reason, Refusal

_MOST_NODES = 24
"""Nodes of an expression; the longest known form has 14, the function body of Gelu."""


class ActivationFusion(Fusion):
    name = "activation"
    op_type = ", ".join(ACTIVATIONS)
    transformation = "Gelu(MatMul(A, B)) -> ai.moonpoly.MatMulGelu(A, B)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        operator = product.operator
        # In a gated product it would be the gates'.
        has_place = not operator.activation and not BASES[operator.base].gated
        missed = None
        expression = Expression(product, product.output)
        known = False
        for form, nodes in expression.forms():
            known = True
            inner = [product.output, *(node.output[0] for node in nodes[:-1])]
            refusal = product.refuse_readers(*inner, by=nodes)
            if refusal is None and not has_place:
                detail = f"{operator.name} has no {form.activation} behind what it does"
                refusal = Refusal(Reason.NO_SUCH_OPERATOR, detail)
            if refusal is not None:
                missed = missed or NearMiss(nodes[-1], refusal, inner=nodes[:-1])
                continue
            wanted = dataclasses.replace(operator, activation=form.activation)
            return Fused(
                wanted,
                product.inputs,
                absorbed=nodes,
                attributes=form.attributes,
            )
        return missed if known else expression.unknown()


class Expression:
    """All that is computed from a value and numbers alone, near to it: the output of a product, or
    one of its rank and type that only the product goes into.
    """

    def __init__(self, product: Product, value: str) -> None:
        self._product = product
        self._value = value
        self._terms: dict[str, Terms] = {value: polynomial.variable()}
        self._atoms: dict[str, Atom] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._grow()

    def forms(self) -> Iterator[tuple[Form, Sequence[onnx.NodeProto]]]:
        """The known activations in it, longest first, each with its nodes in order."""
        dtypes = {view.dtype for view in self._product.types(self._product.output)}
        exact = dtypes == {ir.DataType.FLOAT}
        for node in reversed(self._nodes):
            form = recognize(self._terms[node.output[0]], self._atoms, exact=exact)
            if form is not None:
                yield form, self._needed(node)

    def unknown(self) -> NearMiss | None:
        """What ends in x times a function of x, or in an erf, without being a known form."""
        for node in reversed(self._nodes):
            terms = self._terms[node.output[0]]
            functions = {self._atoms[n].function for names in terms for n in names if n != X}
            gated = any(X in names and set(names) != {X} for names in terms)
            if "Erf" in functions or (gated and len(functions) == 1):
                detail = f"it computes {polynomial.written(terms, self._atoms)}, no known form"
                refusal = Refusal(Reason.FORM_UNKNOWN, detail)
                return NearMiss(node, refusal, inner=self._needed(node)[:-1])
        return None

    def _grow(self) -> None:
        pending = [self._value]
        while pending and len(self._nodes) < _MOST_NODES:
            for node in self._product.readers(pending.pop(0)):
                if len(node.output) != 1 or node.output[0] in self._terms:
                    continue
                operands = [self._operand(name) for name in node.input]
                found = evaluate(self._product, node, operands, self._atoms)
                if found is None:
                    continue
                name = node.output[0]
                if isinstance(found, Atom):
                    self._atoms[name] = found
                    found = polynomial.variable(name)
                self._terms[name] = found
                self._nodes.append(node)
                # One of its readers may have been passed over, for want of this operand.
                pending.append(name)

    def _operand(self, name: str) -> Terms | None:
        if name in self._terms:
            return self._terms[name]
        number = self._product.scalar(name) if name else None
        return None if number is None else polynomial.constant(number)

    def _needed(self, last: onnx.NodeProto) -> list[onnx.NodeProto]:
        """`last` and the nodes that it depends on, `last` at the end."""
        producers = {node.output[0]: node for node in self._nodes}
        wanted: set[str] = set()
        pending = list(last.input)
        while pending:
            name = pending.pop()
            if name in producers and name not in wanted:
                wanted.add(name)
                pending.extend(producers[name].input)
        return [*(node for node in self._nodes if node.output[0] in wanted), last]
