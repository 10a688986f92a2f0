"""Convolutions by staged images (`conv_stage`, `conv_staged`: on trial) beside the kernels of the
pack and cuDNN, on the GPU alone.

    python -m benchmarks.try_conv --output FOLDER [--pack sm_90.mpk.xz] [--seconds 90]

The core rows of the convolution suite that are neither pointwise nor depthwise and have 8 channels
or more. Needs Triton, which compiles each tile when it is first used: some 2 s each. In the
folder: staged.csv with, for each row, microseconds of the plan (`planned_us`), of cuDNN's best
plan, of staging and multiplying together (`both_us`) and of the products alone, which is what a
chain of convolutions that stays in that layout would take; the tile and K split that were fastest
in a quick pass; and what the model of `predicted_us` promised. Results are checked against float64.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_conv, conv_kernel_only, conv_sets, conv_suite, csv_rows
from benchmarks.conv_sets import ConvSets
from benchmarks.conv_suite import ConvRow
from benchmarks.interleaved import Interleaved, Loop
from benchmarks.kernel_only import same_again
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import Launch, geometric_mean
from benchmarks.operands import NUMBERS
from benchmarks.recording import say
from benchmarks.running import Provider
from benchmarks.staged import StagedConv, Tile

TILES = (
    Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3),
    Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 4, 4), Tile(128, 64, 64, 4, 4),
    Tile(32, 128, 64, 4, 4, swap=True),
)  # fmt: skip
SPLIT = {TILES[0], TILES[3], TILES[5]}
SMS, FLOPS_PER_US, BYTES_PER_US = (
    132,
    7.5e6,
    3.5e6,
)  # of an H200: its SMs, what one of them multiplies, copies
HEAD = [
    *conv_kernel_only.KEY[:-1], *conv_kernel_only.SIZES, "status", "note", "error", "tile", "split",
    "predicted_us", "planned_us", "cudnn_us", "both_us", "products_us", "kernel",
]  # fmt: skip


def rows(seed: int) -> list[ConvRow]:
    """The suite's core rows that staged images could serve."""
    order = bench_conv.chosen(seed, full=False, most=None)
    return [row for row in order if row.kind == "dense"]


def choices(conv: StagedConv) -> Iterator[tuple[Tile, int]]:
    """Tiles that are at least half full along the output channels, and K splits that the SMs have
    room for."""
    for tile in TILES:
        if tile.bm >= 2 * conv.case.k and tile.bm > 32:
            continue
        yield tile, 1
        if tile in SPLIT:
            for split in (2, 4, 8):
                if conv.tiles(tile) * split <= 2 * SMS and conv.steps(tile) >= 2 * split:
                    yield tile, split


