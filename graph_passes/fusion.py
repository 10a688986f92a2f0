"""What a rule is that fuses nodes around a product into it, and how such rules see a product.

A node of ours absorbs the nodes that read its output, one rule at a time (`fusing.py`). What it
absorbs is read by nobody else, is no output of a graph and is in the same graph.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import onnx
import onnx_ir as ir

from .computed_numbers import computed_number
from .domain import DOMAIN, is_standard
from .operators import OPERATORS, Operator
from .report import Reason, Refusal
from .stand_ins import CONTRIB
from .tree import Array, Columns

if TYPE_CHECKING:
    from .fusing import Graph

_LARGEST_VECTOR = 1 << 24
"""Elements; constants beyond are no biases, and are not read from files."""

_MOST_COMPUTED = 6
"""Nodes between a number and its constant; Sqrt(CastLike(Div(2.0, pi), x)) has 3."""


@dataclasses.dataclass(frozen=True)
class NewConstant:
    """The name that a constant should have, and its values."""

    name: str
    array: Array


@dataclasses.dataclass(frozen=True)
class Fused:
    """What a rule makes of a product and nodes behind it.

    Attributes:
        operator: What the node becomes.
        inputs: Its inputs.
        constants: Constants to make, by the index of the input that they replace.
        alternating: Pairs of columns of initializers, which in turn become a new one, by the index
            of the input that this becomes.
        absorbed: The nodes that go, in the order of the graph; the last one gives the output.
            Empty where nothing behind the product changes.
        attributes: Floats, ints and lists of ints to set on it.
        changes: Nodes that stay, and what they become.
        concerns: The node to report where none is absorbed.
    """

    operator: Operator
    inputs: Sequence[str]
    absorbed: Sequence[onnx.NodeProto] = ()
    constants: Mapping[int, NewConstant] = dataclasses.field(default_factory=dict)
    alternating: Mapping[int, tuple[Columns, Columns]] = dataclasses.field(default_factory=dict)
    attributes: Mapping[str, float | Sequence[int]] = dataclasses.field(default_factory=dict)
    changes: Sequence[tuple[onnx.NodeProto, onnx.NodeProto]] = ()
    concerns: onnx.NodeProto | None = None


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A node that looked like a rule's, and why it is not.

    `inner`: the other nodes of what it ends, of which no rule says anything on its own.
    """

    node: onnx.NodeProto
    refusal: Refusal
    inner: Sequence[onnx.NodeProto] = ()


class Fusion(abc.ABC):
    """A rule that fuses nodes around a product or convolution into it. Rules hold no state."""

    name: ClassVar[str]
    """What selects the rule in `rules=` and `disable=`, and what is stamped on its nodes."""
    op_type: ClassVar[str]
    """The operators that it absorbs."""
    transformation: ClassVar[str]
    """The rewrite with an arrow, in one line."""
    changes_weights: ClassVar[bool] = False
    """Whether it may replace weights, which a model that is to be trained names."""

    @abc.abstractmethod
    def match(self, product: Product) -> Fused | NearMiss | None:
        """What can be fused now; None if nothing there is of interest to the rule."""


