"""Two pictures of kernel-only rows as one PNG; needs matplotlib and the CSV, no GPU.

    python -m benchmarks.plotting FOLDER/kernels.csv --output picture.png [--dtype f16]

Left, the speed-up over the vendor's library by FLOPs per byte: cuBLAS for products, cuDNN for
convolutions. Right, a roofline: what each row reaches, ours and the library, under the measured
copy bandwidth and the fastest product. These two are read from `gpu.json` beside the CSV; without
it there are no lines.
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

COLOURS = {
    "skinny (M <= 16)": "tab:orange", "N or K unaligned": "tab:green", "batched": "tab:red",
    "other": "tab:blue", "dense": "tab:blue", "pointwise": "tab:green", "depthwise": "tab:red",
    "few channels": "tab:orange",
}  # fmt: skip
VENDORS = {"cublas": "cuBLAS", "cudnn": "cuDNN"}
TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(frozen=True)
class Point:
    """A row: FLOPs per byte, speed-up, TFLOP/s of ours and of the vendor, and its kind."""

    intensity: float
    speedup: float
    ours: float
    vendor: float
    kind: str


def points(lines: Sequence[Line], ours: str, vendor: str = "cublas") -> list[Point]:
    """Of the rows that are right and have both times."""
    found = []
    for line in lines:
        mine, other = summaries.time_of(line, ours), summaries.time_of(line, vendor)
        if line["status"] != "ok" or not mine or not other:
            continue
        work = summaries.flops(line)
        found.append(Point(
            work / summaries.moved_bytes(line), other / mine, work / mine / 1e6,
            work / other / 1e6, _kind(line),
        ))  # fmt: skip
    return found


def _kind(line: Line) -> str:
    if line["op"] == "conv":
        return line["class"]
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
    some = [line for line in lines if line["dtype"] == dtype]
    convolutions = any(line["op"] == "conv" for line in some)
    base = "cudnn" if convolutions else "cublas"
    vendor = VENDORS[base]
    title = "convolutions" if convolutions else f"{summaries.OURS[ours]}: products"
    found = points(some, "ours" if convolutions else ours, base)
    if not found:
        raise ValueError(f"no row of {dtype} has times of {ours!r} and of {vendor}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    mean = geometric_mean([p.speedup for p in found])
    figure.suptitle(
        f"{facts.get('gpu', '')} {dtype}, {title} ({len(found)}), geometric mean {mean:.3f} of the "
        f"speed of {vendor}"
    )
    for kind, colour in COLOURS.items():
        alike = [point for point in found if point.kind == kind]
        if alike:
            left.scatter(
                [p.intensity for p in alike], [p.speedup for p in alike], s=12, c=colour,
                label=f"{kind} ({len(alike)})",
            )  # fmt: skip
    left.axhline(1, color="black", linewidth=0.8)
    left.set(xscale="log", yscale="log", ylabel=f"speed-up over {vendor}")
    speedups = [point.speedup for point in found]
    ticks = [x for x in TICKS if 0.8 * min(speedups) <= x <= 1.2 * max(speedups)]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks([], minor=True)
    left.legend(fontsize=8)
    intensities = [point.intensity for point in found]
    right.scatter(intensities, [p.vendor for p in found], s=12, c="tab:gray", label=vendor)
    right.scatter(intensities, [p.ours for p in found], s=12, c="tab:blue", label="ours")
    _roof(right, facts, dtype, min(intensities), max(intensities))
    right.set(xscale="log", yscale="log", ylabel="TFLOP/s")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("FLOPs per byte (operands and result once)")
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
    parser.add_argument("csv", type=Path, nargs="+", help="kernels.csv of either bench")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument(
        "--ours",
        default="alone",
        choices=list(summaries.OURS),
        help="of products: which time",
    )
    arguments = parser.parse_args()
    try:
        draw(csv_rows.read(arguments.csv), arguments.dtype, arguments.ours,
             facts_beside(arguments.csv[0]), arguments.output)  # fmt: skip
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
