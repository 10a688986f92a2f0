"""Per-kernel costs from timings, and how well the planner then chooses. Needs no GPU.

The native planner itself supplies the model: plans under probing costs give each measurement's
coefficients. What the timings of a kernel leave open stays at the analytic model's value. The
memory bandwidth is fitted along.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import native, tables
from ..custom_ops.kernels import pack_format
from ..custom_ops.kernels.spec import Family
from .probes import ConvProbe, probe
from .work import AnyShape, Work, plan

Floats = npt.NDArray[np.float64]
COSTS = ("fixed_us", "step_us", "single_step_us")
TINY = 1e-9  # a cost of nothing that still counts as measured
ENDLESS = 1e12  # a bandwidth that is never the bottleneck
CRAWLING = 1e-4  # a bandwidth that always is
PRIOR = 0.1  # weight of (log cost / analytic)^2 against one timing's squared log error


@dataclass(frozen=True)
class Row:
    """One measurement: a kernel (its index in the pack) and K split on one shape."""

    shape: AnyShape | ConvProbe
    kernel: int
    split: int
    us: float


class Planner:
    """The native planner over one pack's kernels, with whatever costs one gives it.

    `launch_us` is what tables of its packs say; packs are written to `folder`.
    """

    def __init__(self, pack: Path, device: native.Device, launch_us: float, folder: Path) -> None:
        whole = pack_format.read_pack(pack)
        self.info = whole.info
        # Planning needs no code, and a pack without it is written in milliseconds.
        self.kernels = [replace(kernel, cubin=b"") for kernel in whole.kernels]
        self.device, self.launch_us = device, launch_us
        self._folder, self._count = folder, 0
        self._problems: dict[AnyShape | ConvProbe, Work] = {}
        with self.without_table() as catalog:
            self.names = [kernel.name for kernel in catalog.kernels]
            # Blocks that one SM holds, at least 1, of each kernel.
            self.occupancy = [max(1, native.blocks_per_sm(k, self.device)) for k in catalog.kernels]

    def with_costs(self, costs: npt.NDArray[np.void], bandwidth: float) -> native.Pack:
        """A catalog whose table holds these costs, zeros for what was not measured."""
        return self._pack([pack_format.CostTable(self.device.name, self.device.sm_count, bandwidth,
                                                 self.launch_us, costs)])  # fmt: skip

    def with_table(self, *given: tables.Table) -> native.Pack:
        """A catalog with the tables of one GPU as packs hold them."""
        return self._pack([tables.cost_table(given, self.names)])

    def without_table(self) -> native.Pack:
        """A catalog for the analytic model."""
        return self._pack([])

    def _pack(self, given: list[pack_format.CostTable]) -> native.Pack:
        self._count += 1
        path = self._folder / f"{self._count}.mpk"
        pack_format.write_pack(path, self.info.sm, self.kernels, given,
                               key=self.info.key, triton=self.info.triton)  # fmt: skip
        return native.Pack(path)

    def problem(self, shape: AnyShape | ConvProbe) -> Work:
        if shape not in self._problems:
            self._problems[shape] = shape.problem()
        return self._problems[shape]

    def predict(self, pack: native.Pack, rows: Iterable[Row]) -> Floats:
        """Microseconds that the planner expects of each row."""
        return np.array(
            [
                plan(
                    pack, self.device, self.problem(row.shape), kernel=row.kernel, split=row.split
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
        """Predictions for costs (fixed, step, single_step) of each row."""
        loop = self.loops + (self.linear * costs).sum(axis=1)
        traffic = self.traffic / bandwidth
        total: Floats = self.base + self.fixed * costs[:, 0] + np.hypot(loop, traffic)
        return total


def analytic_costs(planner: Planner, wanted: Iterable[int]) -> Floats:
    """(fixed, step, single_step) of the wanted kernels by the analytic model, NaN for others.

    Read off its predictions: one block for few and for many K steps, and a full wave for many.
    Outer products have a single step, or none.
    """
    rows, indices = [], sorted(set(wanted))
    for index in indices:
        kernel = planner.kernels[index]
        spec, split = kernel.spec, 2 if kernel.spec.split_k else 1
        wave = max(1, planner.device.sm_count * planner.occupancy[index] // split)
        few, many = (0, 1) if spec.family is Family.GEMM_SHALLOW else (2, 40)
        for tiles, steps in ((1, few), (1, many), (wave, many)):
            rows.append(Row(probe(spec, tiles, steps * split), index, split, math.nan))
    linear = Coefficients.probe(planner, rows)
    with planner.with_costs(np.zeros(len(planner.kernels), pack_format.COST), ENDLESS) as pack:
        target = planner.predict(pack, rows) - linear.base - linear.loops
    matrix = linear.linear + linear.fixed[:, None] * np.array([1.0, 0.0, 0.0])
    found: Floats = np.full((len(planner.kernels), 3), np.nan)
    found[indices] = np.linalg.solve(matrix.reshape(-1, 3, 3), target.reshape(-1, 3, 1))[:, :, 0]
    return found


@dataclass
class Fit:
    """Costs of every kernel that was timed on some rows; zeros for the others."""

    planner: Planner
    rows: list[Row]
    coefficients: Coefficients
    prior: Floats

    def __post_init__(self) -> None:
        # Rows in the order of kernels, so that sums over a kernel's rows are one call.
        order = np.argsort([row.kernel for row in self.rows], kind="stable")
        fastest: dict[AnyShape | ConvProbe, float] = defaultdict(lambda: math.inf)
        for row in self.rows:
            fastest[row.shape] = min(fastest[row.shape], row.us)
        kernels = np.array([self.rows[i].kernel for i in order])
        self._kernels, self._starts, self._place = np.unique(
            kernels, return_index=True, return_inverse=True
        )
        self._sorted = self.coefficients.select(order)
        self._us = np.array([self.rows[i].us for i in order])
        # What is near the best decides choices.
        self._weights = (np.array([fastest[self.rows[i].shape] for i in order]) / self._us) ** 2

    def _losses(self, logs: Floats, bandwidth: float) -> Floats:
        """Of each kernel: the weighted squared log error, and the distance from the prior."""
        predicted = self._sorted.us(np.exp(logs)[self._place], bandwidth)
        errors = self._weights * np.log(predicted / self._us) ** 2
        away = ((logs - np.log(self.prior[self._kernels])) ** 2).sum(axis=1)
        total: Floats = np.add.reduceat(errors, self._starts) + PRIOR * away
        return total

    def at(self, bandwidth: float, finest: float = 1e-3) -> tuple[npt.NDArray[np.void], float]:
        """The costs that fit best at a memory bandwidth in GB/s, and the summed error.

        A pattern search over the logarithms of all kernels at once, from the prior, until the steps
        are below `finest`.
        """
        logs = np.log(self.prior[self._kernels])
        best, reach = self._losses(logs, bandwidth), np.full(len(logs), 0.5)
        while (active := reach > finest).any():
            improved = np.zeros(len(logs), bool)
            for axis in range(3):
                for sign in (1, -1):
                    trial = logs.copy()
                    trial[:, axis] += sign * reach * active
                    value = self._losses(trial, bandwidth)
                    better = active & (value < best)
                    logs[better], best[better] = trial[better], value[better]
                    improved |= better
            reach[active & ~improved] /= 2
        costs = np.zeros(len(self.planner.kernels), pack_format.COST)
        for kernel, found in zip(self._kernels, np.exp(logs), strict=True):
            costs[kernel] = (*found, self.planner.occupancy[kernel])
        return costs, float(best.sum())

    def bandwidth(self, copied: float) -> float:
        """The memory bandwidth in GB/s that fits best, from half of the data sheet's figure (or
        of what was `copied`, if that is more) to all of it."""
        device = self.planner.device
        peak: float = (
            device.bandwidth_gbps or device.memory_clock_mhz * device.memory_bus_bits / 4000
        )
        most = max(copied, peak)
        tried = [most * percent / 100 for percent in range(50, 101, 5)]
        return min(tried, key=lambda bandwidth: self.at(bandwidth, finest=0.02)[1])


@dataclass(frozen=True)
class Quality:
    """How near the planner's choices come to the best that was measured."""

    mean: float  # of best time / time chosen
    worst: float
    shapes: int
    untimed: int  # choices for which there is no timing; the likeliest one that has stands in
    error: float  # median of |log(predicted / measured)| over all rows
    chosen: dict[AnyShape | ConvProbe, float]  # measured microseconds of the choices

    def __str__(self) -> str:
        return (
            f"best / chosen: mean {self.mean:.4f}, worst {self.worst:.3f} over {self.shapes} "
            f"shapes ({self.untimed} choices were not timed); "
            f"median prediction error {self.error:.1%}"
        )


