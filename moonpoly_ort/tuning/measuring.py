"""Timing candidates against each other on the GPU, through the native runtime.

Launches sit in CUDA graphs, on operands in rotation, and the L2 cache is overwritten between
replays, so that a set of operands used once in a graph is never in it. First every candidate is
timed briefly; then the few fastest take turns, and their figures are medians over the rounds, so
that a change of the clocks touches all of them alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .. import native
from ..errors import DeviceError, MoonPolyError
from .candidates import Candidate
from .cuda import Gpu, Graph, KernelFault
from .work import AnyShape, Work, launch

DTYPES = {
    native.Dtype.F16: np.dtype(np.float16),
    native.Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    native.Dtype.F32: np.dtype(np.float32),
}
CHUNK = 1 << 24  # random bytes that are made on the host; the rest of a pool repeats them
ALIGNMENT = 256  # bytes, of operands in a pool
QUICK_US, CAREFUL_US = 100.0, 250.0  # length of a graph
QUICK_LAUNCHES, CAREFUL_LAUNCHES = (2, 24), (4, 40)  # at least and at most
HOPELESS = 2.5  # times the best: not replayed again


@dataclass(frozen=True)
class Effort:
    """How much is measured: replays of every candidate, finalists and their rounds."""

    quick_replays: int = 2
    finalists: int = 8
    near: float = 1.3  # finalists take at most so many times the best of the first pass
    rounds: int = 7
    chunk: int = CHUNK


@dataclass(frozen=True)
class Timed:
    """Microseconds of one launch; `careful`: it was among the finalists."""

    name: str
    split: int
    us: float
    careful: bool


def rotation(set_bytes: int, l2_bytes: int, most: int = 128) -> int:
    """How many operand sets to rotate so that none is still in L2 when its turn comes again."""
    return max(1, min(most, math.ceil(2 * l2_bytes / max(set_bytes, 1)) + 1))


def launches_for(us: float, target_us: float, bounds: tuple[int, int]) -> int:
    """Launches in a graph of about that length."""
    return max(bounds[0], min(bounds[1], math.ceil(target_us / max(us, 1e-3))))


class CandidateFault(KernelFault):
    """What a candidate, by its `name`, did when it was timed."""

    def __init__(self, name: str, shape: AnyShape, fault: KernelFault) -> None:
        super().__init__(f"{name} on {shape}: {fault}")
        self.name = name


class Stopwatch:
    """Time on the GPU between two points of its stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._start, self._end = gpu, gpu.event(), gpu.event()

    def start(self) -> None:
        self._gpu.record(self._start)

    def stop(self) -> None:
        self._gpu.record(self._end)

    def us(self) -> float:
        """Microseconds, once the work queued between has ended."""
        return self._gpu.elapsed_us(self._start, self._end)


@dataclass(frozen=True)
class _Work:
    """Launches of one problem: addresses of A, B and Y (or W, X and Y) in rotation."""

    problem: Work
    sets: list[tuple[int, int, int]]
    launches: int


