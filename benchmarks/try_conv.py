"""Every kernel of convolutions on chosen rows of the suite: times beside the plan's and cuDNN's.

    python -m benchmarks.try_conv --pack sm_90.mpk --ids 78,79 --dtype f32 --output F.csv

A row of the CSV is a kernel on a row of the suite, with the K split that is planned for it. Its
result is compared with that of the plan, which is judged against float64; what differs is not
timed. Printed: for each row the fastest kernels. Kernels themselves are checked by the section
`conv_kernels` of `validate_gpu`.

Exit codes: 0 all results right, 1 some are not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import conv_sets, conv_suite
from benchmarks.conv_kernel_only import floor_us
from benchmarks.conv_suite import ConvRow
from benchmarks.interleaved import Interleaved, Loop
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import Launch
from benchmarks.operands import NUMBERS
from benchmarks.recording import say
from benchmarks.running import Provider

HEAD = ["id", "dtype", "kernel", "split", "predicted_us", "us", "cudnn_us", "speed"]
CUDNN, PLAN = "cudnn", "plan"
# Of the norm of the result, that two ways of summing may differ by.
ALLOWED = {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-3, "f32ieee": 1e-5}
SLOWEST = 3.0  # kernels that take more times the fastest in a quick pass are not compared


def measure(
    setting: Setting, timer: Interleaved, row: ConvRow, dtype: str, only: list[str]
) -> tuple[list[list[object]], int]:
    """The lines of a row of the suite, the fastest first, and how many kernels are wrong."""
    size = conv_sets.set_bytes(row, dtype)
    loop = Loop.of(floor_us(row, dtype), size, timer.l2_bytes)
    sets = conv_sets.ConvSets.allocate(row, dtype, loop.sets, setting.provider.torch_device)
    plans = {PLAN: conv_sets.planned(setting, row, dtype)}
    for name, plan in conv_sets.forced(setting, row, dtype).items():
        if not only or any(part in name for part in only):
            plans[name] = plan
    launches: dict[str, Launch] = {}
    wrong, first = 0, torch.empty(0)
    for name, plan in plans.items():
        launch = conv_sets.ours(setting, sets, plan)
        sets.y[0].fill_(torch.nan)
        launch(0)
        result = sets.y[0].float()
        if name == PLAN:
            first = result
            if not (judged := sets.judge(sets.y[0])).right:
                say(f"conv {row.id} {dtype}: the plan is wrong: {judged}")
                return [], 1
        difference = float((result - first).norm() / first.norm())
        if difference <= ALLOWED[dtype]:
            launches[name] = launch
        else:
            wrong += 1
            say(f"conv {row.id} {dtype}: {name} differs from the plan by {difference:.1e}")
    loop = loop.shortened(timer.single_us(launches[PLAN]))
    single = {name: timer.single_us(launch) for name, launch in launches.items()}
    least = min(single.values())
    timed = {n: launch for n, launch in launches.items() if single[n] <= SLOWEST * least}
    try:
        vendor = conv_sets.cudnn(sets)
        for index in range(loop.sets):  # torch searches once for each alignment
            vendor(index)
        timed[CUDNN] = vendor
    except RuntimeError as error:
        say(f"conv {row.id} {dtype}: no cuDNN: {error}")
    times = {name: timing.median for name, timing in timer.compare(timed, loop).items()}
    cudnn = times.pop(CUDNN, float("nan"))
    lines: list[list[object]] = []
    for name, us in sorted(times.items(), key=lambda one: one[1]):
        plan = plans[name].plan
        region = plan.regions[0]
        kernel = f"{PLAN} = {setting.kernel_name(region)}" if name == PLAN else name
        figures = [f"{value:.5g}" for value in (plan.predicted_us, us, cudnn, cudnn / us)]
        lines.append([row.id, dtype, kernel, region.split, *figures])
    return lines, wrong


def main() -> int:
    arguments = _arguments()
    rows = {row.id: row for row in conv_suite.rows()}
    if unknown := [i for i in arguments.ids.split(",") if i not in rows]:
        raise SystemExit(f"the suite has no row {unknown[0]}; there are 0 to {len(rows) - 1}")
    wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="moonpoly-") as work,
        arguments.output.open("w", newline="") as file,
    ):
        pack = unpacked(arguments.pack, Path(work))
        provider = Provider(ordinal=arguments.device, pack=pack)
        setting = Setting(provider, pack, work=Path(work))
        torch.cuda.set_device(arguments.device)
        l2_bytes = torch.cuda.get_device_properties(arguments.device).L2_cache_size
        timer = Interleaved(provider.torch_device, l2_bytes)
        out = csv.writer(file)
        out.writerow(HEAD)
        for dtype in arguments.dtype.split(","):
            for row_id in arguments.ids.split(","):
                only = [part for part in arguments.only.split(",") if part]
                lines, faults = measure(setting, timer, rows[row_id], dtype, only)
                wrong += faults
                out.writerows(lines)
                file.flush()
                say(f"{rows[row_id]}, {dtype}")
                for line in lines[: arguments.show]:
                    say(f"  {line[5]:>8} us, {line[7]} of cuDNN, split {line[3]}: {line[2]}")
    return int(wrong > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", required=True, help="rows of the suite, with commas")
    parser.add_argument("--dtype", default="f32", help=f"of {', '.join(NUMBERS)}, with commas")
    parser.add_argument("--only", default="", help="kernels whose names contain one of these")
    parser.add_argument("--output", type=Path, required=True, help="the CSV")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--show", type=int, default=6, help="kernels printed for a row")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    arguments = parser.parse_args()
    for name in arguments.dtype.split(","):
        if name not in NUMBERS:
            parser.error(f"unknown dtype {name!r}; there are: {', '.join(NUMBERS)}")
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
