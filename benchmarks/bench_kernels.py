"""GEMM time on the GPU alone: our plan against cuBLAS, or every kernel against every other.

    python -m benchmarks.bench_kernels --output rows.csv [--shapes gemm.csv] [--seconds 300]
    python -m benchmarks.bench_kernels --output oracle.csv --oracle

Each launch sits in a CUDA graph, on operands rotated beyond L2, all candidates of a shape taking
turns; figures are medians. One CSV row a shape; shapes that the output already holds are skipped,
so that a run cut short goes on where it stopped. With `--oracle` one row for every kernel and K
split that is legal for the shape and may be near the best: what `benchmarks.fit_costs` makes a
table of measured costs from; all dtypes and layouts are meant to fit in a few minutes:

    python -m benchmarks.bench_kernels --oracle --output oracle.csv --dtype f16,bf16,f32,f32ieee
        --layout nn,nt,tn,tt
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Setting, architecture, environment, unpacked
from benchmarks.measuring import (
    Ceilings,
    Launch,
    Sweep,
    capture,
    compare_launches,
    geometric_mean,
    launches_per_graph,
    launches_per_sweep,
    rotation,
    time_graphs,
)
from benchmarks.operands import DTYPES, NUMBERS, Operands, Product, dense, dense_problem
from benchmarks.recording import say
from benchmarks.running import Provider
from moonpoly_ort import native, packs
from moonpoly_ort.errors import MoonPolyError

SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
HEAD = ["id", "class", "dtype", "layout", "m", "n", "k"]
PLAN_HEAD = [*HEAD, "kernel", "split", "regions", "predicted_us", "us", "low_us", "high_us",
             "cublas_us", "cublas_low_us", "cublas_high_us", "speedup"]  # fmt: skip
ORACLE_HEAD = [*HEAD, "kernel", "split", "predicted_us", "us"]


@dataclass(frozen=True)
class Shape:
    """One row of a shape list."""

    id: str
    kind: str
    m: int
    n: int
    k: int
    dtype: str = "f16"
    layout: str = "nn"  # n: stored as multiplied, t: transposed; A, then B

    def product(self) -> Product:
        dtype, precision = NUMBERS[self.dtype]
        return dense(self.m, self.n, self.k, dtype, self.layout, precision)

    def problem(self) -> native.Problem:
        dtype, precision = NUMBERS[self.dtype]
        return dense_problem(self.m, self.n, self.k, dtype, self.layout, precision)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.id, self.dtype, self.layout

    def __str__(self) -> str:
        return f"{self.id} {self.m}x{self.n}x{self.k} {self.dtype} {self.layout}"


def built_in() -> Iterator[Shape]:
    """A small list: BERT's and Llama's weights, odd ones, long K at small N, small squares."""
    weights = (
        ("bert", 768, 768), ("bert", 3072, 768), ("bert", 768, 3072), ("llama", 4096, 4096),
        ("llama", 4096, 11008), ("odd", 1000, 2047), ("odd", 513, 771), ("small", 64, 64),
        ("small", 256, 256), ("long-k", 128, 16384), ("long-k", 1024, 8192),
    )  # fmt: skip
    number = 0
    for kind, n, k in weights:
        for m in (1, 16, 37, 128, 333, 777, 1500, 4096):
            yield Shape(f"b{number}", kind, m, n, k)
            number += 1


def informative() -> Iterator[Shape]:
    """What shows each kernel's costs: few and many K steps, waves that are partly full, full and
    several, K split or not, the memory's speed, and every way of being unaligned."""
    aligned = (768, 768), (4096, 1024), (1024, 4096), (4096, 4096), (256, 8192)
    # N, K or both a multiple of 2 elements only, or odd.
    unaligned = (1002, 1024), (1024, 1002), (1001, 1024), (1024, 1001), (1001, 1003), (257, 4095)
    for kind, sizes, heights in (
        ("aligned", aligned, (1, 16, 48, 160, 512, 1536, 4096)),
        ("unaligned", unaligned, (8, 100, 700, 3000)),
    ):
        for n, k in sizes:
            for m in heights:
                yield Shape(f"{m}x{n}x{k}", kind, m, n, k)


