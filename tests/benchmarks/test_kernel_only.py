"""A row's way through the benchmark: real kernels in the interpreter, a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from benchmarks import contenders, kernel_only
from benchmarks.csv_rows import CsvRows
from benchmarks.cublaslt import CublasLt
from benchmarks.interleaved import Loop, rounds_for
from benchmarks.kernel_only import KernelOnly
from benchmarks.machine import Setting
from benchmarks.measuring import Launch, Timing
from benchmarks.operand_sets import OperandSets
from benchmarks.running import CPU, Provider
from benchmarks.suites import Row
from moonpoly_ort import native, packs
from moonpoly_ort.errors import KernelMissingError

SMALL = Row("gemm", "1", "small", 1, 5, 24, 40, True)


class Clock:
    """Stands in for the GPU's timer: runs every launch once, and times it as it is told."""

    l2_bytes = 1000

    def __init__(self, us: Mapping[str, float], best: int = 0) -> None:
        self.us, self.best = us, best
        self.loops: list[Loop] = []

    def single_us(self, launch: Launch) -> float:
        launch(0)
        return 100.0

    def fastest(self, launches: Sequence[Launch], loop: Loop) -> int:
        for launch in launches:
            launch(0)
        return self.best

    def compare(self, candidates: Mapping[str, Launch], loop: Loop) -> dict[str, Timing]:
        self.loops.append(loop)
        for launch in candidates.values():
            for index in range(loop.sets):
                launch(index)
        return {name: Timing.of([self.us[name]]) for name in candidates}


@pytest.fixture(scope="module")
def setting() -> Setting:
    pack = packs.catalog(90)
    return Setting(Provider(CPU, pack=pack), pack)


@pytest.fixture
def lt(fake_cublaslt: str) -> Iterator[CublasLt]:
    opened = CublasLt([fake_cublaslt])
    yield opened
    opened.close()


def only_ours(setting: Setting, forms: list[contenders.Form]) -> contenders.Plans:
    plans = [contenders.Chosen(setting.plan(form.problem), form) for form in forms]
    return contenders.Plans(plans[0], None)


TIMES = {"alone": 2.0, "allowed": 1.5, "cublas": 3.0, "first": 4.0, "tuned": 2.5}


@pytest.mark.parametrize("dtype", ["f16", "f32ieee"])
@pytest.mark.parametrize(
    "row",
    [
        SMALL,
        Row("gemm", "2", "small", 1, 3, 1, 33, True),  # A and B change places
        Row("gemm", "3", "small", 1, 1, 7, 9, True),
        Row("bmm", "4", "scores-d32", 3, 5, 6, 32, True),
    ],
    ids=str,
)
def test_rows_are_checked_without_a_timer(setting: Setting, row: Row, dtype: str) -> None:
    found = KernelOnly(setting).measure(row, dtype)
    assert (found["status"], found["note"], found["identical"]) == ("ok", "", True)
    assert 0 < found["excess"] <= 1
    assert "alone_us" not in found
    assert set(found) <= set(kernel_only.HEAD)


def test_every_contender_is_timed(
    setting: Setting, lt: CublasLt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "plans", only_ours)
    clock = Clock(TIMES, best=1)
    bench = KernelOnly(setting, clock, lt)  # type: ignore[arg-type]
    found = bench.measure(SMALL, "f32ieee")
    assert found["status"] == "ok", found
    # The last of the three proposed algorithms does not run.
    assert (found["tuned_rank"], found["tuned_of"]) == (1, 2)
    times = {name: found[f"{name}_us"] for name in ("alone", "cublas", "first", "tuned")}
    assert times == {name: TIMES[name] for name in times}
    assert "allowed_us" not in found
    assert found["predicted_us"] > 0
    assert found["kernel"] in {kernel.name for kernel in setting.pack.kernels}
    assert clock.loops == [Loop(3, 2)]
    out = CsvRows(tmp_path / "rows.csv", kernel_only.HEAD, kernel_only.KEY)
    out.write(found)
    assert out.has(*kernel_only.key(SMALL, "f32ieee"))
    out.close()


def test_the_first_algorithm_may_be_the_best(setting: Setting, lt: CublasLt) -> None:
    bench = KernelOnly(setting, Clock(TIMES), lt)  # type: ignore[arg-type]
    found = bench.measure(SMALL, "f32ieee")
    assert found["tuned_us"] == found["first_us"] == TIMES["first"]


