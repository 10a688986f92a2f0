"""Sections about the kernels: each by force on awkward shapes, then the planner's choices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Setting
from benchmarks.operands import GUARD, PATTERNS, Operands, Product, relative_error
from benchmarks.recording import Recorder, isolate, say
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError

NAMES = ("f16", "bf16", "f32")
PRECISION_NAMES = ("tf32", "ieee")
SPLITS = (2, 3, 7)
# (batch, map of A, map of B): both follow z, A is shared, B is shared, inner and outer broadcast.
MAPS = (
    (1, (1, 1), (1, 1)),
    (3, (1, 3), (1, 3)),
    (3, (1, 1), (1, 3)),
    (3, (1, 3), (1, 1)),
    (6, (2, 3), (1, 2)),
    (6, (1, 2), (3, 2)),
)
BIASES = ("none", "row", "column", "scalar")
# Every third product is plain; the others go through the activations, and R in all its places.
ACTIVATIONS, RESIDUALS = list(native.Activation), list(native.Residual)


def kernels(setting: Setting, record: Recorder) -> None:
    """Every kernel of products, forced, against float64; those that fail belong on a blocklist."""
    setting = setting.without_tables()
    pack = setting.pack
    step = 37 if setting.quick else 1
    every = [
        i for i in range(0, len(pack.kernels), step)
        if setting.only in pack.kernels[i].name
        and not native.Family(pack.kernels[i].family).convolves
    ]  # fmt: skip
    order = [pack.kernels[i].name for i in every]
    index = dict(zip(order, every, strict=True))

    def work(name: str) -> list[dict[str, Any]]:
        kernel = pack.kernels[index[name]]
        slots = setting.device.sm_count * native.blocks_per_sm(kernel, setting.device)
        return [_check_forced(setting, index[name], product, split)
                for product, split in _forced_cases(kernel, slots)]  # fmt: skip

    check_each(setting, record, order, work, "kernels")


def check_each(
    setting: Setting, record: Recorder, order: list[str],
    work: Callable[[str], list[dict[str, Any]]], what: str,
) -> None:  # fmt: skip
    """Records what `work` finds of each kernel of that name, in processes where one may hang. Its
    findings have `case`, `faults`, `kind` and `share`, the error as a share of its limit.
    """
    tally = {"launches": 0, "kernels": 0}
    wrong: dict[str, list[str]] = {}
    worst: dict[str, float] = {}

    def on_done(name: str, results: list[dict[str, Any]]) -> None:
        tally["kernels"] += 1
        tally["launches"] += len(results)
        for result in results:
            if result["faults"]:
                wrong.setdefault(name, []).append(
                    f"{result['case']}: {', '.join(result['faults'])}"
                )
            kind = result["kind"]
            worst[kind] = max(worst.get(kind, 0.0), result["share"])
        if tally["kernels"] % 50 == 0:
            say(f"{record.section}: {tally['kernels']} of {len(order)}, {len(wrong)} wrong")

    def on_fault(name: str, reason: str) -> None:
        say(f"{record.section}: {name}: {reason}")
        wrong.setdefault(name, []).append(reason)

    left = isolate(
        order, work, on_done, on_fault, deadline=record.deadline, patience=setting.patience
    )
    record.note("cases", tally)
    record.note("largest error as a share of its limit", worst)
    record.check(f"{what} that are wrong", not wrong, len(wrong), 0,
                 blocklist={name: faults[:3] for name, faults in wrong.items()})  # fmt: skip
    record.check(f"{what} not reached in time", not left, len(left), 0)


def _forced_cases(kernel: native.KernelRecord, slots: int) -> Iterator[tuple[Product, int]]:
    """Shapes that meet every edge of a kernel's tile; bias and batch maps take turns over them.
    Slices that are added up together are no more than the `slots` of the device.
    """
    bm, bn, bk = kernel.bm, kernel.bn, kernel.bk
    base = Product(
        1, 1, 1, NAMES[kernel.dtype], PRECISION_NAMES[kernel.precision],
        trans_a=bool(kernel.trans_a), trans_b=bool(kernel.trans_b),
        align_a=kernel.align_a, align_b=kernel.align_b, align_c=kernel.align_c,
    )  # fmt: skip
    biases = (*BIASES, "matrix") if kernel.bias_matrix else BIASES
    turn = kernel.bm + kernel.bn + kernel.stages + kernel.warps
    for split in SPLITS if kernel.split_k else (1,):
        shapes = [
            (bm + 3, bn + 5, bk * split + 3),
            (1, 1, bk * (split - 1) + 1),
            (bm, bn, bk * split),
            (2 * bm - 1, 3, bk * (2 * split + 1) + 1),
            (37, 131, bk * (split + 1) - 1),
            (bm * (kernel.group_m + 1) + 1, bn + 1, bk * split + 5),
        ]
        if kernel.family == native.Family.GEMM_SHALLOW:
            shapes = [(m, n, min(k, bk)) for m, n, k in shapes] + [(bm + 1, bn, bk // 2 + 1)]
        if kernel.split_k and split != SPLITS[0]:
            shapes = shapes[:2]
        elif kernel.persistent and not kernel.sliced:  # more tiles than blocks, and not a multiple
            shapes.append((bm * 29 + 1, bn * 20 + 3, bk * 5 + 1))
        for m, n, k in shapes:
            batch, a_map, b_map = MAPS[turn % len(MAPS)]
            bias = biases[turn % len(biases)]
            turn += 1
            if kernel.sliced and -(-m // bm) * -(-n // bn) * batch * split > slots:
                batch, a_map, b_map = MAPS[0]
            product = replace(
                base, m=m, n=n, k=k, batch=batch, a_map=a_map, b_map=b_map, bias=bias,
                alpha=1.0 if turn % 2 else 0.5, beta=1.0 if turn % 3 else -1.5,
                **_epilogue(turn),
            )  # fmt: skip
            yield product.fitted(), split
        yield from _paired_and_wide(kernel, base, split, turn, slots)
        most = bk if kernel.family == native.Family.GEMM_SHALLOW else bk * split + 1
        special = replace(
            base, m=bm + 1, n=bn + 1, k=most, special=True, activation=ACTIVATIONS[turn % 12]
        )
        yield special.fitted(), split


def _paired_and_wide(
    kernel: native.KernelRecord, base: Product, split: int, turn: int, slots: int
) -> Iterator[tuple[Product, int]]:
    """Gated products, and those whose result is fp32, of the kernels that store such."""
    if kernel.family == native.Family.GEMM_SHALLOW or (kernel.persistent and kernel.swap):
        return
    bm, bn, bk = kernel.bm, kernel.bn, kernel.bk
    shapes = [(bm + 3, 2 * bn + 6, bk * split + 3), (1, bn, bk * split), (37, 134, bk * split + 1)]
    for place, (m, n, k) in enumerate(shapes):
        batch, a_map, b_map = MAPS[(turn + place) % len(MAPS)]
        if kernel.sliced and -(-m // bm) * -(-n // bn) * batch * split > slots:
            batch, a_map, b_map = MAPS[0]
        product = replace(
            base, m=m, n=n, k=k, batch=batch, a_map=a_map, b_map=b_map,
            bias=BIASES[(turn + place) % len(BIASES)],
        )  # fmt: skip
        if bn % 2 == 0:
            activation = ACTIVATIONS[(turn * 5 + place) % len(ACTIVATIONS)]
            yield replace(product, gated=True, activation=activation).fitted(), split
        if base.dtype != "f32":
            yield replace(product, wide=True).fitted(), split


def _epilogue(turn: int) -> dict[str, Any]:
    if turn % 3 == 0:
        return {}
    activation = ACTIVATIONS[turn * 5 % len(ACTIVATIONS)]
    return {"activation": activation, "residual": RESIDUALS[turn // 3 % len(RESIDUALS)]}


def _check_forced(setting: Setting, kernel: int, product: Product, split: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "case": f"{product} split={split}",
        "kind": _kind(product),
        "share": 0.0,
    }
    try:
        operands = Operands.allocate(product, setting.provider.torch_device, seed=kernel)
        plan = setting.plan(operands.problem, kernel, split)
        share, faults = check_run(setting, operands, plan, repeat=True)
    except MoonPolyError as error:
        return found | {"faults": [f"{type(error).__name__}: {error}"]}
    return found | {"share": share, "faults": faults}


def _kind(product: Product) -> str:
    return f"{product.dtype} {product.precision}" if product.dtype == "f32" else product.dtype


def check_run(
    setting: Setting, operands: Operands, plan: native.Plan, *, repeat: bool = False
) -> tuple[float, list[str]]:
    """Runs a plan into poisoned memory; (error as a share of its limit, what is wrong)."""
    product, faults = operands.product, []
    setting.runner.run(operands, plan)
    if stray := operands.y.stray_writes(product.y_dtype):
        faults.append(f"{stray} stray writes")
    if missing := operands.y.unwritten(product.y_dtype):
        faults.append(f"{missing} elements not written")
    if left := setting.runner.counters_left():
        faults.append(f"{left} counters left non-zero")
    reference = operands.reference()
    limit = operands.limit(reference)
    # Of an output or two an activation may leave nothing: there no error is too large a share.
    share = 0.0 if math.isinf(limit) else relative_error(operands.y.view, reference) / limit
    if not share <= 1.0:
        faults.append(f"error {share * limit:.3g}, limit {limit:.3g}")
    if repeat:
        first = operands.y.storage.clone()
        operands.y.poison(product.y_dtype)
        setting.runner.run(operands, plan)
        bits = torch.int16 if first.element_size() == 2 else torch.int32
        if not torch.equal(first.view(bits), operands.y.storage.view(bits)):
            faults.append("other bits in the second run")
    return share, faults


def shapes(setting: Setting, record: Recorder) -> None:
    """Plans of the planner's own choice on random shapes, and the extreme ones, against float64."""
    device = setting.provider.torch_device
    wrong: list[str] = []
    worst: dict[str, float] = {}
    used: set[str] = set()
    counts = {"products": 0, "regions": 0, "split": 0}

    def check(product: Product, seed: int) -> None:
        try:
            operands = Operands.allocate(product, device, seed)
            plan = setting.plan(operands.problem)
            share, faults = check_run(setting, operands, plan)
        except MoonPolyError as error:
            share, faults = 0.0, [f"{type(error).__name__}: {error}"]
        except Exception as error:
            raise RuntimeError(f"{product}: {error}") from error  # a fault of the device, mostly
        else:
            regions = plan.regions
            used.update(setting.kernel_name(r) for r in regions)
            counts["regions"] += len(regions)
            counts["split"] += any(r.split > 1 for r in regions)
        counts["products"] += 1
        worst[_kind(product)] = max(worst.get(_kind(product), 0.0), share)
        if faults:
            wrong.append(f"{product}: {', '.join(faults)}")

    for seed, product in enumerate(_extreme_products(setting.quick)):
        check(product.fitted(), seed)
    record.check("extreme shapes that are wrong", not wrong, len(wrong), 0, wrong=wrong[:20])
    extreme = len(wrong)
    rng = np.random.default_rng(setting.seed)
    stop = time.monotonic() + 0.75 * record.time_left()
    seed = 1000
    while time.monotonic() < stop and seed < (1010 if setting.quick else 4000):
        check(_random_product(rng, small=setting.quick).fitted(), seed)
        seed += 1
    counts["kernels used"] = len(used)
    record.note("counts", counts)
    record.note("largest error as a share of its limit", worst)
    record.check("random shapes that are wrong", len(wrong) == extreme, len(wrong) - extreme, 0,
                 wrong=wrong[extreme : extreme + 20])  # fmt: skip
    if not setting.quick:
        _huge_output(setting, record)


