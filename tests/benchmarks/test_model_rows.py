"""Streams and totals: who runs what, in which order, and what a sum that was cut short holds."""

from __future__ import annotations

import math
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import exported_models, measuring
from benchmarks.exported_models import Stream
from benchmarks.model_rows import LEAST, Measured, total, turned
from benchmarks.running import CPU, Provider

SIZES = tuple((1, n) for n in range(1, 9))
STREAM = Stream("s", SIZES, ((1, 20),))


class Sleeper:
    """Takes `seconds` a run and notes the lengths that it ran."""

    def __init__(self, name: str, seconds: float, log: list[tuple[str, int]]) -> None:
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


def streamed(
    patience: float, deadline: float = math.inf, **seconds: float
) -> tuple[bool, list[tuple[str, int]], list[dict[str, Any]]]:
    (bert,) = exported_models.named("bert_base")
    rows: list[dict[str, Any]] = []
    log: list[tuple[str, int]] = []
    measured = Measured(bert.shrunk(), "f32", Provider(CPU), rows.append)
    running = {name: Sleeper(name, each, log) for name, each in seconds.items()}
    return measured.stream(running, STREAM, patience, deadline), log, rows


def values(rows: list[dict[str, Any]], measure: str) -> dict[str, tuple[float, str]]:
    return {r["contender"]: (r["value"], r["note"]) for r in rows if r["measure"] == measure}


def test_all_run_every_size_twice_and_take_turns_at_being_first() -> None:
    complete, log, rows = streamed(10, a=0, b=0, c=0)
    assert complete
    assert Counter(log) == {(name, n): 2 for name in "abc" for _, n in SIZES}
    once = log[: 3 * len(SIZES)]
    assert [n for _, n in once] == [n for _, n in SIZES for _ in range(3)]
    assert [name for name, _ in once[::3]] == [*"abcabcab"]
    assert {note for _, note in values(rows, "stream_ms").values()} == {""}
    assert values(rows, "again_stream_ms").keys() == {*"abc"}


def test_a_slow_one_leaves_and_its_sum_is_estimated() -> None:
    complete, log, rows = streamed(0.05, slow=0.02, quick=0)
    assert complete
    assert Counter(name for name, _ in log) == {"slow": 2 * LEAST, "quick": 2 * len(SIZES)}
    value, note = values(rows, "stream_ms")["slow"]
    assert note == f"from {LEAST} of {len(SIZES)} sizes"
    assert value >= 20 * len(SIZES)
    assert values(rows, "stream_ms")["quick"][1] == ""
    assert len([r for r in rows if r["measure"] == "new_ms" and r["contender"] == "slow"]) == LEAST


def test_a_deadline_ends_it_for_all_after_the_least_number_of_sizes() -> None:
    complete, log, rows = streamed(10, deadline=0, a=0, b=0)
    assert not complete
    assert Counter(name for name, _ in log) == {"a": 2 * LEAST, "b": 2 * LEAST}
    assert {note for _, note in values(rows, "stream_ms").values()} == {
        f"from {LEAST} of {len(SIZES)} sizes"
    }


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20), st.integers(0, 50))
def test_a_total_counts_the_rest_at_the_median(taken: list[float], more: int) -> None:
    value, note = total(taken, len(taken) + more)
    assert bool(note) == bool(more)
    assert sum(taken) + more * min(taken) <= value * (1 + 1e-9)
    assert value <= (sum(taken) + more * max(taken)) * (1 + 1e-9)


def test_what_is_compiled_once_is_not_multiplied() -> None:
    assert total([30_000, 20_000, 5, 5, 5], 105) == (50_015 + 100 * 5, "from 5 of 105 sizes")


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
