"""Streams and totals: who runs what, in which order, and what a sum that was cut short holds."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import contender_runs, exported_models, measuring
from benchmarks.contender_runs import ContenderRuns
from benchmarks.exported_models import Stream
from benchmarks.model_contenders import Contender
from benchmarks.model_rows import BURST, CHUNK, LEAST, ROUNDS, Measured, chunks, total, turned
from benchmarks.own_process import CallFailed, ProcessLost
from benchmarks.running import CPU, Provider

SIZES = tuple((1, n) for n in range(1, 21))
STREAM = Stream("s", SIZES, ((1, 40),))
Log = list[tuple[str, int]]


class Sleeper:
    """Takes `seconds` a run and notes the lengths that it ran."""

    def __init__(self, name: str, seconds: float, log: Log) -> None:
        self.name, self.seconds, self.log = name, seconds, log
        self.length = 0

    def prepare(self, inputs: Any) -> Sleeper:
        made = Sleeper(self.name, self.seconds, self.log)
        made.length = inputs["input_ids"].shape[1]
        return made

    def run(self) -> None:
        self.log.append((self.name, self.length))
        time.sleep(self.seconds)

    def fetch(self) -> list[Any]:
        return []


class Here:
    """As `OwnProcess`, in this one. dies: the name of a method in which it does, after how many
    calls of it.
    """

    def __init__(self, served: Any, dies: tuple[str, int] = ("", 0)) -> None:
        self.served, self.dies, self.stopped = served, dies, False
        self.asked: tuple[str, tuple[Any, ...]] = ("", ())

    def begin(self, method: str, *arguments: Any) -> None:
        self.asked = (method, arguments)

    def finish(self, seconds: float) -> Any:
        method, arguments = self.asked
        if method == self.dies[0]:
            if self.dies[1] == 0:
                raise ProcessLost("ended with exit code -11")
            self.dies = (method, self.dies[1] - 1)
        try:
            return getattr(self.served, method)(*arguments)
        except Exception as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from None

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        self.begin(method, *arguments)
        return self.finish(seconds)

    def stop(self) -> None:
        self.stopped = True


class Bench:
    """Contenders that sleep so many seconds a run, ready to run."""

    def __init__(self, **seconds: float) -> None:
        (bert,) = exported_models.named("bert_base")
        self.rows: list[dict[str, Any]] = []
        self.log: Log = []
        self.measured = Measured(bert.shrunk(), "f32", self.rows.append)
        self.workers = {}
        for name, each in seconds.items():
            contender = Contender(name, lambda name=name, each=each: Sleeper(name, each, self.log))
            runs = ContenderRuns(bert.shrunk(), "f32", Provider(CPU), contender)
            self.workers[name] = Here(runs)
        self.measured.workers |= self.workers
        self.names = self.measured.start(seconds, (1, 99), math.inf)

    def stream(self, patience: float, deadline: float = math.inf) -> bool:
        return self.measured.stream(self.names, STREAM, patience, deadline)

    def values(self, measure: str) -> dict[str, tuple[float, str]]:
        return {
            r["contender"]: (r["value"], r["note"]) for r in self.rows if r["measure"] == measure
        }


def turns(log: Log, name: str) -> list[list[int]]:
    """The lengths that one ran, turn by turn, without the first run of each, which repeats."""
    found: list[list[int]] = []
    last = ""
    for who, length in log:
        if who == name:
            if last == name:
                found[-1].append(length)
            else:
                found.append([])
        last = who
    return found


def test_all_run_every_size_twice_a_few_at_a_time_and_take_turns_at_being_first() -> None:
    bench = Bench(a=0, b=0, c=0)
    assert bench.log == [("a", 99), ("b", 99), ("c", 99)]
    bench.log.clear()
    assert bench.stream(10)
    lengths = [n for _, n in SIZES]
    pieces = [lengths[first:end] for first, end in chunks(len(lengths))]
    for name in "bc":  # `a` ends one turn and begins the next, by being first
        assert turns(bench.log, name) == [*pieces, *pieces]
    uncounted = 2 * len(pieces)
    assert Counter(name for name, _ in bench.log) == dict.fromkeys("abc", 40 + uncounted)
    starts = [name for name, length in bench.log if length == 99]
    assert starts == [*"abc"]  # before the first sizes, the one that all were started with
    assert {note for _, note in bench.values("stream_ms").values()} == {""}
    assert bench.values("again_stream_ms").keys() == {*"abc"}


def test_a_slow_one_leaves_and_its_sum_is_estimated() -> None:
    bench = Bench(slow=0.02, quick=0)
    assert bench.stream(0.05)
    taken = [r for r in bench.rows if r["measure"] == "new_ms" and r["contender"] == "slow"]
    assert [r["size"] for r in taken] == [f"1x{n}" for _, n in SIZES[:LEAST]]
    value, note = bench.values("stream_ms")["slow"]
    assert note == f"from {LEAST} of {len(SIZES)} sizes"
    assert value >= 20 * len(SIZES)
    assert bench.values("again_stream_ms")["slow"][1] == note
    assert bench.values("stream_ms")["quick"][1] == ""


def test_one_that_is_very_slow_leaves_before_it_ran_the_least_number_of_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contender_runs, "SLOW_MS", 55.0)
    bench = Bench(slow=0.02, quick=0)
    assert bench.stream(0.001)
    value, note = bench.values("stream_ms")["slow"]
    assert note == f"from 3 of {len(SIZES)} sizes"
    assert value >= 20 * len(SIZES)
    assert bench.values("again_stream_ms")["slow"][1] == note
    bench = Bench(slow=0.02)
    assert bench.stream(10)  # it may take that long
    assert bench.values("stream_ms")["slow"][1] == ""


def test_one_leaves_within_its_turn_when_its_time_is_over() -> None:
    bench = Bench(slow=0.02)
    assert bench.stream(0.02 * (LEAST + 2.5))
    note = bench.values("stream_ms")["slow"][1]
    assert LEAST < int(note.split(" ")[1]) < LEAST + CHUNK


def test_a_deadline_ends_it_for_all_after_the_least_number_of_sizes() -> None:
    bench = Bench(a=0, b=0)
    assert not bench.stream(10, deadline=0)
    assert {note for _, note in bench.values("stream_ms").values()} == {
        f"from {LEAST} of {len(SIZES)} sizes"
    }


@pytest.mark.parametrize("calls", [0, 1])
def test_one_that_dies_takes_no_other_along(calls: int) -> None:
    bench = Bench(a=0, b=0)
    bench.workers["a"].dies = ("sweep", calls)
    assert bench.stream(10)
    assert bench.measured.steady(bench.names, STREAM, 0, math.inf)
    assert bench.workers["a"].stopped
    assert bench.measured.workers.keys() == {"b"}
    assert bench.values("failed") == {"a": (1, "sweep: ended with exit code -11")}
    for measure in ("stream_ms", "again_stream_ms", "steady_ms"):
        assert bench.values(measure).keys() == {"b"}


def test_a_steady_size_that_fails_costs_no_more_than_itself() -> None:
    bench = Bench(a=0, b=0)
    a = bench.workers["a"].served
    a.repeat, real = None, a.repeat  # TypeError
    two = Stream("s", (), ((1, 40), (1, 50)))
    assert bench.measured.steady(bench.names, two, 0, math.inf)
    assert bench.values("steady_ms").keys() == {"b"}
    assert not bench.values("failed")
    a.repeat = real
    assert bench.measured.steady(bench.names, two, 0, math.inf)
    assert bench.values("steady_ms").keys() == {"a", "b"}


def test_a_steady_size_is_warm_and_comes_in_bursts() -> None:
    bench = Bench(a=0, b=0)
    bench.log.clear()
    bench.measured.steady(bench.names, STREAM, 0, math.inf)
    runs = 3 + ROUNDS[0] * (1 + BURST)
    assert Counter(bench.log) == {("a", 40): runs, ("b", 40): runs}
    assert [name for name, _ in bench.log][: 3 + 1 + BURST] == ["a"] * (3 + 1 + BURST)


def test_what_runs_first_in_a_turn_does_not_count() -> None:
    bench = Bench(a=0)
    runs = bench.workers["a"].served
    cold = True

    class Cold(Sleeper):
        def prepare(self, inputs: Any) -> Cold:
            return self

        def run(self) -> None:  # slow behind others
            nonlocal cold
            time.sleep(0.1 if cold else 0)
            cold = False

    runs._ready = Cold("a", 0, [])
    runs.sweep(SIZES[:1], 1, math.inf)
    for turn in (lambda: runs.sweep(SIZES[:4], 4, math.inf), lambda: runs.repeat((1, 40), 4)):
        turn()
        cold = True
        assert max(turn()) < 50


def test_without_time_none_is_started() -> None:
    bench = Bench(a=0)
    bench.measured.workers = {"b": (late := Here(bench.workers["a"].served))}
    assert bench.measured.start(["b"], (1, 9), deadline=0) == []
    assert late.stopped
    assert not bench.measured.all_started
    assert bench.values("failed") == {"b": (1, "no time left")}


def test_worse_than_onnxruntime_is_noted_and_wrong_is_infinite(tmp_path: Path) -> None:
    bench = Bench(ort=0, ours=0, torch=0)
    for name, outputs in {"ort": [1.001], "ours": [1.002], "torch": [9.0]}.items():
        bench.workers[name].served._ready.fetch = None
        fetched = [np.array(outputs)]
        bench.workers[name].served._ready.prepare = lambda _, fetched=fetched: SimpleNamespace(
            fetch=lambda: fetched
        )
    path = tmp_path / "exact.npz"
    np.savez(path, np.array([1.0]))
    bench.measured.errors(bench.names, {(1, 7): path}, "ort")
    found = bench.values("error")
    assert found["ort"] == (pytest.approx(1e-3), "")
    assert found["ours"][1].startswith("WORSE: ort has 0.00")
    assert "torch" not in found  # other weights
    np.savez(path, np.array([1.0, 2.0]))
    bench.measured.errors(bench.names, {(1, 7): path}, "ort")
    value, note = bench.values("error")["ours"]
    assert value == "inf"
    assert note.startswith("WRONG: Mismatch: shape (1,)")


@given(st.integers(0, 300))
def test_turns_cover_a_stream(count: int) -> None:
    found = list(chunks(count))
    assert [n for first, end in found for n in range(first, end)] == list(range(count))
    assert all(end - first <= CHUNK for first, end in found)
    assert not found or found[0] == (0, min(LEAST, count))


@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=20), st.integers(0, 50))
def test_a_total_counts_the_rest_at_the_median(taken: list[float], more: int) -> None:
    value, note = total(taken, len(taken) + more)
    assert bool(note) == bool(more)
    assert sum(taken) + more * min(taken) <= value * (1 + 1e-9)
    assert value <= (sum(taken) + more * max(taken)) * (1 + 1e-9)


def test_what_is_compiled_once_is_not_multiplied() -> None:
    assert total([30_000, 20_000, 5, 5, 5], 105) == (50_015 + 100 * 5, "from 5 of 105 sizes")


@pytest.mark.parametrize("taken", [[30_000], [30_000, 16_000]])
def test_one_size_or_two_are_a_lower_bound(taken: list[float]) -> None:
    """torch.compile compiles again where a size shows that a dimension changes."""
    assert total(taken, 100) == (sum(taken), f"at least: {len(taken)} of 100 sizes")


def test_turning_keeps_all_names() -> None:
    assert [turned([*"abc"], n) for n in range(4)] == [[*"abc"], [*"bca"], [*"cab"], [*"abc"]]
    assert turned([], 3) == []


def test_the_first_call_of_a_burst_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cold = [0.0], [True]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def call() -> None:  # slow whenever another one ran in between
        clock[0] += 9e-6 if cold[0] else 1e-6
        cold[0] = False

    def other() -> None:
        cold[0] = True

    alone = measuring.compare_calls({"a": call, "b": other}, rounds=4, warm_up=0)
    bursts = measuring.compare_calls({"a": call, "b": other}, rounds=4, warm_up=0, burst=3)
    assert alone["a"].low == pytest.approx(9)
    assert bursts["a"].high == pytest.approx(1)
    assert bursts["a"].rounds == 8


def test_kernels_are_counted_where_they_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(a=0, b=0, c=0)
    for name, count in {"a": lambda _: 7, "b": lambda _: None, "c": lambda _: 1 / 0}.items():
        bench.workers[name].served.kernels = count
    bench.measured.launches(bench.names, (1, 7))
    assert bench.values("kernels") == {"a": (7, "")}
    assert "c: kernels cannot be counted: ZeroDivisionError" in capsys.readouterr().out
    assert bench.measured.workers.keys() == {*"abc"}
