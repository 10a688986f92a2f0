"""Turns oracle timings into a table of measured costs; says how well the planner then chooses.

    python -m benchmarks.fit_costs oracle.csv [more.csv] --pack sm_90.mpk --output
    gemm__nvidia-h200.json

Needs no GPU. The native planner itself supplies the model: plans under probing costs give each
measurement's coefficients. What the timings of a kernel leave open stays at the analytic model's
value. The memory bandwidth is fitted along. The quality reported is the mean of (best time measured
/ time of the planner's choice): over the shapes fitted, and over every second shape when only the
others were fitted.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from moonpoly_ort.custom_ops.kernels import pack_format

from benchmarks.operands import NUMBERS, dense_problem
from moonpoly_ort import native, tables

Floats = npt.NDArray[np.float64]
Shape = tuple[str, str, int, int, int]  # dtype, layout, m, n, k
COSTS = ("fixed_us", "step_us", "single_step_us")
TINY = 1e-9  # a cost of nothing that still counts as measured
ENDLESS = 1e12  # a bandwidth that is never the bottleneck
CRAWLING = 1e-4  # a bandwidth that always is
PRIOR = 0.1  # weight of (log cost / analytic)^2 against one timing's squared log error


@dataclass(frozen=True)
class Row:
    """One measurement: a kernel and K split on one shape."""

    shape: Shape
    kernel: int
    split: int
    us: float

    def problem(self) -> native.Problem:
        number, layout, m, n, k = self.shape
        dtype, precision = NUMBERS[number]
        return dense_problem(m, n, k, dtype, layout, precision)


class Planner:
    """The native planner over one pack's kernels, with whatever costs one gives it."""

    def __init__(self, pack: Path, facts: dict[str, Any], folder: Path) -> None:
        whole = pack_format.read_pack(pack)
        self.info = whole.info
        # Planning needs no code, and a pack without it is written in milliseconds.
        self.kernels = [replace(kernel, cubin=b"") for kernel in whole.kernels]
        self.facts, self._folder, self._count = facts, folder, 0
        self.device = native.Device(name=facts["gpu"], **facts["device"])
        with self.without_table() as catalog:
            # Blocks that one SM holds, at least 1, of each kernel.
            self.occupancy = [max(1, native.blocks_per_sm(k, self.device)) for k in catalog.kernels]

    def with_costs(self, costs: npt.NDArray[np.void], bandwidth: float) -> native.Pack:
        """A catalog whose table holds these costs, zeros for what was not measured."""
        return self._pack([pack_format.CostTable(self.facts["gpu"], self.device.sm_count, bandwidth,
                                                 self.facts["launch_us"], costs)])  # fmt: skip

    def without_table(self) -> native.Pack:
        """A catalog for the analytic model."""
        return self._pack([])

    def _pack(self, given: list[pack_format.CostTable]) -> native.Pack:
        self._count += 1
        path = self._folder / f"{self._count}.mpk"
        pack_format.write_pack(path, self.info.sm, self.kernels, given,
                               key=self.info.key, triton=self.info.triton)  # fmt: skip
        return native.Pack(path)

    def predict(self, pack: native.Pack, rows: Iterable[Row]) -> Floats:
        return np.array(
            [
                pack.plan(
                    self.device, row.problem(), kernel=row.kernel, split=row.split
                ).predicted_us
                for row in rows
            ]
        )


@dataclass(frozen=True)
class Coefficients:
    """us = base + fixed_us * fixed + hypot(loop, traffic), where loop = loops + linear @ (fixed_us,
    step_us, single_step_us) is what blocks compute; one entry for each row."""

    base: Floats
    fixed: Floats
    loops: Floats
    linear: Floats  # rows x 3
    traffic: Floats  # at a bandwidth of 1 GB/s

    @staticmethod
    def probe(planner: Planner, rows: list[Row]) -> Coefficients:
        blocks = planner.occupancy

        def predict(bandwidth: float, *costs: float) -> Floats:
            table = np.zeros(len(planner.kernels), pack_format.COST)
            for name, value in zip(COSTS, costs or (TINY,) * 3, strict=True):
                table[name] = value
            table["blocks_per_sm"] = blocks
            with planner.with_costs(table, bandwidth) as pack:
                return planner.predict(pack, rows)

        free = predict(ENDLESS)  # base + loops
        stuck = predict(CRAWLING)  # base + traffic, beside which the loops are nothing
        traffic = 2 * (stuck - predict(2 * CRAWLING))
        base = stuck - traffic
        units = ((1.0, TINY, TINY), (TINY, 1.0, TINY), (TINY, TINY, 1.0))
        linear = np.stack([predict(ENDLESS, *unit) - free for unit in units], axis=1)
        fixed = predict(CRAWLING, *units[0]) - stuck
        linear[:, 0] -= fixed
        return Coefficients(base, fixed, free - base, linear, traffic * CRAWLING)

    def select(self, which: npt.NDArray[np.intp]) -> Coefficients:
        return Coefficients(*(getattr(self, field.name)[which] for field in fields(self)))

    def us(self, costs: Floats, bandwidth: float) -> Floats:
        """Predictions for costs (fixed, step, single_step)."""
        loop = self.loops + self.linear @ costs
        total: Floats = self.base + self.fixed * costs[0] + np.hypot(loop, self.traffic / bandwidth)
        return total


