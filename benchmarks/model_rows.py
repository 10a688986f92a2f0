"""What `bench_models` measures of one model in one type, row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.exported_models import Feed, Model, Size, Stream
from benchmarks.measuring import compare_calls
from benchmarks.model_contenders import Arrays, Contender, Prepared, Running
from benchmarks.recording import say
from benchmarks.running import Provider
from tests.corpus.comparing import Mismatch, relative_error

TURN = 10  # sizes that one contender runs before the next one's turn
HEAD = ("model", "dtype", "stream", "contender", "measure", "size", "value", "note")
KEY = ("model", "dtype", "stream", "contender", "measure", "size")
DONE = "seconds"  # the measure that ends a stream: how long all of it took


@dataclass
class Measured:
    """One model in one type while it is measured. `write` takes a row without model and dtype."""

    model: Model
    dtype: str
    provider: Provider
    write: Callable[[dict[str, Any]], None]

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

    def tensors(self, size: Size) -> dict[str, torch.Tensor]:
        feed = self.model.feed(size, self.dtype)
        return on_device(feed, self.provider)

    def start(self, candidates: Iterable[Contender], size: Size) -> dict[str, Running]:
        """Makes all contenders ready and runs each once, at `size`: `create_s`, `first_run_ms`
        (libraries are loaded, arenas grow) and `memory_mib`, the GPU memory that it took.

        One that fails has the row `failed`, and is out.
        """
        running = {}
        for contender in candidates:
            inputs = self.tensors(size)
            before = self._used()
            started = time.perf_counter()
            try:
                ready = contender.start()
                created = time.perf_counter()
                ready.prepare(inputs).run()
            except Exception as error:
                message = f"{type(error).__name__}: {str(error)[:200]}"
                say(f"{self.model.id} {self.dtype} {contender.name} failed: {message}")
                self.row("-", contender.name, "failed", 1, note=message)
                continue
            self.row("-", contender.name, "create_s", created - started)
            self.row(
                "-", contender.name, "first_run_ms", (time.perf_counter() - created) * 1e3, size
            )
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
        self, running: Mapping[str, Running], stream: Stream, few: Mapping[str, int]
    ) -> None:
        """All sizes, each new, contenders in turns: `new_ms` of each, their sum `stream_ms`; then
        all of them again: `again_ms`. `few`: contenders that run only so many of the sizes.
        """
        for measure, total in (("new_ms", "stream_ms"), ("again_ms", "again_stream_ms")):
            times: dict[str, list[float]] = {name: [] for name in running}
            for start in range(0, len(stream.sizes), TURN):
                sizes = stream.sizes[start : start + TURN]
                inputs = [self.tensors(size) for size in sizes]
                for name, ready in running.items():
                    count = few.get(name, len(stream.sizes)) - start
                    for size, tensors in list(zip(sizes, inputs, strict=True))[: max(count, 0)]:
                        prepared = ready.prepare(tensors)
                        times[name].append(milliseconds(prepared))
                        if measure == "new_ms":
                            self.row(stream.name, name, measure, times[name][-1], size)
            for name, taken in times.items():
                note = "" if len(taken) == len(stream.sizes) else f"first {len(taken)} sizes"
                self.row(stream.name, name, total, sum(taken), note=note)
                self.row(stream.name, name, f"median_{measure}", statistics.median(taken))

    def steady(self, running: Mapping[str, Running], stream: Stream, seconds: float) -> None:
        """`steady_ms`: the median of one size again and again, contenders in turn."""
        for size in stream.steady:
            inputs = self.tensors(size)
            calls = {name: ready.prepare(inputs).run for name, ready in running.items()}
            share = seconds / len(stream.steady)
            for name, timing in compare_calls(calls, rounds=50, warm_up=3, seconds=share).items():
                self.row(stream.name, name, "steady_ms", timing.median / 1e3, size)

    def _used(self) -> int:
        if not self.provider.is_cuda:
            return 0
        torch.cuda.synchronize(self.provider.ordinal)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.provider.ordinal)
        return total - free


def milliseconds(prepared: Prepared) -> float:
    started = time.perf_counter()
    prepared.run()
    return (time.perf_counter() - started) * 1e3


def on_device(feed: Feed, provider: Provider) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value).to(provider.torch_device) for name, value in feed.items()}


def outputs(ready: Running, feed: Feed, provider: Provider) -> Arrays:
    """Of the reference, as float64-comparable arrays."""
    return [np.asarray(value) for value in ready.prepare(on_device(feed, provider)).fetch()]


def shown(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