class _Pool:
    """Device memory that grows: random values of a dtype, or nothing in particular."""

    def __init__(self, gpu: Gpu, dtype: np.dtype[np.generic] | None, chunk: int) -> None:
        self._gpu, self._chunk = gpu, chunk
        self.address, self._size = 0, 0
        self._values = None
        if dtype is not None:
            rng = np.random.default_rng(chunk)
            count = chunk // dtype.itemsize
            self._values = rng.standard_normal(count, np.float32).astype(dtype)

    def at_least(self, size: int) -> int:
        """Its address, with room for `size` bytes."""
        if size <= self._size:
            return self.address
        size = max(size, 2 * self._size)  # few steps on the way to the largest
        if self.address:
            self._gpu.wait()
            self._gpu.free(self.address)
            self.address = self._size = 0
        size = -(-size // self._chunk) * self._chunk
        self.address = self._gpu.allocate(size)
        self._size = size
        if self._values is not None:
            self._gpu.upload(self.address, self._values)
            for start in range(self._chunk, size, self._chunk):
                self._gpu.copy(self.address + start, self.address, self._chunk)
            self._gpu.wait()
        return self.address


class Measurer:
    """Times candidates on one GPU. The launcher must be of the candidates' pack."""

    def __init__(
        self, gpu: Gpu, launcher: native.Launcher, device: native.Device, effort: Effort = Effort()
    ) -> None:
        self.gpu, self.effort = gpu, effort
        self._launcher, self._l2 = launcher, int(device.l2_bytes)
        self._random = {dtype: _Pool(gpu, DTYPES[dtype], effort.chunk) for dtype in native.Dtype}
        self._results = _Pool(gpu, None, effort.chunk)
        self._workspace = _Pool(gpu, None, effort.chunk)
        self._flushed = gpu.allocate(2 * self._l2)
        self._counters, self._counter_count = 0, 0
        self._stopwatches = [Stopwatch(gpu) for _ in range(effort.quick_replays)]

    def time(
        self, shape: AnyShape, candidates: Sequence[Candidate], always: Collection[str] = ()
    ) -> list[Timed]:
        """The time of every candidate, in the order given; those named in `always` are among the
        finalists. Raises CandidateFault for one that hangs or faults, and DeviceError."""
        if not candidates:
            return []
        quick = self._quick(shape, candidates)
        best = min(quick)
        order = sorted(range(len(quick)), key=quick.__getitem__)[: self.effort.finalists]
        chosen = [
            index
            for index, (candidate, us) in enumerate(zip(candidates, quick, strict=True))
            if (index in order and us <= self.effort.near * best) or candidate.name in always
        ]
        finals = self._finals(shape, [candidates[index] for index in chosen], best)
        careful = dict(zip(chosen, finals, strict=True))
        return [
            Timed(candidate.name, candidate.split, careful.get(index, us), index in careful)
            for index, (candidate, us) in enumerate(zip(candidates, quick, strict=True))
        ]

    def refusal(self, shape: AnyShape, candidate: Candidate) -> str:
        """Why a candidate does not run, empty if it does: for one that is no kernel of the pack."""
        self._make_room([candidate])
        work = self._work(shape, 1)
        try:
            self._launch(work, candidate, 0)
        except MoonPolyError as error:
            return str(error)
        self.gpu.wait()
        return ""

    def _quick(self, shape: AnyShape, candidates: Sequence[Candidate]) -> list[float]:
        """The best of few replays of every candidate."""
        predicted = [one.plan.predicted_us for one in candidates if one.plan.predicted_us > 0]
        launches = launches_for(min(predicted, default=1.0), QUICK_US, QUICK_LAUNCHES)
        self._make_room(candidates)
        work = self._work(shape, launches)
        found, best = [], math.inf
        for candidate in candidates:
            try:
                with self._record(work, candidate) as graph:
                    taken = self._replays(graph, 1)
                    if taken[0] <= HOPELESS * best * launches:
                        taken += self._replays(graph, self.effort.quick_replays - 1)
            except KernelFault as fault:
                raise CandidateFault(candidate.name, shape, fault) from fault
            found.append(min(taken) / launches)
            best = min(best, found[-1])
        return found

    def _finals(self, shape: AnyShape, candidates: Sequence[Candidate], best: float) -> list[float]:
        """Median microseconds of candidates that take turns; `best`: about what they take."""
        launches = launches_for(best, CAREFUL_US, CAREFUL_LAUNCHES)
        work = self._work(shape, launches)
        while len(self._stopwatches) < len(candidates):
            self._stopwatches.append(Stopwatch(self.gpu))
        samples: list[list[float]] = [[] for _ in candidates]
        with ExitStack() as stack:
            graphs = [stack.enter_context(self._record(work, one)) for one in candidates]
            for graph in graphs:
                graph.replay()  # the first time a graph is also sent to the device
            for _ in range(self.effort.rounds):
                for graph, stopwatch in zip(graphs, self._stopwatches, strict=False):
                    self._queue(graph, stopwatch)
                self.gpu.wait()
                for taken, stopwatch in zip(samples, self._stopwatches, strict=False):
                    taken.append(stopwatch.us())
        return [statistics.median(taken) / launches for taken in samples]

    def _replays(self, graph: Graph, times: int) -> list[float]:
        """Microseconds of whole replays."""
        for stopwatch in self._stopwatches[:times]:
            self._queue(graph, stopwatch)
        self.gpu.wait()
        return [stopwatch.us() for stopwatch in self._stopwatches[:times]]

    def _queue(self, graph: Graph, stopwatch: Stopwatch) -> None:
        self.gpu.fill(self._flushed, 2 * self._l2)
        stopwatch.start()
        graph.replay()
        stopwatch.stop()

    def _record(self, work: _Work, candidate: Candidate) -> Graph:
        """A graph of the candidate's launches, one operand set after the other."""
        self._launch(work, candidate, 0)  # loads the kernel's code, which a capture must not

        def launches() -> None:
            for index in range(work.launches):
                self._launch(work, candidate, index)

        return self.gpu.capture(launches)

    def _launch(self, work: _Work, candidate: Candidate, index: int) -> None:
        a, b, y = work.sets[index % len(work.sets)]
        launch(
            self._launcher, work.problem, candidate.plan, a=a, b=b, y=y,
            workspace=self._workspace.address, counters=self._counters,
            stream=self.gpu.stream.value,
        )  # fmt: skip

    def _work(self, shape: AnyShape, launches: int) -> _Work:
        """Operand sets for so many launches, in memory of random values."""
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in shape.operand_bytes]
        sets = min(launches, rotation(sum(sizes), self._l2))
        problem = shape.problem()
        inputs = self._random[native.Dtype(problem.dtype)].at_least(sets * (sizes[0] + sizes[1]))
        outputs = self._results.at_least(sets * sizes[2])
        places = []
        for index in range(sets):
            a = inputs + index * (sizes[0] + sizes[1])
            places.append((a, a + sizes[0], outputs + index * sizes[2]))
        return _Work(problem, places, launches)

    def _make_room(self, candidates: Sequence[Candidate]) -> None:
        """Scratch memory for the largest plan. Counters start at 0, and kernels leave them at 0."""
        self._workspace.at_least(max(1, *(c.plan.workspace_bytes for c in candidates)))
        wanted = max(1, *(c.plan.counters for c in candidates))
        if wanted > self._counter_count:
            if self._counters:
                self.gpu.wait()
                self.gpu.free(self._counters)
            self._counters = self.gpu.allocate(4 * wanted)
            self._counter_count = wanted
            self.gpu.fill(self._counters, 4 * wanted)


