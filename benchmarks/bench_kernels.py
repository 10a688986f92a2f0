"""GEMM time on the GPU alone: our plan against cuBLAS, or every kernel against every other.

    python -m benchmarks.bench_kernels --output rows.csv [--shapes gemm.csv] [--seconds 300]
    python -m benchmarks.bench_kernels --output oracle.csv --oracle
    python -m benchmarks.bench_kernels --output vendor.csv --vendor

Each launch sits in a CUDA graph, on operands rotated beyond L2, all candidates of a shape taking
turns; figures are medians. One CSV row a shape; shapes that the output already holds are skipped,
so that a run cut short goes on where it stopped. With `--oracle` one row for every kernel and K
split that is legal for the shape and may be near the best, and one for cuBLAS. Tables of measured
costs come from `moonpoly tune`, not from here.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Setting, environment, pack_of, unpacked
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
from moonpoly_ort import native
from moonpoly_ort.tuning.candidates import Candidate, Kernels, promising
from moonpoly_ort.tuning.shapes import anchors

HEAD = ["id", "class", "dtype", "layout", "m", "n", "k"]
PLAN_HEAD = [*HEAD, "kernel", "split", "regions", "predicted_us", "us", "low_us", "high_us",
             "cublas_us", "cublas_low_us", "cublas_high_us", "speedup"]  # fmt: skip
ORACLE_HEAD = [*HEAD, "kernel", "split", "predicted_us", "us", "batch"]


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
    batch: int = 1

    def product(self) -> Product:
        dtype, precision = NUMBERS[self.dtype]
        return dense(self.m, self.n, self.k, dtype, self.layout, precision, self.batch)

    def problem(self) -> native.Problem:
        dtype, precision = NUMBERS[self.dtype]
        return dense_problem(self.m, self.n, self.k, dtype, self.layout, precision, self.batch)

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
    """The fixed part of what `moonpoly tune` measures."""
    for m, n, k in anchors():
        yield Shape(f"{m}x{n}x{k}", "anchor", m, n, k)


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
        floor = Ceilings().floor_us(shape.m, shape.n, shape.k, shape.batch, size)
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
            a, b, y = one.a.view, one.b.view, one.y.view
            if one.product.batch == 1:
                a, b, y = a[0], b[0], y[0]
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
            shape, kernel=self.setting.kernel_name(regions[0]),
            split=regions[0].split, regions=len(regions), predicted_us=plan.predicted_us,
            us=ours.median, low_us=ours.low, high_us=ours.high, cublas_us=cublas.median,
            cublas_low_us=cublas.low, cublas_high_us=cublas.high,
            speedup=cublas.median / ours.median,
        )  # fmt: skip
        return cublas.median / ours.median

    def oracle(self, shape: Shape, rounds: int, slowest: float, splits: int = 3) -> None:
        """Every legal (kernel, split), the planner's and cuBLAS among them; one row each.

        A candidate predicted more than `slowest` times slower than the best one is left out, and
        of a kernel's splits those but the `splits` that promise most.
        """
        product = shape.product()
        problem = shape.problem()
        one = native.PlanFlag.NO_REGIONS | native.PlanFlag.NO_VENDOR  # as what is measured here
        chosen = self.setting.plan(problem, flags=one).regions[0]
        choices = self._legal(problem, chosen)
        if not choices:
            say(f"{shape}: no kernel is legal")
            return
        fastest = min(choice.plan.predicted_us for choice in choices)
        launches = launches_per_sweep(fastest)
        sets = min(launches, rotation(product_bytes(product), self.l2_bytes))
        operands = self.allocate(product, sets)
        device = self.setting.provider.torch_device
        sweep = Sweep(sets, launches, 2 * self.l2_bytes, rounds, device)
        rows = [
            (choice, sweep.time(self.ours(operands, choice.plan)))
            for choice in promising(choices, slowest, splits)
        ]
        cublas = sweep.time(self.cublas(operands))
        for choice, us in rows:
            self.write(shape, kernel=choice.name, split=choice.split,
                       predicted_us=choice.plan.predicted_us, us=us, batch=shape.batch)  # fmt: skip
        self.write(shape, kernel="cublas", split=1, us=cublas, batch=shape.batch)
        measured = {(choice.kernel, choice.split): us for choice, us in rows}
        best, mine = min(measured.values()), measured.get((chosen.kernel, chosen.split))
        share = f"{best / mine:.3f} of the best" if mine else "not among those measured"
        say(f"{shape}: {len(rows)} candidates, best {best:.1f} us, "
            f"cuBLAS {cublas:.1f} us, the planner's choice {share}")  # fmt: skip

    def vendor(self, shape: Shape, rounds: int) -> None:
        """cuBLASLt's time through our own launches: what `benchmarks.fit_vendor` fits."""
        product = shape.product()
        plan = self.setting.plan(shape.problem(), native.VENDOR)
        size = DTYPES[product.dtype].itemsize
        floor = Ceilings().floor_us(shape.m, shape.n, shape.k, 1, size)
        launches = launches_per_sweep(floor + 2)
        sets = min(launches, rotation(product_bytes(product), self.l2_bytes))
        operands = self.allocate(product, sets)
        sweep = Sweep(sets, launches, 2 * self.l2_bytes, rounds, self.setting.provider.torch_device)
        us = sweep.time(self.ours(operands, plan))
        self.write(shape, kernel="cublaslt", split=1, predicted_us=plan.predicted_us, us=us)

    def _legal(self, problem: native.Problem, chosen: native.Region) -> list[Candidate]:
        """The kernels asked for, and the planner's choice."""
        setting, own = self.setting, self.setting.pack.kernels[chosen.kernel].name
        kernels = Kernels(setting.pack, setting.device, self.avoid,
                          lambda name: setting.only in name or name == own)  # fmt: skip
        found = kernels.legal(problem)
        if own not in self.avoid and all(
            (one.kernel, one.split) != (chosen.kernel, chosen.split) for one in found
        ):
            plan = setting.plan(problem, chosen.kernel, chosen.split)
            found.append(Candidate(own, chosen.kernel, chosen.split, plan))
        return found


def product_bytes(p: Product) -> int:
    return p.batch * (p.m * p.k + p.k * p.n + p.m * p.n) * DTYPES[p.dtype].itemsize


def device_facts(setting: Setting) -> dict[str, Any]:
    """What results must know of the GPU: attributes, copy bandwidth, time of a launch."""
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
        many = arguments.oracle or arguments.vendor
        bench = Bench(setting, arguments.output, ORACLE_HEAD if many else PLAN_HEAD)
        left = [shape for shape in wanted if shape.key not in bench.done]
        _measure(bench, left, arguments)
    return 0


def _shapes(arguments: argparse.Namespace) -> Iterable[Shape]:
    if arguments.shapes:
        return read_shapes(arguments.shapes)
    return informative() if arguments.oracle or arguments.vendor else built_in()


def _measure(bench: Bench, left: list[Shape], arguments: argparse.Namespace) -> None:
    stop = time.monotonic() + arguments.seconds
    ratios: list[float] = []
    for count, shape in enumerate(left):
        if time.monotonic() > stop:
            say(f"the time is up; {len(left) - count} of {len(left)} are left")
            break
        if arguments.vendor:
            bench.vendor(shape, arguments.rounds)
        elif arguments.oracle:
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
        "--vendor", action="store_true", help="time cuBLASLt alone, by our launches"
    )
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
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
