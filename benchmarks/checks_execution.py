"""Sections about ONNX Runtime running our operators: chains, graphs, threads, devices, times."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import operands
from benchmarks.bert import wait
from benchmarks.chains import Chain
from benchmarks.machine import Setting
from benchmarks.measuring import compare_calls, geometric_mean
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, Provider, our_session, plain_session
from moonpoly_ort import native

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
ROWS = (1, 37, 128, 512)
RATIO_LIMIT = 0.6  # of ONNX Runtime's own time per node, fp16 and bf16


def chain(setting: Setting, record: Recorder) -> None:
    """32 MatMul nodes of 768 x 768: values, and time per node against ONNX Runtime's own MatMul."""
    names = ("f16", "bf16", "f32") if setting.provider.is_cuda else ("f32",)
    # A third of the time goes to sessions, float64 references and first runs.
    seconds = 0.65 * record.time_left() / (len(names) * len(ROWS))
    _chain(setting.provider, record, names, seconds)


def _chain(
    provider: Provider, record: Recorder, names: tuple[str, ...], seconds: float, depth: int = 32
) -> None:
    for name in names:
        dtype = DTYPES[name]
        model = Chain.make([768] * (depth + 1), dtype)
        ours = our_session(model.model, provider)
        theirs = plain_session(model.model, provider)
        ratios = []
        for rows in ROWS:
            x = torch.randn(rows, 768).to(dtype).to(provider.torch_device)
            results = [torch.full_like(x, float("nan")) for _ in range(2)]
            bound = [
                Bound(session, provider, {"x": x}, {"y": y})
                for session, y in zip((ours, theirs), results, strict=True)
            ]
            for one in bound:
                one.run()
            reference = model.reference(x)
            errors = [operands.relative_error(y, reference) for y in results]
            # Every node rounds its output once: errors add up like a random walk.
            limit = max(operands.error_limit(name, "tf32", 768) * depth**0.5, 1.2 * errors[1])
            record.check(f"{name} M={rows} error", errors[0] <= limit, errors[0], limit)
            first = results[0].clone()
            bound[0].run()
            record.check(f"{name} M={rows} same bits again", torch.equal(first, results[0]))
            times = compare_calls(
                {"ours": bound[0].run, "ort": bound[1].run}, rounds=300, seconds=seconds
            )
            ours_us, ort_us = times["ours"].median / depth, times["ort"].median / depth
            ratios.append(ours_us / ort_us)
            record.note(
                f"{name} M={rows} us per node",
                {"ours": ours_us, "ort": ort_us, "ours_low": times["ours"].low / depth,
                 "ort_low": times["ort"].low / depth, "rounds": times["ours"].rounds},
            )  # fmt: skip
            if provider.is_cuda and name != "f32":
                record.check(
                    f"{name} M={rows} time per node / ort",
                    ratios[-1] <= RATIO_LIMIT,
                    ratios[-1],
                    RATIO_LIMIT,
                )
        record.note(f"{name} geometric mean of ratios", geometric_mean(ratios))


def split_k_sizes(setting: Setting) -> tuple[int, list[int]]:
    """Rows and sizes of a chain in which the planner cuts K at least once."""
    for rows in (8, 16, 1, 64):
        for wide in (8192, 16384, 4096):
            plan = setting.plan(operands.dense_problem(rows, 512, wide, "f16"))
            if any(region.split > 1 for region in plan.regions):
                return rows, [wide, 512, wide, 512, wide]
    raise AssertionError("the planner cuts K for none of the shapes that call for it")


def cuda_graph(setting: Setting, record: Recorder) -> None:
    """Capture with `enable_cuda_graph`, then replays that must follow the contents of the input."""
    if not setting.provider.is_cuda:
        raise NotApplicable("needs the CUDA provider")
    rows, sizes = split_k_sizes(setting)
    record.note("split-K chain", {"rows": rows, "sizes": sizes})
    for name, count, widths in (("plain", 37, [768] * 33), ("split-K", rows, sizes)):
        model = Chain.make(widths, torch.float16)
        session = our_session(model.model, setting.provider, enable_cuda_graph="1")
        x = torch.randn(count, widths[0]).half().to(setting.provider.torch_device)
        y = torch.full((count, widths[-1]), float("nan"), dtype=x.dtype, device=x.device)
        bound = Bound(session, setting.provider, {"x": x}, {"y": y})
        worst, before = 0.0, native.stats().launches
        for _ in range(8):
            x.copy_(torch.randn(x.shape))
            y.fill_(float("nan"))
            torch.cuda.synchronize()
            bound.run()
            worst = max(worst, operands.relative_error(y, model.reference(x)))
        launched = native.stats().launches - before
        limit = operands.error_limit("f16", "tf32", max(widths)) * model.depth**0.5
        record.check(f"{name}: worst of 8 replays", worst <= limit, worst, limit)
        record.check(f"{name}: launches by the host end with the capture",
                     launched < 8 * model.depth, launched, 8 * model.depth - 1)  # fmt: skip
        eager = plain_session(model.model, setting.provider, enable_cuda_graph="1")
        theirs = Bound(eager, setting.provider, {"x": x}, {"y": torch.empty_like(y)})
        times = compare_calls({"ours": bound.run, "ort": theirs.run}, warm_up=8, seconds=3)
        record.note(
            f"{name}: replay, us per node",
            {who: timing.median / model.depth for who, timing in times.items()},
        )


@dataclass
class _Question:
    """An input, the float64 answer's tolerance, and the bits that every run must give."""

    x: np.ndarray
    answer: np.ndarray


