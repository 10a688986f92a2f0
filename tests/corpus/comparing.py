"""When two results are the same: bit for bit, or within the bound of a data type.

Errors are relative Frobenius norms against a float64 reference; NaN and infinities must stand in
the same places. A failed comparison raises `Mismatch`, whose text names the output, the figure and
the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Precision = Literal["tf32", "ieee"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Mismatch(AssertionError):
    """Two results differ by more than they may."""


def bound(dtype: np.dtype[Any], precision: Precision = "ieee", k: int = 1) -> float:
    """Largest relative error that one product of inner size `k` may have.

    dtype: of the operands: float16, bfloat16 or float32. precision: how float32 is multiplied.
    """
    if dtype == np.float16:
        return 2e-3
    if dtype == BFLOAT16:
        return 1e-2
    if dtype == np.float32:
        return 1e-3 if precision == "tf32" else 1e-6 * max(k, 1) ** 0.5
    raise ValueError(f"no bound for {dtype}: accepted are float16, bfloat16, float32")


def relative_error(got: Array, reference: Array) -> float:
    """Frobenius norm of the difference over that of the reference, finite elements only.

    A reference of norm 0 gives the norm of `got`. Where the reference is outside the range of the
    type of `got`, it counts as the infinity that rounding makes of it. Raises Mismatch if the
    shapes differ, or the places of NaN, Inf or -Inf.
    """
    if got.shape != reference.shape:
        raise Mismatch(f"shape {got.shape}, expected {reference.shape}")
    wide, exact = got.astype(np.float64), reference.astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = reference.astype(got.dtype).astype(np.float64)
    for name, test in (("NaN", np.isnan), ("Inf", np.isposinf), ("-Inf", np.isneginf)):
        wrong = np.argwhere(test(wide) != test(rounded))
        if len(wrong):
            place = tuple(int(i) for i in wrong[0])
            raise Mismatch(
                f"{name} misplaced at {len(wrong)} of {got.size} elements, first at {place}: "
                f"{wide[place]}, expected {exact[place]}"
            )
    finite = np.isfinite(rounded)
    difference = float(np.linalg.norm(wide[finite] - exact[finite]))
    scale = float(np.linalg.norm(exact[finite]))
    return difference / scale if scale else difference


def require_close(got: Outputs, reference: Outputs, limit: float) -> float:
    """Requires the same names in the same order, integers equal and floats within `limit`.

    Returns the largest relative error seen. Data types are not compared, for a float64 reference
    has others: `require_same_form` does that.
    """
    _require_names(got, reference)
    worst = 0.0
    for name, value in got.items():
        if _is_float(value.dtype):
            try:
                error = relative_error(value, reference[name])
            except Mismatch as mismatch:
                raise Mismatch(f"output {name!r}: {mismatch}") from None
            if not error <= limit:
                raise Mismatch(f"output {name!r}: relative error {error:.3g}, allowed {limit:.3g}")
            worst = max(worst, error)
        elif not np.array_equal(value, reference[name]):
            raise Mismatch(f"output {name!r}: {value.dtype} values differ")
    return worst


def require_same_form(got: Outputs, want: Outputs) -> None:
    """Requires the same names in the same order, data types and shapes."""
    _require_names(got, want)
    for name, value in got.items():
        expected = want[name]
        if (value.dtype, value.shape) != (expected.dtype, expected.shape):
            raise Mismatch(
                f"output {name!r}: {value.dtype}{list(value.shape)}, "
                f"expected {expected.dtype}{list(expected.shape)}"
            )


def require_same_bits(got: Outputs, want: Outputs) -> None:
    """Requires `require_same_form` and the same bytes."""
    require_same_form(got, want)
    for name, value in got.items():
        if value.tobytes() != want[name].tobytes():
            error = relative_error(value, want[name]) if _is_float(value.dtype) else float("nan")
            raise Mismatch(f"output {name!r}: not the same bits (relative error {error:.3g})")


def _require_names(got: Outputs, want: Outputs) -> None:
    if list(got) != list(want):
        raise Mismatch(f"outputs {list(got)}, expected {list(want)}")


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == BFLOAT16
