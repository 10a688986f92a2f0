"""One row of a suite on the GPU alone: is our result right, and how long does each contender take?

Checked before it is timed: the outputs against float64 (`accuracy`), and the same bits in ten runs;
once more after the timing, which may have left something behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import accuracy, contenders
from benchmarks.csv_rows import timing_columns
from benchmarks.cublaslt import WORKSPACE_BYTES, CublasLt, Refused
from benchmarks.interleaved import Interleaved, Loop, floor_us
from benchmarks.machine import Setting
from benchmarks.measuring import Launch
from benchmarks.operand_sets import OperandSets, set_bytes
from benchmarks.operands import DTYPES, NUMBERS
from benchmarks.suites import Row
from moonpoly_ort.errors import DeviceError, MoonPolyError

KEY = ("seed", "op", "id", "dtype")
HEAD = [
    *KEY, "class", "batch", "m", "n", "k", "core", "status", "note", "error", "excess", "identical",
    "kernel", "split", "regions", "repacked", "predicted_us",
    "alone_us", "alone_low_us", "alone_high_us",
    "allowed_kernel", "allowed_split", "allowed_regions", "allowed_repacked",
    "allowed_predicted_us", "vendor",
    "allowed_us", "allowed_low_us", "allowed_high_us",
    "cublas_us", "cublas_low_us", "cublas_high_us", "first_us", "first_low_us", "first_high_us",
    "tuned_us", "tuned_low_us", "tuned_high_us", "tuned_rank", "tuned_of",
]  # fmt: skip
REPETITIONS = 10
MOST_RESERVED = 40e9  # bytes that torch may keep between rows
ALGORITHMS = 10  # of cuBLASLt's list

Found = dict[str, Any]


class DeviceLost(Exception):
    """A fault on the GPU: this process can use it no more. `found` is the row at fault."""

    def __init__(self, found: Found) -> None:
        super().__init__(found["note"])
        self.found = found


def identity(row: Row, dtype: str) -> Found:
    """The columns that say which row it is."""
    return {
        "op": row.op, "id": row.id, "dtype": dtype, "class": row.kind, "batch": row.batch,
        "m": row.m, "n": row.n, "k": row.k, "core": row.core, "seed": row.seed,
    }  # fmt: skip


def key(row: Row, dtype: str) -> tuple[str, ...]:
    """What a CSV knows the row by."""
    return str(row.seed), row.op, row.id, dtype


def guarded(setting: Setting, found: Found, measure: Callable[[], Found]) -> Found:
    """`found` and what `measure` adds to it; where we have no plan, or memory does not suffice,
    the status `failed` and why.

    Raises:
        DeviceLost: a fault on the GPU.
    """
    try:
        return found | measure()
    except (MoonPolyError, torch.OutOfMemoryError) as error:
        found |= {"status": "failed", "note": one_line(error)}
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        raise DeviceLost(found | {"status": "failed", "note": one_line(error)}) from error
    try:
        setting.provider.synchronize()
    except RuntimeError as error:  # a fault of ours that came back as an error of a launch
        raise DeviceLost(found) from error
    if setting.provider.is_cuda and torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()
    return found


def same_again(
    y: torch.Tensor, launch: Launch, first: torch.Tensor, times: int = 1
) -> bool:  # fmt: skip
    """Whether launches on the first operand set, whose output is `y`, give the bits of `first`."""
    bits = {2: torch.int16, 4: torch.int32}[y.element_size()]
    differs = torch.zeros((), dtype=torch.bool, device=y.device)
    for _ in range(times):
        y.fill_(torch.nan)
        launch(0)
        differs |= (y.view(bits) != first.view(bits)).any()
    return not bool(differs)


def verdict(setting: Setting, checked: Mapping[str, Checked]) -> Found:
    """The columns of what was checked: status, note, error, excess, identical."""
    judged = [one.judgement for one in checked.values()]
    identical = all(one.identical for one in checked.values())
    notes = [
        f"{name}: an output is {one.judgement.excess:.3g} times its bound off"
        for name, one in checked.items()
        if not one.judgement.right
    ]
    notes += [f"{name}: runs differ" for name, one in checked.items() if not one.identical]
    if left := setting.runner.counters_left():
        notes.append(f"{left} counters are not back at 0")
        setting.runner.clear_counters()  # not to fail the rows behind this one
    return {
        "status": "wrong" if notes else "ok", "note": "; ".join(notes),
        "error": max(one.error for one in judged), "excess": max(one.excess for one in judged),
        "identical": identical,
    }  # fmt: skip


@dataclass
class Checked:
    """What the repetitions of one launch gave."""

    judgement: accuracy.Judgement
    identical: bool
    first: torch.Tensor


class KernelOnly:
    """Measures rows. Without a timer they are only checked, which needs no GPU (slow)."""

    def __init__(
        self, setting: Setting, timer: Interleaved | None = None, lt: CublasLt | None = None
    ) -> None:
        self.setting, self.timer, self._lt = setting, timer, lt
        self.device = setting.provider.torch_device
        self._workspace = torch.empty(
            WORKSPACE_BYTES if lt else 0, dtype=torch.uint8, device=self.device
        )

    def measure(self, row: Row, dtype: str) -> Found:
        """The row's columns. `status`: ok; wrong, where our result is; refused, where cuBLAS has
        no kernel for it; failed, where we have none, or the memory does not suffice.

        Raises:
            DeviceLost: a fault on the GPU.
        """
        return guarded(
            self.setting, identity(row, dtype), lambda: self._measure(row, dtype)
        )  # fmt: skip

    def _measure(self, row: Row, dtype: str) -> Found:
        element_bytes = DTYPES[NUMBERS[dtype][0]].itemsize
        floor = floor_us(row.m, row.n, row.k, row.batch, element_bytes)
        l2_bytes = self.timer.l2_bytes if self.timer else 1
        loop = Loop.of(floor, set_bytes(row, dtype), l2_bytes)
        sets = loop.sets if self.timer else 1
        operands = OperandSets.allocate(row, dtype, sets, self.device)
        vendor = contenders.cublas(operands)
        if self.timer:
            contenders.math_mode(dtype)
            if refusal := self._refusal(vendor):
                return {"status": "refused", "note": refusal}
        plans = contenders.plans(self.setting, contenders.prepared(self.setting, operands))
        found = self._described(plans)
        chosen = {"alone": plans.alone}
        if plans.allowed is not None and not plans.alone.same(plans.allowed):
            chosen["allowed"] = plans.allowed
        launches = self._launches(operands, chosen)
        checked = {name: self._check(operands, launch) for name, launch in launches.items()}
        if self.timer:
            found |= self._timed(self.timer, operands, launches, vendor, loop)
            if plans.allowed is not None and "allowed" not in launches:
                found |= {
                    f"allowed_{end}": found[f"alone_{end}"] for end in ("us", "low_us", "high_us")
                }
            for name, launch in launches.items():
                checked[name].identical &= same_again(
                    operands.y[0], launch, checked[name].first
                )  # fmt: skip
        judged = verdict(self.setting, checked)
        notes = "; ".join(note for note in (found.pop("note", ""), judged.pop("note")) if note)
        return found | judged | {"note": notes}

    def _launches(
        self, operands: OperandSets, chosen: dict[str, contenders.Chosen]
    ) -> dict[str, Launch]:
        placed = {
            id(one.form): contenders.Placed(self.setting, operands, one.form)
            for one in chosen.values()
        }
        runner = self.setting.runner
        return {
            name: contenders.ours(runner, placed[id(one.form)], one.plan)
            for name, one in chosen.items()
        }

    def _described(self, plans: contenders.Plans) -> Found:
        found: Found = {}
        for prefix, chosen in (("", plans.alone), ("allowed_", plans.allowed)):
            if chosen is None:
                continue
            kernel, split, regions = chosen.describe(self.setting.pack)
            found |= {
                f"{prefix}kernel": kernel, f"{prefix}split": split, f"{prefix}regions": regions,
                f"{prefix}repacked": bool(chosen.form.repacked_bytes),
                f"{prefix}predicted_us": chosen.plan.predicted_us,
            }  # fmt: skip
        if plans.allowed is not None:
            found["vendor"] = contenders.VENDOR in found["allowed_kernel"].split("+")
        return found

    def _check(self, operands: OperandSets, launch: Launch) -> Checked:
        y = operands.y[0]
        y.fill_(torch.nan)
        launch(0)
        first = y.clone()
        judgement = accuracy.judge(operands.a[0], operands.b[0], first, operands.dtype)
        identical = same_again(y, launch, first, REPETITIONS - 1)
        return Checked(judgement, identical, first)

    def _timed(
        self, timer: Interleaved, operands: OperandSets, launches: dict[str, Launch],
        vendor: Launch, loop: Loop,
    ) -> Found:  # fmt: skip
        loop = loop.shortened(max(timer.single_us(vendor), timer.single_us(launches["alone"])))
        candidates = launches | {"cublas": vendor}
        found: Found = {}
        lt = None
        try:
            if self._lt is not None:
                lt = contenders.LtContenders(self._lt, self._workspace, operands, ALGORITHMS)
                proposed = [lt.launch(algorithm) for algorithm in lt.algorithms]
                usable = [launch for launch in proposed if self._refusal(launch) is None]
                if not usable:
                    raise Refused("none of the proposed algorithms runs")
                best = timer.fastest(usable, loop) if len(usable) > 1 else 0
                found |= {"tuned_rank": best, "tuned_of": len(usable)}
                candidates |= {"first": usable[0]} | ({"tuned": usable[best]} if best else {})
        except Refused as refusal:
            found["note"] = f"no cuBLASLt: {refusal}"
        try:
            times = timer.compare(candidates, loop)
        finally:
            if lt is not None:
                lt.close()
        for name, timing in times.items():
            found |= timing_columns(name, timing)
        if "first" in times and "tuned" not in times:
            found |= timing_columns("tuned", times["first"])
        return found

    def _refusal(self, launch: Launch) -> str | None:
        """Why a vendor's library cannot run this, None where it can."""
        try:
            launch(0)
            self.setting.provider.synchronize()
        except (Refused, DeviceError) as error:
            return one_line(error)
        except RuntimeError as error:
            if "CUBLAS_STATUS" not in str(error):
                raise
            return one_line(error)
        return None


def one_line(error: Exception) -> str:
    """The error's type and text, cut short, for a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
