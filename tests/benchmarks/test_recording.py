"""Sections and items cannot take each other down, and what they found before is kept."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recording import NotApplicable, Recorder, isolate, run_section


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_section_that_holds(tmp_path: Path) -> None:
    def work(record: Recorder) -> None:
        record.check("small", True, 0.25, 1.0)
        record.note("odd", float("inf"))

    outcome = run_section("one", work, 20, tmp_path)
    assert (outcome.status, outcome.error) == ("passed", None)
    assert outcome.checks == [{"check": "small", "passed": True, "figure": 0.25, "limit": 1.0}]
    assert outcome.notes == {"odd": "inf"}


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [("raise", "error", "ValueError: no"), ("crash", "crashed", "exit code -9"),
     ("hang", "timeout", "killed after 2 s"), ("skip", "failed", None), ("", "failed", None)],
)  # fmt: skip
def test_what_was_found_before_the_end_is_kept(
    tmp_path: Path, end: str, status: str, error: str | None
) -> None:
    def work(record: Recorder) -> None:
        record.check("large", False, 3, 2)
        if end == "raise":
            raise ValueError("no")
        if end == "crash":
            _crash()
        if end == "hang":
            time.sleep(60)
        if end == "skip":
            raise NotApplicable("not here")

    outcome = run_section("one", work, 2 if end == "hang" else 20, tmp_path)
    assert (outcome.status, outcome.error) == (status, error)
    assert [check["check"] for check in outcome.checks] == ["large"]


def test_a_section_with_nothing_to_do_says_why(tmp_path: Path) -> None:
    def work(record: Recorder) -> None:
        raise NotApplicable("no second GPU")

    outcome = run_section("one", work, 20, tmp_path)
    assert (outcome.status, outcome.notes) == ("skipped", {"skipped": "no second GPU"})


def test_items_after_a_fault_are_reached() -> None:
    done: dict[str, Any] = {}
    faults: dict[str, str] = {}

    def work(item: str) -> list[dict[str, Any]]:
        if item == "crash":
            _crash()
        if item == "raise":
            raise ValueError("no")
        if item == "hang":
            time.sleep(60)
        return [{"item": item}]

    items = ["a", "crash", "b", "raise", "hang", "c"]
    left = isolate(items, work, done.__setitem__, faults.__setitem__,
                   deadline=time.monotonic() + 30, patience=0.5)  # fmt: skip
    assert left == []
    assert done == {item: [{"item": item}] for item in "abc"}
    assert faults == {"crash": "the process died, exit code -9", "raise": "ValueError: no",
                      "hang": "no answer for 1 s"}  # fmt: skip


def test_items_beyond_the_deadline_are_named() -> None:
    def work(item: str) -> list[dict[str, Any]]:
        time.sleep(0.4)
        return []

    done: list[str] = []
    items = [str(i) for i in range(20)]
    left = isolate(items, work, lambda item, _: done.append(item), lambda *_: pytest.fail("fault"),
                   deadline=time.monotonic() + 1.0)  # fmt: skip
    assert 1 <= len(done) <= 3
    assert done + left == items
