"""How well cuBLASLt's times can be predicted, and what choosing by it gains; adds it to a table.

    python -m benchmarks.fit_vendor oracle.csv [more.csv] [--pack sm_90.mpk]
        [--table gemm__nvidia-h200.json]

Needs no GPU. Reads what `benchmarks.bench_kernels` writes with --oracle and --vendor: rows of the
kernel `cublaslt`, or of `cublas` where a shape has none, are fitted, one model per class. The other
rows tell what plans of our kernels take beside what they promise: with a pack and a table, of the
plans that the planner makes by that table, else of those that the file's own predictions favour.
Printed per class: the error on the shapes of the half that was not fitted, and what choosing
between ours and cuBLASLt by these predictions gains.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from moonpoly_ort.custom_ops.kernels import pack_format

from benchmarks.operands import NUMBERS, dense_problem
from moonpoly_ort import devices, native, tables
from moonpoly_ort.tuning import vendor_model
from moonpoly_ort.tuning.vendor_model import Floats, Timing

Shape = tuple[str, str, str, int, int, int]  # dtype, precision, layout, m, n, k


@dataclass(frozen=True)
class Row:
    """A kernel of ours on one shape."""

    kernel: str
    split: int
    predicted_us: float
    us: float


def shape_of(t: Timing) -> Shape:
    return t.dtype, t.precision, t.layout, t.m, t.n, t.k


def read(paths: Iterable[Path]) -> tuple[list[Timing], dict[Shape, list[Row]]]:
    """cuBLASLt's timings, and ours of the same shapes."""
    timings: dict[Shape, Timing] = {}
    ours: dict[Shape, list[Row]] = defaultdict(list)
    for path in paths:
        with path.open(newline="") as source:
            for row in csv.DictReader(source):
                dtype, precision = NUMBERS[row["dtype"]]
                shape = (dtype, precision, row["layout"], *(int(row[size]) for size in "mnk"))
                if row["kernel"] in ("cublas", "cublaslt"):
                    # cuBLAS has kernels besides those of cuBLASLt, whose own time is preferred.
                    if row["kernel"] == "cublaslt" or shape not in timings:
                        timings[shape] = Timing(*shape, us=float(row["us"]))
                else:
                    times = float(row["predicted_us"]), float(row["us"])
                    ours[shape].append(Row(row["kernel"], int(row["split"]), *times))
    return list(timings.values()), ours


class Planner:
    """The native planner over a pack's kernels with a table's costs; no code, no GPU."""

    def __init__(self, pack: Path, table: tables.Table, folder: Path) -> None:
        whole = pack_format.read_pack(pack)
        kernels = [replace(kernel, cubin=b"") for kernel in whole.kernels]
        self.names = [pack_format.name(kernel.spec) for kernel in kernels]
        costs = np.zeros(len(kernels), pack_format.COST)
        for cost in table.costs:
            if cost.kernel in self.names:
                costs[self.names.index(cost.kernel)] = (
                    cost.fixed_us, cost.step_us, cost.single_step_us, cost.blocks_per_sm
                )  # fmt: skip
        given = pack_format.CostTable(
            table.gpu, table.sm_count, table.bandwidth_gbps, table.launch_us, costs
        )
        info, path = whole.info, folder / "planned.mpk"
        pack_format.write_pack(path, info.sm, kernels, [given], key=info.key, triton=info.triton)
        self.pack, self.device = native.Pack(path), devices.lookup(table.gpu)

    def plan(self, t: Timing) -> tuple[str, int, float]:
        """Kernel, split and promise of the plan; of several regions, those of the first."""
        problem = dense_problem(t.m, t.n, t.k, t.dtype, t.layout, t.precision)
        plan = self.pack.plan(self.device, problem, flags=native.PlanFlag.NO_VENDOR)
        region = plan.regions[0]
        return self.names[region.kernel], region.split, plan.predicted_us


def promised(
    timings: list[Timing], ours: dict[Shape, list[Row]], planner: Planner | None
) -> list[Timing]:
    """The timings with what our plan promises and takes, where that was timed."""
    found = []
    for t in timings:
        rows = ours.get(shape_of(t), [])
        if planner is None:
            row = min(rows, key=lambda row: row.predicted_us, default=None)
            us = row.predicted_us if row else None
        else:
            kernel, split, us = planner.plan(t)
            row = next((r for r in rows if (r.kernel, r.split) == (kernel, split)), None)
        found.append(replace(t, promised_us=us, taken_us=row.us) if row else t)
    return found


def speed(cublas_us: Floats, us: Floats) -> float:
    """cuBLAS's time over ours, geometric mean."""
    return float(np.exp(np.log(cublas_us / us).mean()))


def report(timings: list[Timing], sm_count: int) -> None:
    """A line for each class. `error`: of cuBLASLt's times, then of ours; `regret`: time lost to the
    better of the two, mean; `share`: of the shapes that go to cuBLASLt."""
    print(f"{'class':26} shapes  error    90%   ours | cuBLAS's time over: ours either  ideal "
          " worst  regret  share")  # fmt: skip
    for key, own in vendor_model.by_class(timings).items():
        held, other = vendor_model.held_out(own, sm_count)
        us = np.array([t.us for t in own])
        errors = np.abs(np.log(held / us))
        dtype, precision, layout, aligned, batched = key
        name = f"{dtype} {precision} {layout} {'aligned' if aligned else 'unaligned'}"
        line = f"{name + (' batch' if batched else ''):26} {len(own):6d} "
        line += f"{np.median(errors):6.3f} {np.quantile(errors, 0.9):6.3f}"
        known = np.array([t.taken_us is not None for t in own])
        if known.any():
            taken = np.array([t.taken_us for t in own if t.taken_us is not None])
            cublas, expected = us[known], other[known]
            use = held[known] * vendor_model.MARGIN < expected
            either, ideal = np.where(use, cublas, taken), np.minimum(cublas, taken)
            line += f" {np.median(np.abs(np.log(expected / taken))):6.3f}"
            line += f" |{speed(cublas, taken):25.3f} {speed(cublas, either):6.3f}"
            line += f" {speed(cublas, ideal):6.3f} {(cublas / either).min():6.3f}"
            line += f" {(either / ideal).mean() - 1:7.3f} {use.mean():6.2f}"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timings", type=Path, nargs="+", help="CSV of bench_kernels")
    parser.add_argument("--gpu", default="H200", help="where they were taken")
    parser.add_argument("--table", type=Path, help="a table of that GPU, to which models are added")
    parser.add_argument("--pack", type=Path, help="with --table: the pack that was measured")
    arguments = parser.parse_args()
    for path in (*arguments.timings, *filter(None, (arguments.table, arguments.pack))):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    if arguments.pack and not arguments.table:
        parser.error("--pack needs --table, whose costs the planner then goes by")
    device = devices.lookup(arguments.gpu)
    timings, ours = read(arguments.timings)
    if not vendor_model.by_class(timings):
        parser.error(f"no class has {vendor_model.LEAST_TIMINGS} timings of cuBLAS in these files")
    table = tables.load(arguments.table, gpu=device.name) if arguments.table else None
    with tempfile.TemporaryDirectory() as folder:
        planner = None
        if table and arguments.pack:
            planner = Planner(arguments.pack, table, Path(folder))
        timings = promised(timings, ours, planner)
    report(timings, device.sm_count)
    if table:
        fitted = vendor_model.fit(timings, device.sm_count)
        tables.dump(replace(table, vendor=fitted), arguments.table)
        print(f"wrote {len(fitted)} classes to {arguments.table}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
