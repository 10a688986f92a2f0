"""Objects in processes of their own: answers, exceptions, deaths, and silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from benchmarks.own_process import CallFailed, OwnProcess, ProcessLost


class Counter:
    """Counts up; and ways not to answer."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def process(self) -> int:
        return os.getpid()

    def refuse(self, why: str) -> None:
        raise ValueError(why)

    def exit(self, code: int) -> None:
        os._exit(code)

    def kill(self, signal_number: int) -> None:
        os.kill(os.getpid(), signal_number)
        time.sleep(20)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def counter() -> Iterator[OwnProcess]:
    made = OwnProcess("counter", Counter)
    yield made
    made.stop()


def test_an_object_lives_elsewhere_and_keeps_its_state(counter: OwnProcess) -> None:
    assert counter.call("add", 2, seconds=20) == 2
    assert counter.call("add", 3, seconds=20) == 5
    assert counter.call("process", seconds=20) != os.getpid()


def test_an_exception_is_told_and_the_next_call_answered(counter: OwnProcess) -> None:
    with pytest.raises(CallFailed, match=r"^ValueError: because$") as raised:
        counter.call("refuse", "because", seconds=20)
    assert not isinstance(raised.value, ProcessLost)
    assert counter.call("add", 1, seconds=20) == 1


@pytest.mark.parametrize(("method", "code"), [("exit", 3), ("kill", -signal.SIGTERM)])
def test_a_death_is_told_by_every_call(counter: OwnProcess, method: str, code: int) -> None:
    with pytest.raises(ProcessLost, match=f"^ended with exit code {code}$"):
        counter.call(method, abs(code), seconds=20)
    with pytest.raises(ProcessLost, match=f"^ended with exit code {code}$"):
        counter.call("add", 1, seconds=20)
    counter.stop()


def test_one_that_does_not_answer_is_killed(counter: OwnProcess) -> None:
    process = counter.call("process", seconds=20)
    with pytest.raises(ProcessLost, match=r"^killed: no answer in 0 s$"):
        counter.call("sleep", 60, seconds=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_two_work_side_by_side_and_a_death_of_one_is_not_hidden_by_the_other() -> None:
    both = [OwnProcess(name, Counter) for name in "ab"]  # b has a copy of what a's pipe is
    try:
        for one in both:
            one.begin("sleep", 1)
        started = time.monotonic()
        for one in both:
            one.finish(20)
        assert time.monotonic() - started < 1.8
        with pytest.raises(ProcessLost, match="exit code 7"):
            both[0].call("exit", 7, seconds=20)
        assert both[1].call("add", 1, seconds=20) == 1
    finally:
        for one in both:
            one.stop()


def test_an_object_that_cannot_be_made_is_lost() -> None:
    broken = OwnProcess("broken", lambda: Counter().exit(9))
    with pytest.raises(ProcessLost, match="exit code 9"):
        broken.call("add", 1, seconds=20)
