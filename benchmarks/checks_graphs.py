"""Section about CUDA graphs over shapes: `InferenceSession(..., cuda_graphs=N)`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks import operands
from benchmarks.chains import Chain
from benchmarks.machine import Setting
from benchmarks.measuring import compare_calls
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, Provider, our_session, plain_session

ROWS = (1, 37, 128, 512)
DEPTH = 32
WIDTH = 768
MANY = 40  # shapes, for what a graph takes

# Reshape reads its sizes on the host; NonZero asks the GPU how many there are, which no capture
# takes; ONNX Runtime makes no graph session at all of the last, whose Loop is control flow.
HOST_INPUT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[a, b] x, int64[2] sizes) => (float[c, d] y) { h = Reshape (x, sizes)  y = MatMul (h, w) }
"""
NOT_CAPTURED = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 24] x) => (int64[two, many] y) { h = MatMul (x, w)  y = NonZero (h) }
"""
NO_SESSION = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 24] x, bool c) => (float[n, 24] y)
{ h = MatMul (x, w)
  y = If (c) <then_branch = a () => (float[n, 24] p) { p = Relu (h) },
              else_branch = b () => (float[n, 24] q) { q = Neg (h) }> }
"""


def graphs(setting: Setting, record: Recorder) -> None:
    """Values, times and memory of sessions that capture the shapes that repeat."""
    provider = setting.provider
    if not provider.is_cuda:
        raise NotApplicable("needs the CUDA provider")
    model = Chain.make([WIDTH] * (DEPTH + 1), torch.float16)
    eager = our_session(model.model, provider)
    graphs = our_session(model.model, provider, cuda_graphs=8)
    record.check("the session has graphs", graphs._graphs is not None)
    _values(model, eager, graphs, record)
    _times(model, eager, graphs, provider, record)
    _memory(model, provider, record)
    _host_inputs(provider, record)
    _not_captured(provider, record)


