"""Candidates for one product timed in turns, on operands that are not in L2.

Every candidate is a CUDA graph of the same launches on the same operand sets. Before each replay
L2 is filled with something else by reading it (writing would leave lines that the replay has to
write back), so that few sets are enough however small they are. A round replays every candidate
once; all rounds are enqueued at once, so that the host is never waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.measuring import Ceilings, Launch, Timing, rotation

MOST_LAUNCHES = 64  # in a graph; recording one takes about 10 us
REPLAY_US = 300.0  # long against the start of a graph, about 10 us
ROUNDS = (3, 15)
FLUSH_US = 40.0
HOST_CYCLES = 100_000  # of the GPU's clock, 50 us: longer than the host takes for a launch


@dataclass(frozen=True)
class Loop:
    """How a product is repeated: launches in a graph, and operand sets that they rotate over."""

    launches: int
    sets: int

    @staticmethod
    def of(floor_us: float, set_bytes: int, l2_bytes: int) -> Loop:
        """For a product that takes at least `floor_us` and whose operands have `set_bytes`.

        A set comes around again after twice the size of L2, or is used once in a graph.
        """
        launches = max(1, min(MOST_LAUNCHES, math.ceil(REPLAY_US / (floor_us + 2))))
        return Loop(launches, min(launches, rotation(set_bytes, l2_bytes, MOST_LAUNCHES)))

    def shortened(self, measured_us: float) -> Loop:
        """Fewer launches where one takes much longer than its floor.

        Single launches as short as 50 us are dominated by the host: they say nothing.
        """
        if measured_us < 50:
            return self
        return Loop(min(self.launches, max(1, math.ceil(REPLAY_US / measured_us))), self.sets)


def floor_us(m: int, n: int, k: int, batch: int, element_bytes: int) -> float:
    return Ceilings().floor_us(m, n, k, batch, element_bytes)


def rounds_for(seconds: float, round_us: float) -> int:
    """As many rounds as fit, within `ROUNDS`."""
    fitting = int(seconds * 1e6 / max(round_us, 1.0))
    return max(ROUNDS[0], min(ROUNDS[1], fitting))


class Interleaved:
    """Times launches on one GPU. `seconds`: how long the rounds of one product may take."""

    def __init__(self, device: str, l2_bytes: int, seconds: float = 0.12) -> None:
        self.l2_bytes, self.seconds = l2_bytes, seconds
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filler = torch.zeros(2 * l2_bytes // 4, device=device)
        self._sum = torch.zeros((), device=device)

    def single_us(self, launch: Launch) -> float:
        """Microseconds of a launch outside a graph, the host's part included."""
        launch(0)
        start, end = _event(), _event()
        start.record()
        for _ in range(3):
            launch(0)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / 3

    def compare(self, candidates: Mapping[str, Launch], loop: Loop) -> dict[str, Timing]:
        """Microseconds per launch of each candidate."""
        graphs = {name: self._capture(launch, loop) for name, launch in candidates.items()}
        first = self._rounds(graphs, loop, 1)  # the graphs are on the GPU now; not counted
        flushes = FLUSH_US * len(graphs)
        round_us = sum(samples[0] for samples in first.values()) * loop.launches + flushes
        samples = self._rounds(graphs, loop, rounds_for(self.seconds, round_us))
        return {name: Timing.of(taken) for name, taken in samples.items()}

    def enqueued(self, launch: Launch, loop: Loop) -> Timing:
        """Microseconds per launch of what no graph can hold: calls enqueued behind a wait on the
        GPU, which gives the host time to be ahead of it.
        """
        samples = []
        for _ in range(ROUNDS[0] + 1):
            start, end = _event(), _event()
            torch.sum(self._filler, dim=0, out=self._sum)
            torch.cuda._sleep(loop.launches * HOST_CYCLES)
            start.record()
            for index in range(loop.launches):
                launch(index % loop.sets)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / loop.launches)
        return Timing.of(samples[1:])

    def fastest(self, launches: Sequence[Launch], loop: Loop, seconds: float = 0.25) -> int:
        """The index of the launch that is fastest in a quick pass.

        The pass ends after `seconds`: launches that come late may not be looked at.
        """
        short = Loop(min(loop.launches, 8), loop.sets)
        stop, best, least = time.perf_counter() + seconds, 0, math.inf
        for index, launch in enumerate(launches):
            graph = {"": self._capture(launch, short)}
            self._rounds(graph, short, 1)
            us = min(self._rounds(graph, short, 3)[""])
            if us < least:
                best, least = index, us
            if time.perf_counter() > stop:
                break
        return best

    def _capture(self, launch: Launch, loop: Loop) -> torch.cuda.CUDAGraph:
        # Not `torch.cuda.graph`: that collects garbage and empties torch's cache every time.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            launch(0)  # what is loaded or allocated at a first use is, before the capture
            self._stream.synchronize()
            graph.capture_begin()
            try:
                for index in range(loop.launches):
                    launch(index % loop.sets)
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph

    def _rounds(
        self, graphs: Mapping[str, torch.cuda.CUDAGraph], loop: Loop, rounds: int
    ) -> dict[str, list[float]]:
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [] for name in graphs
        }
        for _ in range(rounds):
            for name, graph in graphs.items():
                start, end = _event(), _event()
                torch.sum(self._filler, dim=0, out=self._sum)
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) * 1e3 / loop.launches for start, end in pairs]
            for name, pairs in events.items()
        }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