def test_a_product_that_cublaslt_refuses_is_timed_without_it(
    setting: Setting, lt: CublasLt
) -> None:
    bench = KernelOnly(setting, Clock(TIMES), lt)  # type: ignore[arg-type]
    found = bench.measure(Row("gemm", "5", "small", 1, 4, 8, 13, True), "f32ieee")
    assert (found["status"], found["cublas_us"]) == ("ok", 3.0)
    assert "no cuBLASLt: " in found["note"]
    assert "first_us" not in found


def _vendor(chosen: contenders.Chosen) -> contenders.Chosen:
    other = native.Plan.from_buffer_copy(chosen.plan)
    other._regions[0].kernel = -2
    return contenders.Chosen(other, chosen.form)


@pytest.mark.parametrize("same", [True, False])
def test_the_vendor_candidate(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    def plans(setting: Setting, forms: list[contenders.Form]) -> contenders.Plans:
        alone = only_ours(setting, forms).alone
        return contenders.Plans(alone, alone if same else _vendor(alone))

    def ours(runner: Any, placed: contenders.Placed, plan: native.Plan) -> Launch:
        return real(runner, placed, setting.plan(placed.problem))

    real = contenders.ours
    monkeypatch.setattr(contenders, "plans", plans)
    monkeypatch.setattr(contenders, "ours", ours)
    found = KernelOnly(setting, Clock(TIMES)).measure(SMALL, "f16")  # type: ignore[arg-type]
    assert found["vendor"] is not same
    assert (found["allowed_kernel"] == "vendor") is not same
    assert found["allowed_us"] == TIMES["alone" if same else "allowed"]


class Planner:
    """A pack that predicts what it is told, by the problem's `ldb` and the flags."""

    kernels: tuple[Any, ...] = ()

    def __init__(self, us: dict[tuple[int, int], float], size: int = 0) -> None:
        self.us, self.size = us, size

    def plan(self, device: Any, problem: native.Problem, flags: int = 0) -> native.Plan:
        return native.Plan(predicted_us=self.us[int(problem.ldb), int(flags)])

    def repacked(self, problem: native.Problem) -> tuple[native.Problem, int]:
        packed = native.Problem.from_buffer_copy(problem)
        packed.ldb = 48
        return packed, self.size


def _with(pack: Any, provider: Any) -> Any:
    return SimpleNamespace(
        pack=pack, provider=provider, device=None, plan=lambda problem: pack.plan(None, problem)
    )


def test_the_vendor_is_switched_by_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = OperandSets.allocate(SMALL, "f16", 1, "cpu")
    setting = _with(Planner({(24, 0): 2.0, (24, 4): 3.0}), Provider(CPU))
    forms = contenders.prepared(setting, operands)
    monkeypatch.delattr(native, "PlanFlag", raising=False)
    without = contenders.plans(setting, forms)
    assert (without.alone.plan.predicted_us, without.allowed) == (2.0, None)
    monkeypatch.setattr(native, "PlanFlag", SimpleNamespace(NO_VENDOR=4), raising=False)
    both = contenders.plans(setting, forms)
    assert both.allowed is not None
    assert (both.alone.plan.predicted_us, both.allowed.plan.predicted_us) == (3.0, 2.0)


@pytest.mark.parametrize(("packed_us", "expected"), [(1.0, 48), (2.0, 24), (3.0, 24)])
def test_a_constant_weight_is_repacked_where_that_is_predicted_to_win(
    monkeypatch: pytest.MonkeyPatch, packed_us: float, expected: int
) -> None:
    monkeypatch.delattr(native, "PlanFlag", raising=False)
    pack = Planner({(24, 0): 2.0, (48, 0): packed_us}, size=1000)
    setting = _with(pack, SimpleNamespace(is_cuda=True))
    operands = OperandSets.allocate(SMALL, "f16", 1, "cpu")
    chosen = contenders.plans(setting, contenders.prepared(setting, operands)).alone
    assert chosen.form.problem.ldb == expected
    assert (chosen.form.repacked_bytes == 1000) == (expected == 48)
    for row in (
        Row("bmm", "1", "scores", 2, 5, 24, 40, True),  # B is no constant
        Row("gemm", "2", "small", 1, 5, 1, 40, True),  # B takes A's place
    ):
        other = OperandSets.allocate(row, "f16", 1, "cpu")
        assert len(contenders.prepared(setting, other)) == 1
    pack.size = 0
    assert len(contenders.prepared(setting, operands)) == 1


def test_the_repacked_weight_is_what_is_launched() -> None:
    operands = OperandSets.allocate(SMALL, "f16", 3, "cpu")
    stored, swapped = operands.problem()
    calls: list[tuple[int, int]] = []
    launcher = SimpleNamespace(
        repack=lambda problem, b, packed, stream: calls.append((b, packed))
    )  # fmt: skip
    setting: Any = SimpleNamespace(runner=SimpleNamespace(launcher=launcher))
    form = contenders.Form(stored, swapped, repacked_bytes=1000)
    placed = contenders.Placed(setting, operands, form)
    assert [b for b, _ in calls] == [b.data_ptr() for b in operands.b]
    assert [pointers[1] for pointers in placed.pointers] == [packed for _, packed in calls]
    assert [pointers[0] for pointers in placed.pointers] == [a.data_ptr() for a in operands.a]


def test_a_wrong_result_is_seen(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(runner: Any, placed: contenders.Placed, plan: native.Plan) -> Launch:
        launch = real(runner, placed, plan)
        calls = []

        def broken(index: int) -> None:
            launch(index)
            calls.append(index)
            y = watched[0]
            y[0, 0, 0] = 1000.0 if wrong else y[0, 0, 0] + 0.01 * (len(calls) == 5)

        return broken

    watched: list[torch.Tensor] = []

    class Watching(OperandSets):
        @staticmethod
        def allocate(*arguments: Any, **named: Any) -> OperandSets:
            made = OperandSets.allocate(*arguments, **named)
            watched[:] = made.y
            return made

    real = contenders.ours
    monkeypatch.setattr(contenders, "ours", ours)
    monkeypatch.setattr(kernel_only, "OperandSets", Watching)
    wrong = True
    found = KernelOnly(setting).measure(SMALL, "f16")
    assert (found["status"], found["identical"]) == ("wrong", True)
    assert "times its bound off" in found["note"]
    wrong = False
    found = KernelOnly(setting).measure(SMALL, "f16")
    assert (found["status"], found["identical"]) == ("wrong", False)
    assert found["note"] == "alone: runs differ"


def test_refusals_and_faults(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Any:
        def launch(*_: Any) -> Any:
            raise error

        return launch

    refuses = fail(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling gemm"))
    monkeypatch.setattr(contenders, "cublas", lambda operands: refuses)
    bench = KernelOnly(setting, Clock(TIMES))  # type: ignore[arg-type]
    found = bench.measure(SMALL, "f16")
    assert found["status"] == "refused"
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in found["note"]

    monkeypatch.setattr(contenders, "plans", fail(KernelMissingError("no kernel covers it")))
    found = KernelOnly(setting).measure(SMALL, "f16")
    assert (found["status"], found["note"]) == ("failed", "KernelMissingError: no kernel covers it")

    monkeypatch.setattr(contenders, "plans", fail(RuntimeError("CUDA error: an illegal access")))
    with pytest.raises(kernel_only.DeviceLost) as lost:
        KernelOnly(setting).measure(SMALL, "f16")
    assert lost.value.found["status"] == "failed"
    assert lost.value.found["id"] == "1"

    monkeypatch.setattr(contenders, "plans", fail(RuntimeError("a mistake of the program")))
    with pytest.raises(RuntimeError, match="a mistake"):
        KernelOnly(setting).measure(SMALL, "f16")


def test_loops_leave_l2_behind() -> None:
    small = Loop.of(floor_us=0.1, set_bytes=1000, l2_bytes=50_000_000)
    assert small == Loop(64, 64)  # each set once a replay, and L2 is filled between replays
    medium = Loop.of(floor_us=4, set_bytes=10_000_000, l2_bytes=50_000_000)
    assert medium == Loop(50, 11)
    assert (medium.sets - 1) * 10_000_000 >= 2 * 50_000_000
    large = Loop.of(floor_us=3000, set_bytes=6_000_000_000, l2_bytes=50_000_000)
    assert large == Loop(1, 1)
    assert medium.shortened(20) == medium
    assert medium.shortened(100) == Loop(3, 11)
    assert [rounds_for(0.12, us) for us in (10, 10_000, 1e9)] == [15, 12, 3]
