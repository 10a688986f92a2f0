"""What the rows of `bench_gemm` amount to: by class and over all, against each baseline.

Read from the CSV files alone; no GPU is needed. A speed-up is the baseline's time over ours, so
more than 1 is faster. cuBLASLt's autotuned time is the better of its best algorithm and its first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measuring import geometric_mean

Line = Mapping[str, str]

BASELINES = {"cublas": "cuBLAS", "first": "cuBLASLt first", "tuned": "cuBLASLt autotuned"}
OURS = {"alone": "micro-kernels alone", "allowed": "vendor candidate allowed"}
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f32ieee": 4}
SKINNY_ROWS, HEAVY_BYTES = 16, 30e6
ALL = "all"


@dataclass(frozen=True)
class Speedups:
    """Of some rows. `wins`: the share of rows with more than 1. `worst_row`: its op and id."""

    rows: int
    geomean: float
    median: float
    wins: float
    worst: float
    worst_row: str

    @staticmethod
    def of(ratios: Sequence[tuple[float, str]]) -> Speedups | None:
        """None for no rows."""
        if not ratios:
            return None
        values = [ratio for ratio, _ in ratios]
        worst, row = min(ratios)
        return Speedups(
            len(values), geometric_mean(values), statistics.median(values),
            sum(value > 1 for value in values) / len(values), worst, row,
        )  # fmt: skip


def time_of(line: Line, name: str) -> float | None:
    """Microseconds of a contender; None where the row has none."""
    taken = [float(line[column]) for column in _columns(name) if line.get(column)]
    return min(taken, default=None)


def _columns(name: str) -> tuple[str, ...]:
    return ("tuned_us", "first_us") if name == "tuned" else (f"{name}_us",)


def ratios(lines: Sequence[Line], ours: str, baseline: str) -> list[tuple[float, str]]:
    """(speed-up, row) of the rows that have both times."""
    found = []
    for line in lines:
        mine, other = time_of(line, ours), time_of(line, baseline)
        if mine and other:
            found.append((other / mine, f"{line['op']} {line['id']}"))
    return found


def unaligned(line: Line) -> bool:
    """Whether N or K of a product with a constant weight is no multiple of 8."""
    return line["op"] == "gemm" and (int(line["n"]) % 8 != 0 or int(line["k"]) % 8 != 0)


def skinny(line: Line) -> bool:
    """At most 16 rows and a weight above 30 MB: bound by reading the weight."""
    weight = int(line["n"]) * int(line["k"]) * ELEMENT_BYTES[line["dtype"]]
    return line["op"] == "gemm" and int(line["m"]) <= SKINNY_ROWS and weight > HEAVY_BYTES


def flops(line: Line) -> float:
    if "flops" in line:
        return float(line["flops"])
    return 2.0 * math.prod(int(line[column]) for column in ("batch", "m", "n", "k"))


def moved_bytes(line: Line) -> float:
    """The operands and the result once."""
    if "bytes" in line:
        return float(line["bytes"])
    batch, m, n, k = (int(line[column]) for column in ("batch", "m", "n", "k"))
    return float(batch * (m * k + k * n + m * n) * ELEMENT_BYTES[line["dtype"]])


def bandwidth_shares(lines: Sequence[Line], ours: str, gbps: float) -> list[float]:
    """Bytes per second of skinny rows, over the copy bandwidth."""
    shares = []
    for line in lines:
        us = time_of(line, ours)
        if us and skinny(line):
            shares.append(moved_bytes(line) / us / 1e3 / gbps)
    return shares


def prediction(lines: Sequence[Line], ours: str) -> dict[str, float] | None:
    """Predicted over measured time: geometric mean, and the median factor it is off by."""
    column = "allowed_predicted_us" if ours == "allowed" else "predicted_us"
    quotients = []
    for line in lines:
        us = time_of(line, ours)
        if us and line.get(column):
            quotients.append(float(line[column]) / us)
    if not quotients:
        return None
    off = statistics.median(math.exp(abs(math.log(value))) for value in quotients)
    return {"geomean": geometric_mean(quotients), "median_factor_off": off}


def _groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """By class in the suite's order, then the unaligned rows, then all."""
    found: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: (line["op"] != "gemm", int(line["id"]))):
        found.setdefault(line["class"], []).append(line)
    found["unaligned N or K"] = [line for line in lines if unaligned(line)]
    for op in ("gemm", "bmm"):
        found[f"{ALL} {op}"] = [line for line in lines if line["op"] == op]
    found[ALL] = list(lines)
    return {name: members for name, members in found.items() if members}


def kernels(lines: Sequence[Line], gbps: float | None) -> dict[str, Any]:
    """The summary of kernel-only rows of one dtype; `gbps` is the measured copy bandwidth."""
    counted = [line for line in lines if line["status"] != "refused"]
    sound = [line for line in counted if line["status"] == "ok"]
    found: dict[str, Any] = {
        "rows": len(lines),
        "refused by cuBLAS": len(lines) - len(counted),
        "wrong": [row_name(line) for line in counted if line["status"] == "wrong"],
        "failed": [row_name(line) for line in counted if line["status"] == "failed"],
        "not identical": [row_name(line) for line in counted if line["identical"] == "0"],
        "largest error": max((float(line["error"]) for line in sound), default=None),
    }
    for ours in OURS:
        classes: dict[str, dict[str, Any]] = {}
        for name, members in _groups(sound).items():
            against = {base: Speedups.of(ratios(members, ours, base)) for base in BASELINES}
            if any(against.values()):
                classes[name] = {b: asdict(s) for b, s in against.items() if s is not None}
        if not classes:
            continue
        entry: dict[str, Any] = {"classes": classes, "prediction": prediction(sound, ours)}
        if gbps and (shares := bandwidth_shares(sound, ours, gbps)):
            entry["skinny, share of copy bandwidth"] = {
                "rows": len(shares), "geomean": geometric_mean(shares), "worst": min(shares),
            }  # fmt: skip
        found[ours] = entry
    offered = [line for line in sound if line["vendor"]]
    if offered:
        found["share that went to the vendor"] = statistics.fmean(
            line["vendor"] == "1" for line in offered
        )
    return found


