"""New kernels on a GPU in one go: each checked on odd shapes, then timed against the rest.

    python -m benchmarks.try_kernels --only gemm_ws --output FOLDER [--pack sm_90.mpk.xz]

Every check runs in a child process that is killed when it is silent for `--patience` seconds, so
that a kernel that hangs costs that and no more; a kernel that fails or hangs is not timed. The
folder gets checks.json (what is wrong) and oracle.csv (as `bench_kernels --oracle` writes it: a row
for each kernel and K split, the planner's own choice and cuBLAS). Printed: for each shape the best
of the new kernels beside the planner's choice and cuBLAS.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from moonpoly_ort.custom_ops.kernels.kernel_list import small_specs, specs
from moonpoly_ort.custom_ops.kernels.spec import name

from benchmarks import checks_kernels
from benchmarks.bench_kernels import ORACLE_HEAD, Bench, Shape, read_shapes
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import geometric_mean
from benchmarks.recording import Recorder, plain, run_section, say
from benchmarks.running import Provider
from benchmarks.small_shapes import scalar_shapes, small_shapes

# (N, K) of weights, and rows of activations, where tiles of the SMs' number and long K matter.
WEIGHTS = (
    ("bert", 768, 768), ("bert", 3072, 768), ("bert", 768, 3072), ("llama", 4096, 4096),
    ("llama", 4096, 11008), ("long-k", 128, 16384), ("long-k", 1024, 8192),
)  # fmt: skip
ROWS = (64, 128, 200, 333, 777, 1500, 4096)
# Sets of shapes, and the kernels that are on trial there.
SETS = {
    "small": (small_shapes, lambda: small_specs(90)),
    "scalar": (scalar_shapes, lambda: [spec for spec in specs(90) if spec.family.scalar]),
}


def is_new(only: str, of_set: str) -> Callable[[str], bool]:
    """Whether a kernel of this name is on trial."""
    names = {name(spec) for spec in SETS[of_set][1]()} if of_set else set()
    return lambda kernel: only in kernel and (kernel in names or not of_set)


def shapes(path: Path | None, dtypes: list[str], layouts: list[str]) -> list[Shape]:
    base = (
        list(read_shapes(path))
        if path
        else [Shape(f"{kind}-{n}x{k}-{m}", kind, m, n, k) for kind, n, k in WEIGHTS for m in ROWS]
    )
    return [replace(s, dtype=d, layout=lay) for d in dtypes for lay in layouts for s in base]


def check(setting: Setting, folder: Path, seconds: float) -> frozenset[str]:
    """Runs the section of forced kernels; the names of those that are wrong or hang."""
    work = partial(checks_kernels.kernels, setting)
    outcome = run_section("kernels", work, seconds, setting.work)
    (folder / "checks.json").write_text(json.dumps(plain(asdict(outcome)), indent=1) + "\n")
    say(f"checks: {outcome.status} {outcome.error or ''}")
    wrong = [name for found in outcome.checks for name in found.get("blocklist", {})]
    if outcome.status not in ("passed", "failed") or any(
        found["check"] == "kernels not reached in time" and not found["passed"]
        for found in outcome.checks
    ):
        raise SystemExit("not every kernel was checked: none is timed; allow more --check-seconds")
    return frozenset(wrong)


def measure(
    setting: Setting, folder: Path, wanted: list[Shape], avoid: frozenset[str], rounds: int,
    slowest: float, splits: int, record: Recorder,
) -> None:  # fmt: skip
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    output = folder / "oracle.csv"
    bench = Bench(setting, output, ORACLE_HEAD, avoid)
    left = [shape for shape in wanted if shape.key not in bench.done]
    for count, shape in enumerate(left):
        if record.time_left() < 5:
            say(f"the time is up; {len(left) - count} of {len(left)} shapes are left")
            break
        bench.oracle(shape, rounds, slowest, splits)
    record.note("shapes measured", len(bench.done) + len(left))


def summary(path: Path, new: Callable[[str], bool]) -> str:
    """A line a shape: the best new kernel, the best other one that was timed, cuBLAS."""
    rows: dict[tuple[str, ...], list[tuple[float, str]]] = defaultdict(list)
    on_trial: dict[str, bool] = {}
    with path.open(newline="") as source:
        for row in csv.DictReader(source):
            key = tuple(row[c] for c in ("class", "dtype", "layout", "batch", "m", "n", "k"))
            label = f"{row['kernel']}/{row['split']}"
            on_trial[label] = new(row["kernel"])
            rows[key].append((float(row["us"]), label))
    lines: list[str] = []
    ratios: dict[str, list[float]] = defaultdict(list)
    for key, timed in rows.items():
        best = min((entry for entry in timed if on_trial[entry[1]]), default=None)
        old = min(
            (entry for entry in timed if not on_trial[entry[1]] and "cublas" not in entry[1]),
            default=None,
        )
        vendor = next((us for us, name in timed if name.startswith("cublas")), None)
        if best is None or vendor is None:
            continue
        ratios[key[0]].append(vendor / best[0])
        other = f"{old[0]:8.2f} {old[1]}" if old else ""
        lines.append(
            f"{' '.join(key):40} cublas {vendor:8.2f}  new {best[0]:8.2f} "
            f"({vendor / best[0]:.3f}) {best[1]}  other {other}"
        )
    for kind, values in ratios.items():
        lines.append(f"{kind}: geometric mean of cublas / new {geometric_mean(values):.3f}")
    return "\n".join(lines)


def main() -> int:
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + arguments.seconds
    if arguments.set:
        wanted = list(SETS[arguments.set][0]())
    else:
        wanted = shapes(arguments.shapes, arguments.dtype.split(","), arguments.layout.split(","))
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as folder:
        pack = unpacked(arguments.pack, Path(folder))
        setting = Setting(
            Provider(ordinal=arguments.device, pack=pack), pack, work=Path(folder),
            only=arguments.only, patience=arguments.patience,
        )  # fmt: skip
        wrong = check(setting, arguments.output, arguments.check_seconds)
        for name in sorted(wrong):
            say(f"wrong, not timed: {name}")
        run = partial(
            measure, setting, arguments.output, wanted, wrong, arguments.rounds,
            arguments.slowest, arguments.splits,
        )  # fmt: skip
        outcome = run_section("oracle", run, stop - time.monotonic(), Path(folder))
        say(f"oracle: {outcome.status} {outcome.error or ''}")
    if (arguments.output / "oracle.csv").exists():
        print(summary(arguments.output / "oracle.csv", is_new(arguments.only, arguments.set)))
    return 1 if wrong or outcome.error else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="kernels whose names contain this are new")
    parser.add_argument("--set", default="", choices=["", *SETS], help="a set of shapes")
    parser.add_argument("--output", type=Path, required=True, help="folder for the findings")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--shapes", type=Path, help="CSV as for bench_kernels; default: built in")
    parser.add_argument("--dtype", default="f16", help="timed; several with commas")
    parser.add_argument("--layout", default="nn", help="timed; several with commas")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--patience", type=float, default=8, help="seconds before a kernel is hung")
    parser.add_argument("--check-seconds", type=float, default=200, help="for all checks")
    parser.add_argument("--seconds", type=float, default=500, help="for everything")
    parser.add_argument("--rounds", type=int, default=5, help="replays per candidate")
    parser.add_argument("--slowest", type=float, default=2.5, help="as for bench_kernels --oracle")
    parser.add_argument("--splits", type=int, default=3, help="of a kernel that are timed")
    arguments = parser.parse_args()
    if not (arguments.only or arguments.set):
        parser.error("say which kernels are new: --only or --set")
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