def predicted_us(conv: StagedConv, tile: Tile, split: int) -> tuple[float, float]:
    """(staging, products): a launch each; X and its copy at copy speed; K steps at three quarters
    of the tensor cores' speed, 0.1 us at least, wave by wave; sums of slices."""
    size = conv.x.element_size()
    moved = (conv.x.numel() + conv.staged.numel()) * size
    staging = 2.0 + moved / BYTES_PER_US
    step = max(0.1, 2 * tile.bm * tile.bn * tile.bk * 2 / size / (0.75 * FLOPS_PER_US))
    waves = -(-conv.tiles(tile) * split // SMS)
    products = 2.5 + waves * (0.5 + math.ceil(conv.steps(tile) / split) * step)
    return staging, products + (1.5 if split > 1 else 0.0)


def measure(setting: Setting, timer: Interleaved, row: ConvRow, dtype: str) -> dict[str, Any]:
    """The columns of a row."""
    loop = Loop.of(
        conv_kernel_only.floor_us(row, dtype), conv_sets.set_bytes(row, dtype), timer.l2_bytes
    )
    sets = ConvSets.allocate(row, dtype, loop.sets, setting.provider.torch_device)
    case = row.convolution(dtype)
    convs = [StagedConv(case, *xwy) for xwy in zip(sets.x, sets.w, sets.y, strict=True)]
    plan = conv_sets.planned(setting, row, dtype)
    planned = conv_sets.ours(setting, sets, plan)
    cudnn = conv_sets.cudnn(sets)
    for index in range(loop.sets):
        cudnn(index)
    loop = loop.shortened(timer.single_us(planned))
    options = list(choices(convs[0]))
    launches = [_both(convs, *option) for option in options]
    worst, notes = 0.0, []
    for option, launch in zip(options, launches, strict=True):
        sets.y[0].fill_(torch.nan)
        launch(0)
        first = sets.y[0].clone()
        judged = sets.judge(first)
        worst = max(worst, judged.error)
        if not judged.right or not same_again(sets.y[0], launch, first, 3):
            notes.append(f"{option[0]} x{option[1]}: {judged.excess:.3g} of its bound, or differs")
    best = timer.fastest(launches, loop, seconds=2.0)
    tile, split = options[best]
    times = timer.compare(
        {"planned": planned, "cudnn": cudnn, "both": launches[best],
         "products": _both(convs, tile, split, stage=False)},
        loop,
    )  # fmt: skip
    regions = plan.plan.regions
    return conv_kernel_only.identity(row, dtype) | {
        "status": "wrong" if notes else "ok", "note": "; ".join(notes), "error": worst,
        "tile": str(tile), "split": split, "predicted_us": sum(predicted_us(convs[0], tile, split)),
        "kernel": "+".join(setting.kernel_name(region) for region in regions),
    } | {f"{name}_us": timing.median for name, timing in times.items()}  # fmt: skip


def _both(convs: list[StagedConv], tile: Tile, split: int, stage: bool = True) -> Launch:
    scratch = convs[0].scratch(tile, split)

    def launch(index: int) -> None:
        if stage:
            convs[index].stage()
        convs[index].multiply(tile, split, *scratch)

    return launch


def main() -> int:
    arguments = _arguments()
    deadline = time.monotonic() + arguments.seconds
    out = csv_rows.CsvRows(
        arguments.output / "staged.csv", HEAD, conv_kernel_only.KEY[:-1]
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="moonpoly-") as work:
        pack = unpacked(arguments.pack, Path(work))
        setting = Setting(Provider(ordinal=arguments.device, pack=pack), pack, work=Path(work))
        torch.cuda.set_device(arguments.device)
        l2_bytes = torch.cuda.get_device_properties(arguments.device).L2_cache_size
        timer = Interleaved(setting.provider.torch_device, l2_bytes)
        for dtype in arguments.dtype.split(","):
            for row in rows(arguments.seed):
                if out.has(*conv_kernel_only.key(row, dtype)) or time.monotonic() > deadline:
                    continue
                found = measure(setting, timer, row, dtype)
                out.write(found)
                shown = {name: found[name] for name in HEAD[HEAD.index("tile") :]}
                say(f"{row} {dtype}: {found['status']} {found['note']} {shown}")
    return report(csv_rows.read([out.path]))


def report(lines: list[dict[str, str]]) -> int:
    """Prints geometric means; 1 where a row is not right."""
    sound = [line for line in lines if line["status"] == "ok"]
    print(f"{len(sound)} of {len(lines)} rows are right")
    for base, ours in (
        ("planned", "both"), ("planned", "products"), ("cudnn", "planned"), ("cudnn", "both"),
        ("cudnn", "products"), ("predicted", "both"),
    ):  # fmt: skip
        ratios = [float(line[f"{base}_us"]) / float(line[f"{ours}_us"]) for line in sound]
        if ratios:
            mean, least = geometric_mean(ratios), min(ratios)
            print(f"{base} / {ours}: geometric mean {mean:.3f}, worst {least:.3f}")
    return int(len(sound) < len(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder; rows are added to it")
    parser.add_argument("--dtype", default="f16", help="of f16, bf16, f32 (TF32); with commas")
    parser.add_argument("--seed", type=int, default=conv_suite.SEED)
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--seconds", type=float, default=90, help="stop starting rows after this")
    arguments = parser.parse_args()
    accepted = [name for name in NUMBERS if name != "f32ieee"]
    for name in arguments.dtype.split(","):
        if name not in accepted:
            parser.error(f"unknown {name!r}; there are: {', '.join(accepted)}")
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