def sessions(lines: Sequence[Line]) -> dict[str, Any]:
    """The summary of in-session rows of one dtype."""
    sound = [line for line in lines if line["status"] == "ok"]
    classes = {
        name: asdict(found)
        for name, members in _groups(sound).items()
        if (found := Speedups.of(ratios(members, "ours", "ort"))) is not None
    }
    return {
        "rows": len(lines),
        "wrong": [row_name(line) for line in lines if line["status"] == "wrong"],
        "failed": [row_name(line) for line in lines if line["status"] == "failed"],
        "classes": classes,
    }


def summary(lines: Sequence[Line], gbps: float | None = None) -> dict[str, Any]:
    """Of rows of any kind, as JSON takes it: {"kernels": {dtype: ...}, "sessions": {dtype: ...}}.

    Suites of several seeds are summed up apart.

    Of lines about the same row the last counts.
    """
    last = {("ort_us" in x, x["seed"], x["op"], x["id"], x["dtype"]): x for x in lines}
    lines = list(last.values())
    kinds: dict[str, tuple[list[Line], Callable[[list[Line]], dict[str, Any]]]] = {
        "kernels": ([x for x in lines if "alone_us" in x], lambda some: kernels(some, gbps)),
        "sessions": ([x for x in lines if "ort_us" in x], sessions),
    }
    found: dict[str, Any] = {}
    for kind, (members, make) in kinds.items():
        if groups := by_dtype(members):
            found[kind] = {label: make(group) for label, group in groups.items()}
    return found


def by_dtype(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by dtype, and by seed where there are several."""
    groups: dict[str, list[Line]] = {}
    seeds = {line["seed"] for line in lines}
    for line in lines:
        label = f"{line['dtype']}, seed {line['seed']}" if len(seeds) > 1 else line["dtype"]
        groups.setdefault(label, []).append(line)
    return groups


def row_name(line: Line) -> str:
    return f"{line['op']} {line['id']}"


# ---- as text ------------------------------------------------------------------------------------


def markdown(found: Mapping[str, Any]) -> str:
    """The summary as tables: geometric mean, median, share of wins and worst row."""
    parts = []
    for dtype, one in found.get("kernels", {}).items():
        parts.append(_kernels_text(dtype, one))
    for dtype, one in found.get("sessions", {}).items():
        head = f"### {dtype}, in session: {one['rows']} rows over ONNX Runtime's CUDA MatMul"
        classes = {name: {"ort": figures} for name, figures in one["classes"].items()}
        parts.append("\n".join([head, "", *troubles(one), *table(classes, {"ort": "ORT CUDA"})]))
    return "\n\n".join(parts)


def _kernels_text(dtype: str, one: Mapping[str, Any]) -> str:
    lines = [f"### {dtype}, GPU alone: {one['rows']} rows", ""]
    if one["refused by cuBLAS"]:
        lines.append(f"* cuBLAS refuses {one['refused by cuBLAS']} rows")
    lines += troubles(one)
    if one["largest error"] is not None:
        lines.append(f"* largest relative error: {one['largest error']:.2g}")
    for ours, title in OURS.items():
        if ours not in one:
            continue
        entry = one[ours]
        lines += ["", f"#### {dtype}, {title}", ""]
        lines += table(entry["classes"], BASELINES)
        lines.append("")
        if key := entry.get("skinny, share of copy bandwidth"):
            lines.append(
                f"* M <= {SKINNY_ROWS}, weights above {HEAVY_BYTES / 1e6:.0f} MB: "
                f"{key['geomean']:.0%} of the copy bandwidth ({key['rows']} rows, worst "
                f"{key['worst']:.0%})"
            )
        if entry["prediction"]:
            lines.append(
                f"* predicted over measured time: {entry['prediction']['geomean']:.2f}, typically "
                f"off by a factor of {entry['prediction']['median_factor_off']:.2f}"
            )
    if "share that went to the vendor" in one:
        lines.append(f"* {one['share that went to the vendor']:.0%} of the rows went to the vendor")
    return "\n".join(lines)


def troubles(one: Mapping[str, Any]) -> list[str]:
    return [
        f"* {what}: {len(one[what])} ({', '.join(one[what][:8])}{', ...' * (len(one[what]) > 8)})"
        for what in ("wrong", "failed", "not identical")
        if one.get(what)
    ]


def table(
    classes: Mapping[str, Mapping[str, Mapping[str, Any]]], baselines: Mapping[str, str]
) -> list[str]:
    shown = [b for b in baselines if any(b in against for against in classes.values())]
    head = ["class", "rows"]
    for base in shown:
        head += [f"{baselines[base]}: geomean", "median", "wins", "worst"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, against in classes.items():
        cells = [name, str(max(figures["rows"] for figures in against.values()))]
        for base in shown:
            figures = against.get(base)
            cells += (
                [f"{figures[x]:.3f}" for x in ("geomean", "median")]
                + [f"{figures['wins']:.0%}", f"{figures['worst']:.2f} ({figures['worst_row']})"]
                if figures
                else [""] * 4
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
