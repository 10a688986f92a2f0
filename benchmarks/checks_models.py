"""Sections about whole models: ONNX's node tests, hand-written cases, published models, BERT."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import torch
from moonpoly_ort.graph_passes.operators import OPERATORS

import moonpoly_ort
from benchmarks.bert import GEMMS, MATMULS, wait
from benchmarks.machine import Setting
from benchmarks.measuring import compare_calls, geometric_mean
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import (
    Bound,
    Provider,
    count_of,
    executed_nodes,
    our_session,
    plain_session,
)
from moonpoly_ort import native
from tests.corpus import cases, node_tests, wheels
from tests.corpus.comparing import (
    BFLOAT16,
    Mismatch,
    Outputs,
    Precision,
    bound,
    relative_error,
    require_close,
)
from tests.corpus.interface import DOMAIN, operators
from tests.corpus.references import outputs_of

Array = np.ndarray[Any, Any]
MEMCPY = ("MemcpyFromHost", "MemcpyToHost")
HALVES = {
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: BFLOAT16,
}
BOUNDED = (np.dtype(np.float16), np.dtype(np.float32), BFLOAT16)
BERT_SHAPES = 10


def onnx_models(setting: Setting, record: Recorder) -> None:
    """Small and published fp32 models through the provider: rewritten against unmodified."""
    provider = setting.provider
    _run_all(record, "node tests", _node_tests(provider))
    _run_all(record, "cases", _cases(provider))
    found = []
    for model in wheels.ALL:
        path = setting.models / model.wheel.folder.name / model.member if setting.models else None
        if path is not None and path.exists():
            found.append((model, path))
        else:
            record.note(f"{model.id} not checked", "its file is not in the folder of models")
    _run_all(record, "published models", _published(provider, found))


Work = Callable[[], str | None]  # raises, or returns why there was nothing to compare


def _run_all(record: Recorder, name: str, work: Iterable[tuple[str, Work]]) -> None:
    wrong, done, refused = {}, 0, {}
    for identifier, compare in work:
        if record.time_left() < 0:
            refused[identifier] = "no time left"
            continue
        try:
            reason = compare()
        except Exception as error:
            wrong[identifier] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        done += 1
        if reason:
            refused[identifier] = reason
    if refused:
        record.note(f"{name} not compared", refused)
    if done or wrong:
        record.check(
            f"{name} that differ, of {done + len(wrong)}", not wrong, len(wrong), 0, wrong=wrong
        )


def _node_tests(provider: Provider) -> Iterable[tuple[str, Work]]:
    for test in node_tests.collect():

        def compare(test: node_tests.NodeTest = test) -> str | None:
            model = test.dynamic()
            if next(iter(test.feed.values())).dtype.kind != "f":
                return "integers are left to ONNX Runtime"
            return _same(model, provider, [test.feed], dict(test.expected), taken=1)

        yield test.id, compare


def _cases(provider: Provider) -> Iterable[tuple[str, Work]]:
    for case in cases.ALL:

        def compare(case: cases.Case = case) -> str | None:
            with tempfile.TemporaryDirectory() as folder:
                model = case.save(Path(folder)) if case.external else case.model()
                return _same(model, provider, list(case.inputs()), taken=len(case.taken))

        yield case.id, compare


def _published(
    provider: Provider, found: list[tuple[wheels.WheelModel, Path]]
) -> Iterable[tuple[str, Work]]:
    for model, path in found:

        def compare(model: wheels.WheelModel = model, path: Path = path) -> str | None:
            return _same(path, provider, list(model.feeds()))

        yield model.id, compare


def _same(
    model: onnx.ModelProto | Path,
    provider: Provider,
    feeds: Sequence[Mapping[str, Array]],
    expected: Mapping[str, Array] | None = None,
    taken: int | None = None,
) -> str | None:
    """Ours against the unmodified model without TF32, and against `expected`; TF32 and IEEE.

    Returns why the model could not be compared, where plain ONNX Runtime refuses it. The limit is
    that of one product, times the root of how many there are, times 2 for the rounding around
    them. Where TF32 gives a handful of outputs, sums that happen to cancel lose 3 bits more; where
    it exceeds the limit, ONNX Runtime's own TF32 is the measure.
    """
    graph = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
    source = model if isinstance(model, Path) else model.SerializeToString()
    try:
        theirs = plain_session(source, provider, use_tf32="0")
        wanted = [outputs_of(theirs, feed) for feed in feeds]
    except Exception as refusal:
        return f"plain ONNX Runtime refuses it: {str(refusal)[:160]}"
    rules = [rule.name for rule in moonpoly_ort.list_rules()]  # sessions may take fewer
    found = taken_nodes(moonpoly_ort.rewrite(source, rules=rules).model)
    if taken is not None and sum(found.values()) != taken:
        raise Mismatch(f"nodes taken: {dict(found)}, expected {taken}")
    products = sum(name in ("MatMul", "Gemm", "Conv") for _, name in operators(graph))
    for precision in get_args(Precision):
        own = {} if precision == "tf32" else {"use_tf32": "0"}  # for the nodes that stay
        ours = our_session(source, provider, precision=precision, **own)
        for feed, want in zip(feeds, wanted, strict=True):
            floats = [value for value in want.values() if value.dtype in BOUNDED]
            limit = max((_bound(value, precision) for value in floats), default=0)
            limit = 2 * max(limit, _coarsest(graph)) * max(products, 1) ** 0.5
            got = outputs_of(ours, feed)
            try:
                require_close(got, want, limit)
            except Mismatch:
                if precision != "tf32":
                    raise
                _no_worse(got, outputs_of(plain_session(source, provider), feed), want)
            if expected is not None:
                require_close(got, expected, limit)
    return None


def _no_worse(got: Outputs, own: Outputs, want: Outputs) -> None:
    """Requires errors of at most 1.2 times those that ONNX Runtime's own TF32 makes."""
    for name, value in got.items():
        ours, theirs = relative_error(value, want[name]), relative_error(own[name], want[name])
        if not ours <= 1.2 * theirs:
            raise Mismatch(f"output {name!r}: error {ours:.3g}, ONNX Runtime's own {theirs:.3g}")


