"""Figures from a small table whose answers are known, as text, as JSON and as a picture."""

from __future__ import annotations

import csv
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import bench_gemm, in_session, kernel_only, plotting, summaries
from benchmarks.suites import Row


def _kernel_row(number: int, **given: Any) -> dict[str, str]:
    row = {
        "seed": 2026, "op": "gemm", "id": number, "dtype": "f16", "class": "small", "batch": 1,
        "m": 64,
        "n": 128, "k": 256, "core": 1, "status": "ok", "error": 1e-4, "excess": 0.5,
        "identical": 1, "kernel": "x", "split": 1, "regions": 1, "predicted_us": 2,
    } | given  # fmt: skip
    return {column: str(row.get(column, "")) for column in kernel_only.HEAD}


def _times(alone: float, cublas: float, first: float, tuned: float) -> dict[str, float]:
    return {"alone_us": alone, "cublas_us": cublas, "first_us": first, "tuned_us": tuned}


@pytest.fixture
def lines() -> list[dict[str, str]]:
    heavy = {"m": 16, "n": 4096, "k": 4096}  # 33.6 MB of weights
    return [
        _kernel_row(0, **_times(2, 4, 3, 1)),
        _kernel_row(1, **_times(4, 2, 4, 5)),  # tuned is slower than the first algorithm
        _kernel_row(2, n=129, **_times(1, 8, 8, 8), **{"class": "tall"}),
        _kernel_row(3, **heavy, **_times(10, 10, 10, 10), **{"class": "tall"}),
        _kernel_row(4, op="bmm", batch=8, k=33, **{"class": "scores", "alone_us": 3}),
        _kernel_row(5, status="refused"),
        _kernel_row(6, status="wrong", identical=0, **_times(1, 100, 100, 100)),
        _kernel_row(7, status="failed"),
    ]


def test_speed_ups(lines: list[dict[str, str]]) -> None:
    found = summaries.summary(lines, gbps=4000)["kernels"]["f16"]
    assert found["rows"] == 8
    assert found["refused by cuBLAS"] == 1
    assert (found["wrong"], found["failed"]) == (["gemm 6"], ["gemm 7"])
    assert found["not identical"] == ["gemm 6"]
    assert "allowed" not in found
    assert "share that went to the vendor" not in found
    classes = found["alone"]["classes"]
    assert list(classes) == ["small", "tall", "unaligned N or K", "all gemm", "all"]
    assert classes["small"]["cublas"] == {
        "rows": 2, "geomean": 1.0, "median": 1.25, "wins": 0.5, "worst": 0.5,
        "worst_row": "gemm 1",
    }  # fmt: skip
    assert classes["small"]["tuned"]["geomean"] == pytest.approx(math.sqrt(0.5 * 1.0))
    assert classes["unaligned N or K"]["first"]["rows"] == 1
    assert classes["all"]["cublas"]["geomean"] == pytest.approx((2 * 0.5 * 8 * 1) ** 0.25)
    share = found["alone"]["skinny, share of copy bandwidth"]
    moved = 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert share["rows"] == 1
    assert share["geomean"] == pytest.approx(moved / 10e-6 / 4000e9)
    prediction = found["alone"]["prediction"]  # 2 us were predicted for 2, 4, 1, 10 and 3 us
    assert prediction["geomean"] == pytest.approx((1 * 0.5 * 2 * 0.2 * 2 / 3) ** 0.2)
    assert prediction["median_factor_off"] == pytest.approx(2)


def test_the_vendor_s_share(lines: list[dict[str, str]]) -> None:
    for number, line in enumerate(lines[:4]):
        line |= {"vendor": str(int(number == 1)), "allowed_us": "1"}
    found = summaries.summary(lines)["kernels"]["f16"]
    assert found["share that went to the vendor"] == 0.25
    assert found["allowed"]["classes"]["small"]["cublas"]["worst"] == 2
    assert found["alone"]["classes"]["small"]["cublas"]["worst"] == 0.5
    assert "skinny, share of copy bandwidth" not in found["alone"]  # the bandwidth is not known
    text = summaries.markdown(summaries.summary(lines))
    assert "| small | 2 | 1.000 | 1.250 | 50% | 0.50 (gemm 1) |" in text
    assert "* 25% of the rows went to the vendor" in text
    assert "* wrong: 1 (gemm 6)" in text
    assert "* cuBLAS refuses 1 rows" in text
    assert "vendor candidate allowed" in text


