"""ONNX Runtime's CUDA provider as far as graphs go, on the CPU.

As there, a captured graph belongs to the thread that captured it, reads and writes the memory that
was bound then, whatever is bound later, and goes on with the values its host inputs had then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime as ort

from moonpoly_ort.graph_cache import GraphCache, Places
from moonpoly_ort.graph_policy import GraphLimits
from moonpoly_ort.graph_runs import GraphBinding, GraphRuns

HOST_INPUT = "k"
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
scaled (float[n, 8] x, int64[1] k) => (float[n, 4] y, float[n, 4] z)
{ p = MatMul (x, w)  s = Cast <to = 1> (k)  y = Mul (p, s)  z = Relu (y) }
"""


def model() -> bytes:
    """x [n, 8], k [1] -> y = x @ w * k, z = relu(y), both [n, 4]."""
    text = MODEL.replace("\n{", "\n<float[8, 4] w = {%s}>\n{")
    values = np.random.default_rng(3).standard_normal(32)
    return onnx.parser.parse_model(text % ", ".join(f"{x:.6f}" for x in values)).SerializeToString()


class Provider(ort.InferenceSession):  # type: ignore[misc]
    """What `enable_cuda_graph` makes of a session."""

    running: ClassVar[list[bool]] = []  # in the process; whether each is a capture

    def __init__(self, source: bytes) -> None:
        super().__init__(source, providers=["CPUExecutionProvider"])
        self.captured: dict[tuple[int, int], dict[tuple[bool, str], Any]] = {}
        self.replays = 0
        self.failures = 0  # captures that are still to fail
        self._busy = threading.Lock()

    @contextmanager
    def _alone(self, captures: bool = False) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), "two runs share the stream"
        try:
            Provider.running.append(captures)
            assert not (True in Provider.running and len(Provider.running) > 1), "CUDA error 900"
            time.sleep(0)
            yield
        finally:
            Provider.running.remove(captures)
            self._busy.release()

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        with self._alone():
            assert run_options.get_run_config_entry("gpu_graph_id") == "-1", "unbound memory"
            return super().run(output_names, input_feed, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        assert isinstance(iobinding, GraphBinding)
        graph_id = int(run_options.get_run_config_entry("gpu_graph_id"))
        key = threading.get_ident(), graph_id
        with self._alone(captures=graph_id >= 0 and key not in self.captured):
            if key in self.captured:
                self.replays += 1
                return self._replay(self.captured[key])
            if graph_id >= 0 and self.failures:
                self.failures -= 1
                raise RuntimeError("operation not permitted when stream is capturing")
            super().run_with_iobinding(iobinding, run_options)
            if graph_id >= 0:
                memory = dict(iobinding._values)
                if (False, HOST_INPUT) in memory:
                    memory[False, HOST_INPUT] = _array(memory[False, HOST_INPUT]).copy()
                self.captured[key] = memory
            return None

    def _replay(self, memory: dict[tuple[bool, str], Any]) -> None:
        binding = ort.IOBinding(self)
        for (is_output, name), value in memory.items():
            if is_output:
                binding.bind_ortvalue_output(name, value)
            elif name == HOST_INPUT:
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        super().run_with_iobinding(binding)


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy()


class CapturingSession(GraphRuns, Provider):
    """A session with graphs, as `moonpoly_ort.InferenceSession` is one on a GPU."""

    def __init__(self, limits: GraphLimits) -> None:
        super().__init__(model())
        places = Places("cpu", 0, frozenset({HOST_INPUT}), frozenset())
        self.cache = self._graphs = GraphCache(places, limits)
