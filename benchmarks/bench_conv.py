"""Convolutions against cuDNN and ONNX Runtime: the suite, and models on changing image sizes.

    python -m benchmarks.bench_conv --output FOLDER [--models FOLDER] [--budget 240]
    TORCH_CUDNN_USE_HEURISTIC_MODE_B=1 python -m benchmarks.bench_conv --output FOLDER \\
        --parts kernels [--budget 60]
    python -m benchmarks.bench_conv --summary FOLDER      # no GPU

kernels: the GPU alone, our plan against cuDNN (`conv_kernel_only`); cuDNN's heuristic B needs a
process of its own, the second command. sessions: whole nodes in ONNX Runtime (`conv_in_session`).
streams: a chain of eight layers on eight sizes in turn (`checks_conv`), PP-OCRv4 on random sizes,
memory, and Conv nodes left (`conv_streams`); models come from `--models`, a folder of unpacked
wheels as the tests make it.

In the folder: kernels.csv and sessions.csv with a line for each row and dtype, streams.json,
gpu.json, summary.json, and a PNG for each dtype. What is there already is not done again; rows
come in a random order that the seed fixes. `--budget` seconds are shared out over the parts asked
for; what a part leaves goes to those behind it.

Exit codes: 0 every row measured is right, 1 some are not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    bench_gemm,
    checks_conv,
    conv_in_session,
    conv_kernel_only,
    conv_streams,
    conv_suite,
    conv_summaries,
    csv_rows,
    plotting,
)
from benchmarks.bench_gemm import FACTS, KERNELS, SESSIONS, SUMMARY
from benchmarks.conv_suite import ConvRow
from benchmarks.interleaved import Interleaved
from benchmarks.kernel_only import DeviceLost
from benchmarks.machine import Setting, architecture, pack_of, unpacked
from benchmarks.operands import NUMBERS
from benchmarks.recording import Recorder, plain, run_section, say
from benchmarks.running import Provider

STREAMS = "streams.json"
# What each part is given of the budget, as weights.
PARTS = {"kernels": 1.0, "sessions": 1.5, "streams": 3.0}
# The same of the streams: ONNX Runtime's searches are what takes the time.
WEIGHTS = {"chain": 2.0, "detection": 6.0, "recognition": 4.0}
LEAST_SECONDS = 8.0  # that a stream is started with
RESTARTS = 5  # of the kernels behind a fault on the GPU


def chosen(seed: int, full: bool, most: int | None) -> list[ConvRow]:
    """Rows of the suite in a random order that the seed fixes, at most `most` of them."""
    rows = [row for row in conv_suite.rows(seed) if full or row.core]
    random.Random(f"order-{seed}").shuffle(rows)
    return rows[:most]


def measure_kernels(
    rows: list[ConvRow], dtypes: list[str], setting: Setting, folder: Path, every_kernel: bool,
    record: Recorder,
) -> None:  # fmt: skip
    """Adds to kernels.csv until the record's deadline.

    Raises:
        DeviceLost: a fault on the GPU; the row is in the CSV.
    """
    ordinal = setting.provider.ordinal
    torch.cuda.set_device(ordinal)
    l2_bytes = torch.cuda.get_device_properties(ordinal).L2_cache_size
    timer = Interleaved(setting.provider.torch_device, l2_bytes)
    bench_gemm.write_facts(setting, timer, dtypes, folder / FACTS)
    bench = conv_kernel_only.ConvKernelOnly(setting, timer, every_kernel)
    out = csv_rows.CsvRows(folder / KERNELS, conv_kernel_only.HEAD, conv_kernel_only.KEY)
    heuristic = conv_kernel_only.heuristic()
    for dtype in dtypes:
        left = [row for row in rows if not out.has(*conv_kernel_only.key(row, dtype, heuristic))]
        for count, row in enumerate(left):
            if record.time_left() < 0:
                say(f"the time is up; {len(left) - count} of {len(left)} rows of {dtype} are left")
                break
            try:
                found = bench.measure(row, dtype)
            except DeviceLost as lost:
                out.write(lost.found)
                raise
            out.write(found)
            if count % 10 == 0 or found["status"] != "ok" or found["note"]:
                say(f"{dtype} {count + 1} of {len(left)}: {row} {found['status']} {found['note']}")


def measure_sessions(
    rows: list[ConvRow], dtypes: list[str], setting: Setting, folder: Path, record: Recorder
) -> None:
    """Adds to sessions.csv until the record's deadline."""
    out = csv_rows.CsvRows(folder / SESSIONS, conv_in_session.HEAD, conv_in_session.KEY)
    for dtype in dtypes:
        bench = conv_in_session.ConvInSession(setting.provider, dtype)
        left = [row for row in rows if not out.has(*conv_kernel_only.key(row, dtype))]
        found = conv_in_session.groups(left, bench.element.itemsize)
        for count, group in enumerate(found):
            if record.time_left() < 0:
                say(f"the time is up; {len(found) - count} of {len(found)} layers of {dtype} left")
                break
            for measured in bench.measure(group):
                out.write(measured)
                if measured["status"] != "ok":
                    say(f"{dtype} conv {measured['id']}: {measured['note']}")
            say(f"{dtype}, layer {count + 1} of {len(found)}: {group.nodes} nodes")


