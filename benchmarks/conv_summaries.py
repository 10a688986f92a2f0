"""What the rows of `bench_conv` amount to, by kind of layer, by network and over all.

Read from the CSV files and the findings of the streams; no GPU is needed. A speed-up is the
baseline's time over ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.conv_suite import KINDS, NETWORKS
from benchmarks.measuring import geometric_mean
from benchmarks.summaries import (
    ALL,
    Line,
    Speedups,
    by_dtype,
    prediction,
    ratios,
    row_name,
    table,
    troubles,
)

CUDNN = {"cudnn": "cuDNN, best of its heuristics"}
ORT = {"better": "ONNX Runtime, better mode", "default": "default", "heuristic": "HEURISTIC"}
CORE = "core rows"
MODES = ("default", "heuristic")
MEMORY = 1.1  # of ONNX Runtime's own at the largest size, at most


def _groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found = {kind: [line for line in lines if line["class"] == kind] for kind in KINDS}
    found |= {net: [line for line in lines if line["net"] == net] for net in NETWORKS}
    core = [line for line in lines if line["core"] == "1"]
    if len(core) < len(lines):
        found[CORE] = core
    found[ALL] = list(lines)
    return {name: members for name, members in found.items() if members}


def _classes(
    lines: Sequence[Line], against: Callable[[Sequence[Line], str], Any], bases: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, members in _groups(lines).items():
        figures = {base: Speedups.of(against(members, base)) for base in bases}
        if any(figures.values()):
            found[name] = {base: asdict(one) for base, one in figures.items() if one is not None}
    return found


def _against_cudnn(lines: Sequence[Line], base: str) -> list[tuple[float, str]]:
    """Of lines about the same row, one for each heuristic, the better cuDNN counts."""
    least: dict[str, float] = {}
    for ratio, row in ratios(lines, "ours", base):
        least[row] = min(ratio, least.get(row, ratio))
    return [(ratio, row) for row, ratio in least.items()]


def _against_ort(lines: Sequence[Line], base: str) -> list[tuple[float, str]]:
    if base != "better":
        return ratios(lines, "ours", base)
    return [
        (min(float(line[f"{mode}_us"]) for mode in MODES if line[f"{mode}_us"])
         / float(line["ours_us"]), row_name(line))
        for line in lines
        if line["ours_us"] and any(line[f"{mode}_us"] for mode in MODES)
    ]  # fmt: skip


def _rows(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "rows": len({(line["seed"], line["id"]) for line in lines}),
        "wrong": [row_name(line) for line in lines if line["status"] == "wrong"],
        "failed": [row_name(line) for line in lines if line["status"] == "failed"],
    }


def kernels(lines: Sequence[Line]) -> dict[str, Any]:
    """The summary of kernel-only rows of one dtype."""
    sound = [line for line in lines if line["status"] == "ok"]
    best = [ratio for ratio, _ in ratios(sound, "ours", "best")]
    return _rows(lines) | {
        "not identical": [row_name(line) for line in lines if line["identical"] == "0"],
        "largest error": max((float(line["error"]) for line in sound), default=None),
        "heuristics": sorted({line["heuristic"] for line in lines}),
        "timed by events": sum(line["timed_by"] == "events" for line in sound),
        "classes": _classes(sound, _against_cudnn, CUDNN),
        "best kernel's time / the plan's": geometric_mean(best) if best else None,
        "prediction": prediction(sound, "ours"),
    }  # fmt: skip


def sessions(lines: Sequence[Line]) -> dict[str, Any]:
    """The summary of in-session rows of one dtype."""
    sound = [line for line in lines if line["status"] == "ok"]
    return _rows(lines) | {"classes": _classes(sound, _against_ort, ORT)}


def summary(
    kernel_lines: Sequence[Line], session_lines: Sequence[Line], streams: Mapping[str, Any]
) -> dict[str, Any]:
    """As JSON takes it: {"kernels": {dtype: ...}, "sessions": {dtype: ...}, "streams": ...}."""
    found: dict[str, Any] = {}
    for kind, lines, make in (
        ("kernels", kernel_lines, kernels), ("sessions", session_lines, sessions),
    ):  # fmt: skip
        if groups := by_dtype(lines):
            found[kind] = {label: make(group) for label, group in groups.items()}
    if streams:
        found["streams"] = dict(streams)
    if memory := memory_of(streams):
        found["memory"] = memory
    return found


def memory_of(streams: Mapping[str, Any]) -> dict[str, Any]:
    """MiB of each session at the largest size of its stream, and ours over ONNX Runtime's default;
    empty where one of these two was not measured."""
    mib = {
        name.removeprefix("memory_"): outcome["notes"]["MiB"]
        for name, outcome in streams.items()
        if name.startswith("memory_") and "MiB" in outcome["notes"]
    }
    if not {"ours", "default"} <= mib.keys():
        return {}
    share = mib["ours"] / mib["default"]
    return {"MiB": mib, "ours / default": share, "limit": MEMORY, "passed": share <= MEMORY}


def markdown(found: Mapping[str, Any]) -> str:
    """The summary as tables."""
    parts = []
    for dtype, one in found.get("kernels", {}).items():
        heuristics = " and ".join(one["heuristics"])
        head = f"### {dtype}, GPU alone: {one['rows']} rows, cuDNN's heuristic {heuristics}"
        lines = [head, "", *troubles(one)]
        if one["largest error"] is not None:
            lines.append(f"* largest relative error: {one['largest error']:.2g}")
        if one["timed by events"]:
            lines.append(f"* {one['timed by events']} rows timed by events: no graph held them")
        if one["best kernel's time / the plan's"]:
            share = one["best kernel's time / the plan's"]
            lines.append(f"* the best kernel's time over the plan's: {share:.2f}")
        if one["prediction"]:
            lines.append(
                f"* predicted over measured time: {one['prediction']['geomean']:.2f}, typically "
                f"off by a factor of {one['prediction']['median_factor_off']:.2f}"
            )
        parts.append("\n".join([*lines, "", *table(one["classes"], CUDNN)]))
    for dtype, one in found.get("sessions", {}).items():
        lines = [f"### {dtype}, in session: {one['rows']} rows", "", *troubles(one), ""]
        parts.append("\n".join([*lines, *table(one["classes"], ORT)]))
    if memory := found.get("memory"):
        mib = ", ".join(f"{name} {value:.0f}" for name, value in memory["MiB"].items())
        missed = "" if memory["passed"] else " (not reached)"
        parts.append(
            f"### GPU memory, MiB\n\n* {mib}: ours / default {memory['ours / default']:.3f}, "
            f"at most {memory['limit']}{missed}"
        )
    for name, outcome in found.get("streams", {}).items():
        lines = [f"### {name}: {outcome['status']}", ""]
        if outcome["error"]:
            lines.append(f"* {outcome['error']}")
        for check in outcome["checks"]:
            figure = check.get("faster", check["figure"])
            lines.append(
                f"* {check['check']}: {figure}{'' if check['passed'] else ' (not reached)'}"
            )
        lines += [f"* {note}: {value}" for note, value in outcome["notes"].items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
