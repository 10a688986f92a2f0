"""What rewriting does to a model's graph, before and after: `explain_graph`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import onnx

from .graph_passes.domain import DOMAIN, RULE_KEY
from .graph_passes.report import Entry
from .rewriting import rewrite
from .sizing import all_nodes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class FusedNode:
    """A node of ours that took the place of several.

    Attributes:
        name: The node's name, or its output's where it has none.
        op: Its operator.
        rules: The rules that made it, in order.
        absorbed: What it absorbed, as "Add linear" (operator and output), in the order in which
            the rules did.
    """

    name: str
    op: str
    rules: tuple[str, ...]
    absorbed: tuple[str, ...]


@dataclass(frozen=True)
class NearMiss:
    """A node that a rule looked at and left, and why."""

    name: str
    op: str
    where: str
    rule: str
    reason: str
    detail: str


@dataclass(frozen=True)
class GraphExplanation:
    """A model's graph before and after it was rewritten. Prints as tables.

    Attributes:
        before: How many nodes of which operator the model had, in subgraphs and functions too.
        after: The same after rewriting; operators of ours have `ai.moonpoly.` in front.
        fused: The nodes of ours that absorbed others.
        near_misses: The nodes that were left alone.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    fused: tuple[FusedNode, ...] = field(repr=False)
    near_misses: tuple[NearMiss, ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .cli.terminal import table

        names = sorted({*self.before, *self.after}, key=lambda n: (-self.before.get(n, 0), n))
        rows: list[tuple[Any, ...]] = [
            (name, self.before.get(name, 0), self.after.get(name, 0))
            for name in names
            if self.before.get(name) != self.after.get(name)
        ]
        same = sum(count for name, count in self.before.items() if self.after.get(name) == count)
        rows.append(("operators that did not change", same, same))
        rows.append(("all", sum(self.before.values()), sum(self.after.values())))
        yield table("nodes", ("operator", "before", "after"), rows)
        fused = [(f.name, f.op, ", ".join(f.absorbed), ", ".join(f.rules)) for f in self.fused]
        yield table("fused", ("node", "operator", "absorbed", "rules"), fused)
        missed = [(m.name, m.op, m.rule, f"{m.reason}: {m.detail}") for m in self.near_misses]
        yield table("left", ("node", "operator", "rule", "why not"), missed)


def explain_graph(
    model: str | bytes | os.PathLike[str] | onnx.ModelProto,
    *,
    static: bool = False,
    rules: Iterable[str] | None = None,
    disable: Iterable[str] = (),
    optimize: str | None = None,
) -> GraphExplanation:
    """Says what `rewrite` does to a model's graph, which stays as it is.

    Args:
        model: A path, a serialized model, or a ModelProto.
        static: As for `rewrite`.
        rules: As for `rewrite`.
        disable: As for `rewrite`.
        optimize: As for `rewrite`; `before` is the graph in front of it.

    Raises:
        ModelError, ProblemError, OptimizerError, TypeError: As `rewrite` does.
    """
    original = rewrite(model, rules=())
    result = rewrite(model, static=static, rules=rules, disable=disable, optimize=optimize)
    absorbed: dict[tuple[str, str], list[Entry]] = {}
    for entry in result.taken:
        if entry.into:
            absorbed.setdefault((entry.where, entry.into), []).append(entry)
    ours = {node.output[0]: node for node in _nodes(result.model) if node.domain == DOMAIN}
    return GraphExplanation(
        before=_histogram(original.model),
        after=_histogram(result.model),
        fused=tuple(_fused(ours[output], entries) for (_, output), entries in absorbed.items()),
        near_misses=tuple(
            NearMiss(e.name or e.output, e.op_type, e.where, e.rule, str(e.reason), e.detail)
            for e in result.report
            if not e.taken
        ),
    )


def _fused(node: onnx.NodeProto, entries: Iterable[Entry]) -> FusedNode:
    stamps = [entry.value for entry in node.metadata_props if entry.key == RULE_KEY]
    return FusedNode(
        name=node.name or node.output[0],
        op=node.op_type,
        rules=tuple(",".join(stamps).split(",")),
        absorbed=tuple(f"{entry.op_type} {entry.output}" for entry in entries),
    )


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Those of the model, without the function bodies of our operators."""
    bodies = [model.graph.node, *(f.node for f in model.functions if f.domain != DOMAIN)]
    return [node for body in bodies for node in all_nodes(body)]


def _histogram(model: onnx.ModelProto) -> dict[str, int]:
    names = (
        f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in _nodes(model)
    )
    return dict(sorted(Counter(names).items()))
