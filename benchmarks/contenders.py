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
class Plans:
    """`alone`: micro-kernels only. `allowed`: with the vendor as a candidate; None where the
    planner knows none."""

    alone: native.Plan
    allowed: native.Plan | None


def plans(setting: Setting, problem: native.Problem) -> Plans:
    """The planner's choice without and with the vendor candidate.

    The only place that knows how the candidate is switched.

    Raises:
        MoonPolyError: there is no plan.
    """
    return Plans(setting.plan(problem), None)


@dataclass(frozen=True)
class Prepared:
    """A problem as it is launched, and the addresses (A, B, bias, Y) of each operand set."""

    problem: native.Problem
    pointers: list[tuple[int, int, int, int]]
    keep: tuple[torch.Tensor, ...] = ()  # what the addresses point into, beside the operands


def prepared(setting: Setting, operands: OperandSets) -> Prepared:
    """What a session does once, before the first run: B of `gemm` is constant, and a session may
    store it in another way. Not timed."""
    problem, swapped = operands.problem()
    pointers = [
        (b.data_ptr(), a.data_ptr(), 0, y.data_ptr())
        if swapped
        else (a.data_ptr(), b.data_ptr(), 0, y.data_ptr())
        for a, b, y in zip(operands.a, operands.b, operands.y, strict=True)
    ]
    return Prepared(problem, pointers)


def describe(pack: native.Pack, plan: native.Plan) -> tuple[str, str, int]:
    """The names of a plan's kernels and their K splits, each joined by +, and its regions."""
    regions = plan.regions
    count = len(pack.kernels)
    names = [pack.kernels[r.kernel].name if 0 <= r.kernel < count else VENDOR for r in regions]
    return "+".join(names), "+".join(str(r.split) for r in regions), len(regions)


def ours(runner: Runner, given: Prepared, plan: native.Plan) -> Launch:
    runner.reserve(plan)

    def launch(index: int) -> None:
        runner.launch(given.problem, plan, given.pointers[index])

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