def read_shapes(path: Path, *, core: bool = False) -> Iterator[Shape]:
    """Rows of a CSV with the columns id, class, M, N, K; those with core = 1 come first, or alone
    with `core`.
    """
    with path.open(newline="") as source:
        rows = sorted(csv.DictReader(source), key=lambda row: row.get("core", "1") != "1")
    for row in rows:
        if core and row.get("core", "1") != "1":
            continue
        yield Shape(row["id"], row["class"], int(row["M"]), int(row["N"]), int(row["K"]))


class Bench:
    """Measures shapes; rows go to the output as they are made."""

    def __init__(
        self, setting: Setting, output: Path, head: list[str], avoid: frozenset[str] = frozenset()
    ) -> None:
        self.setting, self.avoid = setting, avoid  # names of kernels not to touch
        self.l2_bytes = torch.cuda.get_device_properties(setting.provider.ordinal).L2_cache_size
        self.done: set[tuple[str, str, str]] = set()
        fresh = not output.exists() or output.stat().st_size == 0
        if not fresh:
            with output.open(newline="") as source:
                reader = csv.DictReader(source)
                if reader.fieldnames != head:
                    raise SystemExit(f"{output} has other columns; name another output")
                self.done = {(row["id"], row["dtype"], row["layout"]) for row in reader}
        self._file = output.open("a", newline="")
        self._out = csv.DictWriter(self._file, head, lineterminator="\n")
        if fresh:
            self._out.writeheader()

    def write(self, shape: Shape, **row: Any) -> None:
        shared = {"id": shape.id, "class": shape.kind, "dtype": shape.dtype, "layout": shape.layout,
                  "m": shape.m, "n": shape.n, "k": shape.k}  # fmt: skip
        rounded = {key: f"{v:.5g}" if isinstance(v, float) else v for key, v in row.items()}
        self._out.writerow(shared | rounded)
        self._file.flush()

    def prepare(self, shape: Shape) -> tuple[list[Operands], int]:
        """Rotated operand sets, and how many launches a graph should hold."""
        product = shape.product()
        sets = rotation(product_bytes(product), self.l2_bytes)
        size = DTYPES[product.dtype].itemsize
        floor = Ceilings().floor_us(shape.m, shape.n, shape.k, 1, size)
        return self.allocate(product, sets), launches_per_graph(floor, sets)

    def allocate(self, product: Product, sets: int) -> list[Operands]:
        device = self.setting.provider.torch_device
        return [Operands.allocate(product, device, seed) for seed in range(sets)]

    def ours(self, operands: list[Operands], plan: native.Plan) -> Launch:
        runner = self.setting.runner
        runner.reserve(plan)

        def launch(index: int) -> None:
            runner.launch(operands[index].problem, plan, operands[index].pointers)

        return launch

    @staticmethod
    def cublas(operands: list[Operands]) -> Launch:
        # As ONNX Runtime's fp32 MatMul, unless asked otherwise.
        torch.backends.cuda.matmul.allow_tf32 = operands[0].product.precision == "tf32"

        def launch(index: int) -> None:
            one = operands[index]
            a, b, y = one.a.view[0], one.b.view[0], one.y.view[0]
            product = one.product
            torch.matmul(a.mT if product.trans_a else a, b.mT if product.trans_b else b, out=y)

        return launch

    def compare(self, shape: Shape) -> float:
        """Our plan against cuBLAS; returns how many times faster ours is."""
        operands, launches = self.prepare(shape)
        plan = self.setting.plan(operands[0].problem)
        regions = plan.regions
        times = compare_launches(
            {"ours": self.ours(operands, plan), "cublas": self.cublas(operands)},
            len(operands), launches,
        )  # fmt: skip
        ours, cublas = times["ours"], times["cublas"]
        self.write(
            shape, kernel=self.setting.pack.kernels[regions[0].kernel].name,
            split=regions[0].split, regions=len(regions), predicted_us=plan.predicted_us,
            us=ours.median, low_us=ours.low, high_us=ours.high, cublas_us=cublas.median,
            cublas_low_us=cublas.low, cublas_high_us=cublas.high,
            speedup=cublas.median / ours.median,
        )  # fmt: skip
        return cublas.median / ours.median

    def oracle(self, shape: Shape, rounds: int, slowest: float) -> None:
        """Every legal (kernel, split), the planner's and cuBLAS among them; one row each.

        A candidate predicted more than `slowest` times slower than the best one is left out, and
        of a kernel's splits those but the three that promise most.
        """
        product = shape.product()
        choices = self._legal(shape.problem())
        if not choices:
            say(f"{shape}: no kernel is legal")
            return
        fastest = min(plan.predicted_us for _, _, plan in choices)
        launches = launches_per_sweep(fastest)
        sets = min(launches, rotation(product_bytes(product), self.l2_bytes))
        operands = self.allocate(product, sets)
        device = self.setting.provider.torch_device
        sweep = Sweep(sets, launches, 2 * self.l2_bytes, rounds, device)
        rows = [
            (kernel, split, plan, sweep.time(self.ours(operands, plan)))
            for kernel, split, plan in promising(choices, slowest * fastest)
        ]
        cublas = sweep.time(self.cublas(operands))
        for kernel, split, plan, us in rows:
            self.write(shape, kernel=self.setting.pack.kernels[kernel].name, split=split,
                       predicted_us=plan.predicted_us, us=us)  # fmt: skip
        self.write(shape, kernel="cublas", split=1, us=cublas)
        chosen = self.setting.plan(operands[0].problem).regions[0]
        measured = {(kernel, split): us for kernel, split, _, us in rows}
        best, mine = min(measured.values()), measured.get((chosen.kernel, chosen.split))
        share = f"{best / mine:.3f} of the best" if mine else "not among those measured"
        say(f"{shape}: {len(rows)} candidates, best {best:.1f} us, "
            f"cuBLAS {cublas:.1f} us, the planner's choice {share}")  # fmt: skip

    def _legal(self, problem: native.Problem) -> list[tuple[int, int, native.Plan]]:
        found = []
        chosen = self.setting.plan(problem).regions[0]
        for index, kernel in enumerate(self.setting.pack.kernels):
            if self.setting.only not in kernel.name and index != chosen.kernel:
                continue
            if kernel.name in self.avoid or kernel.family == native.Family.COPY_PADDED:
                continue
            grids = set()  # splits beyond what the device holds make the same persistent launch
            splits = set(SPLITS) if kernel.split_k else {1}
            if index == chosen.kernel:
                splits.add(chosen.split)
            for split in sorted(splits):
                try:
                    plan = self.setting.plan(problem, index, split)
                except MoonPolyError:
                    continue  # not legal for this problem: the planner's own rule says so
                if kernel.persistent and plan.regions[0].grid in grids:
                    continue
                grids.add(plan.regions[0].grid)
                found.append((index, split, plan))
        return found