def quality(planner: Planner, pack: native.Pack, rows: Sequence[Row]) -> Quality:
    """Of the choices that the planner makes with a pack's costs, on the shapes of the rows."""
    predicted = planner.predict(pack, rows)
    timings: dict[AnyShape | ConvProbe, list[tuple[float, Row]]] = defaultdict(list)
    for us, row in zip(predicted, rows, strict=True):
        timings[row.shape].append((us, row))
    ratios, untimed, chosen = [], 0, {}
    one = native.PlanFlag.NO_REGIONS | native.PlanFlag.NO_VENDOR  # as all that was timed
    for shape, timed in timings.items():
        made = plan(pack, planner.device, planner.problem(shape), flags=one)
        region = made.regions[0]
        # Copies in front of a kernel take time that its timings do not hold.
        mine = [] if made.copies else [
            row for _, row in timed if (row.kernel, row.split) == (region.kernel, region.split)
        ]  # fmt: skip
        if not mine:
            untimed += 1
            mine = [min(timed, key=lambda pair: pair[0])[1]]
        chosen[shape] = mine[0].us
        ratios.append(min(row.us for _, row in timed) / mine[0].us)
    errors = np.abs(np.log(predicted / np.array([row.us for row in rows])))
    return Quality(statistics.fmean(ratios), min(ratios), len(ratios), untimed,
                   float(np.median(errors)), chosen)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """Costs (as a pack's table holds them), the memory bandwidth in GB/s, and what they are
    worth: `held_out` on every second shape when only the others were fitted (None: one shape)."""

    costs: npt.NDArray[np.void]
    bandwidth: float
    analytic: Quality
    own: Quality
    held_out: Quality | None

    @property
    def untuned(self) -> float:
        """Speed of the analytic model's choices against the fitted ones: the geometric mean over
        the shapes of time fitted / time analytic."""
        logs = [math.log(us / self.analytic.chosen[shape]) for shape, us in self.own.chosen.items()]
        return math.exp(statistics.fmean(logs))


