"""Sections about convolutions: each kernel by force, the eight-layer chain on changing sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import onnxruntime as ort
import torch

import moonpoly_ort
from benchmarks.checks_kernels import check_each
from benchmarks.convolutions import SENTINEL, ConvChain, Convolution, ConvOperands
from benchmarks.machine import Setting
from benchmarks.measuring import Timing
from benchmarks.operands import error_limit, relative_error
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, plain_session, session_options
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError

NAMES = ("f16", "bf16", "f32")
PRECISIONS = ("tf32", "ieee")
Family = native.Family


def _need_kernels(pack: native.Pack) -> None:
    if not any(Family(kernel.family).convolves for kernel in pack.kernels):
        raise NotApplicable("the pack has no kernels of convolutions")


def kernels(setting: Setting, record: Recorder) -> None:
    """Every conv kernel, forced, on odd parameters against float64."""
    setting = setting.without_tables()
    pack = setting.pack
    _need_kernels(pack)
    records = [
        kernel for kernel in pack.kernels
        if Family(kernel.family).convolves and setting.only in kernel.name
    ][:: 19 if setting.quick else 1]  # fmt: skip
    if not records:
        raise NotApplicable("the pack has no kernel of convolutions of that name")
    index = {kernel.name: i for i, kernel in enumerate(pack.kernels)}
    by_name = {kernel.name: kernel for kernel in records}
    order = list(by_name)

    def work(name: str) -> list[dict[str, Any]]:
        return [
            _check_forced(setting, index[name], case, split, seed)
            for seed, (case, split) in enumerate(_cases(by_name[name], setting.quick))
        ]

    check_each(setting, record, order, work, "conv kernels")


def _cases(kernel: native.KernelRecord, quick: bool) -> Iterator[tuple[Convolution, int]]:
    """Parameters that meet every edge of a kernel's tile, one to three spatial axes."""
    family = Family(kernel.family)
    few = family in (Family.CONV_TAPS4, Family.CONV_TAPS8)
    depthwise = family >= Family.CONV_DEPTHWISE
    base = Convolution(
        (13, 17), (3, 3), c=1, k=1, dtype=NAMES[kernel.dtype],
        precision=PRECISIONS[kernel.precision], packed=kernel.align_a == 16,
        transposed=family in (Family.CONV_TRANSPOSED, Family.CONV_DEPTHWISE_TRANSPOSED),
    )  # fmt: skip
    if depthwise:
        base = replace(base, groups=21)
    width = kernel.bk if depthwise and kernel.bk > 1 else 7 if family is Family.CONV_TAPS8 else 3
    for turn in (1,) if quick else (1, 3):
        # Of one group. Only few channels are stored for several taps.
        few_channels = 2 if kernel.dtype == native.Dtype.F32 else min(turn, 2) * 2
        c = 1 if depthwise else few_channels if few else kernel.bk * turn + 3
        base = replace(base, c=c, k=turn if depthwise else kernel.bm * (turn - 1) + 5)
        cases = [
            replace(base, kernel=(3, width), pads=(1, 1, 2, 3), n=2, bias=True),
            replace(base, size=(37,), kernel=(width,), strides=(2,), groups=base.groups * 2,
                    bias=True),
            replace(base, size=(5, 7, 9), kernel=(2, 2, width), dilations=(1, 2, 1),
                    pads=(0, 1, 2, 1, 0, 2), strides=(1, 2, 2)),
            replace(base, size=(61, 67), kernel=(2, width), strides=(2, 3), pads=(3, 3, 0, 0),
                    groups=base.groups * 3, bias=True),
        ]  # fmt: skip
        for split in (2, 3) if kernel.split_k else (1,):
            for case in cases[: 3 if quick else 4]:
                # Few channels leave a step for each row of taps.
                steps = math.prod(case.kernel[:-1]) if few else math.prod(case.kernel)
                if split <= steps:
                    yield case, split


def _check_forced(
    setting: Setting, kernel: int, case: Convolution, split: int, seed: int
) -> dict[str, Any]:
    kind = f"{case.dtype} {case.precision}" if case.dtype == "f32" else case.dtype
    found: dict[str, Any] = {"case": f"{case} split={split}", "kind": kind, "share": 0.0}
    try:
        operands = ConvOperands.allocate(case, setting.provider.torch_device, seed)
        plan = setting.pack.plan_conv(setting.device, operands.conv, kernel=kernel, split=split)
        share, faults = _check_run(setting, operands, plan)
    except MoonPolyError as error:
        return found | {"faults": [f"{type(error).__name__}: {error}"]}
    return found | {"share": share, "faults": faults}


def _check_run(
    setting: Setting, operands: ConvOperands, plan: native.Plan
) -> tuple[float, list[str]]:
    """Runs a plan twice into NaN; (error as a share of its limit, what is wrong)."""
    runner, faults = setting.runner, []
    results = []
    for _ in range(2):
        operands.y.view.fill_(float("nan"))
        runner.reserve(plan)
        runner.launch_conv(operands.conv, plan, operands.pointers)
        if setting.provider.is_cuda:
            torch.cuda.synchronize()
        results.append(operands.y.view.clone())
    if stray := operands.y.stray_writes(SENTINEL):
        faults.append(f"{stray} stray writes")
    if left := runner.counters_left():
        faults.append(f"{left} counters left non-zero")
    limit = operands.case.limit
    share = relative_error(results[0], operands.exact()) / limit
    if not share <= 1.0:
        faults.append(f"error {share * limit:.3g}, limit {limit:.3g}")
    if not torch.equal(results[0], results[1]):
        faults.append("other bits in the second run")
    return share, faults