def _bound(value: Array, precision: Precision) -> float:
    """The limit of one product with that result."""
    if value.dtype != np.float32:
        return bound(value.dtype)
    if precision == "ieee":
        return bound(value.dtype, "ieee", k=1024)
    return bound(value.dtype, "tf32") * (8 if value.size <= 64 else 1)


def _coarsest(graph: onnx.ModelProto) -> float:
    """The limit of one product of the least precise type among the model's tensors; 0: float32."""
    values = (*graph.graph.input, *graph.graph.output, *graph.graph.value_info)
    types = {value.type.tensor_type.elem_type for value in values}
    types |= {tensor.data_type for tensor in graph.graph.initializer}
    types |= {a.i for node in graph.graph.node if node.op_type == "Cast" for a in node.attribute}
    return max((bound(dtype) for code, dtype in HALVES.items() if code in types), default=0)


def taken_nodes(model: onnx.ModelProto) -> Counter[str]:
    """The operators of our domain in a rewritten model, counted by name."""
    return Counter(name for domain, name in operators(model) if domain == DOMAIN)


def bert(setting: Setting, record: Recorder) -> None:
    """BERT-base, fp16 and fp32, batch and length dynamic: nodes taken, values, copies, times."""
    folder = setting.bert
    if folder is None:
        raise NotApplicable("no folder of exported models")
    layers = wait(folder, record.deadline)
    exact = plain_session(folder / "f32.onnx", setting.provider, use_tf32="0")
    rng = np.random.default_rng(setting.seed)
    feeds = [_sentences(rng, setting.quick) for _ in range(3 if setting.quick else BERT_SHAPES)]
    references = [exact.run(None, feed) for feed in feeds]
    del exact
    names = ("f16", "f32")
    for position, name in enumerate(names):
        seconds = record.time_left() / (len(names) - position)
        _bert(folder / f"{name}.onnx", name, layers, setting, record, feeds, references, seconds)


