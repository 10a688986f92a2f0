"""Section about cuBLASLt as a candidate: values, bits, CUDA graphs, sessions, host and GPU time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from moonpoly_ort.custom_ops.kernels import pack_format

from benchmarks import bench_kernels, operands
from benchmarks.chains import Chain
from benchmarks.checks_kernels import check_run
from benchmarks.machine import Setting
from benchmarks.measuring import capture, compare_launches, geometric_mean
from benchmarks.operands import Operands, Product
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, Provider, our_session
from moonpoly_ort import native, tables
from moonpoly_ort.errors import KernelMissingError, MoonPolyError

NUMBERS = (("f16", "tf32"), ("bf16", "tf32"), ("f32", "tf32"), ("f32", "ieee"))
SIZES = (
    (37, 131, 77), (1, 1, 1), (1, 1000, 513), (513, 1, 300), (128, 256, 64), (200, 136, 4096),
    (65, 33, 30011), (1500, 768, 768),
)  # fmt: skip
# Maps with a common stride: each its own, A shared, B shared.
MAPS = ((1, (1, 1), (1, 1)), (3, (1, 3), (1, 3)), (3, (1, 1), (1, 3)), (3, (1, 3), (1, 1)))
# cuBLAS's own time is what the candidate promises; 5% is what two runs differ by.
PARITY_LIMIT = 1.05
TIMED = ((1, 4096, 4096), (64, 768, 768), (333, 4096, 4096), (1500, 768, 3072), (16, 4096, 11008),
         (128, 128, 16384), (777, 1001, 1003), (37, 513, 2048), (4096, 4096, 4096))  # fmt: skip


def vendor(setting: Setting, record: Recorder) -> None:
    """cuBLASLt forced on every layout it takes, against float64; then in graphs and sessions."""
    if not setting.provider.is_cuda:
        raise NotApplicable("needs a GPU and cuBLASLt")
    _values(setting, record)
    _graph(setting, record)
    _sessions(setting, record)
    _host_times(setting, record)
    _parity(setting, record)


def cases() -> Iterator[Product]:
    """Every dtype and layout at every size; alignments, biases and batch maps take turns."""
    every = itertools.product(NUMBERS, range(4), SIZES)
    for turn, ((dtype, precision), trans, size) in enumerate(every):
        element = 4 if dtype == "f32" else 2
        align = (16, element)[turn % 2]
        batch, a_map, b_map = MAPS[turn % len(MAPS)]
        bias = ("none", "row", "matrix")[turn % 3]
        base = Product(
            *size, dtype, precision, batch, bool(trans & 2), bool(trans & 1), a_map, b_map,
            align, align, align, bias, alpha=1.0 if turn % 5 else 0.5,
            beta=0.75 if bias == "matrix" else 1.0, packed=bool(turn % 7 < 3),
        )  # fmt: skip
        yield base.fitted()
        if size == SIZES[0]:
            yield replace(base, special=True, bias="none").fitted()


def _values(setting: Setting, record: Recorder) -> None:
    wrong: list[str] = []
    without: list[str] = []
    worst, count = 0.0, 0
    for seed, product in enumerate(cases()):
        own = Operands.allocate(product, setting.provider.torch_device, seed)
        count += 1
        try:
            plan = setting.plan(own.problem, native.VENDOR)
            share, faults = check_run(setting, own, plan, repeat=True)
        except KernelMissingError as error:
            without.append(f"{product}: {error}")
            continue
        except MoonPolyError as error:
            share, faults = 0.0, [f"{type(error).__name__}: {error}"]
        worst = max(worst, share)
        if faults:
            wrong.append(f"{product}: {', '.join(faults)}")
    record.note("products", {"run": count - len(without), "without algorithm": len(without)})
    record.note("first of those without algorithm", without[:10])
    record.note("largest error as a share of its limit", worst)
    record.check("products that are wrong", not wrong, len(wrong), 0, wrong=wrong[:20])
    # Sessions run our own kernels there, but if it were many something else would be amiss.
    limit = count // 10
    record.check("products without algorithm", len(without) <= limit, len(without), limit)


def _graph(setting: Setting, record: Recorder) -> None:
    for dtype, size in itertools.product(("f16", "f32"), ((37, 136, 8192), (200, 768, 768))):
        own = Operands.allocate(operands.dense(*size, dtype), setting.provider.torch_device, seed=5)
        plan = setting.plan(own.problem, native.VENDOR)
        setting.runner.run(own, plan)
        expected = own.y.storage.clone()
        graph = capture(
            lambda _, own=own, plan=plan: setting.runner.launch(own.problem, plan, own.pointers),
            1, 3,
        )  # fmt: skip
        own.y.poison(dtype)
        graph.replay()
        torch.cuda.synchronize()
        bits = torch.int16 if dtype == "f16" else torch.int32
        same = torch.equal(expected.view(bits), own.y.storage.view(bits))
        record.check(f"{dtype} {size}: a graph gives the same bits", same)


def vendor_pack(setting: Setting, name: str = "vendor.mpk") -> Path:
    """The pack with a table that lets cuBLASLt win everything on this GPU: its margin makes up for
    what its calls take the host, which is compared too.
    """
    whole = pack_format.read_pack(setting.pack_path)
    classes = [
        tables.VendorCost(
            dtype, precision, layout, aligned, batched, 1e-9, 1e-6, 0, 0, 0, 1.0, 1e9,
            ((128, 128, 1e-9),), tables.LogFactors(), tables.LogFactors(),
        )
        for (dtype, precision), layout, aligned, batched in itertools.product(
            NUMBERS, ("nn", "nt", "tn", "tt"), (0, 1), (0, 1)
        )
    ]  # fmt: skip
    table = pack_format.CostTable(
        setting.device.name, setting.device.sm_count, 0.0, 0.0,
        np.zeros(len(whole.kernels), pack_format.COST), tables.packed_vendor(classes),
    )  # fmt: skip
    path = setting.work / name
    info = whole.info
    pack_format.write_pack(path, info.sm, whole.kernels, [table], key=info.key, triton=info.triton)
    return path


def _sessions(setting: Setting, record: Recorder) -> None:
    path = vendor_pack(setting)
    provider = Provider(ordinal=setting.provider.ordinal, pack=path)
    device = provider.torch_device
    with native.Pack(path) as pack:
        plan = pack.plan(setting.device, operands.dense_problem(37, 200, 192, "f16"))
        record.check("the table lets it win", plan.regions[0].kernel == native.VENDOR)
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("f32", torch.float32)):
        model = Chain.make([192, 200, 2048, 131], dtype)
        session = our_session(model.model, provider, vendor=True)
        worst, equal = 0.0, True
        for rows in (1, 37, 128, 500, 37):
            x = torch.randn(rows, 192).to(dtype).to(device)
            y = torch.full((rows, 131), float("nan"), dtype=dtype, device=device)
            bound = Bound(session, provider, {"x": x}, {"y": y})
            bound.run()
            first = y.clone()
            worst = max(worst, operands.relative_error(y, model.reference(x)))
            bound.run()
            equal &= torch.equal(first, y)
        limit = operands.error_limit(name, "tf32", 2048) * model.depth**0.5
        record.check(f"{name} session: error", worst <= limit, worst, limit)
        record.check(f"{name} session: same bits again", equal)
    model = Chain.make([8192, 512, 8192], torch.float16)
    session = our_session(model.model, provider, vendor=True, enable_cuda_graph="1")
    x = torch.randn(16, 8192).half().to(device)
    y = torch.full((16, 8192), float("nan"), dtype=x.dtype, device=device)
    bound, worst = Bound(session, provider, {"x": x}, {"y": y}), 0.0
    for _ in range(6):
        x.copy_(torch.randn(x.shape))
        y.fill_(float("nan"))
        torch.cuda.synchronize()
        bound.run()
        worst = max(worst, operands.relative_error(y, model.reference(x)))
    limit = operands.error_limit("f16", "tf32", 8192) * model.depth**0.5
    record.check("session with a CUDA graph: worst of 6 replays", worst <= limit, worst, limit)


def _host_times(setting: Setting, record: Recorder) -> None:
    """What a launch costs the host where the shape is new, and where it is known."""
    own = Operands.allocate(
        operands.dense(512, 1024, 1024, "f16"), setting.provider.torch_device, seed=1
    )
    first, later = [], []
    for m in range(1, 200):
        problem = operands.dense_problem(m, 1024, 1024, "f16")
        plan = setting.plan(problem, native.VENDOR)
        setting.runner.reserve(plan)
        for spent in (first, later):
            start = time.perf_counter()
            setting.runner.launch(problem, plan, own.pointers)
            spent.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    for name, spent in (("new", first), ("known", later)):
        record.note(f"host, us, {name} shape", dict(zip(
            ("median", "90%", "most"), np.quantile(spent, (0.5, 0.9, 1)).tolist(), strict=True
        )))  # fmt: skip


def _parity(setting: Setting, record: Recorder) -> None:
    """Its time against torch's cuBLAS, whose algorithms it should find."""
    bench_l2 = torch.cuda.get_device_properties(setting.provider.ordinal).L2_cache_size
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    ratios: dict[str, float] = {}
    for (m, n, k), number in itertools.product(TIMED, ("f16", "f32", "f32ieee")):
        if record.time_left() < 8:
            record.note("not timed", "the time is up")
            break
        dtype, precision = operands.NUMBERS[number]
        product = operands.dense(m, n, k, dtype, precision=precision)
        sets = max(1, min(32, 2 * bench_l2 // bench_kernels.product_bytes(product) + 1))
        own = [Operands.allocate(product, setting.provider.torch_device, i) for i in range(sets)]
        plan = setting.plan(own[0].problem, native.VENDOR)
        setting.runner.reserve(plan)

        def ours(index: int, own: list[Operands] = own, plan: native.Plan = plan) -> None:
            setting.runner.launch(own[index].problem, plan, own[index].pointers)

        found = compare_launches(
            {"ours": ours, "cublas": bench_kernels.Bench.cublas(own)}, sets, max(sets, 8), 9
        )
        ratios[f"{number} {m}x{n}x{k}"] = found["ours"].median / found["cublas"].median
    record.note("time over torch's cuBLAS", ratios)
    mean = geometric_mean(list(ratios.values()))
    record.check("time over torch's cuBLAS, geometric mean", mean <= PARITY_LIMIT, mean,
                 PARITY_LIMIT)  # fmt: skip
