"""What a validation run finds, written down as found; sections that cannot take others down.

Each section runs in a process of its own: a fault on the GPU, which poisons a CUDA context for
good, a crash or a hang ends that section and nothing else. Findings travel as JSON lines in a
file, so that what was found before a kill is kept.
"""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")
START = time.monotonic()  # inherited by forked sections: one clock for the whole run


def say(text: str) -> None:
    """A line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f}s] {text}", flush=True)


def plain(value: Any) -> Any:
    """A value that JSON takes: NaN and Inf as text, floats to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@dataclass
class Recorder:
    """Where one section writes its findings. `deadline` is on the clock of `time.monotonic`."""

    section: str
    path: Path
    deadline: float

    def check(
        self,
        name: str,
        passed: bool,
        figure: float | int | str | None = None,
        limit: float | int | str | None = None,
        **details: Any,
    ) -> bool:
        """What must hold; `figure` is what was found, `limit` what it must not exceed."""
        self._write(
            {"check": name, "passed": bool(passed), "figure": figure, "limit": limit, **details}
        )
        shown = "" if figure is None else f" {_short(figure)}"
        bound = "" if limit is None else f" (limit {_short(limit)})"
        say(f"{self.section}: {'ok  ' if passed else 'FAIL'} {name}{shown}{bound}")
        return passed

    def note(self, name: str, value: Any) -> None:
        """A figure that is reported and not judged."""
        self._write({"note": name, "value": value})
        text = json.dumps(plain(value))
        say(f"{self.section}: {name} = {text if len(text) < 160 else text[:157] + '...'}")

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _write(self, event: dict[str, Any]) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps(plain(event)) + "\n")


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class Outcome:
    """How a section ended: passed, failed, error, crashed, timeout or skipped."""

    status: str
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @staticmethod
    def read(path: Path) -> Outcome:
        """The findings in a section's file; the status is left for the caller where it crashed."""
        outcome = Outcome("passed")
        for line in path.read_text().splitlines() if path.exists() else []:
            event = json.loads(line)
            if "check" in event:
                outcome.checks.append(event)
            elif "note" in event:
                outcome.notes[event["note"]] = event["value"]
            else:
                outcome.error = event["error"]
        if outcome.error is not None:
            outcome.status = "error"
        elif not all(check["passed"] for check in outcome.checks):
            outcome.status = "failed"
        elif not outcome.checks:
            outcome.status = "skipped"
        return outcome


class NotApplicable(Exception):
    """Raised by a section that has nothing to do on this machine; the text says why."""


def run_section(
    name: str, work: Callable[[Recorder], None], seconds: float, folder: Path
) -> Outcome:
    """Runs `work` in a process of its own for at most `seconds` and returns what it found.

    The section is told to stop at 90% of its time, and killed at the end of it.
    """
    path = folder / f"{name}.jsonl"
    started = time.monotonic()
    recorder = Recorder(name, path, started + 0.9 * seconds)
    process = _FORK.Process(target=_work, args=(recorder, work), name=name)
    process.start()
    process.join(seconds)
    timed_out = process.is_alive()
    if timed_out:
        process.kill()
        process.join(10)
    outcome = Outcome.read(path)
    outcome.seconds = time.monotonic() - started
    if timed_out:
        outcome.status, outcome.error = "timeout", f"killed after {seconds:.0f} s"
    elif process.exitcode != 0 and outcome.error is None:
        outcome.status, outcome.error = "crashed", f"exit code {process.exitcode}"
    return outcome


def _work(recorder: Recorder, work: Callable[[Recorder], None]) -> None:
    try:
        work(recorder)
    except NotApplicable as reason:
        recorder.note("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        recorder._write({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a poisoned CUDA context must not speak again in some destructor


def isolate(
    items: list[str],
    work: Callable[[str], list[dict[str, Any]]],
    on_done: Callable[[str, list[dict[str, Any]]], None],
    on_fault: Callable[[str, str], None],
    *,
    deadline: float,
    patience: float = 30.0,
) -> list[str]:
    """Works through items in a child process; returns those not reached before the deadline.

    An item that raises, crashes the child or is silent for `patience` seconds is given to
    `on_fault` with the reason, and a fresh child goes on behind it. The first item of a child
    gets twice the patience, since it brings up CUDA.
    """
    at = 0
    while at < len(items) and time.monotonic() < deadline:
        receiver, sender = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_work_through, args=(items[at:], work, sender))
        child.start()
        sender.close()
        first = True
        while at < len(items) and time.monotonic() < deadline:
            wait = min(patience * (2 if first else 1), max(deadline - time.monotonic(), 0.1))
            try:
                answered = receiver.poll(wait)
                message = receiver.recv() if answered else None
            except EOFError:
                child.join(10)
                on_fault(items[at], f"the process died, exit code {child.exitcode}")
                at += 1
                break
            if message is None:
                if time.monotonic() < deadline:
                    on_fault(items[at], f"no answer for {wait:.0f} s")
                    at += 1
                break
            first = False
            kind, value = message
            item, at = items[at], at + 1
            if kind == "fault":
                on_fault(item, value)
                break
            on_done(item, value)
        child.kill()
        child.join(10)
        receiver.close()
    return items[at:]


def _work_through(items: list[str], work: Callable[[str], list[dict[str, Any]]], out: Any) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: die with the section
    for item in items:
        try:
            answer: tuple[str, Any] = ("done", work(item))
        except Exception as error:
            answer = ("fault", f"{type(error).__name__}: {error}")
        out.send(answer)
        if answer[0] == "fault":
            break
    os._exit(0)