def test_the_last_line_of_a_row_counts_and_dtypes_stay_apart() -> None:
    other = _kernel_row(0, dtype="bf16", **_times(1, 5, 5, 5))
    lines = [_kernel_row(0, status="failed"), other, _kernel_row(0, **_times(1, 2, 2, 2))]
    found = summaries.summary(lines)["kernels"]
    assert found["f16"]["failed"] == []
    assert found["f16"]["alone"]["classes"]["all"]["cublas"]["geomean"] == 2
    assert found["bf16"]["alone"]["classes"]["all"]["cublas"]["geomean"] == pytest.approx(5)


def test_seeds_stay_apart() -> None:
    lines = [_kernel_row(0, seed=seed, **_times(1, us, 2, 2)) for seed, us in ((1, 2), (2, 3))]
    found = summaries.summary(lines)["kernels"]
    assert list(found) == ["f16, seed 1", "f16, seed 2"]
    assert found["f16, seed 2"]["alone"]["classes"]["all"]["cublas"]["worst"] == 3


def _session_row(number: int, ours: float, ort: float) -> dict[str, str]:
    row = _kernel_row(number) | {"ours_us": str(ours), "ort_us": str(ort)}
    return {column: row.get(column, "") for column in in_session.HEAD}


def test_sessions() -> None:
    lines = [_session_row(0, 4, 16), _session_row(1, 4, 4)]
    found = summaries.summary(lines)
    assert list(found) == ["sessions"]
    assert found["sessions"]["f16"]["classes"]["all"]["geomean"] == pytest.approx(2)
    assert "| all | 2 | 2.000 | 2.500 | 50% | 1.00 (gemm 1) |" in summaries.markdown(found)


@pytest.fixture
def folder(tmp_path: Path, lines: list[dict[str, str]]) -> Path:
    for name, head, rows in (
        ("kernels.csv", kernel_only.HEAD, lines),
        ("sessions.csv", in_session.HEAD, [_session_row(0, 1, 2)]),
    ):
        with (tmp_path / name).open("w", newline="") as target:
            out = csv.DictWriter(target, head)
            out.writeheader()
            out.writerows(rows)
    facts = {"gpu": "a GPU", "bandwidth_gbps": 4000, "matmul_tflops": {"f16": 700}}
    (tmp_path / "gpu.json").write_text(json.dumps(facts))
    return tmp_path


def test_the_command_needs_no_gpu(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_gemm", "--summary", str(folder / "kernels.csv"),
         str(folder / "sessions.csv"), "--json", str(folder / "summary.json")],
        capture_output=True, text=True, check=False,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # a row is wrong, and the command says so
    assert "### f16, GPU alone: 8 rows" in done.stdout
    assert "over ONNX Runtime's CUDA MatMul" in done.stdout
    assert "of the copy bandwidth (1 rows" in done.stdout  # the bandwidth is read from gpu.json
    found = json.loads((folder / "summary.json").read_text())
    assert set(found) == {"kernels", "sessions"}


def test_the_picture(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = plotting.csv_rows.read([folder / "kernels.csv"])
    found = plotting.points(lines, "alone")
    assert [point.kind for point in found] == ["other"] * 2 + [
        "N or K unaligned", "skinny (M <= 16)",
    ]  # fmt: skip
    assert found[0].speedup == 2
    assert found[0].ours == pytest.approx(2 * 64 * 128 * 256 / 2e-6 / 1e12)
    target = folder / "picture.png"
    facts = plotting.facts_beside(folder / "kernels.csv")
    plotting.draw(lines, "f16", "alone", facts, target)
    data = target.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 400
    with pytest.raises(ValueError, match="no row of bf16"):
        plotting.draw(lines, "bf16", "alone", facts, target)
    with pytest.raises(ValueError, match="times of 'allowed'"):
        plotting.draw(lines, "f16", "allowed", facts, target)


def test_rows_come_in_an_order_that_the_seed_fixes() -> None:
    core = bench_gemm.chosen(["gemm", "bmm"], 2026, full=False, most=None)
    assert len(core) == 308
    assert all(row.core for row in core)
    part = bench_gemm.chosen(["gemm", "bmm"], 2026, full=False, most=40)
    assert part == core[:40]
    assert len({row.kind for row in part}) > 10  # any part stands for the whole
    assert len(bench_gemm.chosen(["gemm"], 2026, full=True, most=None)) == 1631
    assert isinstance(core[0], Row)