class Product:
    """A node of ours in its surroundings, as rules see it."""

    def __init__(self, graph: Graph, node: onnx.NodeProto) -> None:
        self._graph = graph
        self.node = node

    @property
    def settled(self) -> bool:
        """Whether all products of the graph have taken what needs no other product."""
        return self._graph.settled

    @property
    def joined(self) -> bool:
        """Whether they are settled, and none can be joined with another, or have an R."""
        return self._graph.joined

    def neighbour(self, value: str) -> Product | None:
        """The node of ours in the same graph that computes a value."""
        node = self.producer(value)
        return Product(self._graph, node) if node is not None and node.domain == DOMAIN else None

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.node.op_type]

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution that nothing has been fused into but a bias."""
        return self.operator.is_base and self.operator.standard in ("Conv", "ConvTranspose")

    @property
    def output(self) -> str:
        return str(self.node.output[0])

    @property
    def opset(self) -> int:
        """The version of ai.onnx that its graph imports, which tells what its neighbours mean."""
        return self._graph.tree.opset

    @property
    def inputs(self) -> list[str]:
        """Names of its inputs, one for each of the operator's base; those it lacks are empty."""
        names = list(self.node.input)
        return names + [""] * (len(self.operator.inputs) - len(names))

    def operand(self, index: int) -> str:
        return self.inputs[index]

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        return next((a for a in self.node.attribute if a.name == name), None)

    def new_name(self, wanted: str) -> str:
        """A name that nothing has yet."""
        return self._graph.tree.new_name(wanted)

    def readers(self, value: str) -> list[onnx.NodeProto]:
        """The nodes of the same graph that read a value, once for each time."""
        return self._graph.readers[value]

    def producer(self, value: str) -> onnx.NodeProto | None:
        """The node of the same graph that computes a value."""
        return self._graph.producers.get(value)

    def only_reader(self) -> onnx.NodeProto | None:
        """The node that reads the output, if there is one in the same graph."""
        readers = self.readers(self.output)
        return readers[0] if readers else None

    def reader(self, *op_types: str) -> onnx.NodeProto | None:
        """The first node of some operators that reads the output, in the same graph."""
        readers = self.readers(self.output)
        return next((node for node in readers if node.op_type in op_types), None)

    def beside(self, node: onnx.NodeProto) -> str:
        """What a reader of two inputs reads beside the output; the output, if it reads it twice."""
        return str(node.input[list(node.input).index(self.output) ^ 1])

    def refuse_readers(self, *values: str, by: Sequence[onnx.NodeProto]) -> Refusal | None:
        """Values that go must be read by the nodes that go, and by nothing else."""
        for value in values:
            inside = sum(list(node.input).count(value) for node in by)
            if self._graph.reads[value] != inside:
                return Refusal(Reason.OTHER_READERS, f"{value!r} is an output or has other readers")
        return None

    def is_standard(self, node: onnx.NodeProto) -> bool:
        """Whether a node is of ai.onnx and means what ai.onnx says."""
        return is_standard(node.domain) and ("", node.op_type) not in self._graph.own_functions

    def is_contrib(self, node: onnx.NodeProto) -> bool:
        """Whether a node is of ONNX Runtime's own operators."""
        key = (node.domain, node.op_type)
        return node.domain == CONTRIB and key not in self._graph.own_functions

    def types(self, value: str) -> list[ir.Value]:
        """The value as typed in each call of the function around it; empty if nothing is known."""
        return self._graph.values.get(value, [])

    def shapes(self, value: str) -> list[ir.Shape] | None:
        """Its shapes in each call, None if a rank is not known."""
        shapes = [view.shape for view in self.types(value)]
        known = [shape for shape in shapes if shape is not None]
        return known if known and len(known) == len(shapes) else None

    def rank(self, value: str) -> int | None:
        """The rank that a value has in every call."""
        ranks = {len(shape) for shape in self.shapes(value) or ()}
        return ranks.pop() if len(ranks) == 1 else None

    def least_rank(self) -> int:
        """A lower bound of the output's rank."""
        ranks = [len(shape) for shape in self.shapes(self.output) or ()]
        if ranks:
            return min(ranks)
        standard = self.operator.standard
        if standard == "MatMul":
            return 1 if (self.rank(self.operand(1)) or 0) >= 2 else 0
        return 2 if standard == "Gemm" else 3

    def same_shape(self, one: str, other: str) -> bool:
        """Whether two values have one shape in every call, proven by numbers and names."""
        return self.same_sizes(one, other, slice(None))

    def same_sizes(self, one: str, other: str, axes: slice) -> bool:
        """Whether two values have one rank and, in every call, the same sizes along some axes."""
        first, second = self.shapes(one), self.shapes(other)
        if first is None or second is None or len(first) != len(second):
            return False
        for a, b in zip(first, second, strict=True):
            if len(a) != len(b):
                return False
            names = [self._graph.recorded.get(v, [""] * len(a)) for v in (one, other)]
            pairs = list(zip(a, b, *names, strict=True))[axes]
            if not all(_is_same(*pair) for pair in pairs):
                return False
        return True

    def is_constant(self, value: str) -> bool:
        """Whether it is one, wherever its values are: in another file too."""
        return value in self._graph.place.constants

    def constant(self, value: str) -> Array | None:
        """The values of a constant of a bias's size; None for all others.

        Raises:
            UnreadableError: They are in another file, which cannot be read.
        """
        found = self._graph.place.constants.get(value)
        if found is None or _elements(found.tensor.dims) > _LARGEST_VECTOR:
            return None
        try:
            return self.weight(value)
        except ValueError:
            return None

    def weight(self, value: str) -> Array:
        """The values of a constant of any size.

        Raises:
            ValueError: It is malformed.
            UnreadableError: It is in another file, which cannot be read.
        """
        return self._graph.tree.array(self._graph.place.constants[value])

    def refuse_alternating(self, one: Columns, other: Columns) -> Refusal | None:
        """Columns that can take turns are of initializers of the main graph, matrices of one type,
        as many of the same height."""
        shapes = []
        for columns in (one, other):
            name = columns.matrix
            constant = self._graph.place.constants.get(name)
            if constant is None or constant.index is None:
                return Refusal(Reason.NOT_CONSTANT, f"{name!r} is no initializer of the main graph")
            shape = list(constant.tensor.dims)
            if len(shape) != 2 or 0 in shape or shape[1] % columns.parts:
                what = f"{name!r} is {shape}, to be taken in {columns.parts} equal parts"
                return Refusal(Reason.BROADCASTS, what)
            shapes.append([shape[0], shape[1] // columns.parts])
        if shapes[0] != shapes[1]:
            return Refusal(Reason.BROADCASTS, f"the weights are {shapes[0]} and {shapes[1]}")
        why = self._graph.tree.why_not_alternating(one, other)
        return Refusal(Reason.NOT_CONSTANT, why) if why else None

    def scalar(self, value: str) -> float | None:
        """The number that a constant of one element holds, or that nodes compute from such.

        None too where its rank is above that of the output, which would then grow.

        Raises:
            UnreadableError: As `constant`.
        """
        return self.number(value, self.least_rank())

    def number(self, value: str, rank: int, deepest: int = _MOST_COMPUTED) -> float | None:
        """The number that a constant of one element and of a rank up to `rank` holds.

        Or that up to `deepest` nodes in a row compute from such constants.

        Raises:
            UnreadableError: As `constant`.
        """
        found = self._graph.place.constants.get(value)
        if found is None:
            return computed_number(self, value, rank, deepest)
        if _elements(found.tensor.dims) != 1 or len(found.tensor.dims) > rank:
            return None
        array = self.constant(value)
        return None if array is None else float(array.reshape(()))


def _is_same(one: object, other: object, recorded: str, other_recorded: str) -> bool:
    """The same size as inferred, or where inference does not know it, as recorded."""
    if same_size(one, other):
        return True
    first = one if isinstance(one, int) else recorded
    return first == (other if isinstance(other, int) else other_recorded) != ""


def same_size(one: object, other: object) -> bool:
    """Whether two dimensions are proven equal: by the same number, or the same name."""
    if isinstance(one, int) or isinstance(other, int):
        return one == other
    name = getattr(one, "value", None)
    return name is not None and name == getattr(other, "value", None)


def _elements(dims: Sequence[int]) -> int:
    return math.prod(dims)
