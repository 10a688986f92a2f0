"""The loop around the rows: what is done is skipped, time runs out, the GPU faults."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import bench_gemm, kernel_only
from benchmarks.csv_rows import read
from benchmarks.running import CPU, Provider
from benchmarks.suites import Row

ROWS = bench_gemm.chosen(["gemm", "bmm"], 7, full=False, most=5)
SETTING: Any = SimpleNamespace(provider=Provider(CPU))


class FakeBench:
    """Stands in for the measuring of a row."""

    measured: list[tuple[str, str]]
    faulty = ""

    def __init__(self, *_: object) -> None:
        pass

    def measure(self, row: Row, dtype: str) -> dict[str, Any]:
        found = kernel_only.identity(row, dtype) | {
            "status": "ok", "note": "", "error": 1e-4, "identical": True, "alone_us": 1.0,
        }  # fmt: skip
        if str(row) == self.faulty:
            raise kernel_only.DeviceLost(found | {"status": "failed", "note": "illegal access"})
        self.measured.append((str(row), dtype))
        return found


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1)
    )
    monkeypatch.setattr(bench_gemm, "Interleaved", lambda *_: None)
    monkeypatch.setattr(bench_gemm, "write_facts", lambda *_: None)
    monkeypatch.setattr(kernel_only, "KernelOnly", FakeBench)
    monkeypatch.setattr(FakeBench, "measured", [], raising=False)
    monkeypatch.setattr(FakeBench, "faulty", "")
    return FakeBench


def _measure(folder: Path, rows: list[Row], dtypes: list[str], seconds: float = 60) -> bool:
    stop = time.monotonic() + seconds
    return bench_gemm.measure_kernels(rows, dtypes, SETTING, folder, stop, lt=False)


def test_done_rows_are_skipped(bench: type[FakeBench], tmp_path: Path) -> None:
    assert _measure(tmp_path, ROWS[:2], ["f16"])
    assert _measure(tmp_path, ROWS, ["f16", "bf16"])
    assert bench.measured == [(str(row), "f16") for row in ROWS] + [
        (str(row), "bf16") for row in ROWS
    ]
    lines = read([tmp_path / bench_gemm.KERNELS])
    assert [(line["op"], line["id"], line["dtype"]) for line in lines] == [
        *((row.op, row.id, "f16") for row in ROWS), *((row.op, row.id, "bf16") for row in ROWS),
    ]  # fmt: skip


def test_time_runs_out(bench: type[FakeBench], tmp_path: Path) -> None:
    assert _measure(tmp_path, ROWS, ["f16"], seconds=-1)
    assert bench.measured == []


def test_behind_a_fault_the_next_run_goes_on(bench: type[FakeBench], tmp_path: Path) -> None:
    bench.faulty = str(ROWS[2])
    assert not _measure(tmp_path, ROWS, ["f16"])
    assert [row for row, _ in bench.measured] == [str(row) for row in ROWS[:2]]
    assert _measure(tmp_path, ROWS, ["f16"])
    assert [row for row, _ in bench.measured] == [str(row) for row in ROWS if row is not ROWS[2]]
    lines = read([tmp_path / bench_gemm.KERNELS])
    assert [line["note"] for line in lines if line["status"] == "failed"] == ["illegal access"]


def test_the_report(bench: type[FakeBench], tmp_path: Path, capsys: Any) -> None:
    _measure(tmp_path, ROWS, ["f16"])
    paths = [tmp_path / bench_gemm.KERNELS, tmp_path / bench_gemm.SESSIONS]  # one of them exists
    assert bench_gemm.report(paths, tmp_path / "summary.json") == 0
    assert json.loads((tmp_path / "summary.json").read_text())["kernels"]["f16"]["rows"] == 5
    assert "### f16, GPU alone: 5 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x", "--dtype", "f16,f8"], "unknown 'f8'; there are: f16, bf16, f32"),
        (["--output", "x", "--ops", "conv"], "unknown 'conv'; there are: gemm, bmm"),
        (["--summary", "no.csv"], "there is no file no.csv"),
        (["--output", "x", "--weights-mb", "4000"], "accepted: 1 to 2000"),
        ([], "one of the arguments --output --summary is required"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_gemm", *arguments])
    with pytest.raises(SystemExit) as stopped:
        bench_gemm.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_rows_of_another_seed_are_other_rows(bench: type[FakeBench], tmp_path: Path) -> None:
    other = bench_gemm.chosen(["gemm"], 8, full=False, most=3)
    assert _measure(tmp_path, other, ["f16"])
    twins = [Row(**(vars(row) | {"seed": 9})) for row in other]
    assert _measure(tmp_path, twins, ["f16"])
    assert len(bench.measured) == 6
