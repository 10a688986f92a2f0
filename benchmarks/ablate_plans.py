"""What each kind of plan adds: one kernel alone, then also split-K, stream-K, two regions.

    python -m benchmarks.ablate_plans --output FOLDER [--pack sm_90.mpk.xz] [--seconds 240]

For each shape the planner's best plan with ever more means, all different ones timed in turn
within CUDA graphs on operands rotated beyond L2, and each checked against float64 first. Regions
that run side by side are also timed one after another, which shows what the overlap is worth, and
chains of dependent products are compared bit by bit with the same chains run one launch at a time:
a race would show. The folder gets ablation.csv, a row for each shape and means; printed is what
each means adds. A folder that holds rows already is added to.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.bench_kernels import Bench, Shape, read_shapes
from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import capture, compare_launches, geometric_mean
from benchmarks.operands import relative_error
from benchmarks.recording import say
from benchmarks.running import Provider
from moonpoly_ort import native
from moonpoly_ort.native import PlanFlag

HEAD = ["id", "class", "dtype", "layout", "m", "n", "k", "means", "plan", "predicted_us", "us",
        "low_us", "high_us"]  # fmt: skip
# Means in the order in which they are added, and the flags that withhold what comes later.
MEANS = ("one kernel", "split-K", "stream-K", "two regions", "vendor")
WITHHELD = {
    "split-K": "NO_SPLIT", "stream-K": "NO_STREAM", "two regions": "NO_REGIONS",
    "vendor": "NO_VENDOR",
}  # fmt: skip
IN_TURN = "regions in turn"  # the two regions of the plan before, one after another
CUBLAS = "cublas"
# Rows, of those in the first region, and N = K: whole waves and not, long and short.
CHAINS = ((1500, 1024, 4096), (777, 768, 2816), (300, 256, 512), (2100, 2048, 1024))

WEIGHTS = (
    ("bert", 768, 768), ("bert", 3072, 768), ("bert", 768, 3072), ("llama", 4096, 4096),
    ("llama", 11008, 4096), ("llama", 4096, 11008), ("long-k", 1024, 8192),
)  # fmt: skip
ROWS = (100, 200, 333, 512, 777, 1000, 1500, 2048, 3000, 4096)


def shapes(seed: int, count: int) -> Iterator[Shape]:
    """Weights of models, and `count` random products with M from 100 to 4096."""
    for kind, n, k in WEIGHTS:
        for m in ROWS:
            yield Shape(f"{m}x{n}x{k}", kind, m, n, k)
    generator = random.Random(seed)
    for _ in range(count):
        m = round(100 * 41 ** generator.random())
        n, k = (8 * round(32 * 48 ** generator.random()) for _ in range(2))
        yield Shape(f"{m}x{n}x{k}", "random", m, n, k)


def plans(setting: Setting, problem: native.Problem) -> dict[str, native.Plan]:
    """The planner's choice with ever more means; without those that this runtime lacks."""
    known = {
        name: PlanFlag[flag] for name, flag in WITHHELD.items() if flag in PlanFlag.__members__
    }
    found = {}
    for i, name in enumerate(MEANS):
        if name in WITHHELD and name not in known:
            continue
        flags = sum(known[later] for later in MEANS[i + 1 :] if later in known)
        found[name] = setting.plan(problem, flags=flags)
    regions = found["two regions"]
    if any(region.joins_previous for region in regions.regions):
        found[IN_TURN] = in_turn(regions)
    return found


def in_turn(plan: native.Plan) -> native.Plan:
    """The same launches, one after another."""
    copy = native.Plan.from_buffer_copy(plan)
    for i in range(copy.region_count):
        copy._regions[i].joins_previous = 0
    return copy


def described(setting: Setting, plan: native.Plan) -> str:
    """Kernels, K splits and sizes of a plan's regions: `NAME/SPLIT MxN + NAME/SPLIT MxN`."""
    kernels = setting.pack.kernels
    parts = []
    for r in plan.regions:
        name = kernels[r.kernel].name if 0 <= r.kernel < len(kernels) else "vendor"
        parts.append(f"{'& ' if r.joins_previous else ''}{name}/{r.split} {r.m}x{r.n}")
    return " + ".join(parts).replace("+ &", "&")


