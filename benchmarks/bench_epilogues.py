"""What an activation or a residual costs in the kernels' epilogues, and what it saves.

    python -m benchmarks.bench_epilogues [--pack sm_90.mpk.xz] [--only gemm_ws]

For each product the kernel that the planner takes where nothing follows it (or the best of those
named by --only), forced with everything that may follow; beside it cuBLAS alone, and cuBLAS with
torch's elementwise kernels, which read and write Y once more. Then gated products as one launch
(2 N columns, the planner's choice) and as the two that they would be else, the second of which
reads the first one's result; and a result in fp32. Microseconds, from CUDA graphs on operands
rotated beyond L2. Each result is checked against float64 first. Under two minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Setting, pack_of, unpacked
from benchmarks.measuring import Ceilings, compare_launches, launches_per_graph, rotation
from benchmarks.operands import Operands, Product, dense, relative_error
from benchmarks.recording import say
from benchmarks.running import Provider
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError
from moonpoly_ort.native import Activation, PlanFlag, Residual

SHAPES = (
    (128, 768, 768), (512, 3072, 768), (2048, 4096, 1024), (4096, 4096, 4096), (8192, 1024, 256),
    (16, 4096, 4096),
)  # fmt: skip
FOLLOWING = {
    "plain": (Activation.NONE, Residual.NONE),
    "relu": (Activation.RELU, Residual.NONE),
    "silu": (Activation.SILU, Residual.NONE),
    "gelu": (Activation.GELU, Residual.NONE),
    "add": (Activation.NONE, Residual.BEFORE),
    "add relu": (Activation.RELU, Residual.BEFORE),
    "mul": (Activation.NONE, Residual.MULTIPLIED),
}
ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cublas": lambda y, r: y,
    "cublas, relu": lambda y, r: torch.relu(y),
    "cublas, gelu": lambda y, r: torch.nn.functional.gelu(y),
    "cublas, add": lambda y, r: y + r,
}


GATED_SHAPES = (  # of the outputs
    (1, 5632, 2048), (4, 5632, 2048), (16, 5632, 2048), (128, 5632, 2048), (512, 5632, 2048),
    (2048, 5632, 2048), (1, 14336, 4096), (2048, 14336, 4096),
)  # fmt: skip


def measure_gated(setting: Setting, product: Product, rounds: int) -> None:
    """SwiGLU of the outputs that `product` describes."""
    device, p = setting.provider.torch_device, product
    forms = {
        "gated": [replace(p, n=2 * p.n, gated=True, activation=Activation.SILU)],
        "two": [replace(p, activation=Activation.SILU), replace(p, residual=Residual.MULTIPLIED)],
        "wide": [replace(p, wide=True)],
        "plain": [p],
    }
    element = {"f16": 2, "bf16": 2, "f32": 4}[p.dtype]
    sets = rotation((p.m * p.k + 2 * p.k * p.n + p.m * p.n) * element, setting.device.l2_bytes)
    candidates: dict[str, Callable[[int], Any]] = {}
    chosen = {}
    for name, parts in forms.items():
        launches = []
        for part in parts:
            own = [Operands.allocate(part, device, seed) for seed in range(sets)]
            plan = setting.plan(own[0].problem)
            setting.runner.run(own[0], plan)
            reference = own[0].reference()
            error, limit = relative_error(own[0].y.view, reference), own[0].limit(reference)
            if not error <= limit:
                say(f"WRONG {part}: error {error:.3g}, limit {limit:.3g}")
            launches.append((own, plan))
        names = [setting.kernel_name(region) for _, plan in launches for region in plan.regions]
        chosen[name] = " + ".join(names)

        def run(index: int, launches: list[Any] = launches) -> None:
            for own, plan in launches:
                one = own[index]
                setting.runner.launch(one.problem, plan, one.pointers, one.residual)

        candidates[name] = run
    floor = Ceilings().floor_us(p.m, 2 * p.n, p.k, 1, element)
    times = compare_launches(candidates, sets, launches_per_graph(floor, sets), rounds)
    shown = ", ".join(
        f"{name} {timing.median:.2f} ({chosen[name]})" for name, timing in times.items()
    )
    say(f"{p.m}x{p.n}x{p.k} {p.dtype}: {shown}")


def _kernel_of(setting: Setting, problem: native.Problem, only: str) -> tuple[int, int]:
    """(kernel, split) of the least predicted plan of one region."""
    if not only:
        flags = PlanFlag.NO_VENDOR | PlanFlag.NO_REGIONS
        region = setting.plan(problem, flags=flags).regions[0]
        return region.kernel, region.split
    plans = []
    for index, kernel in enumerate(setting.pack.kernels):
        if only in kernel.name:
            try:
                plans.append(setting.plan(problem, index))
            except MoonPolyError:
                continue
    if not plans:
        raise SystemExit(f"no kernel named {only!r} computes it")
    region = min(plans, key=lambda plan: plan.predicted_us).regions[0]
    return region.kernel, region.split


def measure(setting: Setting, product: Product, only: str, rounds: int) -> None:
    device = setting.provider.torch_device
    p = product
    element = {"f16": 2, "bf16": 2, "f32": 4}[p.dtype]
    moved = (p.m * p.k + p.k * p.n + 2 * p.m * p.n) * element
    sets = rotation(moved, setting.device.l2_bytes)
    candidates: dict[str, Callable[[int], Any]] = {}
    chosen = -1, 0
    for name, (activation, residual) in FOLLOWING.items():
        own = [
            Operands.allocate(replace(p, activation=activation, residual=residual), device, seed)
            for seed in range(sets)
        ]
        if chosen[0] < 0:
            chosen = _kernel_of(setting, own[0].problem, only)
        plan = setting.plan(own[0].problem, *chosen)
        setting.runner.run(own[0], plan)
        reference = own[0].reference()
        error, limit = relative_error(own[0].y.view, reference), own[0].limit(reference)
        if not error <= limit:
            say(f"WRONG {own[0].product}: error {error:.3g}, limit {limit:.3g}")
        candidates[name] = lambda index, own=own, plan=plan: setting.runner.launch(
            own[index].problem, plan, own[index].pointers, own[index].residual
        )
    factors = [(one.a.view[0], one.b.view[0], one.y.view[0].clone()) for one in own]
    for name, then in ELEMENTWISE.items():
        candidates[name] = lambda index, then=then: then(
            factors[index][0] @ factors[index][1], factors[index][2]
        )
    floor = Ceilings().floor_us(p.m, p.n, p.k, 1, element)
    times = compare_launches(candidates, sets, launches_per_graph(floor, sets), rounds)
    kernel = setting.pack.kernels[chosen[0]].name
    shown = ", ".join(f"{name} {timing.median:.2f}" for name, timing in times.items())
    say(f"{p.m}x{p.n}x{p.k} {p.dtype} {kernel} split {chosen[1]}: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, help="a kernel pack; by default the one that is found")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--dtype", default="f16", help="of f16, bf16, f32; several with commas")
    parser.add_argument("--only", default="", help="kernels whose names contain it")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    pack = pack_of(arguments, parser)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Provider(ordinal=arguments.device), unpacked(pack, Path(folder)))
        for dtype in arguments.dtype.split(","):
            for m, n, k in SHAPES:
                measure(setting, dense(m, n, k, dtype), arguments.only, arguments.rounds)
            for m, n, k in () if arguments.only or dtype == "f32" else GATED_SHAPES:
                measure_gated(setting, dense(m, n, k, dtype), arguments.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