def threads(setting: Setting, record: Recorder) -> None:
    """Four threads, 1000 runs each, on one session, the shape changing from run to run."""
    count, runs = 4, 1000 if setting.provider.is_cuda else 50
    dtype = torch.float16 if setting.provider.is_cuda else torch.float32
    name = "f16" if setting.provider.is_cuda else "f32"
    model = Chain.make([2048, 192, 2048, 200], dtype)
    session = our_session(model.model, setting.provider)
    rng = np.random.default_rng(7)
    questions, worst = [], 0.0
    for rows in (1, 2, 3, 5, 8, 13, 16, 17, 31, 37, 64, 77, 100, 128, 129, 200, 256, 333):
        x = rng.standard_normal((rows, 2048)).astype(np.float16 if name == "f16" else np.float32)
        (answer,) = session.run(None, {"x": x})
        reference = model.reference(torch.from_numpy(x))
        worst = max(worst, operands.relative_error(torch.from_numpy(answer), reference))
        questions.append(_Question(x, answer))
    limit = operands.error_limit(name, "tf32", 2048) * model.depth**0.5
    record.check("worst error of one thread", worst <= limit, worst, limit)
    wrong: list[str] = []
    done = [0] * count

    def ask(me: int) -> None:
        order = np.random.default_rng(me)
        try:
            for _ in range(runs):
                question = questions[order.integers(len(questions))]
                (answer,) = session.run(None, {"x": question.x})
                if not np.array_equal(answer, question.answer):
                    wrong.append(f"thread {me}, {len(question.x)} rows: other bits")
                done[me] += 1
        except Exception as error:
            wrong.append(f"thread {me}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=ask, args=(me,)) for me in range(count)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    record.check("runs with other bits or an error", not wrong, len(wrong), 0, first=wrong[:5])
    record.check("runs done", sum(done) == count * runs, sum(done), count * runs)
    record.note("microseconds a run", (time.perf_counter() - started) * 1e6 / max(sum(done), 1))


def devices(setting: Setting, record: Recorder) -> None:
    """The chain on the second GPU while the first stays current."""
    count = torch.cuda.device_count() if setting.provider.is_cuda else 0
    if count < 2:
        raise NotApplicable(f"{count} GPUs here; the check needs 2")
    _chain(Provider(ordinal=1, pack=setting.pack_path), record, ("f16",), seconds=1.0)
    # Both devices in one process, runs alternating: kernels are loaded once for each.
    model = Chain.make([768] * 5, torch.float16)
    x = torch.randn(37, 768).half()
    outputs = []
    for ordinal in (0, 1, 0, 1):
        provider = Provider(ordinal=ordinal, pack=setting.pack_path)
        there = x.to(provider.torch_device)
        y = torch.empty_like(there)
        Bound(our_session(model.model, provider), provider, {"x": there}, {"y": y}).run()
        outputs.append(y.cpu())
    same = all(torch.equal(outputs[0], other) for other in outputs[1:])
    record.check("same bits on both devices, alternating", same)


def times(setting: Setting, record: Recorder) -> None:
    """Pack, session and planner times."""
    record.note("pack bytes", setting.pack_path.stat().st_size)
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        native.Pack(setting.pack_path).close()
        opened.append((time.perf_counter() - start) * 1e3)
    record.note("pack open, ms", statistics.median(opened))
    _planner_times(setting, record)
    model: bytes | Path = Chain.make([768] * 33, torch.float32).model
    label = "chain fp32"
    if setting.bert is not None:
        wait(setting.bert, record.deadline - 15)
        model, label = setting.bert / "f16.onnx", "BERT-base fp16"
    created: dict[str, list[float]] = {"ours": [], "ort": []}
    our_session(model, setting.provider)  # fills the cache and warms the disk for both
    for _ in range(3):
        for who, make in (("ours", our_session), ("ort", plain_session)):
            start = time.perf_counter()
            make(model, setting.provider)
            created[who].append(time.perf_counter() - start)
    ours, ort = (statistics.median(created[who]) for who in ("ours", "ort"))
    record.note(f"session creation, s, {label}", {"ours": ours, "ort": ort})
    record.check(f"session creation over ort, s, {label}", ours - ort <= 1.0, ours - ort, 1.0)


def _planner_times(setting: Setting, record: Recorder) -> None:
    rng = np.random.default_rng(3)
    problems = [
        operands.dense_problem(int(m), int(n), int(k), "f16")
        for m, n, k in zip(
            rng.integers(1, 5000, 2000), rng.integers(1, 600, 2000) * 8,
            rng.integers(1, 600, 2000) * 8, strict=True,
        )
    ]  # fmt: skip
    spent = []
    for problem in problems:
        start = time.perf_counter()
        setting.plan(problem)
        spent.append((time.perf_counter() - start) * 1e6)
    median = statistics.median(spent)
    ninth = sorted(spent)[int(0.9 * len(spent))]
    record.note("plan of one shape through ctypes, us", {"median": median, "90%": ninth})
    record.check("plan of one shape, us, median", median <= 20.0, median, 20.0)
    _hit_times(setting, record)


def _hit_times(setting: Setting, record: Recorder) -> None:
    """What the operator itself reports over a few hundred shapes, each seen twice."""
    model = Chain.make([256] * 5, torch.float16 if setting.provider.is_cuda else torch.float32)
    session = our_session(model.model, setting.provider)
    dtype = np.float16 if setting.provider.is_cuda else np.float32
    before: Any = native.stats()
    for _ in range(2):
        for rows in range(1, 201):
            session.run(None, {"x": np.zeros((rows, 256), dtype)})
    after: Any = native.stats()
    misses = after.plan_misses - before.plan_misses
    spent = after.plan_miss_us_total - before.plan_miss_us_total
    record.note("plan cache", {"misses": misses, "hits": after.plan_hits - before.plan_hits,
                               "us per miss": spent / misses if misses else None,
                               "us of the slowest miss": after.plan_miss_us_max})  # fmt: skip