def measure(bench: Bench, shape: Shape) -> None:
    """Times the plans of a shape in turn, after a check of each; writes a row for each means."""
    setting = bench.setting
    operands, launches = bench.prepare(shape)
    wanted = plans(setting, operands[0].problem)
    texts = {name: described(setting, plan) for name, plan in wanted.items()}
    different = {bytes(plan): plan for plan in wanted.values()}
    reference = operands[0].reference()
    for plan in different.values():
        operands[0].y.poison(shape.product().dtype)
        setting.runner.run(operands[0], plan)
        error = relative_error(operands[0].y.view, reference)
        if error > operands[0].limit(reference):
            raise SystemExit(f"{shape}: {described(setting, plan)} is wrong, error {error:.2g}")
    candidates = {key.hex(): bench.ours(operands, plan) for key, plan in different.items()}
    candidates[CUBLAS] = bench.cublas(operands)
    times = compare_launches(candidates, len(operands), launches)
    for name, plan in wanted.items():
        t = times[bytes(plan).hex()]
        bench.write(shape, means=name, plan=texts[name], predicted_us=plan.predicted_us,
                    us=t.median, low_us=t.low, high_us=t.high)  # fmt: skip
    t = times[CUBLAS]
    bench.write(shape, means=CUBLAS, us=t.median, low_us=t.low, high_us=t.high)


