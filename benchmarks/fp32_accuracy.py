"""How exact fp32 products are on a GPU: kernels of split factors, scalar kernels, cuBLAS.

    python -m benchmarks.fp32_accuracy --output accuracy.csv [--pack sm_90.mpk.xz]

Each row is a product of one kind of numbers by one of the three, against float64: `elementwise` is
the largest |error| / (|A| |B|) of an element, `norm` the relative Frobenius error, both in units of
2^-24, half of an fp32's last place; `bias` is the mean of the signed errors of what is relative.
The kernels are those that the planner deems fastest of their sort.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.machine import Setting, unpacked
from benchmarks.operands import Operands, dense
from benchmarks.running import Provider
from moonpoly_ort import native
from moonpoly_ort.errors import MoonPolyError

UNIT = 2.0**24
SHAPES = ((64, 96, 64), (200, 192, 1024), (96, 128, 16384), (64, 128, 131072))
Fill = Callable[[torch.Tensor, torch.Tensor], None]


def _normal(a: torch.Tensor, b: torch.Tensor) -> None:
    a.normal_()
    b.normal_()


def _positive(a: torch.Tensor, b: torch.Tensor) -> None:
    a.uniform_()
    b.uniform_()


def _wide(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exponents from -40 to 40 in every row and column."""
    for x in (a, b):
        x.normal_().mul_(torch.exp2(torch.empty_like(x).uniform_(-40, 40)))


def _huge(a: torch.Tensor, b: torch.Tensor) -> None:
    """Up to the largest finite number, times small ones."""
    a.uniform_(-1, 1).mul_(3.4e38)
    b.normal_().mul_(1e-9)


def _tiny(a: torch.Tensor, b: torch.Tensor) -> None:
    """Around the least normal number, where lower parts underflow, times large ones."""
    a.normal_().mul_(1e-37)
    b.normal_().mul_(1e30)


def _integers(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exact in fp32 while sums stay below 2^24: K up to 2^14."""
    for x in (a, b):
        x.copy_(torch.randint(-31, 32, x.shape, device=x.device))


KINDS: dict[str, Fill] = {
    "normal": _normal, "positive": _positive, "wide": _wide, "huge": _huge, "tiny": _tiny,
    "integers": _integers,
}  # fmt: skip


def best(setting: Setting, problem: native.Problem, split_factors: bool) -> native.Plan | None:
    """The plan with one kernel of a sort that promises most."""
    plans = []
    for index, kernel in enumerate(setting.pack.kernels):
        if bool(kernel.tf32x3) is not split_factors:
            continue
        try:
            plans.append(setting.plan(problem, index))
        except MoonPolyError:
            continue  # not legal for this problem
    return min(plans, key=lambda plan: plan.predicted_us, default=None)


def errors(y: torch.Tensor, operands: Operands) -> tuple[float, float, float]:
    """(elementwise, norm, bias) in units of 2^-24."""
    reference = operands.reference()
    magnitude = Operands.reference(
        Operands(
            operands.product, operands.a.magnitudes(), operands.b.magnitudes(), operands.y, None,
            None, operands.problem, operands._maps,
        )
    )  # fmt: skip
    error = y.double() - reference
    relative = error / magnitude.clamp_min(1e-300) * reference.sign()
    norm = error.norm() / reference.norm()
    return tuple(float(x) * UNIT for x in (relative.abs().max(), norm, relative.mean()))  # type: ignore[return-value]


def rows(setting: Setting) -> Iterator[dict[str, object]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    for layout in ("nn", "nt"):
        for m, n, k in SHAPES:
            operands = Operands.allocate(
                dense(m, n, k, "f32", layout, "ieee"), setting.provider.torch_device
            )
            for kind, fill in KINDS.items():
                fill(operands.a.view, operands.b.view)
                head = {"layout": layout, "m": m, "n": n, "k": k, "numbers": kind}
                for split_factors in (True, False):
                    plan = best(setting, operands.problem, split_factors)
                    if plan is None:
                        continue
                    setting.runner.run(operands, plan)
                    name = setting.pack.kernels[plan.regions[0].kernel].name
                    yield head | _measured(name, operands.y.view, operands)
                a = operands.a.view[0].mT if layout[0] == "t" else operands.a.view[0]
                b = operands.b.view[0].mT if layout[1] == "t" else operands.b.view[0]
                yield head | _measured("cublas", (a @ b)[None], operands)


def _measured(name: str, y: torch.Tensor, operands: Operands) -> dict[str, object]:
    values = errors(y, operands)
    named = zip(("elementwise", "norm", "bias"), values, strict=True)
    return {"by": name, **{key: f"{value:.3g}" for key, value in named}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="CSV to write")
    parser.add_argument("--pack", type=Path, required=True, help="a kernel pack, .mpk or .mpk.xz")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pack = unpacked(arguments.pack, Path(folder))
        setting = Setting(Provider(ordinal=arguments.device, pack=pack), pack)
        table = list(rows(setting))
    with arguments.output.open("w", newline="") as target:
        out = csv.DictWriter(target, list(table[0]), lineterminator="\n")
        out.writeheader()
        out.writerows(table)
    for row in table:
        shape = f"{row['m']}x{row['n']}x{row['k']} {row['layout']}"
        print(f"{shape:20} {row['numbers']:9} {str(row['by'])[:48]:48} elementwise "
              f"{row['elementwise']:>8} norm {row['norm']:>8} bias {row['bias']:>9}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
