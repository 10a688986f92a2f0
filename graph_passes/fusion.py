"""Fusing what follows a product into it: what a fusing rule is, and the loop that applies them.

A node of ours absorbs the nodes that read its output, one rule at a time, as long as a rule finds
something. What it absorbs is read by nobody else, is no output of a graph and is in the same graph.
The fused node takes the place of the last node that it absorbed, and that node's output: there, all
that it reads has been computed.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import onnx
import onnx_ir as ir

from .domain import DOMAIN, RULE_KEY, is_standard
from .operators import OPERATORS, Operator
from .payload import UnreadableError
from .report import Entry, Reason, Refusal
from .stand_ins import CONTRIB
from .symbolic_sizes import rename_sizes
from .tree import Array, Constant, Place, Tree, reads_of
from .typed_graph import Recorded, recorded_names

_LARGEST_VECTOR = 1 << 24
"""Elements; constants beyond are no biases, and are not read from files."""


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
        absorbed: The nodes that go, in the order of the graph; the last one gives the output.
            Empty where nothing behind the product changes.
        attributes: Floats and ints to set on it.
        changes: Nodes that stay, and what they become.
        bypassed: Names that the product no longer reads, whose producers may go.
        concerns: The node to report where none is absorbed.
    """

    operator: Operator
    inputs: Sequence[str]
    absorbed: Sequence[onnx.NodeProto] = ()
    constants: Mapping[int, NewConstant] = dataclasses.field(default_factory=dict)
    attributes: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    changes: Sequence[tuple[onnx.NodeProto, onnx.NodeProto]] = ()
    bypassed: Sequence[str] = ()
    concerns: onnx.NodeProto | None = None


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A node that looked like a rule's, and why it is not."""

    node: onnx.NodeProto
    refusal: Refusal


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

    def __init__(self, graph: _Graph, node: onnx.NodeProto) -> None:
        self._graph = graph
        self.node = node

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

    def scalar(self, value: str) -> float | None:
        """The number that a constant of one element holds.

        None too where its rank is above that of the output, which would then grow.

        Raises:
            UnreadableError: As `constant`.
        """
        return self.number(value, self.least_rank())

    def number(self, value: str, rank: int) -> float | None:
        """The number that a constant of one element and of a rank up to `rank` holds.

        Raises:
            UnreadableError: As `constant`.
        """
        found = self._graph.place.constants.get(value)
        if found is None or _elements(found.tensor.dims) != 1 or len(found.tensor.dims) > rank:
            return None
        array = self.constant(value)
        return None if array is None else float(array.reshape(()))


