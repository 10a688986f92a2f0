"""What `models.csv` of `bench_models` amounts to: the best setting of ONNX Runtime against ours.

    python -m benchmarks.model_summaries RESULTS/models.csv --output summary.json [--readme FILE]

A stream's best setting is the one with the least sum over all its sizes, each new; a steady size's
best is the quickest there, CUDA graphs among them on both sides. `speedup` is ONNX Runtime's time,
or torch's, over ours. ONNX Runtime on a form with passes of ours, which it does not have without
us, is none of its settings: `ort_with_our_passes` tells of it. torch.compile's sum holds what it
compiled on the way. `--readme` puts the table of the streams between the two comments in a file
that name this module.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import contender_names, csv_rows
from benchmarks.recording import plain

Rows = Sequence[Mapping[str, str]]
ONCE = ("create_s", "first_run_ms", "memory_mib", "kernels", "error", "failed")
BEGIN, END = "<!-- benchmarks.model_summaries -->", "<!-- end -->"


@dataclass
class _Figures:
    """Of one model in one type: by stream and contender, and of contenders alone."""

    totals: dict[str, dict[str, tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    steady: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    sizes: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    again: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    alone: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, row: Mapping[str, str]) -> None:
        stream, contender, measure = row["stream"], row["contender"], row["measure"]
        if measure == "stream_ms":
            self.totals[stream][contender] = (float(row["value"]), row["note"])
        elif measure == "steady_ms":
            self.steady[stream][row["size"]][contender] = float(row["value"])
        elif measure == "new_ms":
            self.sizes[stream][contender][row["size"]] = float(row["value"])
        elif measure == "median_again_ms":
            self.again[stream][contender] = float(row["value"])
        elif measure == "error":
            value = float("inf") if row["value"] == "inf" else float(row["value"])
            self.alone[contender]["error"] = max(value, self.alone[contender].get("error", 0.0))
            if row["note"]:
                self.alone[contender]["note"] = row["note"]
        elif measure in ONCE:
            if measure == "create_s":  # it did start, later
                self.alone[contender].pop("failed", None)
            failed = measure == "failed"
            self.alone[contender][measure] = row["note"] if failed else float(row["value"])


def of_file(path: Path) -> list[dict[str, Any]]:
    """One entry for each model and type of a file that has a stream of both sides."""
    return summarized(csv_rows.read([path]))


def summarized(rows: Rows) -> list[dict[str, Any]]:
    """As `of_file`, of rows; later ones replace earlier ones."""
    figures: dict[tuple[str, str], _Figures] = defaultdict(_Figures)
    for row in rows:
        figures[row["model"], row["dtype"]].take(row)
    found = []
    for (model, dtype), one in figures.items():
        streams = {name: _stream(one, name) for name in one.totals}
        kept = {name: stream for name, stream in streams.items() if stream is not None}
        if kept:
            chosen = _winners(kept.values())
            contenders = {name: values for name, values in one.alone.items()
                          if name in chosen or "failed" in values or "note" in values}  # fmt: skip
            found.append(
                {"model": model, "dtype": dtype, "streams": kept, "contenders": contenders}
            )
    return found


def _stream(figures: _Figures, name: str) -> dict[str, Any] | None:
    totals = figures.totals[name]
    theirs = _best(totals, "ort")
    ours = _best(totals, "ours")
    if theirs is None or ours is None:
        return None
    mine = totals[ours][0]
    found: dict[str, Any] = {"sizes": _count(figures.sizes[name])}
    for side, contender in (("ort", theirs), ("ours", ours)):
        value, note = totals[contender]
        found[side] = {"name": contender, "ms": value, "note": note}
        if times := figures.sizes[name].get(contender):
            found[side]["new_ms"] = statistics.median(times.values())
        if contender in figures.again[name]:
            found[side]["again_ms"] = figures.again[name][contender]
    defaults = {name: total for name, total in totals.items() if " " not in name}
    if plain_best := _best(defaults, "ort"):
        value, note = totals[plain_best]
        found["ort_defaults"] = {"name": plain_best, "ms": value, "note": note}
    informing = [name for name in totals if contender_names.is_for_information(name)]
    if informing:
        best = min(informing, key=lambda name: totals[name][0])
        found["ort_with_our_passes"] = {"name": best, "ms": totals[best][0]}
    found["speedup"] = totals[theirs][0] / mine
    for other in ("torch", "torch.compile"):
        if other in totals:
            value, note = totals[other]
            found[other] = {"ms": value, "note": note, "speedup": value / mine}
    found["steady"] = {
        size: both for size, times in figures.steady[name].items() if (both := _steady(times))
    }
    return found


def _steady(times: Mapping[str, float]) -> dict[str, Any] | None:
    """The best of both sides at one size, and without CUDA graphs on either."""
    found = _against(times)
    without = _against(
        {name: ms for name, ms in times.items() if not contender_names.with_graphs(name)}
    )
    if found is not None and without is not None:
        found["without_graphs"] = without
    return found


def _against(times: Mapping[str, float]) -> dict[str, Any] | None:
    with_notes = {name: (ms, "") for name, ms in times.items()}
    theirs, ours = _best(with_notes, "ort"), _best(with_notes, "ours")
    if theirs is None or ours is None:
        return None
    return {
        "ort": {"name": theirs, "ms": times[theirs]},
        "ours": {"name": ours, "ms": times[ours]},
        "speedup": times[theirs] / times[ours],
    }


def _best(times: Mapping[str, tuple[float, str]], side: str) -> str | None:
    """The quickest contender of one side, of those that are not for information alone."""
    mine = [name for name in times if contender_names.side(name) == side
            and not contender_names.is_for_information(name)]  # fmt: skip
    return min(mine, key=lambda name: times[name][0]) if mine else None


def _count(sizes: Mapping[str, Mapping[str, float]]) -> int:
    return max(map(len, sizes.values()), default=0)


def _winners(streams: Iterable[Mapping[str, Any]]) -> set[str]:
    found = set()
    for stream in streams:
        pairs = [stream, *stream["steady"].values()]
        pairs += [one["without_graphs"] for one in pairs[1:] if "without_graphs" in one]
        found |= {pair[side]["name"] for pair in pairs for side in ("ort", "ours")}
    return found | {"torch"}


def write(path: Path, output: Path) -> None:
    """Writes the summary of a file as JSON."""
    output.write_text(json.dumps(plain(of_file(path)), indent=1) + "\n")


def shown(summaries: Sequence[Mapping[str, Any]]) -> str:
    """A line for each stream, and one for its steady sizes, for a terminal."""
    lines = []
    for one in summaries:
        for name, stream in one["streams"].items():
            theirs, ours = stream["ort"], stream["ours"]
            line = (
                f"{one['model']} {one['dtype']} {name}, {stream['sizes']} sizes: {_side(theirs)} / "
                f"{_side(ours)} = {stream['speedup']:.2f}"
            )
            for other in ("torch", "torch.compile"):
                if other in stream:
                    line += f"; {other} {stream[other]['ms']:.0f} ({stream[other]['speedup']:.1f})"
            if "ort_with_our_passes" in stream:
                line += f"; for information: {_side(stream['ort_with_our_passes'])}"
            lines.append(line)
            for size, pair in stream["steady"].items():
                both = [("steady", pair)]
                if "without_graphs" in pair:
                    both.append(("without graphs", pair["without_graphs"]))
                lines.append(f"    {size}: " + "; ".join(
                    f"{what} {_side(p['ort'])} / {_side(p['ours'])} = {p['speedup']:.2f}"
                    for what, p in both
                ))  # fmt: skip
        for contender, values in one["contenders"].items():
            facts = ", ".join(f"{key} {value}" for key, value in values.items())
            lines.append(f"    {contender}: {facts}")
    return "\n".join(lines)


def _side(side: Mapping[str, Any]) -> str:
    note = f", {side['note']}" if side.get("note") else ""
    return f"{side['ms']:.4g} ms ({side['name']}{note})"


def markdown(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The table of the streams for a README."""
    head = ("model, type, stream", "sizes", "ONNX Runtime, best", "its defaults, best",
            "with MoonPoly, best", "speed-up", "torch eager", "torch.compile",
            "speed-up of steady sizes")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for one in summaries:
        for name, stream in one["streams"].items():
            steady = [pair["speedup"] for pair in stream["steady"].values()]
            cells = [
                f"{one['model']}, {one['dtype']}, {name}", str(stream["sizes"]),
                _cell(stream["ort"]), _cell(stream.get("ort_defaults")), _cell(stream["ours"]),
                f"{stream['speedup']:.2f}", _cell(stream.get("torch")),
                _cell(stream.get("torch.compile")), " / ".join(f"{ratio:.2f}" for ratio in steady),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(side: Mapping[str, Any] | None) -> str:
    if side is None:
        return ""
    estimated = "~" if side.get("note") else ""
    name = f" (`{side['name']}`)" if "name" in side else ""
    return f"{estimated}{side['ms']:,.0f}{name}"


def put(table: str, text: str) -> str:
    """A text with the table between its two comments.

    Raises:
        ValueError: It has no such comments.
    """
    begin = text.find(BEGIN)
    end = text.find(END, begin)
    if begin < 0 or end < 0:
        raise ValueError(f"there is no {BEGIN} with {END} behind it")
    return f"{text[: begin + len(BEGIN)]}\n{table}\n{text[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--readme", type=Path, help="file that gets the table")
    arguments = parser.parse_args()
    found = of_file(arguments.csv)
    print(shown(found))
    if arguments.output:
        write(arguments.csv, arguments.output)
    if arguments.readme:
        try:
            text = put(markdown(found), arguments.readme.read_text())
        except ValueError as error:
            parser.error(f"{arguments.readme}: {error}")
        arguments.readme.write_text(text)


if __name__ == "__main__":
    main()
