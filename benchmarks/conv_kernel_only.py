"""One row of the convolution suite on the GPU alone: is our result right, how long does it take,
and how long cuDNN?

Checked before it is timed: the outputs against float64, and the same bits in ten runs; once more
after the timing. cuDNN is called through torch in the same layout (NCHW): `cudnn_us` is the
fastest plan of the first ten of its heuristic (torch.backends.cudnn.benchmark). Which heuristic,
A or B, torch decides when it is loaded, by the environment variable of `HEURISTIC_B`; each is a
line of the CSV. What the heuristic would have chosen without a search is not timed: torch keeps one
plan for a shape, whichever way it was found.
"""

from __future__ import annotations

import os

import torch

from benchmarks import conv_sets
from benchmarks.contenders import VENDOR
from benchmarks.conv_sets import ConvPlan, ConvSets
from benchmarks.conv_suite import ConvRow
from benchmarks.csv_rows import timing_columns
from benchmarks.interleaved import Interleaved, Loop
from benchmarks.kernel_only import (
    REPETITIONS,
    Checked,
    Found,
    guarded,
    one_line,
    same_again,
    verdict,
)
from benchmarks.machine import Setting
from benchmarks.measuring import Ceilings, Launch

HEURISTIC_B = "TORCH_CUDNN_USE_HEURISTIC_MODE_B"
KEY = ("seed", "op", "id", "dtype", "heuristic")
SIZES = ["class", "net", "n", "c_in", "h", "w", "c_out", "filter", "stride", "groups", "core",
         "flops", "bytes"]  # fmt: skip
HEAD = [
    *KEY, *SIZES, "status", "note", "error", "excess", "identical",
    "kernel", "split", "packed", "predicted_us", "ours_us", "ours_low_us", "ours_high_us",
    "cudnn_us", "cudnn_low_us", "cudnn_high_us",
    "timed_by", "best_kernel", "best_split", "best_us",
]  # fmt: skip
OP = "conv"


def heuristic() -> str:
    """a or b: the heuristic that torch asks for cuDNN's plans in this process."""
    return "b" if os.environ.get(HEURISTIC_B) == "1" else "a"


def identity(row: ConvRow, dtype: str) -> Found:
    """The columns that say which row it is."""
    return {
        "seed": row.seed, "op": OP, "id": row.id, "dtype": dtype, "class": row.kind,
        "net": row.net, "n": row.n, "c_in": row.c_in, "h": row.h, "w": row.w, "c_out": row.c_out,
        "filter": row.kernel, "stride": row.stride, "groups": row.groups, "core": row.core,
        "flops": row.flops, "bytes": conv_sets.set_bytes(row, dtype),
    }  # fmt: skip


def key(row: ConvRow, dtype: str, *more: str) -> tuple[str, ...]:
    """What a CSV knows the row by; `more`: the heuristic, where the CSV has it."""
    return str(row.seed), OP, row.id, dtype, *more


def floor_us(row: ConvRow, dtype: str) -> float:
    """The least time that the row can take."""
    ceilings = Ceilings()
    moved = conv_sets.set_bytes(row, dtype) / ceilings.bytes_per_us
    return max(moved, row.flops / ceilings.flops_per_us)


class ConvKernelOnly:
    """Measures rows. Without a timer they are only checked, which needs no GPU (slow).

    `every_kernel`: all kernels that take a row are timed in a quick pass, and the fastest of them
    against the plan.
    """

    def __init__(
        self, setting: Setting, timer: Interleaved | None = None, every_kernel: bool = False
    ) -> None:
        self.setting, self.timer, self.every_kernel = setting, timer, every_kernel
        self.device = setting.provider.torch_device

    def measure(self, row: ConvRow, dtype: str) -> Found:
        """The row's columns. `status`: ok; wrong, where our result is; failed, where we have no
        plan, or the memory does not suffice.

        Raises:
            DeviceLost: a fault on the GPU.
        """
        found = identity(row, dtype) | {"heuristic": heuristic()}
        return guarded(self.setting, found, lambda: self._measure(row, dtype))

    def _measure(self, row: ConvRow, dtype: str) -> Found:
        l2_bytes = self.timer.l2_bytes if self.timer else 1
        loop = Loop.of(floor_us(row, dtype), conv_sets.set_bytes(row, dtype), l2_bytes)
        sets = ConvSets.allocate(row, dtype, loop.sets if self.timer else 1, self.device)
        chosen = conv_sets.planned(self.setting, row, dtype)
        launch = conv_sets.ours(self.setting, sets, chosen)
        found = self._described(chosen)
        y = sets.y[0]
        y.fill_(torch.nan)
        launch(0)
        first = y.clone()
        checked = Checked(
            sets.judge(first), same_again(y, launch, first, REPETITIONS - 1), first
        )  # fmt: skip
        notes = []
        if self.timer:
            timed, notes = self._timed(self.timer, sets, launch, loop)
            found |= timed
            checked.identical &= same_again(y, launch, first)
        judged = verdict(self.setting, {"ours": checked})
        notes = [note for note in (judged.pop("note"), *notes) if note]
        return found | judged | {"note": "; ".join(notes)}

    def _described(self, chosen: ConvPlan) -> Found:
        kernels, regions = self.setting.pack.kernels, chosen.plan.regions
        names = [kernels[r.kernel].name if r.kernel >= 0 else VENDOR for r in regions]
        return {
            "kernel": "+".join(names), "split": "+".join(str(r.split) for r in regions),
            "packed": bool(chosen.packed), "predicted_us": chosen.plan.predicted_us,
        }  # fmt: skip

    def _timed(
        self, timer: Interleaved, sets: ConvSets, ours: Launch, loop: Loop
    ) -> tuple[Found, list[str]]:
        candidates: dict[str, Launch] = {"ours": ours}
        found: Found = {}
        notes = []
        loop = loop.shortened(timer.single_us(ours))
        if self.every_kernel:
            forced = conv_sets.forced(self.setting, sets.row, sets.dtype)
            plans = list(forced.values())
            launches = [conv_sets.ours(self.setting, sets, plan) for plan in plans]
            best = timer.fastest(launches, loop, seconds=1.0)
            name, plan = list(forced)[best], plans[best]
            found |= {"best_kernel": name, "best_split": plan.plan.regions[0].split}
            candidates["best"] = launches[best]
        by = "graph"
        try:
            vendor = conv_sets.cudnn(sets)
            self._meet(vendor, loop)
            candidates["cudnn"] = vendor
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise
            notes.append(f"no cuDNN: {one_line(error)}")
        try:
            times = timer.compare(candidates, loop)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            torch.cuda.synchronize()
            times = {name: timer.enqueued(one, loop) for name, one in candidates.items()}
            by = "events"
        for name, timing in times.items():
            found |= {"best_us": timing.median} if name == "best" else timing_columns(name, timing)
        return found | {"timed_by": by}, notes

    @staticmethod
    def _meet(vendor: Launch, loop: Loop) -> None:
        """Calls it on all sets: torch searches once for each alignment of the operands, which a
        capture does not allow."""
        for index in range(loop.sets):
            vendor(index)
        torch.cuda.synchronize()
