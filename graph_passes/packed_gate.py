"""G, U = Split(MatMul(X, W)); Mul(Silu(G), U) -> ai.moonpoly.MatMulGatedSilu(X, GU)

SwiGLU, GeGLU and their kind where gates and values are the halves of one product, as in models that
keep both in one layer. As in `gated.py`, the columns of the halves alternate in a new constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx

from .activation import Expression
from .fusion import Fused, Fusion, NearMiss, NewConstant, Product
from .gated import GATED, alternating
from .known_forms import Form
from .operators import Operator
from .report import Reason, Refusal
from .tree import Columns, attributes_of

_BOUNDS_ARE_INPUTS = 10  # of Slice, from this opset on


class PackedGateFusion(Fusion):
    name = "packed_gate"
    op_type = "Split, Slice, Mul"
    transformation = (
        "G, U = Split(MatMul(X, W)); Mul(Silu(G), U) -> ai.moonpoly.MatMulGatedSilu(X, GU), the "
        "columns of the halves of W in turn"
    )
    changes_weights = True

    def match(self, product: Product) -> Fused | NearMiss | None:
        operator = product.operator
        if not product.settled or not operator.is_base or operator.base not in GATED:
            return None
        halves = _split(product) or _sliced(product)
        if halves is None:
            return None
        missed = None
        for gate in (0, 1):
            for form, nodes in _activations(product, halves.values[gate]):
                found = _fused(product, halves, gate, form, nodes)
                if isinstance(found, Fused):
                    return found
                missed = missed or found
        return missed


class _Halves(NamedTuple):
    """The halves of a product's columns, and the nodes that take it apart, in order."""

    values: tuple[str, str]
    nodes: Sequence[onnx.NodeProto]


def _split(product: Product) -> _Halves | None:
    """The halves as the outputs of a Split."""
    node = product.only_reader()
    if node is None or node.op_type != "Split" or not product.is_standard(node):
        return None
    if len(node.output) != 2 or not all(node.output):
        return None
    if any(attribute.ref_attr_name for attribute in node.attribute):  # one axis a call
        return None
    attributes = attributes_of(node)
    if not _is_last_axis(product, attributes.get("axis", 0)):
        return None
    sizes: Sequence[int] = attributes.get("split", ())
    if len(node.input) > 1 and node.input[1]:
        found = _numbers(product, node.input[1])
        if found is None:
            return None
        sizes = found
    return _Halves((node.output[0], node.output[1]), [node]) if len(set(sizes)) < 2 else None


def _sliced(product: Product) -> _Halves | None:
    """The halves as the outputs of two Slices."""
    nodes = product.readers(product.output)
    shapes = product.shapes(product.output)
    if len(nodes) != 2 or product.opset < _BOUNDS_ARE_INPUTS or not shapes:
        return None
    columns = {shape[-1] for shape in shapes if len(shape)}
    width = columns.pop() if len(columns) == 1 else 0
    values = ["", ""]
    for node in nodes:
        if node.op_type != "Slice" or not product.is_standard(node) or len(node.input) < 4:
            return None
        bounds = [_numbers(product, name) for name in node.input[1:]]
        if not isinstance(width, int) or any(b is None or len(b) != 1 for b in bounds):
            return None
        first, end, axis, *step = [b[0] for b in bounds if b]
        if not _is_last_axis(product, axis) or step not in ([], [1]):
            return None
        begin, end, _ = slice(first, end).indices(width)
        if (begin, end) not in ((0, width // 2), (width // 2, width)):
            return None
        values[begin != 0] = node.output[0]
    return _Halves((values[0], values[1]), nodes) if all(values) else None


def _is_last_axis(product: Product, axis: int) -> bool:
    return axis == -1 or axis + 1 == product.rank(product.output)


def _numbers(product: Product, value: str) -> list[int] | None:
    constant = product.constant(value)
    return None if constant is None else constant.reshape(-1).tolist()


def _activations(
    product: Product, gate: str
) -> Iterator[tuple[Form | None, Sequence[onnx.NodeProto]]]:
    """The known activations of the gates, longest first, each with its nodes; last, none."""
    yield from Expression(product, gate).forms()
    yield None, ()


def _fused(
    product: Product,
    halves: _Halves,
    gate: int,
    form: Form | None,
    nodes: Sequence[onnx.NodeProto],
) -> Fused | NearMiss | None:
    gates, values = halves.values[gate], halves.values[1 - gate]
    last = nodes[-1].output[0] if nodes else gates
    products = [
        node for node in product.readers(last)
        if node.op_type == "Mul" and product.is_standard(node)
        and sorted(node.input) == sorted((last, values))
    ]  # fmt: skip
    if not products:
        return None
    (node, *_) = products
    inner = [gates, *(one.output[0] for one in nodes), values]
    weights = tuple(Columns(product.operand(1), part, 2) for part in (gate, 1 - gate))
    refusal = (
        product.refuse_readers(product.output, by=halves.nodes)
        or product.refuse_readers(*inner, by=[*nodes, node])
        or product.refuse_alternating(*weights)
    )
    biases: dict[int, NewConstant] = {}
    if refusal is None and len(product.inputs) > 2:
        bias = product.constant(product.operand(2))
        if bias is None or bias.ndim != 1 or len(bias) % 2:
            what = f"{product.operand(2)!r} is no constant vector of both halves"
            refusal = Refusal(Reason.NOT_CONSTANT, what)
        else:
            parts = bias.reshape(2, -1)
            biases = {2: alternating(product.operand(2), parts[gate], parts[1 - gate])}
    if refusal is not None:
        return NearMiss(node, refusal)
    return Fused(
        Operator(GATED[product.operator.base], form.activation if form else ""),
        product.inputs,
        absorbed=[*halves.nodes, *nodes, node],
        constants=biases,
        alternating={1: (weights[0], weights[1])},
        attributes=form.attributes if form else {},
    )