def promising(
    choices: list[tuple[int, int, native.Plan]], limit_us: float, splits: int = 3
) -> list[tuple[int, int, native.Plan]]:
    """Those of the (kernel, split, plan) that are predicted to stay within the limit, and of each
    kernel no more than its best few splits; the likeliest first."""
    taken: Counter[int] = Counter()
    found = []
    for choice in sorted(choices, key=lambda choice: choice[2].predicted_us):
        if choice[2].predicted_us <= limit_us and taken[choice[0]] < splits:
            taken[choice[0]] += 1
            found.append(choice)
    return found


def product_bytes(p: Product) -> int:
    return (p.m * p.k + p.k * p.n + p.m * p.n) * DTYPES[p.dtype].itemsize


def device_facts(setting: Setting) -> dict[str, Any]:
    """What a table of costs must know of the GPU: attributes, copy bandwidth, time of a launch."""
    where = setting.provider.torch_device
    source = torch.randn(2**28, device=where)  # 1 GiB, far beyond L2
    target = torch.empty_like(source)
    # A kernel: a graph would give `copy_` to the copy engines, which are slower.
    copies = {"copy": capture(lambda _: torch.neg(source, out=target), 1, 4)}
    copy_us = time_graphs(copies, 4, 7)["copy"].median
    one = torch.zeros(1, device=where)
    empties = {"empty": capture(lambda _: one.add_(1), 1, 256)}
    device = setting.device
    fields = [name for name, *_ in device._fields_ if name != "_name"]
    head = environment(setting, "")
    return {
        "gpu": device.name,
        "device": {name: getattr(device, name) for name in fields},
        "bandwidth_gbps": 2 * source.nbytes / copy_us / 1e3,
        "launch_us": time_graphs(empties, 256, 7)["empty"].median,
        "cuda": torch.version.cuda,
        "driver": ", ".join(dict.fromkeys(head["driver"])),
        "clocks": "free",
        "date": datetime.date.today().isoformat(),
        "pack_key": setting.pack.header.key.decode(),
    }


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    wanted = [
        replace(shape, dtype=dtype, layout=layout)
        for shape in _shapes(arguments)
        for dtype in arguments.dtype.split(",")
        for layout in arguments.layout.split(",")
    ]
    with tempfile.TemporaryDirectory() as folder:
        pack = unpacked(arguments.pack, Path(folder))
        setting = Setting(Provider(ordinal=arguments.device, pack=pack), pack, only=arguments.only)
        bench = Bench(setting, arguments.output, ORACLE_HEAD if arguments.oracle else PLAN_HEAD)
        left = [shape for shape in wanted if shape.key not in bench.done]
        if arguments.oracle:
            facts = json.dumps(device_facts(setting), indent=1)
            arguments.output.with_suffix(".json").write_text(facts + "\n")
        _measure(bench, left, arguments)
    return 0