def _feed(rows: int, seed: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng([rows, seed]).standard_normal((rows, WIDTH), np.float32)
    return {"x": values.astype(np.float16)}


def _values(model: Chain, eager: Any, graphs: Any, record: Recorder) -> None:
    """Shapes in turn, every run with other values, in one thread and in four."""
    jobs = [(rows, seed) for seed in range(6) for rows in (*ROWS, 200 + seed)]
    want = {job: eager.run(None, _feed(*job))[0] for job in jobs}
    got = {job: graphs.run(None, _feed(*job))[0] for job in jobs}
    same = sum(np.array_equal(got[job], want[job]) for job in jobs)
    record.check(
        "runs with the bits of a session without graphs", same == len(jobs), same, len(jobs)
    )
    record.check("graphs captured", len(graphs._graphs.policy.ids) == len(ROWS),
                 len(graphs._graphs.policy.ids), len(ROWS))  # fmt: skip

    def ask(_: int) -> int:
        return sum(np.array_equal(graphs.run(None, _feed(*job))[0], want[job]) for job in jobs)

    with ThreadPoolExecutor(4) as pool:
        same = sum(pool.map(ask, range(4)))
    record.check("the same from four threads", same == 4 * len(jobs), same, 4 * len(jobs))


def _times(model: Chain, eager: Any, graphs: Any, provider: Provider, record: Recorder) -> None:
    """Microseconds a run: numpy in and out, and with memory bound on the GPU."""
    theirs = plain_session(model.model, provider)
    for rows in ROWS:
        feed = _feed(rows, 0)
        x = torch.from_numpy(feed["x"]).to(provider.torch_device)
        bound = {
            name: Bound(session, provider, {"x": x}, {"y": torch.empty_like(x)})
            for name, session in (("eager", eager), ("graph", graphs), ("ort", theirs))
        }
        for one in bound.values():
            for _ in range(3):
                one.run()
        reference = model.reference(x)
        errors = {name: operands.relative_error(one._keep[1]["y"], reference)
                  for name, one in bound.items()}  # fmt: skip
        record.check(f"M={rows} error of a bound replay", errors["graph"] == errors["eager"],
                     errors["graph"], errors["eager"])  # fmt: skip
        calls: dict[str, Any] = {f"{name}, bound": one.run for name, one in bound.items()}
        calls |= {
            f"{name}, numpy": partial(session.run, None, feed)
            for name, session in (("eager", eager), ("graph", graphs), ("ort", theirs))
        }
        times = compare_calls(calls, rounds=200, seconds=3)
        record.note(f"M={rows} us a run", {name: timing.median for name, timing in times.items()})
        shorter = times["graph, bound"].median / times["eager, bound"].median
        record.check(f"M={rows} replay / eager, bound", shorter <= 1, shorter, 1)


def _free(provider: Provider) -> int:
    torch.cuda.synchronize(provider.ordinal)
    return torch.cuda.mem_get_info(provider.ordinal)[0]


def _memory(model: Chain, provider: Provider, record: Recorder) -> None:
    """What graphs take, and that those which are dropped make room for as many again."""
    session = our_session(model.model, provider, cuda_graphs=MANY)
    for rows in range(256, 0, -1):  # the arena grows now
        session.run(None, _feed(rows, 0))
    before = _free(provider)
    for rows in range(1, MANY + 1):
        session.run(None, _feed(rows, 0))
    taken = (before - _free(provider)) / MANY
    held = len(session._graphs.policy.ids)
    record.check("graphs held", held == MANY, held, MANY)
    record.check("MB of GPU memory a graph of 32 nodes", taken <= 4e6, taken / 1e6, 4)
    for _ in range(2):
        for rows in range(101, 101 + MANY):
            session.run(None, _feed(rows, 0))
    held = len(session._graphs.policy.ids)
    record.check("graphs held after others took their place", held == MANY, held, MANY)
    record.note("MB a graph, dropped ones counted", (before - _free(provider)) / 2 / MANY / 1e6)


def _text_model(text: str) -> bytes:
    values = ", ".join(f"{x:.5f}" for x in np.random.default_rng(5).standard_normal(24 * 24))
    head, body = text.rstrip().split("{", 1)
    model = onnx.parser.parse_model(f"{head}<float[24, 24] w = {{{values}}}>\n{{{body}")
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _host_inputs(provider: Provider, record: Recorder) -> None:
    """Equal shapes of inputs whose values decide the shapes of what follows."""
    model = _text_model(HOST_INPUT)
    session = our_session(model, provider, cuda_graphs=4)
    on_host = session._graphs and sorted(session._graphs.places.host_inputs)
    record.check("sizes are known to be read on the host", on_host == ["sizes"], str(on_host))
    plain = plain_session(model, provider)
    same = 0
    for run in range(12):
        x = np.random.default_rng(run).standard_normal((12, 48), np.float32)
        sizes = np.array([24, 24] if run % 2 else [-1, 24], np.int64)
        feed = {"x": x, "sizes": sizes}
        (got,), (want,) = session.run(None, feed), plain.run(None, feed)
        same += got.shape == want.shape and np.allclose(got, want, rtol=5e-3, atol=5e-2)
    record.check("runs whose sizes change at equal shapes", same == 12, same, 12)


def _not_captured(provider: Provider, record: Recorder) -> None:
    """Models that cannot be captured run all the same, and the log says so."""
    x = np.random.default_rng(1).standard_normal((9, 24), np.float32)
    for name, text, extra in (
        ("a node that waits for the GPU", NOT_CAPTURED, {}),
        ("control flow", NO_SESSION, {"c": np.array(True)}),
    ):
        model = _text_model(text)
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda entry, said=said: said.append(entry.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("moonpoly_ort")
        logger.addHandler(handler)
        try:
            session = our_session(model, provider, cuda_graphs=4)
            got = [session.run(None, {"x": x, **extra})[0] for _ in range(8)]
        finally:
            logger.removeHandler(handler)
        (want,) = our_session(model, provider).run(None, {"x": x, **extra})
        record.check(f"{name}: values", all(_equal(y, want) for y in got))
        warned: Sequence[str] = [text for text in said if "CUDA graph" in text]
        record.check(f"{name}: the log says so", bool(warned), "; ".join(warned)[:200])


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b))
