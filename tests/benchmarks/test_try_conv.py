"""Staged images through the benchmark: the kernels in the interpreter, a clock of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from benchmarks import conv_sets, try_conv
from benchmarks.conv_suite import ConvRow
from benchmarks.interleaved import Loop
from benchmarks.measuring import Launch, Timing
from benchmarks.running import CPU, Provider
from benchmarks.staged import StagedConv, Tile

ROW = ConvRow("1", "resnet50", 1, 9, 5, 4, 20, 3, 1, 1, True)
TIMES = {"planned": 6.0, "cudnn": 3.0, "both": 4.0, "products": 2.0}


class Clock:
    """Stands in for the GPU's timer: times every launch as it is told, and runs none."""

    l2_bytes = 1

    def single_us(self, launch: Launch) -> float:
        return 100.0

    def fastest(self, launches: Sequence[Launch], loop: Loop, seconds: float) -> int:
        return len(launches) - 1

    def compare(self, candidates: Mapping[str, Launch], loop: Loop) -> dict[str, Timing]:
        return {name: Timing.of([TIMES[name]]) for name in candidates}


def _measure(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    plan = conv_sets.ConvPlan(_Plan(), None, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(conv_sets, "planned", lambda *_: plan)
    for name in ("ours", "cudnn"):
        monkeypatch.setattr(conv_sets, name, lambda *_, **__: lambda index: None)
    monkeypatch.setattr(try_conv, "StagedConv", partial(StagedConv, interpret=True))
    monkeypatch.setattr(try_conv, "TILES", (Tile(16, 32, 32, 4, 2),))
    monkeypatch.setattr(try_conv, "SPLIT", set(try_conv.TILES))
    monkeypatch.setattr(try_conv, "Loop", _OneSet)
    setting: Any = _Setting()
    return try_conv.measure(setting, Clock(), ROW, "f16")  # type: ignore[arg-type]


class _Plan:
    regions: tuple[int, ...] = (7,)


class _Setting:
    provider = Provider(CPU)

    def kernel_name(self, region: int) -> str:
        return f"kernel{region}"


class _OneSet:
    @staticmethod
    def of(*_: float) -> Loop:
        return Loop(4, 1)


def test_rows_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _measure(monkeypatch)
    assert set(found) == set(try_conv.HEAD)
    assert (found["status"], found["note"], found["kernel"]) == ("ok", "", "kernel7")
    assert 0 < found["error"] < 1e-3
    assert (found["both_us"], found["products_us"]) == (4.0, 2.0)
    assert found["split"] == 4  # 9 steps: no more than 4 slices
    lines = [{name: str(value) for name, value in found.items()}]
    assert try_conv.report(lines) == 0
    assert "cudnn / products: geometric mean 1.500" in capsys.readouterr().out


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagedConv.stage

    def off(self: StagedConv) -> None:
        real(self)
        self.staged.copy_(self.staged.roll(1, dims=0))

    monkeypatch.setattr(StagedConv, "stage", off)
    found = _measure(monkeypatch)
    assert found["status"] == "wrong"
    assert try_conv.report([{name: str(value) for name, value in found.items()}]) == 1


@pytest.mark.parametrize("row", try_conv.rows(2026), ids=str)
def test_every_row_has_choices_and_predictions(row: ConvRow) -> None:
    with torch.device("meta"):
        case = row.convolution("f16")
        shapes = (case.x_shape, case.w_shape, row.y_shape)
        conv = StagedConv(case, *(torch.empty(shape, dtype=torch.float16) for shape in shapes))
    choices = list(try_conv.choices(conv))
    assert len(choices) == len(set(choices)) > 0
    for tile, split in choices:
        staging, products = try_conv.predicted_us(conv, tile, split)
        # Never below what the tensor cores and the memory allow.
        assert products >= row.flops / (try_conv.SMS * try_conv.FLOPS_PER_US)
        assert staging >= row.n * row.c_in * row.h * row.w * 2 / try_conv.BYTES_PER_US
        assert split == 1 or conv.tiles(tile) * split <= 2 * try_conv.SMS
