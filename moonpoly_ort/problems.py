"""From tensor shapes to the canonical product `mp_problem`, as the native runtime folds them.

The runtime does this in C++ at every new shape (custom_ops/runtime); this is its mirror for plans
that are made without running anything. Buffers are assumed to start 16-byte aligned, as ONNX
Runtime's do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .errors import ProblemError
from .native import Bias, Dtype, Precision, Problem

Shape = tuple[int, ...]

DTYPES = {"f16": (Dtype.F16, 2), "bf16": (Dtype.BF16, 2), "f32": (Dtype.F32, 4)}  # bytes
PRECISIONS = {"tf32": Precision.TF32, "ieee": Precision.IEEE}


@dataclass(frozen=True)
class Launches:
    """One problem and how often it is launched for one node (batch groups beyond two are looped
    over).
    """

    problem: Problem
    count: int = 1


def _alignment(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all sizes (bytes)."""
    return next(power for power in (16, 8, 4, 2, 1) if all(size % power == 0 for size in sizes))


def matmul(a: Shape, b: Shape, dtype: str, precision: str = "tf32") -> Launches:
    """ONNX MatMul of `a` and `b`, any ranks from 1 on. Raises `ProblemError` for shapes that do not
    fit.
    """
    if not a or not b:
        raise ProblemError(f"MatMul takes no scalars: {list(a)} @ {list(b)}")
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    m, k, n = left[-2], left[-1], right[-1]
    rank = max(len(left), len(right)) - 2
    outer_a = (1,) * (rank + 2 - len(left)) + left[:-2]
    outer_b = (1,) * (rank + 2 - len(right)) + right[:-2]
    if right[-2] != k or any(
        x != y and 1 not in (x, y) for x, y in zip(outer_a, outer_b, strict=True)
    ):
        raise ProblemError(f"the shapes {list(a)} @ {list(b)} do not fit together")
    groups = _groups(outer_a, outer_b)
    if all(
        in_a and not in_b for _, in_a, in_b in groups
    ):  # B has no batch: rows of A are rows of A
        m, groups = m * prod(size for size, _, _ in groups), []
    count = prod(size for size, _, _ in groups[:-2])
    (outer, a_outer, b_outer), (inner, a_inner, b_inner) = ([(1, True, True)] * 2 + groups)[-2:]
    a_div, a_mod = _index(outer, inner, a_outer, a_inner)
    b_div, b_mod = _index(outer, inner, b_outer, b_inner)
    problem = _problem(dtype, precision, m, n, k, lda=k, ldb=n, batch=outer * inner)
    problem.a_div, problem.a_mod, problem.b_div, problem.b_mod = a_div, a_mod, b_div, b_mod
    return Launches(problem, count)


def _groups(a: Shape, b: Shape) -> list[tuple[int, bool, bool]]:
    """Batch dimensions as (size, does A run along it, does B), neighbours that broadcast alike
    merged.
    """
    groups: list[tuple[int, bool, bool]] = []
    for x, y in zip(a, b, strict=True):
        size, along_a, along_b = max(x, y) if x and y else 0, x != 1, y != 1
        if not along_a and not along_b:
            continue
        if groups and groups[-1][1:] == (along_a, along_b):
            groups[-1] = (groups[-1][0] * size, along_a, along_b)
        else:
            groups.append((size, along_a, along_b))
    return groups


def _index(outer: int, inner: int, along_outer: bool, along_inner: bool) -> tuple[int, int]:
    """(div, mod) so that z // div % mod is the operand's batch entry, z = outer index * inner +
    inner index.
    """
    div = 1 if along_inner else inner
    mod = (outer if along_outer else 1) * (inner if along_inner else 1)
    return max(div, 1), max(mod, 1)


def gemm(
    a: Shape,
    b: Shape,
    c: Shape | None,
    dtype: str,
    precision: str = "tf32",
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Launches:
    """ONNX Gemm; C broadcasts to (M, N). Raises `ProblemError` for shapes that do not fit."""
    if len(a) != 2 or len(b) != 2:
        raise ProblemError(f"Gemm takes matrices, not {list(a)} and {list(b)}")
    m, k = a[::-1] if trans_a else a
    inner, n = b[::-1] if trans_b else b
    if inner != k:
        raise ProblemError(
            f"the shapes {list(a)} and {list(b)} do not fit (transA={trans_a:d}, "
            f"transB={trans_b:d})"
        )
    problem = _problem(dtype, precision, m, n, k, lda=a[1], ldb=b[1], batch=1)
    problem.trans_a, problem.trans_b, problem.alpha = int(trans_a), int(trans_b), alpha
    if c is not None and beta != 0:
        rows, columns = (1, 1, *c)[-2:] if len(c) <= 2 else (-1, -1)
        if rows not in (1, m) or columns not in (1, n):
            raise ProblemError(f"C of shape {list(c)} does not broadcast to {[m, n]}")
        along_m, along_n = rows > 1, columns > 1
        problem.beta = beta
        problem.bias = Bias.MATRIX if along_m and along_n else Bias.VECTOR
        problem.bias_stride_m, problem.bias_stride_n = columns * along_m, int(along_n)
    return Launches(problem)


def _problem(
    dtype: str, precision: str, m: int, n: int, k: int, *, lda: int, ldb: int, batch: int
) -> Problem:
    code, size = DTYPES[dtype]
    return Problem(
        dtype=code, precision=PRECISIONS[precision], m=m, n=n, k=k, batch=batch,
        lda=lda, ldb=ldb, ldc=n, a_batch_stride=m * k, b_batch_stride=k * n, c_batch_stride=m * n,
        a_div=1, a_mod=1, b_div=1, b_mod=1,
        align_a=_alignment(lda * size, m * k * size if batch > 1 else 0),
        align_b=_alignment(ldb * size, k * n * size if batch > 1 else 0),
        align_c=_alignment(n * size, m * n * size if batch > 1 else 0),
        alpha=1.0,
    )  # fmt: skip
