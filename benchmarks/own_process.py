"""An object in a process of its own, whose methods are called from here over a pipe.

The process is forked before its object exists, so that what the object loads (CUDA, a session) is
its own. A call that takes too long and a process that dies are exceptions here, and nothing else.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_FORK = multiprocessing.get_context("fork")
SHOWN = 200  # characters of an exception's text


class CallFailed(RuntimeError):
    """The method raised, the text says what; the process goes on."""


class ProcessLost(CallFailed):
    """The process died, or did not answer in time and was killed."""


class OwnProcess:
    """`make` is called in the new process. One call at a time: `begin` it, then `finish` it, which
    lets several processes work side by side; `call` does both.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(make, theirs), name=name)
        self._process.start()
        theirs.close()  # so that the pipe ends with the process

    def begin(self, method: str, *arguments: Any) -> None:
        """Sends a call. That the process is gone is told by `finish`."""
        try:
            self._pipe.send((method, arguments))
        except OSError:
            self._process.join(1)

    def finish(self, seconds: float) -> Any:
        """What the method returned.

        Raises:
            CallFailed: It raised.
            ProcessLost: There was no answer within `seconds`, or the process is dead.
        """
        try:
            if not self._pipe.poll(max(seconds, 0)):
                self.stop()
                raise ProcessLost(f"killed: no answer in {seconds:.0f} s")
            worked, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise ProcessLost(f"ended with exit code {self._process.exitcode}") from None
        if not worked:
            raise CallFailed(value)
        return value

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """`begin` and `finish`."""
        self.begin(method, *arguments)
        return self.finish(seconds)

    def stop(self) -> None:
        """Ends the process at once; nothing of it is needed any more. May be called again."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _serve(make: Callable[[], Any], pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: die with the caller
    served = make()
    while True:
        method, arguments = pipe.recv()
        try:
            answer = (True, getattr(served, method)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {str(error)[:SHOWN]}")
        pipe.send(answer)
