"""Everything that must hold on a GPU, checked in one go, section by section.

    python -m benchmarks.validate_gpu --output results.json [--pack sm_90.mpk] [--models FOLDER]

Each section runs in its own process with its own time limit; what it finds is in the results file
at once. The last lines are a table: section, checks that hold, the worst figure and its limit.
Exit codes: 0 everything holds, 1 something does not, 2 the arguments are wrong.

With `--provider CPUExecutionProvider` it rehearses on a machine without a GPU: models run on ONNX
Runtime's own kernels, the kernels (few of them, with `--quick`) in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from benchmarks import (
    checks_conv,
    checks_execution,
    checks_graphs,
    checks_kernels,
    checks_models,
    checks_sanitizer,
    checks_vendor,
)
from benchmarks.machine import Setting, architecture, commit, environment, unpacked
from benchmarks.recording import START, Outcome, Recorder, plain, run_section, say
from benchmarks.running import CUDA, Provider
from moonpoly_ort import packs

Work = Callable[[Setting, Recorder], None]

# Name -> (work, seconds). Timings come late: BERT-base is being exported beside the first sections.
SECTIONS: dict[str, tuple[Work, float]] = {
    "kernels": (checks_kernels.kernels, 100),
    "shapes": (checks_kernels.shapes, 60),
    "onnx": (checks_models.onnx_models, 50),
    "threads": (checks_execution.threads, 40),
    "chain": (checks_execution.chain, 60),
    "cuda_graph": (checks_execution.cuda_graph, 30),
    "graphs": (checks_graphs.graphs, 40),
    "bert": (checks_models.bert, 100),
    "times": (checks_execution.times, 40),
    "conv_kernels": (checks_conv.kernels, 60),
    "conv_chain": (checks_conv.chain, 40),
    "devices": (checks_execution.devices, 20),
    "vendor": (checks_vendor.vendor, 70),
    "sanitizer": (checks_sanitizer.sanitizer, 90),
}


class Results:
    """The results file: a head, then a section each; written aside and renamed at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
        }
        self.sections: dict[str, Outcome] = {}

    def save(self) -> None:
        sections = {name: plain(asdict(outcome)) for name, outcome in self.sections.items()}
        text = json.dumps({"head": plain(self.head), "sections": sections}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        aside.write_text(text + "\n")
        os.replace(aside, self.path)

    def table(self) -> str:
        """A line for each section and for each check that does not hold."""
        lines = [
            f"{'section':12} {'status':8} {'checks':>8} {'s':>6}  nearest to its limit, or over it"
        ]
        for name, outcome in self.sections.items():
            held = sum(check["passed"] for check in outcome.checks)
            share, seconds = f"{held}/{len(outcome.checks)}", f"{outcome.seconds:.1f}"
            lines.append(
                f"{name:12} {outcome.status:8} {share:>8} {seconds:>6}  {_telling(outcome)}"
            )
            for check in outcome.checks:
                if not check["passed"]:
                    lines.append(
                        f"    FAIL {check['check']}: {check['figure']} (limit {check['limit']})"
                    )
        return "\n".join(lines)


def _telling(outcome: Outcome) -> str:
    if outcome.error:
        return outcome.error[:110]
    if "skipped" in outcome.notes:
        return str(outcome.notes["skipped"])[:110]
    shares = [
        (check["figure"] / check["limit"], check)
        for check in outcome.checks
        if isinstance(check["figure"], (int, float))
        and isinstance(check["limit"], (int, float))
        and check["limit"]
    ]
    if not shares:
        return ""
    _, check = max(shares, key=lambda pair: pair[0])
    return f"{check['check']}: {check['figure']} (limit {check['limit']})"


def main() -> int:
    arguments = _arguments()
    results = Results(arguments.output)
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as folder:
        work = Path(folder)
        pack = unpacked(arguments.pack, work)
        bert = arguments.bert or work / "bert"
        setting = Setting(
            Provider(arguments.provider, arguments.device, pack), pack, arguments.models, bert,
            work, arguments.seed, arguments.quick, arguments.only, arguments.patience,
        )  # fmt: skip
        exporting = None
        if arguments.bert is None and {"bert", "times"} & set(arguments.sections):
            layers = "2" if arguments.quick else "12"
            with (work / "bert.log").open("w") as log:
                exporting = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.bert", str(bert), "--layers", layers],
                    stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
        try:
            _head(results, setting, arguments.commit)
            _sections(results, setting, arguments.sections, arguments.seconds)
        finally:
            if exporting is not None:
                exporting.kill()
                exporting.wait()
    print(results.table())
    bad = [
        name
        for name, outcome in results.sections.items()
        if outcome.status not in ("passed", "skipped")
    ]
    print(
        f"results: {results.path}; "
        + (f"not held: {', '.join(bad)}" if bad else "everything holds")
    )
    return 1 if bad else 0


def _head(results: Results, setting: Setting, commit: str) -> None:
    """Read in a process of its own, since it touches the pack and the driver."""

    def work(record: Recorder) -> None:
        record.note("environment", environment(setting, commit))

    outcome = run_section("environment", work, 60, setting.work)
    results.head |= outcome.notes.get("environment", {"error": outcome.error})
    results.head["provider"] = setting.provider.name
    results.save()


def _sections(results: Results, setting: Setting, names: list[str], seconds: float) -> None:
    for name in names:
        work, allowed = SECTIONS[name]
        left = seconds - (time.monotonic() - START)
        if left < 10:
            results.sections[name] = Outcome(
                "timeout", error="not started: the time for all sections is up"
            )
            results.save()
            continue
        say(f"{name}: starts, {min(allowed, left):.0f} s at most")
        outcome = run_section(name, partial(work, setting), min(allowed, left), setting.work)
        results.sections[name] = outcome
        results.save()
        say(f"{name}: {outcome.status} after {outcome.seconds:.1f} s {outcome.error or ''}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the results file, JSON")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=540, help="for all sections together")
    parser.add_argument(
        "--pack", type=Path, help="a kernel pack, perhaps .xz; default: what is found"
    )
    parser.add_argument(
        "--models", type=Path, help="folder of published models, as tests/ unpack them"
    )
    parser.add_argument(
        "--bert", type=Path, help="folder that `python -m benchmarks.bert` has written"
    )
    parser.add_argument("--provider", default=CUDA, help="ONNX Runtime's execution provider")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument(
        "--commit", default=commit(), help="recorded in the results; default: git's HEAD"
    )
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", default="", help="kernels: those whose names contain this")
    parser.add_argument(
        "--patience", type=float, default=30, help="kernels: seconds before one counts as hung"
    )
    parser.add_argument("--quick", action="store_true", help="a small part of everything")
    arguments = parser.parse_args()
    arguments.sections = [name for name in arguments.sections.split(",") if name]
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    if arguments.provider not in ort.get_available_providers():
        parser.error(f"onnxruntime {ort.__version__} has no {arguments.provider}, only "
                     f"{', '.join(ort.get_available_providers())}")  # fmt: skip
    if arguments.pack is None:
        sm = architecture(arguments.device) or 90
        arguments.pack = packs.find_pack(sm) or packs.catalog(sm)
    elif not arguments.pack.is_file():
        parser.error(f"there is no pack {arguments.pack}; build one with `moonpoly pack`")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