def bandwidth_gbps(gpu: Gpu, size: int, copies: int = 4, rounds: int = 5) -> float:
    """GB/s of the memory when `size` bytes are copied: read and written."""
    source, target = gpu.allocate(size), gpu.allocate(size)
    gpu.fill(source, size)
    gpu.copy(target, source, size)

    def copy_all() -> None:
        for _ in range(copies):
            gpu.copy(target, source, size)

    us = _median_us(gpu, copy_all, rounds)
    gpu.free(source)
    gpu.free(target)
    return 2 * size * copies / us / 1e3


def launch_us(gpu: Gpu, launches: int = 256, rounds: int = 7) -> float:
    """Microseconds of an empty kernel, back to back on one stream."""
    try:
        empty = gpu.empty_kernel()
    except DeviceError:  # a driver without its compiler: setting a word is a kernel, too
        word = gpu.allocate(4)

        def empty() -> None:
            gpu.fill(word, 4)

    empty()

    def launch_all() -> None:
        for _ in range(launches):
            empty()

    with gpu.capture(launch_all) as graph:
        graph.replay()
        return _median_us(gpu, graph.replay, rounds) / launches


def _median_us(gpu: Gpu, queue: Callable[[], None], rounds: int) -> float:
    stopwatch, samples = Stopwatch(gpu), []
    for _ in range(rounds):
        stopwatch.start()
        queue()
        stopwatch.stop()
        gpu.wait()
        samples.append(stopwatch.us())
    return statistics.median(samples)