# ---- the chain -----------------------------------------------------------------------------------
SIZES = (
    (64, 64), (72, 96), (80, 80), (96, 112), (100, 60), (56, 120), (110, 110), (128, 128),
)  # fmt: skip
DEPTH, CHANNELS = 8, 64
OVER_STEADY = 1.15
FIRST_RUN_US = 2000.0
FASTER = {"heuristic": 50.0, "default": 300.0}


def chain(setting: Setting, record: Recorder) -> None:
    """Eight fp16 Conv layers on eight image sizes in turn: values, time per run over that of sizes
    that repeat, and against ONNX Runtime with HEURISTIC and with its default search.
    """
    _need_kernels(setting.pack)
    provider = setting.provider
    dtype = torch.float16 if provider.is_cuda else torch.float32
    sizes = SIZES if not setting.quick else tuple((h // 8, w // 8) for h, w in SIZES[:2])
    depth, channels = (DEPTH, CHANNELS) if not setting.quick else (2, 16)
    model = ConvChain.make(depth, channels, dtype)
    sessions = {"ours": _our_session(setting, model)}
    if provider.is_cuda:
        sessions["heuristic"] = plain_session(
            model.model, provider, cudnn_conv_algo_search="HEURISTIC"
        )
        sessions["default"] = plain_session(model.model, provider)
    else:
        sessions["plain"] = plain_session(model.model, provider)

    generator = torch.Generator().manual_seed(0)

    def images(size: tuple[int, int]) -> torch.Tensor:
        x = torch.randn(1, channels, *size, generator=generator)
        return x.to(dtype).to(provider.torch_device)

    inputs = [images(size) for size in sizes]
    outputs = {name: [torch.full_like(x, float("nan")) for x in inputs] for name in sessions}
    bound = {
        name: [
            Bound(session, provider, {"x": x}, {"y": y})
            for x, y in zip(inputs, outputs[name], strict=True)
        ]
        for name, session in sessions.items()
    }

    for one in bound["ours"]:
        one.run()
    # Each node rounds its output once: errors add up like a random walk.
    limit = error_limit("f16" if provider.is_cuda else "f32", "tf32", 9 * channels) * depth**0.5
    errors = [
        relative_error(y, model.reference(x)) for x, y in zip(inputs, outputs["ours"], strict=True)
    ]
    record.check("chain error, worst of all sizes", max(errors) <= limit, max(errors), limit)
    first = [y.clone() for y in outputs["ours"]]
    for one in bound["ours"]:
        one.run()
    same = all(torch.equal(a, b) for a, b in zip(first, outputs["ours"], strict=True))
    record.check("chain: same bits again", same)

    steady: dict[str, float] = {}
    turns: dict[str, float] = {}
    for name, runs in bound.items():
        sweeps = 20 if name == "ours" and not setting.quick else 2
        _sweep(runs)  # sizes that were all seen before
        turns[name] = _median_us([_sweep(runs) for _ in range(sweeps)]) / len(runs)
        if name != "default":  # a search for each size: seconds
            steady[name] = sum(_steady_us(one, 2 if setting.quick else 20) for one in runs) / len(
                runs
            )
    record.note("us a run, sizes in turn", turns)
    record.note("us a run, the same size again", steady)
    over = turns["ours"] / steady["ours"]
    record.check("sizes in turn / own steady state", over <= OVER_STEADY, over, OVER_STEADY)
    for name, wanted in FASTER.items():
        if name in turns:
            faster = turns[name] / turns["ours"]
            record.check(f"times faster than {name}", faster >= wanted, wanted / faster, 1.0,
                         faster=faster)  # fmt: skip
    if "heuristic" in steady:
        record.note("steady state / heuristic's", steady["ours"] / steady["heuristic"])
    fresh = []
    for extra in range(20 if not setting.quick else 2):
        x = images((40 + 3 * extra, 50 + 5 * extra) if not setting.quick else (5 + extra, 6))
        y = torch.empty_like(x)
        one = Bound(sessions["ours"], provider, {"x": x}, {"y": y})
        fresh.append(_timed(one.run))
    record.note("us of the first run of a new size", sorted(fresh))
    if provider.is_cuda:
        typical = _median_us(fresh)
        record.check("first run of a new size, us", typical <= FIRST_RUN_US, typical, FIRST_RUN_US)


def _our_session(setting: Setting, model: ConvChain) -> ort.InferenceSession:
    options = session_options()
    backend = "cuda" if setting.provider.is_cuda else "interpreter"
    moonpoly_ort.register(
        options, backend=backend, pack=setting.pack_path, device_id=setting.provider.ordinal
    )  # type: ignore[arg-type]
    return ort.InferenceSession(model.rewritten, options, providers=setting.provider.listed())


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _median_us(samples: list[float]) -> float:
    return Timing.of(samples).median


def _sweep(runs: list[Bound]) -> float:
    def call() -> None:
        for one in runs:
            one.run()

    return _timed(call)


def _steady_us(one: Bound, runs: int) -> float:
    one.run()
    return _median_us([_timed(one.run) for _ in range(runs)])
