"""Convolutions' way through the benchmark: real kernels in the interpreter, a clock of our own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from benchmarks import (
    bench_conv,
    conv_in_session,
    conv_kernel_only,
    conv_sets,
    conv_streams,
    conv_summaries,
    plotting,
)
from benchmarks.conv_in_session import ConvInSession
from benchmarks.conv_kernel_only import ConvKernelOnly
from benchmarks.conv_suite import ConvRow
from benchmarks.csv_rows import read
from benchmarks.interleaved import Loop
from benchmarks.kernel_only import DeviceLost
from benchmarks.machine import Setting
from benchmarks.measuring import Launch, Timing
from benchmarks.recording import Outcome, Recorder
from benchmarks.running import CPU, Provider
from moonpoly_ort import native
from tests.corpus import wheels

DENSE = ConvRow("1", "resnet50", 2, 9, 5, 4, 20, 3, 1, 1, True)
FIRST = ConvRow("2", "yolo", 1, 3, 9, 8, 16, 3, 2, 1, True)
DEPTHWISE = ConvRow("3", "mobilenet", 1, 6, 7, 9, 6, 3, 2, 6, True)
POINTWISE = ConvRow("4", "yolo", 2, 24, 5, 8, 16, 1, 1, 1, True)
ODD = ConvRow("5", "yolo", 1, 24, 5, 7, 16, 1, 1, 1, True)  # 35 pixels in a row of the product
ROWS = [DENSE, FIRST, DEPTHWISE, POINTWISE, ODD]


class Clock:
    """Stands in for the GPU's timer: runs every launch once, and times it as it is told."""

    l2_bytes = 1000

    def __init__(self, us: Mapping[str, float], captures: bool = True) -> None:
        self.us, self.captures = us, captures

    def single_us(self, launch: Launch) -> float:
        launch(0)
        return 100.0

    def fastest(self, launches: Sequence[Launch], loop: Loop, seconds: float) -> int:
        launches[0](0)
        return 0

    def compare(self, candidates: Mapping[str, Launch], loop: Loop) -> dict[str, Timing]:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        for launch in candidates.values():
            launch(loop.sets - 1)
        return {name: Timing.of([self.us[name]]) for name in candidates}

    def enqueued(self, launch: Launch, loop: Loop) -> Timing:
        return Timing.of([7.0])


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    kernels = compiling.catalog_kernels(90, trial=True)
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return Setting(Provider(CPU, pack=path), path)


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_kernel_only, "REPETITIONS", 2)  # the interpreter takes its time