class _Graph:
    """One graph while nodes in it are fused."""

    def __init__(
        self,
        tree: Tree,
        place: Place,
        values: Mapping[str, list[ir.Value]],
        recorded: Recorded,
        own_functions: Collection[tuple[str, str]],
    ) -> None:
        self.tree = tree
        self.recorded = recorded
        self.place = place
        self.values = dict(values)
        self.own_functions = own_functions
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.reads = Counter(reads_of(place.body))
        self.producers: dict[str, onnx.NodeProto] = {}
        self._nodes = list(place.body.node)
        self._gone: set[int] = set()
        self._constants: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        self._released: list[str] = []
        for node in self._nodes:
            self._enter(node, count=False)

    def fuse(
        self, rules: Sequence[Fusion], refuse: Callable[[Operator], Refusal | None]
    ) -> Iterator[Entry]:
        """Fuses what can be fused.

        Args:
            rules: In the order in which they are tried.
            refuse: Why an operator cannot be used here, if so.
        """
        fused: list[tuple[Product, Entry]] = []
        missed: dict[tuple[str, int], tuple[onnx.NodeProto, Entry]] = {}
        taken: set[int] = set()
        products = [Product(self, node) for node in self._nodes if node.domain == DOMAIN]
        changed = True
        while changed:  # what one product absorbs may have stood in the way of another
            changed = False
            for product in products:
                for rule, found in self._matches(product, rules, refuse):
                    if isinstance(found, NearMiss):
                        entry = self._entry(found.node, rule, found.refusal)
                        missed[rule.name, id(found.node)] = found.node, entry
                        continue
                    for node in found.absorbed or [_reported(found)]:
                        taken.add(id(node))
                        fused.append((product, self._entry(node, rule, None)))
                    self._replace(product, found, rule)
                    changed = True
        for product, entry in fused:
            yield dataclasses.replace(entry, into=product.output)
        for node, entry in missed.values():
            if id(node) not in taken | self._gone:
                yield entry
        self._finish()

    def _matches(
        self,
        product: Product,
        rules: Sequence[Fusion],
        refuse: Callable[[Operator], Refusal | None],
    ) -> Iterator[tuple[Fusion, Fused | NearMiss]]:
        """What the rules find at a product, from the first rule on again after each change."""
        pending = list(rules)
        while pending:
            rule = pending.pop(0)
            try:
                found = rule.match(product)
            except UnreadableError as error:
                reader = product.only_reader()
                node = product.node if reader is None else reader
                found = NearMiss(node, Refusal(Reason.DATA_UNREADABLE, str(error)))
            if isinstance(found, Fused) and (refusal := refuse(found.operator)):
                found = NearMiss(_reported(found), refusal)
            if found is None:
                continue
            yield rule, found
            if isinstance(found, Fused):
                pending = list(rules)

    def _entry(self, node: onnx.NodeProto, rule: Fusion, refusal: Refusal | None) -> Entry:
        return Entry(
            name=node.name,
            op_type=node.op_type,
            where=self.place.where,
            output=next(iter(node.output), ""),
            rule=rule.name,
            refusal=refusal,
        )

    def _enter(self, node: onnx.NodeProto, *, count: bool = True) -> None:
        for name in node.input:
            self.readers[name].append(node)
            self.reads[name] += count
            self.tree.readers[name] += count
        for name in node.output:
            if name:
                self.producers[name] = node

    def _leave(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            self.readers[name] = [other for other in self.readers[name] if other is not node]
            self.reads[name] -= 1
            self.tree.readers[name] -= 1
            if name in self.place.constants:
                self._released.append(name)
        for name in node.output:
            self.producers.pop(name, None)

    def _replace(self, product: Product, found: Fused, rule: Fusion) -> None:
        """The last node absorbed becomes the fused one; the others go."""
        old = product.node
        last = found.absorbed[-1] if found.absorbed else old
        inputs = list(found.inputs)
        constants = self.place.constants
        others = any(constants[name].is_node for name in inputs if name in constants)
        for index, constant in found.constants.items():
            replaced = constants.get(inputs[index])
            as_node = others if replaced is None else replaced.is_node
            inputs[index] = self._new_constant(constant, last, as_node=as_node)
            views = len(self.values.get(old.output[0], ()))
            self.values[inputs[index]] = [_typed(constant.array)] * views
        while inputs and not inputs[-1]:
            inputs.pop()
        fused = onnx.NodeProto()
        fused.CopyFrom(old)
        fused.op_type = found.operator.name
        del fused.input[:]
        fused.input.extend(inputs)
        fused.output[0] = last.output[0]
        for foreign in [a for a in fused.attribute if a.name not in found.operator.attributes]:
            fused.attribute.remove(foreign)
        for name, value in found.attributes.items():
            for stale in [a for a in fused.attribute if a.name == name]:
                fused.attribute.remove(stale)
            fused.attribute.append(onnx.helper.make_attribute(name, value))
        _stamp(fused, rule.name)
        if last is not old:  # its constants follow it
            self._constants[id(last)] = self._constants.pop(id(old), []) + self._constants[id(last)]
        for node in (*found.absorbed, *(() if last is old else (old,))):
            self._leave(node)
            if node is not last:
                self._gone.add(id(node))
        if last is old:
            self._leave(old)
        last.CopyFrom(fused)
        product.node = last
        self._enter(last)
        for node, new in found.changes:
            self._leave(node)
            node.CopyFrom(new)
            self._enter(node)
        self._drop_unread(found.bypassed)

    def _new_constant(self, wanted: NewConstant, before: onnx.NodeProto, *, as_node: bool) -> str:
        """Makes a constant, in a node in front of another if told so, and returns its name."""
        new = self.tree.new_name(wanted.name)
        tensor = onnx.numpy_helper.from_array(wanted.array, new)
        self.place.constants[new] = Constant(tensor, as_node)
        if isinstance(self.place.body, onnx.GraphProto) and not as_node:
            self.place.body.initializer.append(tensor)
        else:
            node = onnx.helper.make_node("Constant", [], [new], value=tensor)
            self._constants[id(before)].append(node)
        return new

    def _drop_unread(self, names: Sequence[str]) -> None:
        """Removes nodes whose only output nothing reads any more."""
        for name in names:
            node = self.producers.get(name)
            if node is not None and not self.reads[name]:
                self._leave(node)
                self._gone.add(id(node))

    def _finish(self) -> None:
        """Carries over to the graph what was decided about its nodes."""
        body = self.place.body
        gone = {name for n in self._nodes if id(n) in self._gone for name in n.output if name}
        gone -= set(self.producers)
        for index in reversed(range(len(self._nodes))):
            node = self._nodes[index]
            if id(node) in self._gone:
                del body.node[index]
                continue
            for constant in reversed(self._constants[id(node)]):
                body.node.insert(index, constant)
        for info in [info for info in body.value_info if info.name in gone]:
            body.value_info.remove(info)
        self.tree.remove_unread(self._released)


def fuse(
    trees: Sequence[Tree],
    values: Sequence[Mapping[str, list[ir.Value]]],
    typed: Sequence[Sequence[ir.Node]],
    rules: Sequence[Fusion],
    model: onnx.ModelProto,
    body_opset: int,
) -> list[Entry]:
    """Applies fusing rules to all nodes of ours, in place.

    Args:
        trees: All graphs of the model.
        values: The typed values of each graph of `trees`, in order.
        typed: The typed nodes of each graph that was inferred, as `TypedViews.by_graph`.
        rules: In the order in which they are tried.
        model: The model.
        body_opset: The version of ai.onnx that function bodies import.

    Returns:
        An entry for each node absorbed, and for each near miss.
    """
    own = {("" if is_standard(f.domain) else f.domain, f.name) for f in model.functions}

    def refuse(operator: Operator) -> Refusal | None:
        if operator.name not in OPERATORS:
            return Refusal(Reason.NO_SUCH_OPERATOR, f"there is no operator {operator.name}")
        if body_opset < operator.min_opset:
            return Refusal(
                Reason.OPSET,
                f"the body of {operator.name} needs ai.onnx version {operator.min_opset} "
                f"(CastLike); the model imports {body_opset}",
            )
        return None

    report: list[Entry] = []
    places = [(tree, place) for tree in trees for place in tree.places]
    graphs = [
        (place.body, known)
        for (_, place), known in zip(places, values, strict=True)
        if isinstance(place.body, onnx.GraphProto) and place.where.startswith("graph")
    ]
    recorded = recorded_names(model, graphs)
    # Only now: what a model records for a size is another name for it, and contradicts nothing.
    for nodes in typed:
        rename_sizes(nodes, [name for domain, name in own if not domain])
    recorded += [{}] * (len(places) - len(recorded))  # in functions, names differ from call to call
    for (tree, place), known, names in zip(places, values, recorded, strict=True):
        report += _Graph(tree, place, known, names, own).fuse(rules, refuse)
    return report


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


def _reported(found: Fused) -> onnx.NodeProto:
    return found.concerns if found.concerns is not None else found.absorbed[-1]


def _typed(array: Array) -> ir.Value:
    value = ir.tensor(array)
    return ir.Value(shape=value.shape, type=ir.TensorType(value.dtype))


def _stamp(node: onnx.NodeProto, rule: str) -> None:
    """Adds a rule to those that the node names."""
    for entry in node.metadata_props:
        if entry.key == RULE_KEY:
            entry.value = f"{entry.value},{rule}"
            return
    node.metadata_props.add(key=RULE_KEY, value=rule)


def _elements(dims: Sequence[int]) -> int:
    return math.prod(dims)
