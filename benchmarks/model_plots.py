"""A picture of one model in one type from `models.csv`: stream totals, and time by size.

python -m benchmarks.model_plots RESULTS/models.csv --output FOLDER
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path

from benchmarks import contender_names, csv_rows


def totals(rows: list[dict[str, str]]) -> dict[str, dict[str, float]]:
    """`stream_ms` by stream and contender, estimates too; later rows replace earlier ones."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["measure"] == "stream_ms":
            found[row["stream"]][row["contender"]] = float(row["value"])
    return dict(found)


def draw(path: Path, model: str, dtype: str, folder: Path) -> Path | None:
    """Writes FOLDER/MODEL-DTYPE.png; None where it has no stream."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    rows = [row for row in csv_rows.read([path]) if (row["model"], row["dtype"]) == (model, dtype)]
    found = totals(rows)
    if not found:
        return None
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    colours = {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}
    estimated = {(row["stream"], row["contender"]) for row in rows
                 if row["measure"] == "stream_ms" and row["note"]}  # fmt: skip
    figure = Figure(figsize=(6 * len(found), 8), layout="constrained")
    figure.suptitle(f"{model}, {dtype}")
    for column, (stream, times) in enumerate(found.items()):
        bars = figure.add_subplot(2, len(found), column + 1)
        shown = [_label(name, (stream, name) in estimated) for name in times]
        bars.barh(shown, list(times.values()), color=[colours[name] for name in times])
        bars.set(title=f"{stream}: all sizes, each new", xlabel="ms", xscale="log")
        bars.xaxis.set_minor_formatter(NullFormatter())
        bars.invert_yaxis()
        by_size = figure.add_subplot(2, len(found), len(found) + column + 1)
        for name in times:
            mine = [r for r in rows if (r["stream"], r["contender"], r["measure"])
                    == (stream, name, "new_ms")]  # fmt: skip
            work = [math.prod(n for n in map(int, r["size"].split("x")) if n) for r in mine]
            by_size.scatter(work, [float(r["value"]) for r in mine], s=8, color=[colours[name]])
        by_size.set(yscale="log", xlabel="product of the sizes", ylabel="ms, first run of a size")
        by_size.grid(alpha=0.3)
    output = folder / f"{model}-{dtype}.png"
    figure.savefig(output, dpi=80)
    return output


def _label(name: str, estimated: bool) -> str:
    notes = ["our passes"] * contender_names.is_for_information(name) + ["estimated"] * estimated
    return f"{name} ({', '.join(notes)})" if notes else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pictures")
    arguments = parser.parse_args()
    pairs = dict.fromkeys((row["model"], row["dtype"]) for row in csv_rows.read([arguments.csv]))
    for model, dtype in pairs:
        draw(arguments.csv, model, dtype, arguments.output)


if __name__ == "__main__":
    main()
