"""What `bench_models` measures of one model in one type, row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.exported_models import Feed, Model, Size, Stream
from benchmarks.measuring import compare_calls
from benchmarks.model_contenders import Arrays, Contender, Prepared, Running
from benchmarks.recording import say
from benchmarks.running import Provider
from tests.corpus.comparing import Mismatch, relative_error

HEAD = ("model", "dtype", "stream", "contender", "measure", "size", "value", "note")
KEY = HEAD[:6]
LEAST = 5  # sizes of a stream that every contender runs, however slow it is
SWEEPS = {"new_ms": "stream_ms", "again_ms": "again_stream_ms"}


@dataclass
class Measured:
    """One model in one type while it is measured. `write` takes a row; `all_started` is False once
    there was no time left for a contender.
    """

    model: Model
    dtype: str
    provider: Provider
    write: Callable[[dict[str, Any]], None]
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

    def tensors(self, size: Size, dtype: str = "") -> Feed:
        """Inputs on the device, in the type that is measured or another one."""
        feed = self.model.feed(size, dtype or self.dtype, self.provider.torch_device)
        self.provider.synchronize()
        return feed

    def start(
        self, candidates: Iterable[Contender], size: Size, deadline: float
    ) -> dict[str, Running]:
        """Makes contenders ready and runs each once, at `size`: `create_s`, `first_run_ms` (arenas
        grow) and `memory_mib`, the GPU memory that it took.

        One that fails, or for which there is no time left, has the row `failed`, and is out.
        """
        running: dict[str, Running] = {}
        inputs = self.tensors(size)
        for contender in candidates:
            if time.monotonic() > deadline:
                self.row("-", contender.name, "failed", 1, note="no time left")
                self.all_started = False
                continue
            before = self._used()
            started = time.perf_counter()
            try:
                ready = contender.start()
                created = time.perf_counter()
                taken = milliseconds(ready.prepare(inputs))
            except Exception as error:
                message = f"{type(error).__name__}: {str(error)[:200]}"
                say(f"{self.model.id} {self.dtype} {contender.name} failed: {message}")
                self.row("-", contender.name, "failed", 1, note=message)
                continue
            self.row("-", contender.name, "create_s", created - started)
            self.row("-", contender.name, "first_run_ms", taken, size)
            if self.provider.is_cuda:
                self.row("-", contender.name, "memory_mib", (self._used() - before) / 2**20, size)
            running[contender.name] = ready
        return running

    def errors(
        self, running: Mapping[str, Running], wanted: Mapping[Size, Arrays], own: str
    ) -> None:
        """`error`: the largest relative error of an output against the fp32 reference; the note
        says where it is more than 1.2 times the one of `own` (and more than 1e-5).
        """
        for size, references in wanted.items():
            inputs = self.tensors(size)
            found = {}
            for name, ready in running.items():
                if name.startswith("torch"):
                    continue  # other weights
                try:
                    pairs = zip(ready.prepare(inputs).fetch(), references, strict=True)
                    found[name] = max(relative_error(got, want) for got, want in pairs)
                except Mismatch as error:
                    self.row("-", name, "error", "inf", size, note=f"WRONG: {error}")
            for name, error in found.items():
                limit = max(1.2 * found.get(own, 0.0), 1e-5)
                note = "" if error <= limit else f"WORSE: {own} has {found.get(own)}"
                self.row("-", name, "error", error, size, note=note)

    def launches(self, running: Mapping[str, Running], size: Size) -> None:
        """`kernels`: kernels and copies on the GPU in one run, as CUPTI reports them."""
        from torch.profiler import ProfilerActivity, profile

        inputs = self.tensors(size)
        for name, ready in running.items():
            prepared = ready.prepare(inputs)
            prepared.run()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                prepared.run()
            on_gpu = [e for e in profiler.events() if e.device_type.name == "CUDA"]
            if on_gpu:  # none: this machine does not let us see them
                self.row("-", name, "kernels", len(on_gpu), size)

    def stream(
        self, running: Mapping[str, Running], stream: Stream, patience: float, deadline: float
    ) -> bool:
        """All sizes, each new, and then all of them again; every size is run by all contenders, in
        an order that turns. Rows `new_ms` of each size, `median_new_ms`, `median_again_ms`, and the
        sums `stream_ms` and `again_stream_ms`.

        A contender that has run for `patience` seconds is out of the rest of a sweep: see `total`.

        Returns:
            Whether the end was reached before the deadline, which ends a sweep for all.
        """
        in_time = True
        count = dict.fromkeys(running, len(stream.sizes))
        for measure in SWEEPS:
            times: dict[str, list[float]] = {name: [] for name in running}
            for index, size in enumerate(stream.sizes):
                if index >= LEAST and time.monotonic() > deadline:
                    in_time = False
                    break
                inputs = self.tensors(size)
                for name in turned(list(running), index):
                    taken = times[name]
                    out = index >= LEAST and sum(taken) > 1e3 * patience
                    if out or not len(taken) == index < count[name]:
                        continue
                    taken.append(milliseconds(running[name].prepare(inputs)))
                    if measure == "new_ms":
                        self.row(stream.name, name, measure, taken[-1], size)
            for name, taken in times.items():
                self.totals(stream, name, measure, taken)
                count[name] = len(taken)
        return in_time

    def totals(self, stream: Stream, name: str, measure: str, taken: list[float]) -> None:
        """The rows about one contender's sweep of a stream."""
        if taken:
            value, note = total(taken, len(stream.sizes))
            self.row(stream.name, name, SWEEPS[measure], value, note=note)
            self.row(stream.name, name, f"median_{measure}", statistics.median(taken))

    def steady(
        self, running: Mapping[str, Running], stream: Stream, seconds: float, deadline: float
    ) -> bool:
        """`steady_ms`: the median of one size again and again, contenders in turn. Returns whether
        all sizes were reached before the deadline.
        """
        for size in stream.steady:
            if time.monotonic() > deadline:
                return False
            inputs = self.tensors(size)
            calls = {}
            for name, ready in running.items():
                try:
                    calls[name] = ready.prepare(inputs).run
                except Exception as error:  # a graph that does not fit, say
                    say(f"{self.model.id} {self.dtype} {name} {shown(size)} failed: {error}")
            share = seconds / len(stream.steady)
            found = compare_calls(calls, rounds=50, warm_up=3, seconds=share, burst=3)
            for name, timing in found.items():
                self.row(stream.name, name, "steady_ms", timing.median / 1e3, size)
        return True

    def compiled(self, contender: Contender, stream: Stream, patience: float) -> None:
        """torch.compile on its own: it starts anew, `stream_ms` holds what it compiled on the way,
        and it stops, at `LEAST` sizes or later, after `patience` seconds.
        """
        ready = contender.start()
        taken: list[float] = []
        for size in stream.sizes:
            if len(taken) >= LEAST and sum(taken) > 1e3 * patience:
                break
            taken.append(milliseconds(ready.prepare(self.tensors(size))))
            self.row(stream.name, contender.name, "new_ms", taken[-1], size)
        self.totals(stream, contender.name, "new_ms", taken)
        for size in stream.steady:
            call = ready.prepare(self.tensors(size)).run
            (timing,) = compare_calls({"": call}, rounds=30, warm_up=3, seconds=0.3).values()
            self.row(stream.name, contender.name, "steady_ms", timing.median / 1e3, size)

    def _used(self) -> int:
        if not self.provider.is_cuda:
            return 0
        torch.cuda.synchronize(self.provider.ordinal)
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(self.provider.ordinal)
        return whole - free


def total(taken: Sequence[float], sizes: int) -> tuple[float, str]:
    """The sum over a stream of so many sizes, of which the first were taken, and what to note of
    it. The others count as the (lower) median, which leaves out what is compiled or searched once.
    """
    if len(taken) == sizes:
        return sum(taken), ""
    rest = (sizes - len(taken)) * statistics.median_low(taken)
    return sum(taken) + rest, f"from {len(taken)} of {sizes} sizes"


def turned(names: list[str], by: int) -> list[str]:
    """The names with the first ones at the end."""
    at = by % len(names) if names else 0
    return names[at:] + names[:at]


def milliseconds(prepared: Prepared) -> float:
    started = time.perf_counter()
    prepared.run()
    return (time.perf_counter() - started) * 1e3


def shown(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