def _extreme_products(quick: bool) -> Iterator[Product]:
    for dtype, precision in (("f16", "tf32"), ("bf16", "tf32"), ("f32", "tf32"), ("f32", "ieee")):
        size = 4 if dtype == "f32" else 2
        dense = Product(1, 1, 1, dtype, precision)
        odd = replace(dense, align_a=size, align_b=size, align_c=size)
        yield from (
            replace(odd, m=m, n=n, k=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1))
        )
        yield replace(odd, m=5, n=3, k=0, bias="row", beta=0.5)
        yield replace(odd, m=5, n=3, k=7, batch=0)
        if quick:
            continue
        for base in (dense, odd):
            yield replace(base, m=33, n=65, k=65536)
            yield replace(base, m=1, n=1000, k=65536, bias="row")
            yield replace(base, m=65, n=1, k=30011)
            yield replace(base, m=100003, n=3, k=5)
            yield replace(base, m=7, n=50257, k=64, trans_b=True)
            yield replace(base, m=200, n=136, k=96, batch=300, a_map=(1, 300), b_map=(12, 25))
            yield replace(base, m=40, n=40, k=40, batch=1030, a_map=(1, 1030), b_map=(1, 1030))


def _random_product(rng: np.random.Generator, small: bool) -> Product:
    def size(high: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(high))))

    def pick(choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    dtype = pick(NAMES)
    bytes_each = 4 if dtype == "f32" else 2
    aligns = [a for a in (16, 16, 8, 4, 2) if a >= bytes_each]
    batch, a_map, b_map = pick(MAPS) if rng.random() < 0.4 else MAPS[0]
    following = _epilogue(int(rng.integers(300)))
    if rng.random() < 0.15:
        following = {"gated": True, "activation": pick(ACTIVATIONS)}
    elif dtype != "f32" and rng.random() < 0.1:
        following = {"wide": True}
    high = (40, 40, 100) if small else (3000, 3000, 8000)
    return Product(
        size(high[0]), size(high[1]), size(high[2]), dtype,
        pick(PRECISION_NAMES) if dtype == "f32" else "tf32",
        batch, bool(rng.random() < 0.3), bool(rng.random() < 0.3), a_map, b_map,
        pick(aligns), pick(aligns), pick(aligns), pick((*BIASES, "matrix")),
        alpha=pick((1.0, 0.25, -2.0)), beta=pick((1.0, 0.5, -1.0)),
        packed=bool(rng.random() < 0.5), special=bool(rng.random() < 0.1), **following,
    )  # fmt: skip


def _huge_output(setting: Setting, record: Recorder, side: int = 46400) -> None:
    """M x N above 2^31 elements in fp16, compared in slices of rows."""
    product = Product(side, side, 64, "f16", packed=True)
    operands = Operands.allocate(product, setting.provider.torch_device)
    plan = setting.plan(operands.problem)
    setting.runner.run(operands, plan)
    squares, differences, missing = 0.0, 0.0, 0
    for first in range(0, product.m, 2320):
        rows = slice(first, first + 2320)
        reference = operands.reference(rows)
        got = operands.y.view[:, rows]
        missing += int(torch.count_nonzero(~torch.isfinite(got)))
        differences += float((got.double() - reference).square().sum())
        squares += float(reference.square().sum())
    bits = operands.y.storage.view(torch.int16)
    pattern = PATTERNS[product.dtype]
    stray = int((bits[:GUARD] != pattern).sum() + (bits[-GUARD:] != pattern).sum())
    error = math.sqrt(differences / squares) if squares else math.inf
    elements = product.m * product.n
    name = f"{elements} elements ({elements / 2**31:.3f} x 2^31)"
    record.check(f"{name}: error", error <= product.limit and not missing, error, product.limit)
    record.check(f"{name}: stray writes", stray == 0, stray, 0)