def fit_all(
    planner: Planner, rows: list[Row], copied: float, bandwidth: float | None = None
) -> Fitted:
    """Fits all kernels; `copied` is the bandwidth of a copy in GB/s, where one was measured.
    `bandwidth`: that of the memory, fitted before to other work, as both share a table's head.
    """
    prior = analytic_costs(planner, (row.kernel for row in rows))
    whole = Fit(planner, rows, Coefficients.probe(planner, rows), prior)
    with planner.without_table() as pack:
        analytic = quality(planner, pack, rows)
    if bandwidth is None:
        bandwidth = float(f"{whole.bandwidth(copied):.4g}")
    order = {shape: i for i, shape in enumerate(dict.fromkeys(row.shape for row in rows))}
    kept = np.array([i for i, row in enumerate(rows) if order[row.shape] % 2 == 0])
    others = [row for row in rows if order[row.shape] % 2 == 1]
    held_out = None
    if others:
        half = Fit(planner, [rows[i] for i in kept], whole.coefficients.select(kept), prior)
        with planner.with_costs(half.at(bandwidth)[0], bandwidth) as pack:
            held_out = quality(planner, pack, others)
    costs, _ = whole.at(bandwidth)
    with planner.with_costs(costs, bandwidth) as pack:
        own = quality(planner, pack, rows)
    return Fitted(costs, bandwidth, analytic, own, held_out)