def _sentences(rng: np.random.Generator, quick: bool) -> dict[str, Array]:
    batch, length = int(rng.integers(1, 9)), int(rng.integers(1, 64 if quick else 385))
    mask = np.ones((batch, length), np.int64)
    mask[0, (length + 1) // 2 :] = 0
    return {"input_ids": rng.integers(0, 30522, (batch, length)), "attention_mask": mask}


def _bert(
    path: Path,
    name: str,
    layers: int,
    setting: Setting,
    record: Recorder,
    feeds: list[dict[str, Array]],
    references: list[list[Array]],
    seconds: float,
) -> None:
    provider, started = setting.provider, time.monotonic()
    counts = taken_nodes(moonpoly_ort.rewrite(path).model)
    bases = Counter[str]()
    for operator, count in counts.items():  # with what is fused behind each product
        bases[OPERATORS[operator].standard] += count
    expected = {"MatMul": MATMULS * layers // 12, "Gemm": GEMMS}
    record.check(f"{name} nodes taken", dict(bases) == expected, str(dict(bases)), str(expected))
    record.note(f"{name} operators of ours", dict(counts))
    our_counts = executed_nodes(path, provider, feeds[0], ours=True)
    plain_counts = executed_nodes(path, provider, feeds[0], ours=False)
    copies, before = count_of(our_counts, MEMCPY), count_of(plain_counts, MEMCPY)
    record.check(f"{name} Memcpy nodes", copies <= before, copies, before)
    record.note(f"{name} operators by provider", {" on ".join(k): v for k, v in our_counts.items()})
    if provider.is_cuda:
        elsewhere = [k for k in our_counts if k[0] in ("MatMul", "Gemm") and k[1] != provider.name]
        record.check(f"{name} products off the GPU", not elsewhere, str(elsewhere), "[]")

    ours, theirs = our_session(path, provider), plain_session(path, provider)
    if provider.is_cuda:
        before = native.stats().launches
        ours.run(None, feeds[0])
        launched, products = native.stats().launches - before, sum(expected.values())
        record.check(f"{name} launches of one run", launched >= products, launched, None)
    worst: dict[str, tuple[float, float]] = {}
    ratios = []
    for feed, reference in zip(feeds, references, strict=True):
        tensors = _tensors(feed, provider)
        bound = [Bound(session, provider, tensors) for session in (ours, theirs)]
        errors = []
        for one in bound:
            pairs = zip(one.fetch(), reference, strict=True)
            errors.append(
                max(relative_error(value.astype(np.float64), want) for value, want in pairs)
            )
        shape = "x".join(map(str, feed["input_ids"].shape))
        worst[shape] = (errors[0], errors[1])
        left = (seconds - (time.monotonic() - started)) / (2 * len(feeds))
        times = compare_calls(
            {"ours": bound[0].run, "ort": bound[1].run},
            rounds=60,
            warm_up=2,
            seconds=max(left, 0.05),
        )
        ratios.append(times["ours"].median / times["ort"].median)
        record.note(
            f"{name} {shape} ms",
            {
                "ours": times["ours"].median / 1e3,
                "ort": times["ort"].median / 1e3,
                "ratio": ratios[-1],
            },
        )
    # No worse than ONNX Runtime's own run in the same precision (20% for other rounding), or exact.
    excess = max(mine / max(1.2 * other, 1e-5) for mine, other in worst.values())
    record.check(
        f"{name} error / (1.2 x ort's own), worst of {len(worst)} shapes", excess <= 1, excess, 1,
        errors={shape: list(pair) for shape, pair in worst.items()},
    )  # fmt: skip
    record.note(f"{name} geometric mean of time ratios", geometric_mean(ratios))
    _changing_shapes(ours, theirs, provider, feeds, record, name)


def _tensors(feed: Mapping[str, Array], provider: Provider) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(value).to(provider.torch_device) for k, value in feed.items()}


def _changing_shapes(
    ours: Any,
    theirs: Any,
    provider: Provider,
    feeds: list[dict[str, Array]],
    record: Recorder,
    name: str,
) -> None:
    """All shapes one after the other, again and again: what a serving process sees."""
    calls: dict[str, Callable[[], None]] = {}
    for who, session in (("ours", ours), ("ort", theirs)):
        bound = [Bound(session, provider, _tensors(feed, provider)) for feed in feeds]

        def sweep(bound: list[Bound] = bound) -> None:
            for one in bound:
                one.run()

        calls[who] = sweep
    times = compare_calls(calls, rounds=10, warm_up=1, seconds=4.0)
    record.note(
        f"{name} all {len(feeds)} shapes in turn, ms",
        {who: timing.median / 1e3 for who, timing in times.items()},
    )
