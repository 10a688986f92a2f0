"""Timing: GPU work inside CUDA graphs on operands rotated beyond L2, host calls by the wall clock.

Candidates that are compared take turns within every round, so that clock changes and neighbours
on the machine touch all of them alike; the figure reported is the median over rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonpoly_ort.tuning.measuring import rotation as rotation

# Launches the work once, on operand set `index`, on torch's current stream.
Launch = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds for one piece of work: the median over rounds and the 10% and 90% quantiles."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """Summarises samples in microseconds; raises ValueError when there is none."""
        if not samples:
            raise ValueError("no sample was taken: allow more time or at least one round")
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Timing(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)],
            len(ordered),
        )  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """What the GPU cannot exceed, only used to size a measurement (an H200, rounded up)."""

    bytes_per_us: float = 5e6
    flops_per_us: float = 1e9

    def floor_us(self, m: int, n: int, k: int, batch: int, element_bytes: int) -> float:
        """The least time, in microseconds, that a product of this size can take."""
        moved = batch * (m * k + k * n + m * n) * element_bytes
        return max(moved / self.bytes_per_us, 2 * batch * m * n * k / self.flops_per_us)


def launches_per_sweep(best_us: float, target_us: float = 250.0) -> int:
    """Launches in a graph of a `Sweep`: few, since recording them takes longer than they run."""
    return max(4, min(40, math.ceil(target_us / best_us)))


def launches_per_graph(floor_us: float, sets: int, target_us: float = 400.0) -> int:
    """Launches that make one replay long against the cost of starting it (about 10 us).

    A multiple of `sets`, so that every replay starts where the rotation starts.
    """
    wanted = math.ceil(target_us / (floor_us + 2.0))
    return sets * max(1, math.ceil(min(wanted, 256) / sets))


def capture(launch: Launch, sets: int, launches: int) -> torch.cuda.CUDAGraph:
    """Records `launches` calls, the operand sets in rotation, after one call as warm-up."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index % sets)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], launches: int, rounds: int
) -> dict[str, Timing]:
    """Microseconds per launch of graphs that all hold `launches`, replayed in turn."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / launches)
    return {name: Timing.of(taken) for name, taken in samples.items()}


class Sweep:
    """Times many candidates of one shape one after the other, each in a short graph.

    L2 is overwritten between replays, so that a set used once in a graph is never in it. A
    candidate whose first replay takes more than `hopeless` times the best so far is not replayed
    again.
    """

    def __init__(
        self, sets: int, launches: int, flushed_bytes: int, rounds: int, device: str,
        hopeless: float = 2.5,
    ) -> None:  # fmt: skip
        self.sets, self.launches, self.rounds, self.hopeless = sets, launches, rounds, hopeless
        self._flush = torch.empty(flushed_bytes, dtype=torch.int8, device=device)
        self._best = math.inf

    def time(self, launch: Launch) -> float:
        """Median microseconds of a launch over the rounds."""
        graph = capture(launch, self.sets, self.launches)
        taken = self._replay(graph, 1)
        if taken[0] <= self.hopeless * self._best:
            taken += self._replay(graph, self.rounds - 1)
        median = statistics.median(taken)
        self._best = min(self._best, median)
        return median

    def _replay(self, graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
        events = [(_event(), _event()) for _ in range(times)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.launches for start, end in events]


def compare_launches(
    candidates: Mapping[str, Launch], sets: int, launches: int, rounds: int = 15
) -> dict[str, Timing]:
    """Captures every candidate and times them against each other: microseconds per launch."""
    graphs = {name: capture(launch, sets, launches) for name, launch in candidates.items()}
    return time_graphs(graphs, launches, rounds)


def compare_calls(
    candidates: Mapping[str, Callable[[], None]],
    *,
    rounds: int = 200,
    warm_up: int = 5,
    seconds: float = 5.0,
    burst: int = 1,
) -> dict[str, Timing]:
    """Wall-clock microseconds of synchronous host calls that take turns.

    Stops at `rounds` or after `seconds`, whichever comes first, but never before three rounds.
    burst: calls of one candidate in a row; of several, the first one, which finds the caches of the
    host as the others left them, does not count.
    """
    for call in candidates.values():
        for _ in range(warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    stop = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > stop:
            break
        for name, call in candidates.items():
            taken = []
            for _ in range(burst):
                start = time.perf_counter()
                call()
                taken.append((time.perf_counter() - start) * 1e6)
            samples[name] += taken[1:] or taken
    return {name: Timing.of(taken) for name, taken in samples.items()}


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive numbers; NaN for none."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
