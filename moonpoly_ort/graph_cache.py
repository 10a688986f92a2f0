"""CUDA graphs over shapes: a graph for every shape that repeats, the least recently used dropped.

ONNX Runtime captures a run under an id (provider option `enable_cuda_graph`, run config entry
`gpu_graph_id`) and replays it when a run has that id again; -1 does neither. What that leaves to
its user decides how this file is written:

* A graph reads and writes the addresses it was captured with. Each has buffers of its own here,
  which inputs are copied into and outputs out of.
* Graphs belong to the thread that captured them, so runs take turns on one thread
  (`graph_threads.py`); when it changes, all graphs are captured again.
* A capture must be alone in the process. `gate` keeps the sessions of this package with graphs
  apart; it cannot keep others away, so that a capture may fail and is tried again.
* What kernels read on the host (the sizes of a Reshape, say) is part of the graph. Inputs that ONNX
  Runtime keeps on the host are part of the key, byte for byte.
* Intermediate results lie in the arena, where other runs may use the same memory between two
  replays. Nothing but a run may therefore hold arena memory: results are copied out before a run
  ends, and the calls that leave them in the arena are refused (`graph_runs.py`).
* The CUDA provider keeps a graph until its session ends, whatever is asked of it. A dropped
  graph gives back its buffers and its id is never used again; how many are captured over the
  life of a session is bounded too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from . import dependencies
from .graph_policy import PATIENCE, GraphLimits, Policy
from .graph_threads import Turns, gate

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.InferenceSession")

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1
HOST_BYTES = 1024  # of one input that is read on the host: sizes and axes, not data

log = logging.getLogger("moonpoly_ort")


def run_options(graph_id: int) -> Any:
    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, str(graph_id))
    return options


@dataclass(frozen=True)
class Places:
    """Where a session's tensors lie: the device of its buffers, and what is kept on the host."""

    device: str  # as OrtValue names it
    device_id: int
    host_inputs: frozenset[str]
    host_outputs: frozenset[str]

    @staticmethod
    def of(session: Any, device_id: int) -> Places | None:
        """None where this onnxruntime cannot tell."""
        try:
            sides = (
                (session.get_inputs(), session.get_input_memory_infos()),
                (session.get_outputs(), session.get_output_memory_infos()),
            )
        except AttributeError:
            return None
        on_host = [
            frozenset(
                meta.name for meta, info in zip(*side, strict=True) if info.name.lower() != "cuda"
            )
            for side in sides
        ]
        return Places("cuda", device_id, *on_host)

    def buffer(self, shape: Sequence[int], dtype: np.dtype[Any], on_host: bool) -> Any:
        """An OrtValue outside of the session's arena."""
        place = ("cpu", 0) if on_host else (self.device, self.device_id)
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype.type, *place)


