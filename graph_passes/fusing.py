"""The loop that applies fusing rules to a graph, until none finds anything.

The fused node takes the place of the last node that it absorbed, and that node's output: there, all
that it reads has been computed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from .domain import DOMAIN, is_standard, rules_of, stamp
from .fusion import Fused, Fusion, NearMiss, NewConstant, Product
from .operators import OPERATORS, Operator
from .payload import UnreadableError
from .report import Entry, Reason, Refusal
from .symbolic_sizes import rename_sizes
from .tree import Array, Constant, Place, Tree, reads_of
from .typed_graph import Recorded, recorded_names


class Graph:
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
        self.settled = self.joined = False
        self.own_functions = own_functions
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.reads = Counter(reads_of(place.body))
        self.producers: dict[str, onnx.NodeProto] = {}
        self._nodes = list(place.body.node)
        self._gone: set[int] = set()
        self._renamed: set[str] = set()  # values that have no such name any more
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
        parts: dict[int, str] = {}  # of what one rule looked at, and which one says something
        products = [Product(self, node) for node in self._nodes if node.domain == DOMAIN]
        successors: dict[int, Product] = {}  # of products that another one absorbed
        changed = True
        while changed or not self.joined:
            # What one product absorbs may have stood in the way of another. What joins two of them
            # comes when each has what it can have on its own, and what ends all that comes last.
            self.joined = self.settled and not changed
            self.settled = not changed
            changed = False
            for product in products:
                if id(product.node) in self._gone:
                    continue
                for rule, found in self._matches(product, rules, refuse):
                    if isinstance(found, NearMiss):
                        entry = self._entry(found.node, rule, found.refusal)
                        missed[rule.name, id(found.node)] = found.node, entry
                        if found.inner:
                            parts.update(dict.fromkeys(map(id, found.inner), ""))
                            parts[id(found.node)] = rule.name
                        continue
                    for node in found.absorbed or [_reported(found)]:
                        taken.add(id(node))
                        fused.append((product, self._entry(node, rule, None)))
                        if node.domain == DOMAIN:
                            successors[id(node)] = product
                    self._replace(product, found, rule)
                    changed = True
        for product, entry in fused:
            owner = product
            while id(owner.node) in successors:
                owner = successors[id(owner.node)]
            yield dataclasses.replace(entry, into=owner.output)
        for node, entry in missed.values():
            if id(node) in taken | self._gone:
                continue
            if parts.get(id(node), entry.rule) == entry.rule:
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
                found = NearMiss(_reported(found), refusal, inner=found.absorbed[:-1])
            if found is None:
                continue
            yield rule, found
            if isinstance(found, Fused):
                pending = list(rules)

    def _entry(self, node: onnx.NodeProto, rule: Fusion, refusal: Refusal | None) -> Entry:
        own = node.domain == DOMAIN
        return Entry(
            name=node.name,
            op_type=OPERATORS[node.op_type].standard if own else node.op_type,
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
        for index, names in found.alternating.items():
            inputs[index] = self.tree.add_alternating(self.place, *names)
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
        for absorbed in found.absorbed:
            if absorbed.domain == DOMAIN:
                stamp(fused, *rules_of(absorbed))
        stamp(fused, rule.name)
        if last is not old:  # its constants follow it
            self._constants[id(last)] = self._constants.pop(id(old), []) + self._constants[id(last)]
        leaving = [*found.absorbed, *(() if last is old else (old,))]
        read = [name for node in (*leaving, old) for name in node.input]
        for node in leaving:
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
            self._renamed.update(name for name in node.output if name not in new.output)
            node.CopyFrom(new)
            self._enter(node)
        self._drop_unread(read)

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

    def _drop_unread(self, names: Iterable[str]) -> None:
        """Removes nodes of which nothing reads any output, and what was computed for them alone."""
        for name in names:
            node = self.producers.get(name)
            if node is not None and not any(self.reads[output] for output in node.output):
                self._leave(node)
                self._gone.add(id(node))
                self._drop_unread(node.input)

    def _finish(self) -> None:
        """Carries over to the graph what was decided about its nodes."""
        body = self.place.body
        gone = {name for n in self._nodes if id(n) in self._gone for name in n.output if name}
        gone = (gone | self._renamed) - set(self.producers)
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
        report += Graph(tree, place, known, names, own).fuse(rules, refuse)
    return report


def _reported(found: Fused) -> onnx.NodeProto:
    return found.concerns if found.concerns is not None else found.absorbed[-1]


def _typed(array: Array) -> ir.Value:
    tensor = ir.tensor(array)
    return ir.Value(shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