# ---- races ---------------------------------------------------------------------------------------
def side_by_side(setting: Setting, problem: native.Problem, rows: int) -> native.Plan:
    """Two kernels that can run side by side, the second with split-K, cut at a row."""
    kernels = setting.pack.kernels
    usable = [
        i for i, k in enumerate(kernels)
        if k.dependent_launch and k.family == native.Family.GEMM_TMA and not k.bias_matrix
        and (k.dtype, k.trans_a, k.trans_b) == (problem.dtype, problem.trans_a, problem.trans_b)
    ]  # fmt: skip
    large = max((i for i in usable if not kernels[i].split_k), key=lambda i: kernels[i].bn)
    small = next(i for i in usable if kernels[i].split_k and kernels[i].bm == 64)
    untuned = native.Device.from_buffer_copy(setting.device)
    untuned._name = b"no table, which may exclude these kernels"
    plan = native.Plan()
    for i, (m0, m, kernel, split) in enumerate(
        ((0, rows, large, 1), (rows, problem.m - rows, small, 3))
    ):
        part = native.Problem.from_buffer_copy(problem)
        part.m = m
        made = setting.pack.plan(untuned, part, kernel=kernel, split=split)
        (region,) = made.regions
        region.m0, region.joins_previous = m0, i
        region.workspace_offset, region.counters_offset = plan.workspace_bytes, plan.counters
        plan.workspace_bytes += -(-made.workspace_bytes // 256) * 256
        plan.counters += made.counters
        plan._regions[i] = region
    plan.region_count = 2
    return plan


def chain_is_exact(setting: Setting, m: int, rows: int, width: int, links: int = 24) -> str:
    """Products that each read what the one before wrote, in two buffers that take turns: queued at
    once, and in a graph, against one at a time. Returns what is wrong, or nothing.
    """
    device = setting.provider.torch_device
    generator = torch.Generator(device=device).manual_seed(m)
    problem = Shape("chain", "chain", m, width, width).problem()
    weight = torch.randn(width, width, generator=generator, device=device, dtype=torch.float16)
    weight /= math.sqrt(width)
    start = torch.randn(m, width, generator=generator, device=device, dtype=torch.float16)
    plan = side_by_side(setting, problem, rows)
    buffers = [torch.empty_like(start) for _ in range(2)]
    runner = setting.runner
    runner.reserve(plan)

    def queue(wait: bool) -> None:
        source = start
        for link in range(links):
            target = buffers[link % 2]
            addresses = (source.data_ptr(), weight.data_ptr(), 0, target.data_ptr())
            runner.launch(problem, plan, addresses)
            if wait:
                torch.cuda.synchronize()
            source = target

    queue(wait=True)
    expected = buffers[(links - 1) % 2].clone()
    if not bool(torch.isfinite(expected).all()) or float(expected.float().std()) < 0.1:
        return f"{m} x {width}: the chain does not keep its magnitude"
    graph = capture(lambda _: queue(wait=False), 1, 1)
    for round_ in range(20):
        for how, run in (("queued", lambda: queue(wait=False)), ("in a graph", graph.replay)):
            for buffer in buffers:
                buffer.fill_(math.nan)
            run()
            torch.cuda.synchronize()
            if not torch.equal(buffers[(links - 1) % 2], expected):
                return f"{m} x {width}: other bits {how}, round {round_}"
    return ""


# ---- what it comes to ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Added:
    """What one means adds to those before it, over all shapes, and where it changes the plan."""

    means: str
    shapes: int
    chosen: int
    gain: float  # geometric mean over all shapes of time before / time with it
    gain_chosen: float  # where it changes the plan
    predicted_chosen: float  # the same, as predicted
    worst: float
    over_cublas: float  # cuBLAS's time / ours


def summary(rows: list[dict[str, str]]) -> list[Added]:
    """What the rows of ablation.csv say of each means."""
    by_shape: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        key = tuple(row[field] for field in HEAD[:7])
        by_shape.setdefault(key, {})[row["means"]] = row
    found = []
    before: str | None = None
    for means in (*MEANS, IN_TURN):
        having = [shape for shape in by_shape.values() if means in shape]
        if not having:
            continue
        base = "two regions" if means == IN_TURN else before
        pairs = [(shape[base or means], shape[means]) for shape in having]
        changed = [pair for pair in pairs if pair[0]["plan"] != pair[1]["plan"]]
        gains = [float(a["us"]) / float(b["us"]) for a, b in changed]
        promised = [float(a["predicted_us"]) / float(b["predicted_us"]) for a, b in changed]
        rivals = [float(s[CUBLAS]["us"]) / float(s[means]["us"]) for s in having if CUBLAS in s]
        every = gains + [1.0] * (len(pairs) - len(gains))
        found.append(
            Added(
                means,
                len(pairs),
                len(changed),
                geometric_mean(every),
                geometric_mean(gains),
                geometric_mean(promised),
                min(gains, default=math.nan),
                geometric_mean(rivals),
            )
        )
        before = means if means != IN_TURN else before
    return found


def table(added: list[Added]) -> str:
    lines = [
        "means            shapes  chosen  gain over the line above: all  chosen  predicted  worst"
        "   cuBLAS / ours"
    ]
    for a in added:
        lines.append(
            f"{a.means:16} {a.shapes:6} {a.chosen:7} {a.gain:34.3f} {a.gain_chosen:7.3f} "
            f"{a.predicted_chosen:10.3f} {a.worst:6.2f} {a.over_cublas:15.3f}"
        )
    lines.append(f"({IN_TURN}: against two regions side by side, where those are)")
    return "\n".join(lines)


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    arguments.output.mkdir(parents=True, exist_ok=True)
    target = arguments.output / "ablation.csv"
    base = (
        list(read_shapes(arguments.shapes))
        if arguments.shapes
        else list(shapes(arguments.seed, arguments.random))
    )
    with tempfile.TemporaryDirectory() as folder:
        pack = unpacked(arguments.pack, Path(folder))
        setting = Setting(Provider(ordinal=arguments.device, pack=pack), pack)
        faults = [chain_is_exact(setting, *sizes) for sizes in CHAINS]
        for fault in filter(None, faults):
            say(f"chain: {fault}")
        if any(faults):
            return 1
        bench = Bench(setting, target, HEAD)
        wanted = [
            replace(shape, dtype=dtype, layout=layout)
            for shape in base
            for dtype in arguments.dtype.split(",")
            for layout in arguments.layout.split(",")
        ]
        stop = time.monotonic() + arguments.seconds
        for count, shape in enumerate(shape for shape in wanted if shape.key not in bench.done):
            if time.monotonic() > stop:
                say(f"the time is up after {count} shapes; run it again for the rest")
                break
            measure(bench, shape)
            if count % 20 == 0:
                say(f"{count + 1}: {shape}")
    print(table(summary(_rows(target))))
    print(f"chains bit for bit: {sum(not fault for fault in faults)} of {len(faults)}")
    return 0


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as source:
        return list(csv.DictReader(source))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument(
        "--shapes", type=Path, help="CSV: id, class, M, N, K; default: a built-in list"
    )
    parser.add_argument("--random", type=int, default=40, help="random shapes in the built-in list")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="f16", help="of f16, bf16, f32 (TF32), f32ieee")
    parser.add_argument("--layout", default="nn", help="of nn, nt, tn, tt; several with commas")
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument(
        "--seconds", type=float, default=240, help="stop starting shapes after this long"
    )
    arguments = parser.parse_args()
    arguments.pack = pack_of(arguments, parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
