"""Turns oracle timings into a table of measured costs; says how well the planner then chooses.

    python -m benchmarks.fit_costs oracle.csv [more.csv] --pack sm_90.mpk --output
    gemm__nvidia-h200.json

Needs no GPU. The native planner itself supplies the model: its prediction is linear in a kernel's
costs up to the bandwidth floor, so that plans under probing costs give each measurement's
coefficients, and a change of the model's formula needs no change here. The quality reported is
the mean of (time of the planner's choice / best time measured): over the shapes fitted, and over
every second shape when only the others were fitted.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from moonpoly_ort.custom_ops.kernels import pack_format

from benchmarks.operands import dense_problem
from moonpoly_ort import native, tables

Floats = npt.NDArray[np.float64]
Shape = tuple[str, str, int, int, int]  # dtype, layout, m, n, k
TINY = 1e-9  # a cost of nothing that still counts as measured
PROBE = 1e3  # large against everything else in a prediction
ENDLESS = 1e12  # a bandwidth that is never the bottleneck
PRIOR = 0.02  # weight of the prior on step / single_step, against one measurement


@dataclass(frozen=True)
class Row:
    """One measurement: a kernel and K split on one shape."""

    shape: Shape
    kernel: int
    split: int
    us: float

    def problem(self) -> native.Problem:
        dtype, layout, m, n, k = self.shape
        return dense_problem(m, n, k, dtype, layout)


class Planner:
    """The native planner over one pack's kernels, with whatever costs one gives it."""

    def __init__(self, pack: Path, facts: dict[str, Any], folder: Path) -> None:
        whole = pack_format.read_pack(pack)
        self.info = whole.info
        # Planning needs no code, and a pack without it is written in milliseconds.
        self.kernels = [replace(kernel, cubin=b"") for kernel in whole.kernels]
        self.facts, self._folder, self._count = facts, folder, 0
        self.device = native.Device(name=facts["gpu"], **facts["device"])

    def with_costs(self, costs: npt.NDArray[np.void] | None, bandwidth: float) -> native.Pack:
        """A catalog whose table holds these costs; None for the analytic model."""
        given = [] if costs is None else [
            pack_format.CostTable(self.facts["gpu"], self.device.sm_count, bandwidth,
                                  self.facts["launch_us"], costs)
        ]  # fmt: skip
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

    def occupancy(self, index: int) -> int:
        """Blocks of a kernel that one SM holds, by shared memory, registers and threads."""
        kernel, device = self.kernels[index], self.device
        threads = 32 * kernel.spec.warps
        # The system keeps 1 KB per block; a warp's registers are allocated in units of 256.
        registers = -(-max(kernel.registers, 16) * 32 // 256) * 256 * kernel.spec.warps
        fits = (
            device.shared_per_sm // (kernel.shared_bytes + 1024),
            device.registers_per_sm // registers,
            device.threads_per_sm // threads,
            device.blocks_per_sm,
        )
        return max(1, int(min(fits)))


@dataclass(frozen=True)
class Coefficients:
    """us = base + max(fixed * f + step * s + single_step * g, floor), one entry for each row."""

    base: Floats
    floor: Floats
    fixed: Floats
    step: Floats
    single: Floats

    @staticmethod
    def probe(planner: Planner, rows: list[Row]) -> Coefficients:
        def predict(fixed: float, step: float, single: float, bandwidth: float = ENDLESS) -> Floats:
            costs = np.zeros(len(planner.kernels), pack_format.COST)
            costs["fixed_us"], costs["step_us"], costs["single_step_us"] = fixed, step, single
            costs["blocks_per_sm"] = [planner.occupancy(i) for i in range(len(planner.kernels))]
            with planner.with_costs(costs, bandwidth) as pack:
                return planner.predict(pack, rows)

        base = predict(TINY, TINY, TINY)
        return Coefficients(
            base,
            predict(TINY, TINY, TINY, planner.facts["bandwidth_gbps"]) - base,
            (predict(PROBE, TINY, TINY) - base) / PROBE,
            (predict(TINY, PROBE, TINY) - base) / PROBE,
            (predict(TINY, TINY, PROBE) - base) / PROBE,
        )

    def select(self, which: npt.NDArray[np.intp]) -> Coefficients:
        return Coefficients(self.base[which], self.floor[which], self.fixed[which],
                            self.step[which], self.single[which])  # fmt: skip

    def us(self, costs: Floats) -> Floats:
        """Predictions for costs (fixed, step, single_step)."""
        linear = self.fixed * costs[0] + self.step * costs[1] + self.single * costs[2]
        total: Floats = self.base + np.maximum(linear, self.floor)
        return total


def fit(coefficients: Coefficients, us: Floats, blocks_per_sm: int) -> Floats:
    """(fixed, step, single_step) of one kernel that minimise the squared log error.

    A start by least squares on what is not at the bandwidth floor, then a pattern search over the
    logs. Where no SM held one block alone, or no wave was full, the prior decides the other step:
    blocks that share an SM overlap by half.
    """
    matrix = np.stack([coefficients.fixed, coefficients.step, coefficients.single], axis=1)
    target = us - coefficients.base
    free = us > 1.15 * (coefficients.base + coefficients.floor)
    chosen = free if free.sum() >= 3 else np.ones_like(free)
    weight = 1 / us[chosen]
    start, *_ = np.linalg.lstsq(
        matrix[chosen] * weight[:, None], target[chosen] * weight, rcond=None
    )
    prior = math.log((1 + blocks_per_sm) / 2)

    def loss(logs: Floats) -> float:
        costs = np.exp(logs)
        errors = np.log(coefficients.us(costs) / us)
        return float(np.square(errors).sum()) + PRIOR * float(logs[1] - logs[2] - prior) ** 2

    logs = np.log(np.maximum(start, 1e-2))
    best, reach = loss(logs), 1.0
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
    return costs


def fit_all(planner: Planner, rows: list[Row], coefficients: Coefficients) -> npt.NDArray[np.void]:
    """Costs of every kernel that was measured; zeros, never preferred, for the others."""
    by_kernel: dict[int, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        by_kernel[row.kernel].append(position)
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    for kernel, positions in by_kernel.items():
        which = np.array(positions)
        us = np.array([rows[position].us for position in positions])
        blocks = planner.occupancy(kernel)
        costs[kernel] = (*fit(coefficients.select(which), us, blocks), blocks)
    return costs


@dataclass(frozen=True)
class Quality:
    """How near the planner's choices come to the best that was measured."""

    mean: float  # of time chosen / best time
    worst: float
    shapes: int
    unmeasured: int  # choices for which there is no timing
    error: float  # median of |log(predicted / measured)| over all rows

    def __str__(self) -> str:
        return (
            f"chosen / best: mean {self.mean:.4f}, worst {self.worst:.3f} over {self.shapes} "
            f"shapes ({self.unmeasured} choices were not timed); "
            f"median prediction error {self.error:.1%}"
        )


def quality(planner: Planner, pack: native.Pack, rows: list[Row]) -> Quality:
    timings: dict[Shape, dict[tuple[int, int], Row]] = defaultdict(dict)
    for row in rows:
        timings[row.shape][row.kernel, row.split] = row
    ratios, unmeasured = [], 0
    for measured in timings.values():
        problem = next(iter(measured.values())).problem()
        region = pack.plan(planner.device, problem).regions[0]
        mine = measured.get((region.kernel, region.split))
        if mine is None:
            unmeasured += 1
            continue
        ratios.append(mine.us / min(row.us for row in measured.values()))
    errors = np.abs(np.log(planner.predict(pack, rows) / np.array([row.us for row in rows])))
    return Quality(
        statistics.fmean(ratios) if ratios else math.nan, max(ratios, default=math.nan),
        len(ratios), unmeasured, float(np.median(errors)),
    )  # fmt: skip


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
        coefficients = Coefficients.probe(planner, rows)
        bandwidth = facts["bandwidth_gbps"]
        with planner.with_costs(None, bandwidth) as pack:
            print(f"analytic model: {quality(planner, pack, rows)}")

        order = {shape: i for i, shape in enumerate(dict.fromkeys(row.shape for row in rows))}
        kept = np.array([i for i, row in enumerate(rows) if order[row.shape] % 2 == 0])
        held_out = [row for row in rows if order[row.shape] % 2 == 1]
        if held_out:
            half = fit_all(planner, [rows[i] for i in kept], coefficients.select(kept))
            with planner.with_costs(half, bandwidth) as pack:
                print(f"fitted, on shapes held out: {quality(planner, pack, held_out)}")
        costs = fit_all(planner, rows, coefficients)
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
