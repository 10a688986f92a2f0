"""What is timed against each other on a row: our plans, cuBLAS, cuBLASLt's algorithms.

Each contender is a launch: called with the index of an operand set, it enqueues Y = A @ B on
torch's current stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cublaslt import WORKSPACE_BYTES, Algorithm, CublasLt, Sizes
from benchmarks.machine import Runner, Setting
from benchmarks.measuring import Launch
from benchmarks.operand_sets import OperandSets
from moonpoly_ort import native

VENDOR = "vendor"  # the name of a region that no kernel of the pack computes


@dataclass(frozen=True)
class Form:
    """A problem as it may be launched. `repacked_bytes`: of a copy of the constant B that it takes
    instead of the stored one; 0 where it takes that."""

    problem: native.Problem
    swapped: bool  # A and B change places
    repacked_bytes: int = 0


def prepared(setting: Setting, operands: OperandSets) -> list[Form]:
    """The forms that a session can choose from: B as it is stored, and B as it may be repacked
    once, when the session is made. B is constant in `gemm` alone.

    The only place that knows about repacking, with `Placed`.
    """
    problem, swapped = operands.problem()
    forms = [Form(problem, swapped)]
    repacked = getattr(setting.pack, "repacked", None)
    on_gpu = setting.provider.is_cuda
    if repacked is not None and on_gpu and operands.row.op == "gemm" and not swapped:
        packed, size = repacked(problem)
        if size:
            forms.append(Form(packed, swapped, size))
    return forms


@dataclass(frozen=True)
class Chosen:
    """A plan, and the form that it is for."""

    plan: native.Plan
    form: Form

    def describe(self, pack: native.Pack) -> tuple[str, str, int]:
        """The names of the kernels and their K splits, each joined by +, and the regions.

        Operands that the plan copies first come as `copy_a` and `copy_b`.
        """
        regions, count = self.plan.regions, len(pack.kernels)
        names = [f"copy_{operand}" for operand, _ in getattr(self.plan, "copies", ())]
        for region in regions:
            known = 0 <= region.kernel < count
            names.append(pack.kernels[region.kernel].name if known else VENDOR)
        return "+".join(names), "+".join(str(r.split) for r in regions), len(regions)

    def same(self, other: Chosen) -> bool:
        return self.form is other.form and self._parts() == other._parts()

    def _parts(self) -> list[str]:
        return [repr(part) for part in (*self.plan.regions, *getattr(self.plan, "copies", ()))]


@dataclass(frozen=True)
class Plans:
    """`alone`: micro-kernels only. `allowed`: with the vendor as a candidate; None where the
    planner knows none."""

    alone: Chosen
    allowed: Chosen | None


def plans(setting: Setting, forms: list[Form]) -> Plans:
    """The planner's choice without and with the vendor candidate, over all forms.

    The only place that knows how the candidate is switched.

    Raises:
        MoonPolyError: there is no plan.
    """

    def best(**flags: int) -> Chosen:
        found = [
            Chosen(setting.pack.plan(setting.device, form.problem, **flags), form) for form in forms
        ]
        return min(found, key=lambda chosen: chosen.plan.predicted_us)  # the stored one if equal

    switch = getattr(getattr(native, "PlanFlag", None), "NO_VENDOR", None)
    return Plans(best(), None) if switch is None else Plans(best(flags=switch), best())


class Placed:
    """A form on the operand sets: the addresses (A, B, bias, Y) of each; what is repacked, is."""

    def __init__(self, setting: Setting, operands: OperandSets, form: Form) -> None:
        self.problem = form.problem
        stored = [b.data_ptr() for b in operands.b]
        self._copies: list[torch.Tensor] = []  # kept for as long as they are used
        if form.repacked_bytes:
            problem, _ = operands.problem()
            for b in stored:
                copy = torch.empty(
                    form.repacked_bytes, dtype=torch.uint8, device=operands.b[0].device
                )
                setting.runner.launcher.repack(
                    problem, b=b, packed=copy.data_ptr(), stream=_stream(copy)
                )
                self._copies.append(copy)
        used = [copy.data_ptr() for copy in self._copies] or stored
        self.pointers = []
        for a, b, y in zip(operands.a, used, operands.y, strict=True):
            factors = (b, a.data_ptr()) if form.swapped else (a.data_ptr(), b)
            self.pointers.append((*factors, 0, y.data_ptr()))


def ours(runner: Runner, placed: Placed, plan: native.Plan) -> Launch:
    runner.reserve(plan)

    def launch(index: int) -> None:
        runner.launch(placed.problem, plan, placed.pointers[index])

    return launch


def cublas(operands: OperandSets) -> Launch:
    """cuBLAS as torch calls it, in the row's math mode."""
    flat = operands.row.op == "gemm"
    views = [
        (a[0], b[0], y[0]) if flat else (a, b, y)
        for a, b, y in zip(operands.a, operands.b, operands.y, strict=True)
    ]

    def launch(index: int) -> None:
        a, b, y = views[index]
        torch.matmul(a, b, out=y)

    return launch


def math_mode(dtype: str) -> None:
    """Lets torch's products go to cuBLAS, accumulate in fp32, and use TF32 only for `f32`."""
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library("cublas")
    matmul.allow_tf32 = dtype == "f32"
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False


class LtContenders:
    """The algorithms that cuBLASLt proposes for a row, the most promising first.

    Raises:
        Refused: it proposes none.
    """

    def __init__(
        self, library: CublasLt, workspace: torch.Tensor, operands: OperandSets, most: int = 10
    ) -> None:
        row = operands.row
        if workspace.nbytes < WORKSPACE_BYTES:
            raise ValueError(f"the workspace has {workspace.nbytes} of {WORKSPACE_BYTES} bytes")
        self._workspace, self._operands = workspace, operands
        self._product = library.product(Sizes.dense(row.m, row.n, row.k, row.batch), operands.dtype)
        try:
            self.algorithms = self._product.algorithms(most)
        except Exception:
            self._product.close()
            raise

    def launch(self, algorithm: Algorithm) -> Launch:
        operands, product, workspace = self._operands, self._product, self._workspace.data_ptr()

        def launch(index: int) -> None:
            product.run(
                algorithm, operands.a[index].data_ptr(), operands.b[index].data_ptr(),
                operands.y[index].data_ptr(), workspace, _stream(operands.y[index]),
            )  # fmt: skip

        return launch

    def close(self) -> None:
        self._product.close()


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
