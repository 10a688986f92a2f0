"""Sections about convolutions: each kernel by force, the eight-layer chain on changing image sizes,
and the time of kernels beside cuDNN's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import onnxruntime as ort
import torch
import torch.nn.functional as F

import moonpoly_ort
from benchmarks.checks_kernels import check_each
from benchmarks.convolutions import SENTINEL, ConvChain, Convolution, ConvOperands
from benchmarks.machine import Setting
from benchmarks.measuring import Timing, compare_launches, geometric_mean, rotation
from benchmarks.operands import error_limit, relative_error
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, plain_session, session_options
from moonpoly_ort import native
from moonpoly_ort.errors import KernelMissingError, MoonPolyError, ProblemError

NAMES = ("f16", "bf16", "f32")
PRECISIONS = ("tf32", "ieee")
Family = native.Family


def _need_kernels(pack: native.Pack) -> None:
    if not any(Family(kernel.family).convolves for kernel in pack.kernels):
        raise NotApplicable(
            "the pack has no kernels of convolutions, which are on trial: build one with "
            "`moonpoly pack --trial`"
        )


def kernels(setting: Setting, record: Recorder) -> None:
    """Every conv kernel, forced, on odd parameters against float64."""
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


# ---- kernels beside cuDNN ------------------------------------------------------------------------
# Rows of the networks that the issue names: a first layer, 3 x 3 of every depth, 1 x 1, depthwise.
SHAPES = (
    Convolution((224, 224), (7, 7), 3, 64, n=2, strides=(2, 2), pads=(3, 3, 3, 3)),
    Convolution((56, 56), (3, 3), 64, 64, n=4, pads=(1, 1, 1, 1)),
    Convolution((110, 110), (3, 3), 64, 64, pads=(1, 1, 1, 1)),
    Convolution((28, 28), (3, 3), 128, 128, n=8, pads=(1, 1, 1, 1)),
    Convolution((14, 14), (3, 3), 256, 256, n=8, pads=(1, 1, 1, 1)),
    Convolution((7, 7), (3, 3), 512, 512, n=4, pads=(1, 1, 1, 1)),
    Convolution((30, 30), (3, 3), 512, 512, n=20, pads=(1, 1, 1, 1)),
    Convolution((56, 56), (1, 1), 256, 128, n=4, strides=(2, 2)),
    Convolution((112, 112), (3, 3), 1, 1, n=4, groups=64, pads=(1, 1, 1, 1)),
    Convolution((14, 14), (3, 3), 1, 1, n=16, groups=512, pads=(1, 1, 1, 1)),
    Convolution((40, 160), (3, 3), 96, 24, pads=(1, 1, 1, 1)),
)


def times(setting: Setting, record: Recorder) -> None:
    """Every kernel that takes a convolution, the planned one, and cuDNN's best, on an H200's L2
    emptied between runs; nothing is judged.
    """
    if not setting.provider.is_cuda:
        raise NotApplicable("needs a GPU")
    _need_kernels(setting.pack)
    ratios, chosen = [], []
    for shape in SHAPES:
        if record.time_left() < 6:
            record.note("stopped early at", str(shape))
            break
        found = _time_shape(setting, shape)
        record.note(_label(shape), found)
        ratios.append(found["cudnn_us"] / found["planned_us"])
        chosen.append(found["best_us"] / found["planned_us"])
    record.note("cuDNN's time / ours, geometric mean, worst", [geometric_mean(ratios), min(ratios)])
    record.note("best kernel's time / the planned one's", [geometric_mean(chosen), min(chosen)])


def _label(shape: Convolution) -> str:
    size, kernel = ("x".join(map(str, s)) for s in (shape.size, shape.kernel))
    strides = shape.strides[0] if shape.strides else 1
    return (
        f"{shape.n}x{shape.groups}x{shape.c}x{size} -> {shape.k}, {kernel}, stride {strides}, "
        f"{shape.dtype}, us"
    )


def _time_shape(setting: Setting, shape: Convolution) -> dict[str, Any]:
    device = setting.provider.torch_device
    pack = setting.pack
    first = ConvOperands.allocate(shape, device)
    moved = sum(t.storage.numel() * t.storage.element_size() for t in (first.x, first.w, first.y))
    sets = rotation(moved, setting.device.l2_bytes, most=24)
    copies = [first, *(ConvOperands.allocate(shape, device, seed) for seed in range(1, sets))]
    planned = pack.plan_conv(setting.device, first.conv)
    plans = {"planned": planned}
    for index, kernel in enumerate(pack.kernels):
        if not Family(kernel.family).convolves:
            continue
        try:
            plan = pack.plan_conv(setting.device, first.conv, kernel=index)
        except (KernelMissingError, ProblemError):
            continue
        plans[f"{kernel.name} x{plan.regions[0].split}"] = plan

    def cudnn(index: int) -> None:
        F.conv2d(copies[index].x.view, copies[index].stored, stride=shape.strides or 1,
                 padding=shape.pads[:2] or 0, groups=shape.groups)  # fmt: skip

    def ours(plan: native.Plan) -> Callable[[int], None]:
        return lambda i: setting.runner.launch_conv(copies[i].conv, plan, copies[i].pointers)

    for plan in plans.values():
        setting.runner.reserve(plan)
    launches = sets * max(1, 24 // sets)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        timings = compare_launches(
            {"cudnn": cudnn} | {name: ours(plan) for name, plan in plans.items()},
            sets, launches, rounds=7,
        )  # fmt: skip
    figures = {name: timing.median for name, timing in timings.items()}
    by_time = sorted((us, name) for name, us in figures.items() if name not in ("planned", "cudnn"))
    region = planned.regions[0]
    return {
        "cudnn_us": figures["cudnn"], "planned_us": figures["planned"], "best_us": by_time[0][0],
        "predicted_us": planned.predicted_us,
        "planned": f"{pack.kernels[region.kernel].name} x{region.split}",
        "kernels": {name: us for us, name in by_time},
    }  # fmt: skip
