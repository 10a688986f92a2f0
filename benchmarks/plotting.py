"""Two pictures of kernel-only rows as one PNG; needs matplotlib and the CSV, no GPU.

    python -m benchmarks.plotting FOLDER/kernels.csv --output picture.png [--dtype f16]

Left, the speed-up over cuBLAS by FLOPs per byte; right, a roofline: what each row reaches, ours
and cuBLAS, under the measured copy bandwidth and the fastest product. These two are read from
`gpu.json` beside the CSV; without it there are no lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import csv_rows, summaries
from benchmarks.measuring import geometric_mean
from benchmarks.summaries import Line

COLOURS = {"skinny (M <= 16)": "tab:orange", "N or K unaligned": "tab:green", "batched": "tab:red",
           "other": "tab:blue"}  # fmt: skip
TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(frozen=True)
class Point:
    """A row: FLOPs per byte, speed-up, TFLOP/s of ours and of cuBLAS, and its kind."""

    intensity: float
    speedup: float
    ours: float
    cublas: float
    kind: str


def points(lines: Sequence[Line], ours: str) -> list[Point]:
    """Of the rows that are right and have both times."""
    found = []
    for line in lines:
        mine, other = summaries.time_of(line, ours), summaries.time_of(line, "cublas")
        if line["status"] != "ok" or not mine or not other:
            continue
        work = summaries.flops(line)
        found.append(Point(
            work / summaries.moved_bytes(line), other / mine, work / mine / 1e6,
            work / other / 1e6, _kind(line),
        ))  # fmt: skip
    return found


def _kind(line: Line) -> str:
    if line["op"] == "bmm":
        return "batched"
    if summaries.unaligned(line):
        return "N or K unaligned"
    return "skinny (M <= 16)" if int(line["m"]) <= summaries.SKINNY_ROWS else "other"


def draw(
    lines: Sequence[Line], dtype: str, ours: str, facts: Mapping[str, Any], output: Path
) -> None:
    """Writes the picture of one dtype; `facts` is what gpu.json holds, or empty.

    Raises:
        ValueError: no row has the times it needs.
    """
    found = points([line for line in lines if line["dtype"] == dtype], ours)
    if not found:
        raise ValueError(f"no row of {dtype} has times of {ours!r} and of cuBLAS")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    mean = geometric_mean([p.speedup for p in found])
    figure.suptitle(
        f"{facts.get('gpu', '')} {dtype}, {summaries.OURS[ours]}: {len(found)} products, geometric "
        f"mean {mean:.3f} of cuBLAS' speed"
    )
    for kind, colour in COLOURS.items():
        some = [point for point in found if point.kind == kind]
        if some:
            left.scatter(
                [p.intensity for p in some], [p.speedup for p in some], s=12, c=colour,
                label=f"{kind} ({len(some)})",
            )  # fmt: skip
    left.axhline(1, color="black", linewidth=0.8)
    left.set(xscale="log", yscale="log", ylabel="speed-up over cuBLAS")
    speedups = [point.speedup for point in found]
    ticks = [x for x in TICKS if 0.8 * min(speedups) <= x <= 1.2 * max(speedups)]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks([], minor=True)
    left.legend(fontsize=8)
    intensities = [point.intensity for point in found]
    right.scatter(intensities, [p.cublas for p in found], s=12, c="tab:gray", label="cuBLAS")
    right.scatter(intensities, [p.ours for p in found], s=12, c="tab:blue", label="ours")
    _roof(right, facts, dtype, min(intensities), max(intensities))
    right.set(xscale="log", yscale="log", ylabel="TFLOP/s")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("FLOPs per byte (A, B and Y once)")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=130)


def _roof(axes: Any, facts: Mapping[str, Any], dtype: str, low: float, high: float) -> None:
    gbps = facts.get("bandwidth_gbps")
    peak = facts.get("matmul_tflops", {}).get(dtype)
    if not gbps or not peak:
        return
    ridge = peak / (gbps / 1e3)
    xs = sorted({low, min(max(ridge, low), high), high})
    axes.plot(
        xs, [min(peak, x * gbps / 1e3) for x in xs], color="black", linewidth=0.8,
        label=f"{gbps / 1e3:.2f} TB/s copied, {peak:.0f} TFLOP/s of a large product",
    )  # fmt: skip


def facts_beside(path: Path) -> dict[str, Any]:
    """gpu.json in the folder of a CSV; empty where there is none."""
    beside = path.parent / "gpu.json"
    found: dict[str, Any] = json.loads(beside.read_text()) if beside.exists() else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+", help="kernel-only rows of bench_gemm")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument(
        "--ours", default="alone", choices=list(summaries.OURS), help="which of our two times"
    )
    arguments = parser.parse_args()
    try:
        draw(csv_rows.read(arguments.csv), arguments.dtype, arguments.ours,
             facts_beside(arguments.csv[0]), arguments.output)  # fmt: skip
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
