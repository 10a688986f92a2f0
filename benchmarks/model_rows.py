"""What `bench_models` measures of one model in one type, row by row, of contenders that each have a
process of their own (`contender_runs`). One works at a time while times are taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import contender_names
from benchmarks.exported_models import Model, Size, Stream
from benchmarks.own_process import CallFailed, ProcessLost
from benchmarks.recording import say

HEAD = ("model", "dtype", "stream", "contender", "measure", "size", "value", "note")
KEY = HEAD[:6]
LEAST = 5  # sizes of a stream that every contender runs, however slow it is
FEWEST = 3  # sizes from which the time of the others is estimated
CHUNK = 10  # sizes that a process runs before the next one has its turn
BURST = 4  # runs of a steady size before the next one has its turn
ROUNDS = (3, 15)  # turns of each at a steady size, at least and at most
SWEEPS = {"new_ms": "stream_ms", "again_ms": "again_stream_ms"}


class Worker(Protocol):
    """`OwnProcess` of `ContenderRuns`."""

    def begin(self, method: str, *arguments: Any) -> None: ...

    def finish(self, seconds: float) -> Any: ...

    def call(self, method: str, *arguments: Any, seconds: float) -> Any: ...

    def stop(self) -> None: ...


@dataclass
class Measured:
    """One model in one type while it is measured.

    write: takes a row. limit: seconds in which a contender must answer, else it is out.
    workers: the contenders that are not out. all_started: False once no time was left for one.
    """

    model: Model
    dtype: str
    write: Callable[[dict[str, Any]], None]
    limit: float = 60.0
    workers: dict[str, Worker] = field(default_factory=dict)
    all_started: bool = True

    def row(
        self, stream: str, contender: str, measure: str, value: float | str, size: Size = (),
        note: str = "",
    ) -> None:  # fmt: skip
        self.write(
            {
                "model": self.model.id, "dtype": self.dtype, "stream": stream,
                "contender": contender, "measure": measure, "size": shown(size), "value": value,
                "note": note,
            }
        )  # fmt: skip

    def load(self, workers: Mapping[str, Worker], meanwhile: Callable[[], None]) -> None:
        """Takes workers over: all load their libraries side by side, and `meanwhile` is called."""
        self.workers |= workers
        for worker in workers.values():
            worker.begin("load")
        meanwhile()
        self._finish(workers, "load", self.limit)

    def start(self, names: Iterable[str], size: Size, deadline: float) -> list[str]:
        """Makes contenders ready, one after the other, and runs each once, at `size`: `create_s`,
        `first_run_ms` (arenas grow), `memory_mib`, the GPU memory that it took. Those that started
        beside others already have a note.

        One that fails, or for which there is no time left, has the row `failed`, and is out.
        Returns the names of those that are ready.
        """
        ready = []
        for name in list(names):
            if name not in self.workers:
                continue
            if time.monotonic() > deadline:
                self.all_started = False
                self._out(name, "no time left")
                continue
            started = self._ask(name, "start", size)
            if started is None:
                continue
            ready.append(name)
            beside = "made beside others" if started.beside else ""
            self.row("-", name, "create_s", started.create_s, note=beside)
            self.row("-", name, "first_run_ms", started.first_run_ms, size)
            if started.memory_mib is not None:
                what = "of torch's allocator" if started.beside else ""
                self.row("-", name, "memory_mib", started.memory_mib, size, what)
        return ready

    def stream(
        self, names: Iterable[str], stream: Stream, patience: float, deadline: float,
        sweeps: Iterable[str] = tuple(SWEEPS),
    ) -> bool:  # fmt: skip
        """All sizes, each new, and then all of them again, by one contender after the other a few
        sizes at a time, in an order that turns. Rows `new_ms` of each size, `median_new_ms`,
        `median_again_ms`, and the sums `stream_ms` and `again_stream_ms`.

        A contender that has run for `patience` seconds is out of the rest of a sweep: see `total`.

        Returns:
            Whether the end was reached before the deadline, which ends a sweep for all.
        """
        in_time = True
        count = {name: len(stream.sizes) for name in names if name in self.workers}
        for measure in sweeps:
            times: dict[str, list[float]] = {name: [] for name in count}
            for turn, (first, end) in enumerate(chunks(len(stream.sizes))):
                if first >= LEAST and time.monotonic() > deadline:
                    in_time = False
                    break
                for name in turned(list(times), turn):
                    taken = times[name]
                    sizes = stream.sizes[first : min(end, count[name])]
                    left = 1e3 * patience - sum(taken)
                    if len(taken) != first or not sizes or (first >= LEAST and left < 0):
                        continue
                    found = self._ask(name, "sweep", sizes, max(LEAST - first, 0), left)
                    if found is None:
                        del times[name], count[name]
                        continue
                    taken += found
                    if measure == "new_ms":
                        for size, one in zip(sizes, found, strict=False):
                            self.row(stream.name, name, measure, one, size)
            for name, taken in times.items():
                self._totals(stream, name, measure, taken)
                count[name] = len(taken)
        return in_time

    def steady(self, names: Iterable[str], stream: Stream, seconds: float, deadline: float) -> bool:
        """`steady_ms`: the median of one size again and again, contenders in turn, a few runs each.
        Returns whether all sizes were reached before the deadline.
        """
        names = list(names)
        for size in stream.steady:
            if time.monotonic() > deadline:
                return False
            taken: dict[str, list[float]] = {name: [] for name in names if name in self.workers}
            stop = 0.0
            for turn in range(ROUNDS[1]):
                if turn >= ROUNDS[0] and time.monotonic() > stop:
                    break
                for name in turned(list(taken), turn):
                    found = self._ask(name, "repeat", size, BURST, may_fail=True)
                    if found is None:  # a graph that does not fit, say
                        del taken[name]
                    else:
                        taken[name] += found
                if turn == 0:  # warm
                    stop = time.monotonic() + seconds / len(stream.steady)
            for name, times in taken.items():
                self.row(stream.name, name, "steady_ms", statistics.median(times), size)
        return True

    def launches(self, names: Iterable[str], size: Size) -> None:
        """`kernels`: kernels and copies on the GPU in one run, where they can be seen."""
        for name, found in self._all(names, "kernels", size).items():
            if isinstance(found, CallFailed):
                say(f"{self.model.id} {self.dtype} {name}: kernels cannot be counted: {found}")
            elif found is not None:
                self.row("-", name, "kernels", found, size)

    def errors(self, names: Iterable[str], exact: Mapping[Size, Path], own: str) -> None:
        """`error`: the largest relative error of an output against the exact ones in a file; the
        note says where it is more than 1.2 times the one of `own` (and more than 1e-5).
        """
        mine = [name for name in names if contender_names.side(name) in ("ort", "ours")]
        for size, path in exact.items():  # torch has other weights
            found = self._all(mine, "error", size, path)
            least = found.get(own)
            for name, error in found.items():
                if isinstance(error, CallFailed):
                    self.row("-", name, "error", "inf", size, note=f"WRONG: {error}")
                    continue
                worse = isinstance(least, float) and error > max(1.2 * least, 1e-5)
                note = f"WORSE: {own} has {least}" if worse else ""
                self.row("-", name, "error", error, size, note=note)

    def stop(self) -> None:
        """Ends all processes."""
        for worker in self.workers.values():
            worker.stop()
        self.workers.clear()

    def _totals(self, stream: Stream, name: str, measure: str, taken: list[float]) -> None:
        """The rows about one contender's sweep of a stream."""
        if taken:
            value, note = total(taken, len(stream.sizes))
            self.row(stream.name, name, SWEEPS[measure], value, note=note)
            self.row(stream.name, name, f"median_{measure}", statistics.median(taken))

    def _ask(self, name: str, method: str, *arguments: Any, may_fail: bool = False) -> Any:
        """What a contender answers; None where it does not, after which it is out, unless it lives
        and may fail.
        """
        try:
            return self.workers[name].call(method, *arguments, seconds=self.limit)
        except CallFailed as error:
            if may_fail and not isinstance(error, ProcessLost):
                say(f"{self.model.id} {self.dtype} {name} {method} failed: {error}")
            else:
                self._out(name, f"{method}: {error}")
            return None

    def _all(self, names: Iterable[str], method: str, *arguments: Any) -> dict[str, Any]:
        """What contenders answer that work side by side; an exception of theirs is an answer."""
        asked = {name: self.workers[name] for name in names if name in self.workers}
        for worker in asked.values():
            worker.begin(method, *arguments)
        return self._finish(asked, method, self.limit, may_fail=True)

    def _finish(
        self, asked: Mapping[str, Worker], method: str, seconds: float, *, may_fail: bool = False
    ) -> dict[str, Any]:
        by = time.monotonic() + seconds
        found: dict[str, Any] = {}
        for name, worker in asked.items():
            try:
                found[name] = worker.finish(max(by - time.monotonic(), 0.1))
            except CallFailed as error:
                if may_fail and not isinstance(error, ProcessLost):
                    found[name] = error
                else:
                    self._out(name, f"{method}: {error}")
        return found

    def _out(self, name: str, why: str) -> None:
        say(f"{self.model.id} {self.dtype} {name} failed: {why}")
        self.row("-", name, "failed", 1, note=why)
        self.workers.pop(name).stop()


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """Where turns of a stream of so many sizes begin and end: the first `LEAST`, then more."""
    first, end = 0, LEAST
    while first < count:
        yield first, min(end, count)
        first, end = end, end + CHUNK


def total(taken: Sequence[float], sizes: int) -> tuple[float, str]:
    """The sum over a stream of so many sizes, of which the first were taken, and what to note of
    it. The others count as the (lower) median, which leaves out what is compiled or searched once;
    behind one or two, all of which may have been compiled, they count nothing.
    """
    if len(taken) == sizes:
        return sum(taken), ""
    if len(taken) < FEWEST:
        return sum(taken), f"at least: {len(taken)} of {sizes} sizes"
    rest = (sizes - len(taken)) * statistics.median_low(taken)
    return sum(taken) + rest, f"from {len(taken)} of {sizes} sizes"


def turned(names: list[str], by: int) -> list[str]:
    """The names with the first ones at the end."""
    at = by % len(names) if names else 0
    return names[at:] + names[:at]


def shown(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
