"""What a contender of `bench_models` does in the process that it has for itself.

All methods return plain values, for a pipe. Inputs are drawn where they are needed, on the device,
from seeds that their size gives: all contenders get the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.exported_models import Feed, Model, Size
from benchmarks.model_contenders import Contender, Prepared, Running
from benchmarks.running import Bound, Provider, plain_session
from tests.corpus.comparing import relative_error

SLOW_MS = 5000.0
WARM_UP = 3  # runs of a size before it is in its steady state
KEPT = 2 << 30  # bytes that torch may keep of inputs that are no longer needed


@dataclass(frozen=True)
class Started:
    """Seconds to make a contender ready, milliseconds of its first run, and MiB of GPU memory that
    both took: beside the CUDA context and its libraries, or if it was made ready beside others, of
    torch's allocator. None: not known.
    """

    create_s: float
    first_run_ms: float
    memory_mib: float | None
    beside: bool = False


class ContenderRuns:
    """One contender on one model in one type; `contender` is made ready by `load` and `start`."""

    def __init__(self, model: Model, dtype: str, provider: Provider, contender: Contender) -> None:
        self.model, self.dtype, self.provider, self.contender = model, dtype, provider, contender
        self._create_s = 0.0
        self._ready: Running | None = None
        self._last: Prepared | None = None
        self._steady: tuple[Size, Prepared] | None = None

    def load(self) -> None:
        """What processes can do side by side: the CUDA context, CUDA's libraries with a product and
        a convolution of ONNX Runtime, and all of a contender that starts beside others.
        """
        if self.contender.beside:
            self._create()
        else:
            warm_up(self.provider)

    def start(self, size: Size) -> Started:
        """Makes it ready, if `load` did not, and runs it once (arenas grow)."""
        inputs = self._tensors(size)
        before = self._used()
        if self._ready is None:
            self._create()
        assert self._ready is not None
        self._last = self._ready.prepare(inputs)
        taken = milliseconds(self._last)
        after = self._used()
        beside = self.contender.beside
        memory = (after - (0 if beside else before)) / 2**20
        return Started(self._create_s, taken, memory if self.provider.is_cuda else None, beside)

    def sweep(self, sizes: tuple[Size, ...], least: int, allowance_ms: float) -> list[float]:
        """Milliseconds of one run of each size, one after the other. Behind the first `least` it
        stops when all took more than `allowance_ms`, before that also needs `SLOW_MS`: ONNX Runtime
        searches 3 s for the convolutions of a MobileNetV2 at each new size.

        The size before is run again first, and does not count: while this process waited, others
        had the caches and the GPU.
        """
        assert self._ready is not None
        inputs = [self._tensors(size) for size in sizes]
        if self._last is not None:
            self._last.run()
        taken: list[float] = []
        for tensors in inputs:
            if sum(taken) > max(allowance_ms, 0 if len(taken) >= least else SLOW_MS):
                break
            self._last = self._ready.prepare(tensors)
            taken.append(milliseconds(self._last))
        del inputs
        self._give_back()
        return taken

    def repeat(self, size: Size, runs: int) -> list[float]:
        """Milliseconds of `runs` runs of a size that is seen again and again, behind one that finds
        the caches as others left them.
        """
        assert self._ready is not None
        if self._steady is None or self._steady[0] != size:
            self._steady = None
            prepared = self._ready.prepare(self._tensors(size))
            for _ in range(WARM_UP):
                prepared.run()
            self._steady = (size, prepared)
        (_, prepared) = self._steady
        prepared.run()
        return [milliseconds(prepared) for _ in range(runs)]

    def kernels(self, size: Size) -> int | None:
        """Kernels and copies on the GPU in one run, as CUPTI reports them; None: it sees none."""
        from torch.profiler import ProfilerActivity, profile

        assert self._ready is not None
        prepared = self._ready.prepare(self._tensors(size))
        prepared.run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            prepared.run()
        return sum(event.device_type.name == "CUDA" for event in profiler.events()) or None

    def save(self, size: Size, path: Path) -> None:
        """Writes the outputs in the model's order as an .npz file."""
        if self._ready is None:
            self._create()
        assert self._ready is not None
        np.savez(path, *self._ready.prepare(self._tensors(size)).fetch())

    def error(self, size: Size, path: Path) -> float:
        """The largest relative error of an output against those of a file; see `relative_error`."""
        assert self._ready is not None
        found = self._ready.prepare(self._tensors(size)).fetch()
        with np.load(path) as exact:
            wanted = [exact[name] for name in exact.files]
        return max(relative_error(got, want) for got, want in zip(found, wanted, strict=True))

    def _create(self) -> None:
        started = time.perf_counter()
        self._ready = self.contender.start()
        self.provider.synchronize()
        self._create_s = time.perf_counter() - started

    def _tensors(self, size: Size) -> Feed:
        feed = self.model.feed(size, self.dtype, self.provider.torch_device)
        self.provider.synchronize()
        return feed

    def _used(self) -> int:
        """Bytes of the GPU that are taken, by all: the difference is ours while others wait. What
        torch holds is known for one process.
        """
        if not self.provider.is_cuda:
            return 0
        self.provider.synchronize()
        if self.contender.beside:
            return torch.cuda.memory_reserved(self.provider.ordinal)
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(self.provider.ordinal)
        return whole - free

    def _give_back(self) -> None:
        """Memory of inputs, of which many processes would hoard more than there is."""
        if not self.provider.is_cuda or self.contender.beside:  # torch would ask for it again
            return
        ordinal = self.provider.ordinal
        if torch.cuda.memory_reserved(ordinal) - torch.cuda.memory_allocated(ordinal) > KEPT:
            torch.cuda.empty_cache()


def warm_up(provider: Provider) -> None:
    """A product and a convolution in ONNX Runtime: loading CUDA's libraries is no contender's."""
    import onnx.parser

    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[1,4,8,8] x, float[8,8] w, float[4,4,1,1] k) => (float[1,4,8,8] y)
        { p = MatMul(x, w)  y = Conv(p, k) }"""
    )
    shapes = {"x": (1, 4, 8, 8), "w": (8, 8), "k": (4, 4, 1, 1)}
    inputs = {
        name: torch.ones(shape, device=provider.torch_device) for name, shape in shapes.items()
    }
    Bound(plain_session(model.SerializeToString(), provider), provider, inputs).run()


def milliseconds(prepared: Prepared) -> float:
    started = time.perf_counter()
    prepared.run()
    return (time.perf_counter() - started) * 1e3
