"""Products whose rows are not aligned to 16 bytes, against cuBLAS: which of the ways to multiply
them is the fastest, and whether the planner finds it.

    python -m benchmarks.bench_unaligned --shapes gemm.csv --output unaligned.csv --seconds 120

One CSV row for every candidate that may be near the best: the kernels on the operands as they are
stored (`way` stored), on a constant B repacked once (repacked, outside the timing), and on operands
copied in front of every product (copied, inside the timing; repacked+copied: A alone). The
planner's choice has `chosen` 1. Candidates sit in short CUDA graphs on rotated operands with L2
overwritten between replays; figures are medians. A summary is printed last. Shapes that the output
holds are skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.bench_kernels import HEAD, Bench, Shape, product_bytes, read_shapes
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import Launch, Sweep, geometric_mean, launches_per_sweep, rotation
from benchmarks.operands import (
    DTYPES,
    NUMBERS,
    Operands,
    Repacked,
    relative_error,
    repack,
)
from benchmarks.recording import say
from benchmarks.running import Provider
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError
from moonpoly_ort.tuning.candidates import SPLITS

COLUMNS = [*HEAD, "way", "kernel", "split", "chosen", "predicted_us", "us"]
SLOWEST = 2.5  # candidates predicted this many times slower than the best are left out
Candidate = tuple[str, native.Problem, native.Plan]


def unaligned(shape: Shape) -> bool:
    size = DTYPES[NUMBERS[shape.dtype][0]].itemsize
    return bool(shape.n * size % 16 or shape.k * size % 16)


class Unaligned(Bench):
    """Measures every way of multiplying a shape; results stay in `ratios` for the summary."""

    def __init__(self, setting: Setting, output: Path) -> None:
        super().__init__(setting, output, COLUMNS)
        # class -> cuBLAS's time over that of the planner's choice, and of the best candidate
        self.ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.worst: list[tuple[float, str]] = []
        self.wrong: list[str] = []

    def candidates(self, problem: native.Problem) -> tuple[list[Candidate], int]:
        """What may be near the best, and which of them the planner chooses."""
        ways: list[tuple[str, native.Problem]] = [("stored", problem)]
        packed, size = self.setting.pack.repacked(problem)
        if size:
            ways.append(("repacked", packed))
        plans = [(way, p, self.setting.plan(p)) for way, p in ways]
        chosen = min(plans, key=lambda one: one[2].predicted_us)
        found = [_named(one) for one in plans]
        for way, p in ways:
            for index, kernel in enumerate(self.setting.pack.kernels):
                if kernel.family == native.Family.COPY_PADDED:
                    continue
                for split in SPLITS if kernel.split_k else (1,):
                    try:
                        found.append((way, p, self.setting.plan(p, index, split)))
                    except MoonPolyError:
                        continue  # not legal for this problem: the planner's own rule says so
        copied = self._copied(problem)
        if copied is not None:
            found.append(copied)
        limit = SLOWEST * chosen[2].predicted_us
        unique: dict[tuple[str, int, int], Candidate] = {}
        per_kernel: dict[tuple[str, int], int] = defaultdict(int)
        for way, p, plan in sorted(found, key=lambda one: one[2].predicted_us):
            region = plan.regions[0]
            key = (way, region.kernel, region.split)
            keep = key == _key(_named(chosen)) or (
                plan.predicted_us <= limit and per_kernel[way, region.kernel] < 2
            )
            if keep and key not in unique:
                unique[key] = (way, p, plan)
                per_kernel[way, region.kernel] += 1
        order = list(unique)
        return [unique[key] for key in order], order.index(_key(_named(chosen)))

    def _copied(self, problem: native.Problem) -> Candidate | None:
        """Both operands copied by force, where one kernel does that for both."""
        for index, kernel in enumerate(self.setting.pack.kernels):
            if kernel.family == native.Family.COPY_PADDED:
                try:
                    return "copied", problem, self.setting.plan(problem, index, 1)
                except MoonPolyError:
                    continue  # of another dtype or layout
        return None

    def launch_of(self, sets: list[tuple[Operands, Repacked | None]], one: Candidate) -> Launch:
        way, problem, plan = one
        runner = self.setting.runner
        runner.reserve(plan)
        pointers = [
            repacked.pointers if way.startswith("repacked") and repacked else operands.pointers
            for operands, repacked in sets
        ]
        return lambda index: runner.launch(problem, plan, pointers[index])

    def measure(self, shape: Shape, rounds: int) -> None:
        candidates, chosen = self.candidates(shape.problem())
        product = shape.product()
        launches = launches_per_sweep(min(plan.predicted_us for _, _, plan in candidates))
        count = min(launches, rotation(product_bytes(product), self.l2_bytes))
        operands = self.allocate(product, count)
        packs_b = any(way.startswith("repacked") for way, _, _ in candidates)
        launcher = self.setting.runner.launcher
        sets = [
            (one, repack(one, self.setting.pack, launcher) if packs_b else None) for one in operands
        ]
        self._check(shape, sets[0], candidates)
        sweep = Sweep(
            count, launches, 2 * self.l2_bytes, rounds, self.setting.provider.torch_device
        )
        times = [sweep.time(self.launch_of(sets, one)) for one in candidates]
        cublas = sweep.time(self.cublas(operands))
        for i, ((way, _, plan), us) in enumerate(zip(candidates, times, strict=True)):
            region = plan.regions[0]
            self.write(
                shape, way=way, kernel=self.setting.pack.kernels[region.kernel].name,
                split=region.split, chosen=int(i == chosen), predicted_us=plan.predicted_us, us=us,
            )  # fmt: skip
        self.write(shape, way="cublas", kernel="cublas", split=1, chosen=0, us=cublas)
        self.ratios[shape.kind].append((cublas / times[chosen], cublas / min(times)))
        way, _, plan = candidates[chosen]
        name = self.setting.pack.kernels[plan.regions[0].kernel].name
        self.worst.append((
            cublas / times[chosen],
            f"{shape}: {times[chosen]:.2f} us ({way}, {name}, split {plan.regions[0].split}), best "
            f"{min(times):.2f}, cuBLAS {cublas:.2f}",
        ))  # fmt: skip

    def _check(
        self, shape: Shape, one: tuple[Operands, Repacked | None], candidates: list[Candidate]
    ) -> None:
        """Each candidate once against float64: a wrong one is told, and fails the run."""
        operands = one[0]
        reference = operands.reference()
        limit = operands.limit(reference)
        for candidate in candidates:
            operands.y.poison(operands.product.dtype)
            self.launch_of([one], candidate)(0)
            torch.cuda.synchronize()
            error = relative_error(operands.y.view, reference)
            stray = operands.y.stray_writes(operands.product.dtype)
            if not error <= limit or stray:
                region = candidate[2].regions[0]
                name = self.setting.pack.kernels[region.kernel].name
                self.wrong.append(
                    f"{shape} {candidate[0]} {name} split {region.split}: error {error:.3g}, "
                    f"{stray} stray writes"
                )

    def summary(self) -> None:
        for ratio, text in sorted(self.worst)[:20]:
            say(f"{ratio:.2f}  {text}")
        say("class            shapes   chosen   best   (cuBLAS's time over ours, geometric means)")
        everything = [pair for pairs in self.ratios.values() for pair in pairs]
        for kind, pairs in [*sorted(self.ratios.items()), ("all", everything)]:
            chosen, best = (geometric_mean([pair[i] for pair in pairs]) for i in (0, 1))
            say(f"{kind:16s} {len(pairs):5d}   {chosen:6.3f}  {best:6.3f}")
        for text in self.wrong[:20]:
            say(f"WRONG {text}")
        say(f"{len(self.wrong)} wrong")


def _named(one: Candidate) -> Candidate:
    way, problem, plan = one
    if plan.copies:
        way = {"stored": "copied", "repacked": "repacked+copied"}.get(way, way)
    return way, problem, plan


def _key(one: Candidate) -> tuple[str, int, int]:
    return one[0], one[2].regions[0].kernel, one[2].regions[0].split


def _shapes(path: Path, dtypes: str, layouts: str, core: bool) -> Iterator[Shape]:
    rows = list(read_shapes(path, core=core))
    for dtype in dtypes.split(","):
        for layout in layouts.split(","):
            for row in rows:
                shape = replace(row, dtype=dtype, layout=layout)
                if unaligned(shape):
                    yield shape


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True, help="CSV: id, class, M, N, K, core")
    parser.add_argument("--output", type=Path, required=True, help="CSV; rows are appended")
    parser.add_argument("--dtype", default="f16", help="of f16, bf16, f32, f32ieee; with commas")
    parser.add_argument("--layout", default="nn", help="of nn, nt; several with commas")
    parser.add_argument("--every", action="store_true", help="all rows, not the core ones alone")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300, help="stop starting shapes then")
    arguments = parser.parse_args()
    pack = pack_of(arguments, parser)
    stop = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        provider = Provider(ordinal=arguments.device)
        bench = Unaligned(Setting(provider, unpacked(pack, Path(folder))), arguments.output)
        shapes = _shapes(arguments.shapes, arguments.dtype, arguments.layout, not arguments.every)
        left = 0
        for shape in shapes:
            if shape.key in bench.done:
                continue
            if time.monotonic() > stop:
                left += 1
                continue
            bench.measure(shape, arguments.rounds)
        bench.summary()
        if left:
            say(f"{left} shapes not reached in time: run again with the same output")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