def _shapes(arguments: argparse.Namespace) -> Iterable[Shape]:
    if arguments.shapes:
        return read_shapes(arguments.shapes)
    return informative() if arguments.oracle else built_in()


def _measure(bench: Bench, left: list[Shape], arguments: argparse.Namespace) -> None:
    stop = time.monotonic() + arguments.seconds
    ratios: list[float] = []
    for count, shape in enumerate(left):
        if time.monotonic() > stop:
            say(f"the time is up; {len(left) - count} of {len(left)} are left")
            break
        if arguments.oracle:
            bench.oracle(shape, arguments.rounds, arguments.slowest)
        else:
            ratios.append(bench.compare(shape))
            if count % 20 == 0:
                say(f"{count + 1} of {len(left)}: {shape}, {ratios[-1]:.3f} times cuBLAS")
    if ratios:
        print(
            f"{len(ratios)} products: geometric mean {geometric_mean(ratios):.3f} of cuBLAS' "
            f"speed, from {min(ratios):.3f} to {max(ratios):.3f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="CSV; rows are appended")
    parser.add_argument(
        "--shapes", type=Path, help="CSV: id, class, M, N, K; default: a built-in list"
    )
    parser.add_argument(
        "--dtype", default="f16", help="of f16, bf16, f32 (TF32), f32ieee; with commas"
    )
    parser.add_argument("--layout", default="nn", help="of nn, nt, tn, tt; several with commas")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument(
        "--seconds", type=float, default=480, help="stop starting shapes after this long"
    )
    parser.add_argument("--oracle", action="store_true", help="time every legal kernel and split")
    parser.add_argument(
        "--only", default="", help="with --oracle, kernels whose names contain this"
    )
    parser.add_argument("--rounds", type=int, default=5, help="replays per candidate with --oracle")
    parser.add_argument(
        "--slowest", type=float, default=2.5,
        help="with --oracle, leave out what is predicted this many times slower than the best",
    )  # fmt: skip
    arguments = parser.parse_args()
    for name in arguments.dtype.split(","):
        if name not in NUMBERS:
            parser.error(f"unknown dtype {name!r}; there are: {', '.join(NUMBERS)}")
    for name in arguments.layout.split(","):
        if name not in ("nn", "nt", "tn", "tt"):
            parser.error(f"unknown layout {name!r}; there are: nn, nt, tn, tt")
    if arguments.pack is None:
        sm = architecture(arguments.device) or 90
        arguments.pack = packs.find_pack(sm)
        if arguments.pack is None:
            parser.error(f"there is no pack for sm_{sm}: build one with `moonpoly pack`, or name "
                         "one with --pack")  # fmt: skip
    return arguments


if __name__ == "__main__":
    sys.exit(main())
