"""The library against cuBLAS, cuBLASLt and ONNX Runtime on the operator suites.

    python -m benchmarks.bench_gemm --output FOLDER --dtype f16,bf16 [--seconds 240]
    python -m benchmarks.bench_gemm --output FOLDER --in-session [--seconds 150]
    python -m benchmarks.bench_gemm --summary FOLDER/kernels.csv FOLDER/sessions.csv   # no GPU

The first measures the GPU alone (`kernel_only`), the second whole nodes in sessions
(`in_session`); each prints a summary at its end. In the folder: kernels.csv and sessions.csv with
a line for each row and dtype, gpu.json with what the GPU can do, summary.json. Rows that a CSV
holds already are skipped, so that a suite can be done in parts; rows come in a random order that
the seed fixes, so that any part stands for the whole. `benchmarks.plotting` draws the CSV.

Exit codes: 0 every row measured is right, 1 some are not, 2 wrong usage, 3 the GPU faulted on a
row (it is in the CSV as failed: the same command goes on behind it).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders, csv_rows, in_session, kernel_only, plotting, suites, summaries
from benchmarks.bench_kernels import device_facts
from benchmarks.cublaslt import CublasLt
from benchmarks.interleaved import Interleaved, Loop
from benchmarks.machine import Setting, commit, pack_of, unpacked
from benchmarks.operands import DTYPES, NUMBERS
from benchmarks.recording import say
from benchmarks.running import Provider
from benchmarks.suites import Row

KERNELS, SESSIONS, FACTS, SUMMARY = "kernels.csv", "sessions.csv", "gpu.json", "summary.json"
SESSION_ROWS = 100


def chosen(ops: list[str], seed: int, full: bool, most: int | None) -> list[Row]:
    """Rows of the suites in a random order that the seed fixes, at most `most` of them."""
    rows = [row for op in ops for row in suites.rows(op, seed) if full or row.core]
    random.Random(f"order-{seed}").shuffle(rows)
    return rows[:most]


def measure_kernels(
    rows: list[Row], dtypes: list[str], setting: Setting, folder: Path, deadline: float,
    lt: bool,
) -> bool:  # fmt: skip
    """Adds to kernels.csv until the deadline; returns whether the GPU is still usable."""
    ordinal = setting.provider.ordinal
    l2_bytes = torch.cuda.get_device_properties(ordinal).L2_cache_size
    timer = Interleaved(setting.provider.torch_device, l2_bytes)
    write_facts(setting, timer, dtypes, folder / FACTS)
    bench = kernel_only.KernelOnly(setting, timer, CublasLt() if lt else None)
    out = csv_rows.CsvRows(folder / KERNELS, kernel_only.HEAD, kernel_only.KEY)
    for dtype in dtypes:
        left = [row for row in rows if not out.has(*kernel_only.key(row, dtype))]
        for count, row in enumerate(left):
            if time.monotonic() > deadline:
                say(f"the time is up; {len(left) - count} of {len(left)} rows of {dtype} are left")
                break
            try:
                found = bench.measure(row, dtype)
            except kernel_only.DeviceLost as lost:
                out.write(lost.found)
                say(f"{row} {dtype}: {lost}; this process can use the GPU no more")
                return False
            out.write(found)
            if count % 40 == 0 or found["status"] != "ok":
                say(f"{dtype} {count + 1} of {len(left)}: {row} {found['status']} {found['note']}")
    return True


def measure_sessions(
    rows: list[Row], dtypes: list[str], setting: Setting, folder: Path, deadline: float,
    limits: in_session.Limits,
) -> None:  # fmt: skip
    """Adds to sessions.csv until the deadline."""
    out = csv_rows.CsvRows(folder / SESSIONS, in_session.HEAD, kernel_only.KEY)
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(dir=setting.work, prefix="models-") as models:
            in_session.run(
                rows, dtype, setting.provider, out, Path(models), limits, deadline, say
            )  # fmt: skip


def write_facts(setting: Setting, timer: Interleaved, dtypes: list[str], path: Path) -> None:
    """Writes gpu.json, or adds to it: bandwidth, launch time, and a large product in each dtype."""
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not facts:
        facts = device_facts(setting) | {"commit": commit(), "matmul_tflops": {}}
    for dtype in set(dtypes) - facts["matmul_tflops"].keys():
        contenders.math_mode(dtype)
        size, device = 8192, setting.provider.torch_device
        a, b = (
            torch.randn(size, size, device=device).to(DTYPES[NUMBERS[dtype][0]]) for _ in range(2)
        )
        multiply = partial(torch.matmul, a, b, out=torch.empty_like(a))

        def launch(_: int, multiply: Callable[[], torch.Tensor] = multiply) -> None:
            multiply()

        us = timer.compare({"": launch}, Loop(1, 1))[""].median
        facts["matmul_tflops"][dtype] = 2 * size**3 / us / 1e6
    path.write_text(json.dumps(facts, indent=1) + "\n")


def report(paths: list[Path], json_path: Path | None) -> int:
    """Prints the summary of the CSV files and writes it as JSON; 1 where a row is not right."""
    lines = csv_rows.read(path for path in paths if path.exists())
    facts = plotting.facts_beside(paths[0])
    found = summaries.summary(lines, facts.get("bandwidth_gbps"))
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    print(summaries.markdown(found))
    return int(any(line["status"] in ("wrong", "failed") for line in lines))


def main() -> int:
    arguments = _arguments()
    if arguments.summary:
        return report(arguments.summary, arguments.json)
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here; --summary needs none")
    deadline = time.monotonic() + arguments.seconds
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    most = arguments.rows or (SESSION_ROWS if arguments.in_session else None)
    ops = ["gemm"] if arguments.in_session else arguments.ops
    rows = chosen(ops, arguments.seed, arguments.full, most)
    usable = True
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as work:
        pack = unpacked(arguments.pack, Path(work))
        setting = Setting(Provider(ordinal=arguments.device, pack=pack), pack, work=Path(work))
        torch.cuda.set_device(arguments.device)
        if arguments.in_session:
            limits = in_session.Limits(weight_bytes=arguments.weights_mb << 20)
            measure_sessions(rows, arguments.dtype, setting, folder, deadline, limits)
        else:
            usable = measure_kernels(
                rows, arguments.dtype, setting, folder, deadline, arguments.cublaslt
            )
    wrong = report([folder / KERNELS, folder / SESSIONS], folder / SUMMARY)
    return wrong if usable else 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder of the results; rows are added to it")
    what.add_argument("--summary", type=Path, nargs="+", help="CSV files to sum up")
    parser.add_argument("--json", type=Path, help="with --summary: written as JSON, too")
    parser.add_argument("--in-session", action="store_true", help="nodes in ONNX Runtime sessions")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--core", action="store_true", help="the rows marked as core; the default")
    part.add_argument("--full", action="store_true", help="all rows")
    parser.add_argument(
        "--rows", type=int, help=f"at most so many rows; in session {SESSION_ROWS} by default"
    )
    parser.add_argument("--ops", default="gemm,bmm", help="suites; in session only gemm")
    parser.add_argument(
        "--dtype", default="f16", help="of f16, bf16, f32 (TF32), f32ieee; with commas"
    )
    parser.add_argument("--seed", type=int, default=suites.SEED, help="of the suites")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument(
        "--seconds", type=float, default=240, help="stop starting rows after this long"
    )
    parser.add_argument(
        "--weights-mb", type=int, default=256,
        help="in session: all weights of a model, at most 2000; fewer load sooner",
    )  # fmt: skip
    parser.add_argument(
        "--no-cublaslt", dest="cublaslt", action="store_false", help="leave out its baselines"
    )
    arguments = parser.parse_args()
    arguments.dtype, arguments.ops = arguments.dtype.split(","), arguments.ops.split(",")
    for given, known in ((arguments.dtype, list(NUMBERS)), (arguments.ops, list(suites.OPS))):
        for name in given:
            if name not in known:
                parser.error(f"unknown {name!r}; there are: {', '.join(known)}")
    if arguments.summary:
        for path in arguments.summary:
            if not path.is_file():
                parser.error(f"there is no file {path}")
        return arguments
    if not 1 <= arguments.weights_mb <= 2000:
        parser.error(f"--weights-mb {arguments.weights_mb}; accepted: 1 to 2000")
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