class Captured:
    """A graph: its buffers, bound, and the id that ONNX Runtime has it under."""

    def __init__(
        self,
        session: Any,
        places: Places,
        graph_id: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    ) -> None:
        self._options = run_options(graph_id)
        self._binding = session.io_binding()
        self._inputs: dict[str, Any] = {}  # those on the device
        self._outputs: list[tuple[Any, bool]] = []  # and whether on the host
        for name, array in inputs.items():
            on_host = name in places.host_inputs
            buffer = places.buffer(array.shape, array.dtype, on_host)
            self._binding.bind_ortvalue_input(name, buffer)
            if on_host:
                buffer.update_inplace(np.ascontiguousarray(array))  # the same at every run
            else:
                self._inputs[name] = buffer
        for name, (shape, dtype) in outputs.items():
            buffer = places.buffer(shape, dtype, name in places.host_outputs)
            self._binding.bind_ortvalue_output(name, buffer)
            self._outputs.append((buffer, buffer.device_name() == "cpu"))

    def run(self, plain: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Captures (the first time) and replays; returns copies of the outputs."""
        for name, buffer in self._inputs.items():
            # Complete when it returns: ONNX Runtime waits for the copy, and its own stream would
            # not.
            buffer.update_inplace(np.ascontiguousarray(inputs[name]))
        plain.run_with_iobinding(self._binding, self._options)
        # From the device `numpy` copies; from the host it is a view of the buffer.
        return [
            value.numpy().copy() if on_host else value.numpy() for value, on_host in self._outputs
        ]


class GraphCache:
    """The graphs of one session, and its runs.

    It does not know the session, which holds it: `plain` in the methods is the session as
    onnxruntime's own class sees it, with `run` and `run_with_iobinding`.
    """

    def __init__(self, places: Places, limits: GraphLimits) -> None:
        self.policy = Policy(limits)
        self.places = places
        self._turns = Turns()
        self._epoch = 0  # of the turns, when the graphs were captured
        self._eager = run_options(NO_GRAPH)
        self._graphs: dict[int, Captured] = {}
        self._bound: dict[int, Any] = {}  # run options of graphs in the user's own memory

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs something else of the session in its turn; it must not capture."""
        return self._turns.call(self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with gate.run():
            return function(*arguments)

    def run(self, session: Any, plain: Any, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        """As `onnxruntime.InferenceSession.run`, by a graph where there is one."""
        return self._turns.call(self._run, session, plain, names, feeds)

    def run_bound(self, session: Any, plain: Any, binding: Any, key: Hashable) -> None:
        """A run whose tensors the user bound: `key` has their addresses, so that any binding of the
        same memory shares a graph.
        """
        self._turns.call(self._run_bound, session, plain, binding, key)

    def _run_bound(self, session: Any, plain: Any, binding: Any, key: Hashable) -> None:
        if self._epoch != self._turns.epoch:
            self._leave_behind(session)
        graph_id = self.policy.find(key)
        options = self._eager if graph_id is None else self._bound[graph_id]
        with gate.run():
            plain.run_with_iobinding(binding, options)
        if graph_id is not None:
            return None
        if self.policy.repeats(key):
            admitted = self.policy.admit(key, 0)
            if admitted is not None:
                options = run_options(admitted[0])
                attempt = partial(plain.run_with_iobinding, binding, options)
                if self._attempt(session, key, admitted, attempt):
                    self._bound[admitted[0]] = options
                return None
        return self.policy.note(key)

    def _run(self, session: Any, plain: Any, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        if self._epoch != self._turns.epoch:
            self._leave_behind(session)
        key = self._key(names, feeds)
        graph_id = None if key is None else self.policy.find(key)
        with gate.run():
            if graph_id is not None:
                return self._graphs[graph_id].run(plain, feeds)
            outputs = plain.run(names, feeds, self._eager)
        if key is None:
            return outputs
        if self.policy.repeats(key):
            self._capture(session, plain, key, dict(zip(names, outputs, strict=True)), feeds)
        else:
            self.policy.note(key)
        return outputs

    def _capture(
        self,
        session: Any,
        plain: Any,
        key: Hashable,
        outputs: Mapping[str, Any],
        feeds: Mapping[str, np.ndarray],
    ) -> None:
        """Captures the run whose outputs these are, if it may have a graph."""
        if any(not isinstance(value, np.ndarray) or not value.size for value in outputs.values()):
            return self.policy.note(key)
        size = sum(math.prod(value.shape) * value.dtype.itemsize
                   for value in (*feeds.values(), *outputs.values()))  # fmt: skip
        admitted = self.policy.admit(key, size)
        if admitted is None:
            return self.policy.note(key)
        shapes = {name: (value.shape, value.dtype) for name, value in outputs.items()}

        def attempt() -> None:
            graph = Captured(session, self.places, admitted[0], feeds, shapes)
            graph.run(plain, feeds)
            self._graphs[admitted[0]] = graph

        self._attempt(session, key, admitted, attempt)
        return None

    def _attempt(
        self,
        session: Any,
        key: Hashable,
        admitted: tuple[int, list[int]],
        attempt: Callable[[], None],
    ) -> bool:
        """Drops what had to go, then captures; whether that went well."""
        graph_id, dropped = admitted
        with gate.capture():
            for old in dropped:
                self._drop(session, old)
            try:
                attempt()
            except Exception as error:  # onnxruntime has no common base for its errors
                self._drop(session, graph_id)
                given_up = self.policy.failed(key)
                log.warning(
                    "a CUDA graph could not be captured, the run went on without%s: %s",
                    f"; after {PATIENCE} such failures none is tried any more" if given_up else "",
                    error,
                )
                self.policy.note(key)
                return False
        self.policy.captured()
        return True

    def _leave_behind(self, session: Any) -> None:
        """Gives up the graphs of the thread that runs took place on before."""
        self._epoch = self._turns.epoch
        for graph_id in self.policy.forget():
            self._drop(session, graph_id)

    def _drop(self, session: Any, graph_id: int) -> None:
        self._graphs.pop(graph_id, None)
        self._bound.pop(graph_id, None)
        # Newer versions have it (1.31 does), but their CUDA provider takes no notice.
        release = getattr(session, "release_captured_graph", None)
        if release is not None:
            release(graph_id)

    def _key(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Hashable | None:
        """What two runs must have in common to share a graph; None: it takes no part."""
        parts: list[Hashable] = [tuple(names)]
        for name in sorted(feeds):
            value = feeds[name]
            if not isinstance(value, np.ndarray) or not value.size or not value.dtype.isnative:
                return None
            if value.dtype.kind not in "biuf":
                return None
            content = None
            if name in self.places.host_inputs:
                if value.nbytes > HOST_BYTES:
                    return None
                content = value.tobytes()
            parts.append((name, value.dtype.char, value.shape, content))
        return tuple(parts)
