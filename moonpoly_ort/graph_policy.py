"""Which shapes get a CUDA graph: limits, and what is kept and dropped within them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from .errors import ArgumentError

REMEMBERED = 64  # shapes seen without a graph that are remembered, for each graph allowed
PATIENCE = 3  # captures that may fail in a row


@dataclass(frozen=True)
class GraphLimits:
    """How much CUDA graphs may take.

    Args:
        graphs: at most so many at a time, one for each set of input shapes.
        buffer_bytes: of GPU memory for their inputs and outputs, together. Intermediate results
            take none: they lie where those of other runs lie.
        captures: over the life of the session, since ONNX Runtime's CUDA provider keeps what was
            captured until the session ends; by default 8 for each graph. When they are used up,
            the graphs that are there stay. Graphs that are captured again because another thread
            runs the session (twice at most) come on top.

    Raises:
        ArgumentError: a limit is not a positive number.
    """

    graphs: int = 8
    buffer_bytes: int = 256 << 20
    captures: int | None = None

    def __post_init__(self) -> None:
        for name in ("graphs", "buffer_bytes", "captures"):
            value = getattr(self, name)
            if name == "captures" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"GraphLimits: {name} = {value!r}; accepted: 1 and more")

    @staticmethod
    def of(wanted: int | GraphLimits) -> GraphLimits | None:
        """The limits that a session's `cuda_graphs` stands for; None where it is 0."""
        if isinstance(wanted, GraphLimits):
            return wanted
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
            raise ArgumentError(
                f"cuda_graphs = {wanted!r}; accepted: 0 (none), the number of graphs to keep, or a "
                "moonpoly_ort.GraphLimits"
            )
        return GraphLimits(graphs=wanted) if wanted else None


@dataclass
class _Live:
    graph_id: int
    size: int  # bytes of its buffers
    used: int  # the run that used it last


class Policy:
    """Which shapes have a graph. Knows keys, sizes and ids, and nothing of ONNX Runtime.

    A shape gets a graph when it is seen the second time. Where one must be dropped for it, the
    least recently used goes, but only if it was not used since the shape was last seen: many
    shapes that take turns would otherwise capture at every run and replay at none.
    """

    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.captures = 0  # and the last id given out: ids begin with 1, 0 is ONNX Runtime's own
        self.size = 0  # bytes, of all graphs
        self._runs = 0
        self._failed = 0  # captures, in a row
        self._forgotten = 0  # graphs, which count for nothing
        self._live: OrderedDict[Hashable, _Live] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # to the run that saw it last

    @property
    def budget(self) -> int:
        """Captures over the life of the session."""
        return (self.limits.captures or 8 * self.limits.graphs) + self._forgotten

    @property
    def ids(self) -> list[int]:
        """Of the graphs there are, the least recently used first."""
        return [live.graph_id for live in self._live.values()]

    def find(self, key: Hashable) -> int | None:
        """The id of this shape's graph; a run begins with this question."""
        self._runs += 1
        live = self._live.get(key)
        if live is None:
            return None
        live.used = self._runs
        self._live.move_to_end(key)
        return live.graph_id

    def repeats(self, key: Hashable) -> bool:
        """Whether the shape was seen before."""
        return key in self._seen

    def note(self, key: Hashable) -> None:
        """The shape ran without a graph."""
        self._seen[key] = self._runs
        self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED * self.limits.graphs:
            self._seen.popitem(last=False)

    def admit(self, key: Hashable, size: int) -> tuple[int, list[int]] | None:
        """The id of a graph with buffers of `size` bytes, and the ids to drop; None: no graph."""
        if key not in self._seen or key in self._live or size > self.limits.buffer_bytes:
            return None
        if self.captures >= self.budget or self._failed >= PATIENCE:
            return None
        victims, left, total = [], len(self._live), self.size + size
        for name, live in self._live.items():
            if left < self.limits.graphs and total <= self.limits.buffer_bytes:
                break
            if live.used > self._seen[key]:
                return None
            victims.append(name)
            left, total = left - 1, total - live.size
        dropped = [self._live.pop(name).graph_id for name in victims]
        for name in victims:  # as good as seen in this run: it may come back
            self.note(name)
        self.captures += 1
        self.size = total
        self._live[key] = _Live(self.captures, size, self._runs)
        del self._seen[key]
        return self.captures, dropped

    def forget(self) -> list[int]:
        """All graphs are lost, at no fault of their shapes: these are captured again when they come
        again, and beyond the budget. Returns the ids that were in use.
        """
        lost = list(self._live.items())
        self._live.clear()
        self.size = 0
        self._forgotten += len(lost)
        for key, _ in lost:
            self.note(key)
        return [live.graph_id for _, live in lost]

    def captured(self) -> None:
        self._failed = 0

    def failed(self, key: Hashable) -> bool:
        """The graph just admitted could not be captured. Whether none will be tried any more."""
        self.size -= self._live.pop(key).size
        self._failed += 1
        return self._failed >= PATIENCE