def measure_streams(setting: Setting, folder: Path, deadline: float) -> None:
    """Adds to streams.json those that it does not hold yet."""
    path = folder / STREAMS
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    works: dict[str, Callable[[Recorder], Any]] = {
        "chain": partial(checks_conv.chain, setting)
    } | conv_streams.sections(setting)
    left = [name for name in works if name not in done]
    for place, name in enumerate(left):
        weights = [WEIGHTS.get(one, 0.5) for one in left[place:]]
        remaining = deadline - time.monotonic()
        if remaining < LEAST_SECONDS:
            say(f"the time is up; left: {', '.join(left[place:])}")
            break
        seconds = max(LEAST_SECONDS, remaining * weights[0] / sum(weights))
        outcome = run_section(name, works[name], seconds, setting.work)
        say(f"{name}: {outcome.status} after {outcome.seconds:.1f} s {outcome.error or ''}")
        if outcome.status != "timeout":
            done[name] = plain(asdict(outcome))
            path.write_text(json.dumps(done, indent=1) + "\n")


def run_part(name: str, work: Callable[[Recorder], None], deadline: float, folder: Path) -> None:
    """Runs a part that writes a CSV in a process of its own, again behind a fault on the GPU."""
    for turn in range(RESTARTS):
        seconds = (deadline - time.monotonic()) / 0.9  # it is told to stop at 90%, and killed then
        if seconds < 5:
            return
        outcome = run_section(f"{name}-{turn}", work, seconds, folder)
        say(f"{name}: {outcome.seconds:.1f} s {outcome.error or ''}")
        if outcome.error is None or not outcome.error.startswith(DeviceLost.__name__):
            return


def report(folder: Path) -> int:
    """Prints the summary of what is in the folder and writes it, with pictures; 1 where a row is
    not right."""
    kernels, sessions = (
        csv_rows.read(path for path in [folder / name] if path.exists())
        for name in (KERNELS, SESSIONS)
    )
    streams = folder / STREAMS
    found = conv_summaries.summary(
        kernels, sessions, json.loads(streams.read_text()) if streams.exists() else {}
    )
    (folder / SUMMARY).write_text(json.dumps(plain(found), indent=1) + "\n")
    print(conv_summaries.markdown(found))
    for dtype in sorted({line["dtype"] for line in kernels}):
        try:
            plotting.draw(
                kernels, dtype, "ours", plotting.facts_beside(folder / KERNELS),
                folder / f"{dtype}.png",
            )  # fmt: skip
        except (ImportError, ValueError) as reason:
            say(f"no picture of {dtype}: {reason}")
    return int(any(line["status"] in ("wrong", "failed") for line in (*kernels, *sessions)))


def main() -> int:
    arguments = _arguments()
    if arguments.summary:
        return report(arguments.summary)
    if architecture(arguments.device) is None:
        raise SystemExit("this measures a GPU, and nvidia-smi names none; --summary needs none")
    deadline = time.monotonic() + arguments.budget
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    rows = chosen(arguments.seed, arguments.full, arguments.rows)
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as work:
        pack = unpacked(arguments.pack, Path(work))
        setting = Setting(
            Provider(ordinal=arguments.device, pack=pack), pack, arguments.models, work=Path(work),
            seed=arguments.seed,
        )  # fmt: skip
        for place, part in enumerate(arguments.parts):
            weights = [PARTS[one] for one in arguments.parts[place:]]
            left = deadline - time.monotonic()
            until = time.monotonic() + left * weights[0] / sum(weights)
            say(f"{part}: {until - time.monotonic():.0f} s at most")
            if part == "streams":
                measure_streams(setting, folder, until)
            elif part == "kernels":
                measure = partial(
                    measure_kernels, rows, arguments.dtype, setting, folder, arguments.every_kernel
                )
                run_part(part, measure, until, setting.work)
            else:
                measure = partial(measure_sessions, rows, arguments.dtype, setting, folder)
                run_part(part, measure, until, setting.work)
    return report(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder of the results; rows are added to it")
    what.add_argument("--summary", type=Path, help="such a folder, to be summed up")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--core", action="store_true", help="the rows marked as core; the default")
    part.add_argument("--full", action="store_true", help="all rows")
    parser.add_argument("--rows", type=int, help="at most so many rows")
    parser.add_argument(
        "--dtype", default="f16", help="of f16, bf16, f32 (TF32), f32ieee; with commas"
    )
    parser.add_argument("--seed", type=int, default=conv_suite.SEED, help="of suite and streams")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--models", type=Path, help="folder of published models")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--budget", type=float, default=240, help="seconds for all parts")
    parser.add_argument(
        "--every-kernel", action="store_true",
        help="kernels: time each kernel that takes a row, and the fastest beside the plan",
    )  # fmt: skip
    arguments = parser.parse_args()
    arguments.dtype, arguments.parts = arguments.dtype.split(","), arguments.parts.split(",")
    for given, known in ((arguments.dtype, list(NUMBERS)), (arguments.parts, list(PARTS))):
        for name in given:
            if name not in known:
                parser.error(f"unknown {name!r}; there are: {', '.join(known)}")
    if arguments.summary:
        if not arguments.summary.is_dir():
            parser.error(f"there is no folder {arguments.summary}")
        return arguments
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
