"""What cuBLASLt's heuristic chooses for many shapes, and how long that takes: a CSV to model it by.

    python -m benchmarks.collect_vendor_choices --output choices.csv [--pack sm_90.mpk]
        [--seconds 55] [--shapes 1000]

Asked for: drawn shapes, model weights, the suites' core rows and batched products, in four number
formats, B as it is multiplied and transposed. Each row tells the algorithm of the first choice in
cuBLASLt's codes and what the search for it cost the host. As many as `--seconds` allow are timed
too, those and ours beside them: CUDA graphs of launches on rotated operands, in turns. Of each
kind of algorithm among them one is profiled, for the kernel's name and its grid. At the end: what a
launch costs the host, of cuBLASLt and of ours.

Rows of the suites are not timed: `benchmarks.bench_gemm` does that, and a model that was fitted to
the others can be judged by them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import csv_rows, suites
from benchmarks.cublaslt import SETTINGS, WORKSPACE_BYTES, Algorithm, CublasLt, Refused, Sizes
from benchmarks.interleaved import Interleaved, Loop, floor_us
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import Launch
from benchmarks.operand_sets import OperandSets, set_bytes
from benchmarks.operands import DTYPES, NUMBERS, dense_problem
from benchmarks.recording import say
from benchmarks.running import Provider
from benchmarks.suites import Row
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError
from moonpoly_ort.tuning.shapes import batched, drawn

KEY = ("source", "dtype", "layout", "batch", "m", "n", "k")
HEAD = [
    *KEY, *SETTINGS, "workspace", "waves", "ask_us", "us", "ours_us", "ours_predicted_us",
    "kernel", "grid", "kernels",
]  # fmt: skip
LAYOUTS = ("nn", "nt")
ALIGNMENT = 16  # bytes that the runtime asks with
LONGEST_US = 1500.0  # of what is timed, by the least time that it can take
SECONDS_A_SHAPE = 0.015

Found = dict[str, Any]


@dataclass
class Choice:
    """A product with cuBLASLt's first choice. `found`: the columns of its row."""

    row: Row
    dtype: str
    layout: str
    algorithm: Algorithm
    found: Found = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Products of one kind run the same kernel, as far as cuBLASLt tells."""
        return self.dtype, self.layout, *(self.found.get(name) for name in SETTINGS)


def shapes(count: int, seed: int = 0) -> Iterator[Row]:
    """What is asked for; `kind` says where it is from."""
    rng = np.random.default_rng(seed)
    draw = random.Random(seed)
    for m, n, k in drawn(count, rng, 2):
        yield Row("gemm", "", "drawn", 1, m, n, k, False)
    for weights in suites.WEIGHTS.values():
        for n, k in weights:
            for low, high in suites.ROW_COUNTS:
                yield Row("gemm", "", "weight", 1, draw.randint(low, high), n, k, False)
    for layout in LAYOUTS:
        for m, n, k, batch in batched(count // 10, rng, layout):
            yield Row("bmm", "", "batched", batch, m, n, k, False)
    for op in suites.OPS:
        yield from (row for row in suites.rows(op) if row.core)


def source(row: Row) -> str:
    return row.kind if not row.core else "suite"


def ask(lt: CublasLt, row: Row, dtype: str, layout: str) -> Choice | None:
    """The first choice for a product; None where there is none."""
    start = time.perf_counter()
    sizes = Sizes.dense(row.m, row.n, row.k, row.batch)
    product = lt.product(sizes, dtype, layout == "nt")
    try:
        algorithm = product.algorithms(1, ALIGNMENT)[0]
    except Refused:
        return None
    finally:
        product.close()
    took = time.perf_counter() - start
    found: Found = {
        "source": source(row), "dtype": dtype, "layout": layout, "batch": row.batch,
        "m": row.m, "n": row.n, "k": row.k, "workspace": algorithm.workspace_bytes,
        "waves": float(algorithm.waves), "ask_us": took * 1e6, **lt.settings(algorithm),
    }  # fmt: skip
    return Choice(row, dtype, layout, algorithm, found)


class Bench:
    """Times choices, and our plans for the same products where there is a pack."""

    def __init__(self, lt: CublasLt, setting: Setting | None, device: str) -> None:
        self.lt, self.setting, self.device = lt, setting, device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.timer = Interleaved(device, l2_bytes, SECONDS_A_SHAPE)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def vendor(self, choice: Choice, operands: OperandSets) -> Launch:
        """cuBLASLt's first choice; B holds the same number of elements either way."""
        row = choice.row
        sizes = Sizes.dense(row.m, row.n, row.k, row.batch)
        product = self.lt.product(sizes, choice.dtype, choice.layout == "nt")
        workspace, algorithm = self._workspace.data_ptr(), choice.algorithm

        def launch(index: int) -> None:
            product.run(
                algorithm, operands.a[index].data_ptr(), operands.b[index].data_ptr(),
                operands.y[index].data_ptr(), workspace,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        return launch

    def ours(self, choice: Choice, operands: OperandSets) -> tuple[Launch, float] | None:
        """Our plan and what it promises; None where we have none."""
        if self.setting is None:
            return None
        row, (dtype, precision) = choice.row, NUMBERS[choice.dtype]
        problem = dense_problem(row.m, row.n, row.k, dtype, choice.layout, precision, row.batch)
        if (problem.m, problem.n) != (row.m, row.n):  # a vector, described the other way
            return None
        try:
            plan = self.setting.plan(problem, flags=native.PlanFlag.NO_VENDOR)
        except MoonPolyError:
            return None
        runner = self.setting.runner
        runner.reserve(plan)

        def launch(index: int) -> None:
            a, b, y = (s[index].data_ptr() for s in (operands.a, operands.b, operands.y))
            runner.launch(problem, plan, (a, b, 0, y))

        return launch, plan.predicted_us

    def measure(self, choice: Choice) -> None:
        """Adds the times to the choice's columns."""
        row = choice.row
        element_bytes = DTYPES[NUMBERS[choice.dtype][0]].itemsize
        floor = floor_us(row.m, row.n, row.k, row.batch, element_bytes)
        loop = Loop.of(floor, set_bytes(row, choice.dtype), self.timer.l2_bytes)
        operands = OperandSets.allocate(row, choice.dtype, loop.sets, self.device)
        candidates = {"us": self.vendor(choice, operands)}
        if (ours := self.ours(choice, operands)) is not None:
            candidates["ours_us"], choice.found["ours_predicted_us"] = ours
        loop = loop.shortened(max(map(self.timer.single_us, candidates.values())))
        times = self.timer.compare(candidates, loop)
        choice.found |= {name: timing.median for name, timing in times.items()}

    def names(self, choices: list[Choice]) -> None:
        """Adds the kernel's name and grid to each choice's columns, by torch's profiler."""
        marker = torch.zeros(16, device=self.device)
        prepared = []
        for choice in choices:
            operands = OperandSets.allocate(choice.row, choice.dtype, 1, self.device)
            prepared.append(self.vendor(choice, operands))
            prepared[-1](0)
        torch.cuda.synchronize()
        with (
            tempfile.TemporaryDirectory() as folder,
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        ):
            for launch in prepared:
                marker.erfinv_()  # a kernel that nothing else here runs: it parts the products
                launch(0)
            torch.cuda.synchronize()
            profile.stop()
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        kernels = sorted(
            (event for event in events if event.get("cat") == "kernel"), key=lambda e: e["ts"]
        )
        parts: list[list[dict[str, Any]]] = []
        for event in kernels:
            if "erfinv" in event["name"]:
                parts.append([])
            elif parts:
                parts[-1].append(event)
        for choice, own in zip(choices, parts, strict=True):
            if own:
                grid = "x".join(str(size) for size in own[0]["args"].get("grid", []))
                choice.found |= {"kernel": own[0]["name"][:90], "grid": grid, "kernels": len(own)}


def host_us(launch: Launch, times: int = 500) -> float:
    """Microseconds that the host takes for a launch, the queue never full."""
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            launch(0)
        taken.append((time.perf_counter() - start) / times * 1e6)
    return min(taken)


def report_host(setting: Setting, device: str) -> None:
    """What a launch costs the host through the same call: our kernel and cuBLASLt's."""
    row = Row("gemm", "", "host", 1, 64, 256, 64, False)
    for dtype in NUMBERS:
        operands = OperandSets.allocate(row, dtype, 1, device)
        problem, _ = operands.problem()
        pointers = (
            operands.a[0].data_ptr(), operands.b[0].data_ptr(), 0, operands.y[0].data_ptr()
        )  # fmt: skip
        for name, kernel in (("ours", -1), ("cuBLASLt", native.VENDOR)):
            flags = 0 if kernel == native.VENDOR else native.PlanFlag.NO_VENDOR
            plan = setting.plan(problem, kernel, flags=flags)
            setting.runner.reserve(plan)

            def launch(
                _: int, problem: native.Problem = problem, plan: native.Plan = plan,
                pointers: tuple[int, int, int, int] = pointers,
            ) -> None:  # fmt: skip
                setting.runner.launch(problem, plan, pointers)

            say(f"host, {dtype}, {name}: {host_us(launch):.2f} us a launch")


def one_of_each(choices: list[Choice]) -> list[Choice]:
    """The first choice of every kind."""
    kinds: dict[tuple[Any, ...], Choice] = {}
    for choice in choices:
        kinds.setdefault(choice.kind, choice)
    return list(kinds.values())


def in_turns(choices: list[Choice], seed: int) -> list[Choice]:
    """An order of which every beginning has all kinds of algorithm as evenly as there are: a kind
    of few products comes early with all of them.
    """
    shuffled = list(choices)
    random.Random(seed).shuffle(shuffled)
    seen: dict[tuple[Any, ...], int] = defaultdict(int)
    ranked = []
    for position, choice in enumerate(shuffled):
        ranked.append((seen[choice.kind], position))
        seen[choice.kind] += 1
    return [shuffled[position] for _, position in sorted(ranked)]


def timeable(choice: Choice) -> bool:
    row = choice.row
    element_bytes = DTYPES[NUMBERS[choice.dtype][0]].itemsize
    return not row.core and floor_us(row.m, row.n, row.k, row.batch, element_bytes) < LONGEST_US


def write(path: Path, choices: list[Choice]) -> None:
    path.unlink(missing_ok=True)
    out = csv_rows.CsvRows(path, HEAD, KEY)
    for choice in choices:
        out.write(choice.found)
    out.close()


def main() -> int:
    arguments, setting_of = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this asks cuBLASLt on a GPU, and torch finds none here")
    device = f"cuda:{arguments.device}"
    stop = time.monotonic() + arguments.seconds
    torch.cuda.set_device(arguments.device)
    torch.zeros(1, device=device)  # the context that cuBLASLt then shares
    lt = CublasLt()
    say(f"cuBLASLt {lt.version}")
    asked = dict.fromkeys(
        (row, dtype, layout)
        for row in shapes(arguments.shapes)
        for dtype in NUMBERS
        for layout in LAYOUTS
    )
    answers = [ask(lt, *one) for one in asked]
    choices = [choice for choice in answers if choice is not None]
    say(f"{len(choices)} of {len(answers)} products have an algorithm, of "
        f"{len(one_of_each(choices))} kinds")  # fmt: skip
    write(arguments.output, choices)
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_of(Path(folder))
        bench = Bench(lt, setting, device)
        timed = []
        for choice in in_turns([c for c in choices if timeable(c)], seed=1):
            if time.monotonic() > stop:
                break
            try:
                bench.measure(choice)
            except (Refused, MoonPolyError) as error:
                say(f"{choice.row} {choice.dtype} {choice.layout}: {error}")
                continue
            timed.append(choice)
            if torch.cuda.memory_reserved() > 40e9:
                torch.cuda.empty_cache()
        say(f"{len(timed)} are timed")
        write(arguments.output, choices)
        if setting is not None:
            report_host(setting, device)
        bench.names(one_of_each(timed)[: arguments.profiled])
        write(arguments.output, choices)
    say(f"written to {arguments.output}")
    return 0


def _arguments() -> tuple[argparse.Namespace, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pack", type=Path, help="may be NAME.mpk.xz; with the GPU's table")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=55.0, help="for asking and timing")
    parser.add_argument("--shapes", type=int, default=1000, help="drawn ones, in each format")
    parser.add_argument("--profiled", type=int, default=300, help="kinds of algorithm at most")
    parser.add_argument("--alone", action="store_true", help="without our plans: needs no pack")
    arguments = parser.parse_args()

    def setting_of(folder: Path) -> Setting | None:
        if arguments.alone:
            return None
        pack = unpacked(pack_of(arguments, parser), folder)
        return Setting(Provider(ordinal=arguments.device, pack=pack), pack)

    return arguments, setting_of


if __name__ == "__main__":
    raise SystemExit(main())
