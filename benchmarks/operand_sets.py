"""Operands of a suite's row as a runtime hands them over, several sets of them to rotate.

Dense row-major matrices, each set at an address aligned to 256 bytes, as ONNX Runtime's allocator
gives them; values are normal random numbers, made where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.operands import DTYPES, NUMBERS
from benchmarks.suites import Row
from moonpoly_ort import native

ALIGNMENT = 256  # bytes, as cuBLASLt takes for granted


def matrices(
    count: int, batch: int, rows: int, columns: int, element: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Unset dense stacks (batch, rows, columns), each at an aligned address."""
    size, unit = batch * rows * columns, ALIGNMENT // element.itemsize
    storage = torch.empty(count, -(-size // unit) * unit, dtype=element, device=device)
    return [one[:size].view(batch, rows, columns) for one in storage]


@dataclass(frozen=True)
class OperandSets:
    """`a`, `b`, `y`: one tensor a set, (batch, m, k), (batch, k, n) and (batch, m, n)."""

    row: Row
    dtype: str  # a name of `NUMBERS`
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    y: list[torch.Tensor]

    @staticmethod
    def allocate(row: Row, dtype: str, sets: int, device: str, seed: int = 0) -> OperandSets:
        """Random A and B, the same for the same seed; Y is NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        element = DTYPES[NUMBERS[dtype][0]]

        def make(rows: int, columns: int) -> list[torch.Tensor]:
            return matrices(sets, row.batch, rows, columns, element, device)

        a, b, y = make(row.m, row.k), make(row.k, row.n), make(row.m, row.n)
        for matrix in (*a, *b):
            matrix.normal_(generator=generator)
        for matrix in y:
            matrix.fill_(torch.nan)
        return OperandSets(row, dtype, a, b, y)

    def problem(self) -> tuple[native.Problem, bool]:
        """The problem as ONNX's MatMul forms it; whether A and B change places in it."""
        row = self.row
        dtype, precision = NUMBERS[self.dtype]
        batch = () if row.op == "gemm" else (row.batch,)
        problem, launches = native.matmul_problem(
            (*batch, row.m, row.k), (*batch, row.k, row.n), native.Dtype[dtype.upper()],
            native.Precision[precision.upper()],
        )  # fmt: skip
        sizes = problem.m, problem.n, problem.k, problem.batch, launches
        if sizes == (row.m, row.n, row.k, row.batch, 1):
            return problem, False
        if sizes == (row.n, row.m, row.k, row.batch, 1):
            return problem, True
        raise ValueError(f"{row} became another problem: {problem}")

    def __len__(self) -> int:
        return len(self.y)


def set_bytes(row: Row, dtype: str) -> int:
    """Bytes of one set."""
    return row.elements * DTYPES[NUMBERS[dtype][0]].itemsize