def analytic_costs(planner: Planner) -> Floats:
    """(fixed, step, single_step) of every kernel of products by the analytic model, read off its
    predictions: one block for few and for many K steps, and a full wave for many. Ones for others.
    """
    rows = []
    products = [i for i, kernel in enumerate(planner.kernels) if not kernel.spec.family.convolves]
    for index in products:
        spec = planner.kernels[index].spec
        split = 2 if spec.split_k else 1
        wave = max(1, planner.device.sm_count * planner.occupancy[index] // split)
        number = (str(spec.dtype), "ieee" if spec.precision == "ieee" else "tf32")
        name = next(name for name in NUMBERS if NUMBERS[name] == number)
        layout = "nt"[spec.trans_a] + "nt"[spec.trans_b]
        for tiles, steps in ((1, 2), (1, 40), (wave, 40)):
            shape = (name, layout, spec.bm, spec.bn * tiles, spec.bk * steps * split)
            rows.append(Row(shape, index, split, math.nan))
    linear = Coefficients.probe(planner, rows)
    with planner.with_costs(np.zeros(len(planner.kernels), pack_format.COST), ENDLESS) as pack:
        target = planner.predict(pack, rows) - linear.base - linear.loops
    matrix = linear.linear + linear.fixed[:, None] * np.array([1.0, 0.0, 0.0])
    found: Floats = np.ones((len(planner.kernels), 3))
    found[products] = np.linalg.solve(matrix.reshape(-1, 3, 3), target.reshape(-1, 3, 1))[:, :, 0]
    return found


def fit(
    coefficients: Coefficients, us: Floats, weights: Floats, prior: Floats, bandwidth: float
) -> tuple[Floats, float]:
    """(fixed, step, single_step) of one kernel that minimise the weighted squared log error, and
    the error: a pattern search over the logs, from the prior."""
    center = np.log(prior)

    def loss(logs: Floats) -> float:
        errors = np.log(coefficients.us(np.exp(logs), bandwidth) / us)
        return float((weights * errors**2).sum()) + PRIOR * float(((logs - center) ** 2).sum())

    logs, best, reach = center, loss(center), 0.5
    while reach > 1e-3:
        improved = False
        for axis in range(3):
            for direction in (reach, -reach):
                trial = logs.copy()
                trial[axis] += direction
                if (value := loss(trial)) < best:
                    logs, best, improved = trial, value, True
        if not improved:
            reach /= 2
    costs: Floats = np.exp(logs)
    return costs, best


@dataclass
class Fit:
    """Costs of every kernel that was timed on some rows; zeros for the others."""

    planner: Planner
    rows: list[Row]
    coefficients: Coefficients
    prior: Floats

    def __post_init__(self) -> None:
        self.by_kernel: dict[int, list[int]] = defaultdict(list)
        fastest: dict[Shape, float] = defaultdict(lambda: math.inf)
        for position, row in enumerate(self.rows):
            self.by_kernel[row.kernel].append(position)
            fastest[row.shape] = min(fastest[row.shape], row.us)
        self.us = np.array([row.us for row in self.rows])
        # What is near the best decides choices.
        self.weights = (np.array([fastest[row.shape] for row in self.rows]) / self.us) ** 2

    def at(self, bandwidth: float) -> tuple[npt.NDArray[np.void], float]:
        """The costs that fit best at a memory bandwidth in GB/s, and the summed error."""
        costs, error = np.zeros(len(self.planner.kernels), pack_format.COST), 0.0
        for kernel, positions in self.by_kernel.items():
            which = np.array(positions)
            found, loss = fit(
                self.coefficients.select(which), self.us[which], self.weights[which],
                self.prior[kernel], bandwidth,
            )  # fmt: skip
            costs[kernel] = (*found, self.planner.occupancy[kernel])
            error += loss
        return costs, error

    def bandwidth(self) -> float:
        """The memory bandwidth in GB/s that fits best, from half of the data sheet's figure (or
        of what was copied, if that is more) to all of it."""
        device = self.planner.device
        peak: float = (
            device.bandwidth_gbps or device.memory_clock_mhz * device.memory_bus_bits / 4000
        )
        most = max(float(self.planner.facts["bandwidth_gbps"]), peak)
        tried = [most * percent / 100 for percent in range(50, 101, 5)]
        return min(tried, key=lambda bandwidth: self.at(bandwidth)[1])


@dataclass(frozen=True)
class Quality:
    """How near the planner's choices come to the best that was measured."""

    mean: float  # of best time / time chosen
    worst: float
    shapes: int
    untimed: int  # choices for which there is no timing; the likeliest one that has stands in
    error: float  # median of |log(predicted / measured)| over all rows

    def __str__(self) -> str:
        return (
            f"best / chosen: mean {self.mean:.4f}, worst {self.worst:.3f} over {self.shapes} "
            f"shapes ({self.untimed} choices were not timed); "
            f"median prediction error {self.error:.1%}"
        )


def quality(planner: Planner, pack: native.Pack, rows: list[Row]) -> Quality:
    predicted = planner.predict(pack, rows)
    timings: dict[Shape, list[tuple[float, Row]]] = defaultdict(list)
    for us, row in zip(predicted, rows, strict=True):
        timings[row.shape].append((us, row))
    ratios, untimed = [], 0
    for timed in timings.values():
        region = pack.plan(planner.device, timed[0][1].problem()).regions[0]
        mine = [row for _, row in timed if (row.kernel, row.split) == (region.kernel, region.split)]
        if not mine:
            untimed += 1
            mine = [min(timed, key=lambda pair: pair[0])[1]]
        ratios.append(min(row.us for _, row in timed) / mine[0].us)
    errors = np.abs(np.log(predicted / np.array([row.us for row in rows])))
    return Quality(statistics.fmean(ratios), min(ratios), len(ratios), untimed,
                   float(np.median(errors)))  # fmt: skip


def read_rows(paths: list[Path], planner: Planner) -> list[Row]:
    """The rows of oracle files; raises SystemExit for a kernel that the pack does not hold."""
    index = {pack_format.name(kernel.spec): i for i, kernel in enumerate(planner.kernels)}
    rows = []
    for path in paths:
        with path.open(newline="") as source:
            for line in csv.DictReader(source):
                if line["kernel"] == "cublas":
                    continue
                if line["kernel"] not in index:
                    raise SystemExit(f"{path}: the pack holds no kernel {line['kernel']!r}")
                m, n, k = (int(line[size]) for size in "mnk")
                shape = (line["dtype"], line["layout"], m, n, k)
                rows.append(
                    Row(shape, index[line["kernel"]], int(line["split"]), float(line["us"]))
                )
    return rows


def main() -> int:
    arguments = _arguments()
    facts = json.loads(arguments.facts.read_text())
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(arguments.pack, facts, Path(folder))
        if facts["pack_key"] != planner.info.key:
            raise SystemExit(f"the timings were taken with pack {facts['pack_key'][:12]}, and "
                             f"{arguments.pack} is {planner.info.key[:12]}")  # fmt: skip
        rows = read_rows(arguments.timings, planner)
        if not rows:
            raise SystemExit("there are no timings of our kernels in it")
        whole = Fit(planner, rows, Coefficients.probe(planner, rows), analytic_costs(planner))
        with planner.without_table() as pack:
            print(f"analytic model: {quality(planner, pack, rows)}")
        bandwidth = float(f"{whole.bandwidth():.4g}")
        print(f"memory bandwidth {bandwidth:.0f} GB/s fits best, "
              f"{facts['bandwidth_gbps']:.0f} GB/s were copied")  # fmt: skip

        order = {shape: i for i, shape in enumerate(dict.fromkeys(row.shape for row in rows))}
        kept = np.array([i for i, row in enumerate(rows) if order[row.shape] % 2 == 0])
        held_out = [row for row in rows if order[row.shape] % 2 == 1]
        if held_out:
            half = Fit(planner, [rows[i] for i in kept], whole.coefficients.select(kept),
                       whole.prior)  # fmt: skip
            with planner.with_costs(half.at(bandwidth)[0], bandwidth) as pack:
                print(f"fitted, on shapes held out: {quality(planner, pack, held_out)}")
        costs, _ = whole.at(bandwidth)
        with planner.with_costs(costs, bandwidth) as pack:
            print(f"fitted, on its own shapes: {quality(planner, pack, rows)}")
    measured = [
        tables.Cost(
            pack_format.name(kernel.spec), *(float(f"{value:.6g}") for value in cost.tolist())
        )
        for kernel, cost in zip(planner.kernels, costs, strict=True)
        if cost["step_us"] > 0
    ]
    print(f"{len(measured)} of {len(planner.kernels)} kernels measured, {len(rows)} timings")
    tables.dump(
        tables.Table(
            facts["gpu"], planner.info.sm, planner.device.sm_count, planner.device.shared_per_block,
            bandwidth, facts["launch_us"], planner.info.triton, facts["cuda"], facts["driver"],
            planner.info.key, facts["date"], facts["clocks"], tuple(measured),
        ),
        arguments.output,
    )  # fmt: skip
    tables.load(arguments.output, gpu=facts["gpu"])
    print(f"wrote {arguments.output}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timings", type=Path, nargs="+", help="CSV of bench_kernels --oracle")
    parser.add_argument("--facts", type=Path, help="what bench_kernels wrote beside the first CSV")
    parser.add_argument("--pack", type=Path, required=True, help="the pack that was measured")
    parser.add_argument("--output", type=Path, required=True, help="the table, JSON")
    arguments = parser.parse_args()
    arguments.facts = arguments.facts or arguments.timings[0].with_suffix(".json")
    for path in (*arguments.timings, arguments.facts, arguments.pack):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