@pytest.mark.parametrize("dtype", ["f16", "f32ieee"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_are_right(setting: Setting, row: ConvRow, dtype: str) -> None:
    found = ConvKernelOnly(setting).measure(row, dtype)
    assert (found["status"], found["note"], found["identical"]) == ("ok", "", True)
    assert 0 < found["excess"] <= 1
    assert found["kernel"].startswith("gemm") == (row is POINTWISE) or row is ODD
    assert set(found) <= set(conv_kernel_only.HEAD)


@pytest.mark.parametrize("row", [DENSE, DEPTHWISE], ids=str)
def test_a_wrong_output_is_seen(
    setting: Setting, row: ConvRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conv_sets.ours

    def off(setting: Setting, sets: conv_sets.ConvSets, plan: conv_sets.ConvPlan) -> Launch:
        launch = real(setting, sets, plan)

        def run(index: int) -> None:
            launch(index)
            sets.y[index][-1, -1, -1, -1] += 0.5

        return run

    monkeypatch.setattr(conv_sets, "ours", off)
    found = ConvKernelOnly(setting).measure(row, "f16")
    assert found["status"] == "wrong"
    assert "times its bound off" in found["note"]


@pytest.mark.parametrize("captures", [True, False])
def test_times_and_what_no_graph_holds(
    setting: Setting, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def vendor(sets: conv_sets.ConvSets) -> Launch:
        def launch(index: int) -> None:
            asked.append(index)
            sets.y[index].zero_()

        return launch

    monkeypatch.setattr(conv_sets, "cudnn", vendor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock: Any = Clock({"ours": 2.0, "cudnn": 3.0, "best": 1.5}, captures)
    found = ConvKernelOnly(setting, clock, every_kernel=True).measure(FIRST, "f16")
    assert found["status"] == "ok"
    assert found["timed_by"] == ("graph" if captures else "events")
    assert (found["ours_us"], found["cudnn_us"]) == ((2.0, 3.0) if captures else (7.0, 7.0))
    # It is met on every operand set before a capture.
    sets = max(asked) + 1
    assert sets > 1
    assert asked[:sets] == list(range(sets))
    names = [kernel.name for kernel in setting.pack.kernels]
    assert found["best_kernel"] in names


def test_without_cudnn_ours_is_timed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock: Any = Clock({"ours": 2.0})
    found = ConvKernelOnly(setting, clock).measure(DEPTHWISE, "f16")  # this torch has no cuDNN
    assert found["status"] == "ok"
    assert found["ours_us"] == 2.0
    assert "cudnn_us" not in found
    assert "no cuDNN: " in found["note"]


def test_forced_kernels_are_of_convolutions(setting: Setting) -> None:
    found = conv_sets.forced(setting, DENSE, "f16")
    assert len(found) > 1
    assert all(name.startswith("conv_f16") or "conv_taps" in name for name in found)
    assert all(plan.packed for plan in found.values())


class FakeBench:
    """Stands in for the measuring of a row on a GPU that faults on the first depthwise one."""

    def __init__(self, *_: object) -> None:
        pass

    def measure(self, row: ConvRow, dtype: str) -> dict[str, Any]:
        found = conv_kernel_only.identity(row, dtype) | {
            "heuristic": conv_kernel_only.heuristic(), "status": "ok", "note": "", "ours_us": 2.0,
            "cudnn_us": 3.0, "error": 1e-4, "identical": True,
        }  # fmt: skip
        if row is DEPTHWISE:
            raise DeviceLost(found | {"status": "failed", "note": "illegal access"})
        return found


def test_a_part_goes_on_behind_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1)
    )
    monkeypatch.setattr(bench_conv, "Interleaved", lambda *_: None)
    monkeypatch.setattr(bench_conv.bench_gemm, "write_facts", lambda *_: None)
    monkeypatch.setattr(conv_kernel_only, "ConvKernelOnly", FakeBench)
    setting: Any = SimpleNamespace(provider=Provider(CPU))

    def work(record: Recorder) -> None:
        bench_conv.measure_kernels(ROWS, ["f16", "bf16"], setting, tmp_path, False, record)

    bench_conv.run_part("kernels", work, time.monotonic() + 60, tmp_path)
    lines = read([tmp_path / bench_conv.KERNELS])
    assert [(line["id"], line["dtype"]) for line in lines] == [
        (row.id, dtype) for dtype in ("f16", "bf16") for row in ROWS
    ]
    assert [line["id"] for line in lines if line["status"] == "failed"] == ["3", "3"]
    monkeypatch.setenv(conv_kernel_only.HEURISTIC_B, "1")  # another heuristic, other lines
    with pytest.raises(DeviceLost):
        work(Recorder("kernels", tmp_path / "x.jsonl", time.monotonic() + 60))
    again = read([tmp_path / bench_conv.KERNELS])[len(lines) :]
    assert [(line["id"], line["heuristic"]) for line in again] == [
        ("1", "b"), ("2", "b"), ("3", "b"),
    ]  # fmt: skip
    late = Recorder("kernels", tmp_path / "x.jsonl", time.monotonic() - 1)
    bench_conv.measure_kernels(ROWS, ["f16"], setting, tmp_path, False, late)
    assert len(read([tmp_path / bench_conv.KERNELS])) == len(lines) + 3


# ---- in sessions ---------------------------------------------------------------------------------


def test_groups_share_layers_and_keep_the_limits() -> None:
    other = ConvRow("9", "resnet50", 1, 9, 300, 300, 20, 3, 1, 1, True)
    found = conv_in_session.groups([DENSE, POINTWISE, other], 2)
    assert [(group.rows, group.nodes) for group in found] == [
        ((DENSE, other), 16), ((POINTWISE, ODD)[:1], 16),
    ]  # fmt: skip
    large = ConvRow("10", "yolo", 32, 3, 3000, 3000, 16, 3, 2, 1, True)
    assert conv_in_session.groups([large], 2)[0].nodes == 1


@pytest.mark.parametrize("dtype", ["f32", "f32ieee"])
def test_session_rows_are_measured(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conv_in_session.compare_calls
    monkeypatch.setattr(
        conv_in_session, "compare_calls",
        lambda calls, seconds: real(calls, rounds=3, seconds=seconds),
    )  # fmt: skip
    setting: Any = SimpleNamespace(provider=Provider(CPU))
    record = Recorder("sessions", tmp_path / "x.jsonl", time.monotonic() + 60)
    bench_conv.measure_sessions(ROWS[:2], [dtype], setting, tmp_path, record)
    bench_conv.measure_sessions(ROWS, [dtype], setting, tmp_path, record)
    lines = read([tmp_path / bench_conv.SESSIONS])
    assert [line["id"] for line in lines] == ["1", "2", "3", "4", "5"]
    for line in lines:
        assert (line["status"], line["note"], line["nodes"]) == ("ok", "", "16")
        assert float(line["ours_us"]) > 0
        assert float(line["default_us"]) > 0
    found = conv_summaries.sessions(lines)
    assert found["classes"]["all"]["better"]["rows"] == 5


def test_other_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ConvInSession(Provider(CPU), "f32", seconds_per_row=0.01)
    real = conv_in_session.plain_session
    other = conv_in_session.model_of(DENSE.layer, 2, torch.float32, seed=1)
    monkeypatch.setattr(conv_in_session, "plain_session", lambda _, *a, **k: real(other, *a, **k))
    (found,) = bench.measure(conv_in_session.Group(DENSE.layer, (DENSE,), 2))
    assert found["status"] == "wrong"
    assert "results differ by " in found["note"]


def test_a_session_that_fails_is_recorded() -> None:
    bench = ConvInSession(Provider(CPU), "bf16")  # the CPU provider has no bf16 Conv
    found = list(bench.measure(conv_in_session.Group(DENSE.layer, (DENSE, DENSE), 1)))
    assert [line["status"] for line in found] == ["failed", "failed"]
    assert "NotImplemented" in found[0]["note"]


# ---- streams -------------------------------------------------------------------------------------


def test_streams_are_drawn_by_seed() -> None:
    for make in (conv_streams.detection, conv_streams.recognition):
        one, other = make(1), make(2)
        assert one == make(1)
        assert one.shapes != other.shapes
        assert set(one.faster) == set(conv_in_session.ORT_MODES)
    pages = conv_streams.detection(3).shapes
    assert len(pages) == 100
    assert all(320 <= side <= 1280 and side % 32 == 0 for shape in pages for side in shape[2:])
    lines = conv_streams.recognition(3).shapes
    assert len(lines) == 200
    assert {shape[0] for shape in lines} == set(range(1, 9))
    assert len(set(pages)) > 90  # hardly any size comes twice
    assert len(set(lines)) > 180


@pytest.mark.parametrize(("ours", "passed"), [(109.0, True), (111.0, False)])
def test_memory_is_held_against_onnx_runtimes_own(ours: float, passed: bool) -> None:
    def outcome(mib: float | None) -> dict[str, Any]:
        notes = {} if mib is None else {"MiB": mib}
        return {"status": "passed", "error": None, "checks": [], "notes": notes}

    streams = {
        "memory_ours": outcome(ours), "memory_default": outcome(100.0),
        "memory_heuristic": outcome(None),
    }  # fmt: skip
    found = conv_summaries.summary([], [], streams)
    assert found["memory"]["passed"] is passed
    assert found["memory"]["MiB"] == {"ours": ours, "default": 100.0}
    assert ("(not reached)" in conv_summaries.markdown(found)) is not passed
    assert not conv_summaries.memory_of({"memory_ours": outcome(ours)})


def test_streams_on_the_cpu(tmp_path: Path) -> None:
    wheels.PP_OCR_RECOGNITION.path()
    setting = Setting(
        Provider(CPU), tmp_path / "no.mpk", wheels.MODEL_FOLDER, quick=True
    )  # fmt: skip

    def small(seed: int) -> conv_streams.Stream:
        return conv_streams.recognition(seed, runs=2, widths=(48, 80))

    path = tmp_path / "recognition.jsonl"
    conv_streams.run(small, setting, Recorder("recognition", path, time.monotonic() + 60))
    found = Outcome.read(path)
    assert found.status == "passed", found
    assert found.notes["default: runs done, of"] == [2, 2]
    assert found.notes["ours, ms"]["runs"] == 2
    path = tmp_path / "left.jsonl"
    conv_streams.nodes_left(setting, Recorder("left", path, time.monotonic() + 60))
    found = Outcome.read(path)
    assert "pp_ocr_v4_rec: Conv nodes left of 38" in {check["check"] for check in found.checks}


def test_streams_are_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"

    def section(name: str) -> Any:
        def work(record: Recorder) -> None:
            with ran.open("a") as out:
                out.write(f"{name} ")
            record.check("holds", name != "detection")

        return work

    monkeypatch.setattr(bench_conv.checks_conv, "chain", lambda _, record: section("chain")(record))
    monkeypatch.setattr(
        conv_streams, "sections", lambda _: {name: section(name) for name in ("detection", "left")}
    )
    setting: Any = SimpleNamespace(work=tmp_path)
    bench_conv.measure_streams(setting, tmp_path, time.monotonic() + 4)  # too short for any
    assert not ran.exists()
    for _ in range(2):
        bench_conv.measure_streams(setting, tmp_path, time.monotonic() + 60)
    assert ran.read_text() == "chain detection left "
    found = json.loads((tmp_path / bench_conv.STREAMS).read_text())
    assert {name: one["status"] for name, one in found.items()} == {
        "chain": "passed", "detection": "failed", "left": "passed",
    }  # fmt: skip


# ---- figures -------------------------------------------------------------------------------------


def _line(row: ConvRow, head: list[str], **given: Any) -> dict[str, str]:
    found = conv_kernel_only.identity(row, "f16") | {
        "heuristic": "a", "status": "ok", "error": 1e-4, "identical": 1, "timed_by": "graph",
    } | given  # fmt: skip
    return {column: str(found.get(column, "")) for column in head}


def test_the_summary_and_the_picture(tmp_path: Path, capsys: Any) -> None:
    def kernel(row: ConvRow, **given: Any) -> dict[str, str]:
        return _line(row, conv_kernel_only.HEAD, **given)

    kernels = [
        kernel(DENSE, ours_us=2, cudnn_us=8, best_us=1, predicted_us=3),
        kernel(DENSE, ours_us=2, cudnn_us=4, heuristic="b"),  # the better cuDNN
        kernel(POINTWISE, ours_us=2, cudnn_us=1),
        kernel(FIRST, status="wrong", ours_us=1, cudnn_us=100),
    ]
    found = conv_summaries.summary(kernels, [], {})["kernels"]["f16"]
    assert (found["rows"], found["wrong"], found["failed"]) == (3, ["conv 2"], [])
    assert found["heuristics"] == ["a", "b"]
    assert found["classes"]["all"]["cudnn"]["geomean"] == pytest.approx(1.0)
    assert found["classes"]["dense"]["cudnn"]["worst"] == 2
    assert found["classes"]["yolo"]["cudnn"]["worst_row"] == "conv 4"
    assert found["best kernel's time / the plan's"] == pytest.approx(0.5)

    sessions = [
        _line(DENSE, conv_in_session.HEAD, ours_us=2, default_us=8, heuristic_us=6),
        _line(FIRST, conv_in_session.HEAD, ours_us=2, default_us=1),
    ]
    every = conv_summaries.summary([], sessions, {})["sessions"]["f16"]["classes"]["all"]
    assert every["better"]["geomean"] == pytest.approx((3 * 0.5) ** 0.5)
    assert every["default"]["worst"] == 0.5

    for name, lines in ((bench_conv.KERNELS, kernels), (bench_conv.SESSIONS, sessions)):
        text = [",".join(lines[0])] + [",".join(line.values()) for line in lines]
        (tmp_path / name).write_text("\n".join(text) + "\n")
    outcome = {
        "status": "failed", "error": None, "notes": {"ms": 3}, "seconds": 1,
        "checks": [{"check": "faster", "figure": 2, "limit": 1, "passed": False}],
    }  # fmt: skip
    (tmp_path / bench_conv.STREAMS).write_text(json.dumps({"detection": outcome}))
    assert bench_conv.report(tmp_path) == 1
    text = capsys.readouterr().out
    assert "### f16, GPU alone: 3 rows, cuDNN's heuristic a and b" in text
    assert "* faster: 2 (not reached)" in text
    assert json.loads((tmp_path / bench_conv.SUMMARY).read_text())["kernels"]["f16"]["rows"] == 3
    if any(tmp_path.glob("*.png")):
        assert (tmp_path / "f16.png").read_bytes().startswith(b"\x89PNG")
    points = plotting.points(kernels, "ours", "cudnn")
    assert [point.kind for point in points] == ["dense", "dense", "pointwise"]
    assert points[0].speedup == 4
    assert points[0].ours == pytest.approx(DENSE.flops / 2e6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x", "--dtype", "f16,f8"], "unknown 'f8'; there are: f16, bf16, f32"),
        (["--output", "x", "--parts", "gemm"], "unknown 'gemm'; there are: kernels, sessions"),
        (["--summary", "no"], "there is no folder no"),
        ([], "one of the arguments --output --summary is required"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_conv", *arguments])
    with pytest.raises(SystemExit) as stopped:
        bench_conv.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_plans_are_those_of_the_problem(setting: Setting) -> None:
    dense = conv_sets.planned(setting, DENSE, "f16")
    assert dense.product is None
    assert dense.packed > 0
    pointwise = conv_sets.planned(setting, POINTWISE, "f16")
    assert isinstance(pointwise.product, native.Problem)
    assert pointwise.w_is_a
    one_pixel = ConvRow("6", "yolo", 5, 24, 1, 1, 16, 1, 1, 1, True)
    assert not conv_sets.planned(setting, one_pixel, "f16").w_is_a
    assert ConvKernelOnly(setting).measure(one_pixel, "f16")["status"] == "ok"
