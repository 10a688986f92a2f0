"""Section about CUDA graphs over shapes: `InferenceSession(..., cuda_graphs=N)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from benchmarks import operands
from benchmarks.chains import Chain
from benchmarks.machine import Setting
from benchmarks.measuring import compare_calls
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, Provider, our_session, plain_session
from moonpoly_ort import native
from moonpoly_ort.graph_threads import Worker

ROWS = (1, 37, 128, 512)
BY_HAND = 37  # of these, captured without an id, which a session does for one shape alone
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
    _times(model, eager, graphs, provider, record)  # whose runs are a worker's by now
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


def _times(model: Chain, eager: Any, worker: Any, provider: Provider, record: Recorder) -> None:
    """Microseconds a run: numpy in and out, and with memory bound on the GPU; and the parts of a
    replay: ONNX Runtime's own (once as its part of ours, once captured by hand), the copies of
    numpy arrays, and handing over to another thread.
    """
    graphs = our_session(model.model, provider, cuda_graphs=8)
    by_hand = our_session(model.model, provider, enable_cuda_graph="1")
    theirs = plain_session(model.model, provider)
    hand_over = Worker()
    for rows in ROWS:
        feed = _feed(rows, 0)
        x = torch.from_numpy(feed["x"]).to(provider.torch_device)
        sessions = {"eager": eager, "graph": graphs, "graph of a worker": worker, "ort": theirs}
        bound = {
            name: Bound(session, provider, {"x": x}, {"y": torch.empty_like(x)})
            for name, session in sessions.items()
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
            f"{name}, numpy": partial(session.run, None, feed) for name, session in sessions.items()
        }
        times = compare_calls(calls, rounds=200, seconds=3)
        for how in ("bound", "numpy"):
            taken = {name: times[f"{name}, {how}"].median for name in sessions}
            record.note(f"M={rows} us a run, {how}", taken)
            shorter = taken["graph"] / taken["eager"]
            record.check(f"M={rows} replay / eager, {how}", shorter <= 1, shorter, 1)
        before = native.stats().launches
        bound["graph"].run()
        graphs.run(None, feed)
        launched = native.stats().launches - before
        record.check(f"M={rows} launches by the host in replays", launched == 0, launched, 0)

        parts: dict[str, Any] = {
            "raw replay": _raw_replay(graphs, bound["graph"].binding),
            "bound": bound["graph"].run,
            "numpy": partial(graphs.run, None, feed),
            "copy in": partial(_buffer(feed["x"], provider).update_inplace, feed["x"]),
            "copy out": _buffer(feed["x"], provider).numpy,
            "hand over to a thread": partial(hand_over.call, int),
        }
        if rows == BY_HAND:
            captured = Bound(by_hand, provider, {"x": x}, {"y": torch.empty_like(x)})
            parts["captured by hand"] = captured.run
        found = compare_calls(parts, rounds=400, seconds=2)
        record.note(f"M={rows} us, parts of a replay",
                    {name: timing.median for name, timing in found.items()})  # fmt: skip
        added = found["bound"].median - found["raw replay"].median
        record.check(f"M={rows} us added to a bound replay", added <= 15, added, 15)


def _raw_replay(session: Any, binding: Any) -> Callable[[], None]:
    """ONNX Runtime's part of a bound replay of a session with graphs."""
    cache = session._graphs
    options = cache._bound[cache.policy.find(binding.key(cache.places))]
    return partial(session._sess.run_with_iobinding, binding._iobinding, options)


def _buffer(array: np.ndarray, provider: Provider) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array, "cuda", provider.ordinal)


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
    record.note("onnxruntime can be asked to release a graph",
                hasattr(session, "release_captured_graph"))  # fmt: skip
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
