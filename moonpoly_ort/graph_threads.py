"""On which thread the runs of a session with CUDA graphs take place, and when none may.

ONNX Runtime keeps a captured graph for the thread that captured it, and library handles for every
thread that ever ran such a session, until the session ends; all its threads share one stream, on
which nothing else may be queued during a capture. So runs take turns, and few threads make them:

* The thread that calls first makes its runs itself. Handing a run over to another thread costs
  17 us where both cores are awake, and several times that where an idle one must be woken, as
  on a virtual machine: as much as a replay saves.
* A second thread that calls takes the session over (the first one may only have warmed it up).
* From the next change on, all runs take place on a worker thread.

Each change loses the graphs that there are: they are captured again.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HOMES = 2  # threads that may have the session to themselves, one after the other


class Gate:
    """Captures take place alone in the process, anything else beside one another.

    While one thread captures, CUDA refuses some calls of every other thread of the process (to
    allocate, to copy and wait), and such a call spoils the capture.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside: dict[int, int] = {}  # how often each thread is
        self._captures = 0  # waiting or in progress
        self._run = _Inside(self)

    def run(self) -> _Inside:
        """What anything else than a capture is done within (`with gate.run():`)."""
        return self._run

    def _enter(self) -> None:
        me = threading.get_ident()
        with self._changed:
            # A thread that is inside already (a run that makes its session anew) must not wait for
            # a capture that waits for it.
            while self._captures and me not in self._inside:
                self._changed.wait()
            self._inside[me] = self._inside.get(me, 0) + 1

    def _leave(self) -> None:
        me = threading.get_ident()
        with self._changed:
            left = self._inside.pop(me) - 1
            if left:
                self._inside[me] = left
            if self._captures:
                self._changed.notify_all()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Not from inside of `run`."""
        with self._changed:
            while self._captures:
                self._changed.wait()
            self._captures = 1
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._captures = 0
                self._changed.notify_all()


class _Inside:
    """A context without state of its own: every run enters one, and a generator costs 2 us."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate._enter()

    def __exit__(self, *error: object) -> None:
        self._gate._leave()


gate = Gate()


class Turns:
    """Calls functions one at a time, on the caller's thread or a worker, as said above.

    A function must not call the same `Turns` again.

    Attributes:
        epoch: grows when the thread changes. To be read by the functions that are called.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._lock = threading.Lock()
        self._home: object = None
        self._worker: Worker | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises."""
        if self._worker is None:
            with self._lock:
                if self._worker is None and self._is_home():
                    return function(*arguments)
        assert self._worker is not None
        return self._worker.call(function, *arguments)

    def _is_home(self) -> bool:
        """Whether this thread makes the run itself; it may become the one that does."""
        me = _this_thread()
        if me is self._home:
            return True
        self.epoch += 1
        if self.epoch <= HOMES:
            self._home = me
            return True
        self._worker = Worker()
        return False


_local = threading.local()


def _this_thread() -> object:
    """Stands for this thread alone: identifiers are given out again when a thread has ended."""
    try:
        return _local.token
    except AttributeError:
        _local.token = object()
        return _local.token


class Worker:
    """A thread that makes calls for others; it ends with the worker object."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name="moonpoly-cuda-graphs", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises, there."""
        job = _Job(function, arguments)
        self._jobs.put(job)
        job.done.acquire()
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # a cycle: the traceback knows this frame
        return job.result


class _Job:
    __slots__ = ("arguments", "done", "error", "function", "result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.result = job.function(*job.arguments)
        except BaseException as error:
            job.error = error
        job.done.release()
        del job  # it holds the session, which must not live until the next run
