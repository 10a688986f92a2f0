"""The comparison rules reject what they must."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .comparing import (
    Array,
    Mismatch,
    bound,
    relative_error,
    require_close,
    require_same_bits,
    require_same_form,
)


def test_error_is_relative_to_the_norm_of_the_reference() -> None:
    assert relative_error(np.array([3, 4.5], np.float32), np.array([3.0, 4.0])) == pytest.approx(
        0.1
    )


def test_error_against_zero_is_the_norm_itself() -> None:
    assert relative_error(np.array([0.5], np.float32), np.zeros(1)) == 0.5


def test_empty_outputs_agree() -> None:
    assert relative_error(np.zeros((0, 3), np.float32), np.zeros((0, 3))) == 0


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_misplaced_special_value_is_named_with_its_place(special: float) -> None:
    with pytest.raises(Mismatch, match=r"misplaced at 1 of 3 elements, first at \(1,\)"):
        relative_error(np.array([1, special, 2], np.float32), np.array([1.0, 1.0, 2.0]))
    with pytest.raises(Mismatch, match="misplaced"):
        relative_error(np.array([1, 1, 2], np.float32), np.array([1.0, special, 2.0]))


def test_special_values_in_place_do_not_hide_an_error() -> None:
    got, reference = np.array([np.nan, np.inf, 2], np.float32), np.array([np.nan, np.inf, 1.0])
    assert relative_error(got, reference) == 1


def test_overflow_of_the_narrow_type_is_no_error() -> None:
    assert relative_error(np.array([np.inf, 1], np.float16), np.array([1e6, 1.0])) == 0


def test_bounds_follow_type_and_precision() -> None:
    assert bound(np.dtype(np.float16)) == 2e-3
    assert bound(np.dtype(ml_dtypes.bfloat16)) == 1e-2
    assert bound(np.dtype(np.float32), "tf32") == 1e-3
    assert bound(np.dtype(np.float32), "ieee", 400) == pytest.approx(2e-5)
    with pytest.raises(ValueError, match="int8"):
        bound(np.dtype(np.int8))


def test_close_needs_equal_integers_and_bounded_floats() -> None:
    reference = {"y": np.array([1.0]), "n": np.array([3])}
    assert require_close({"y": np.array([1], np.float32), "n": np.array([3])}, reference, 1e-6) == 0
    with pytest.raises(Mismatch, match=r"'y': relative error 0\.5"):
        require_close({"y": np.array([1.5], np.float32), "n": np.array([3])}, reference, 0.1)
    with pytest.raises(Mismatch, match="'n'"):
        require_close({"y": np.array([1], np.float32), "n": np.array([4])}, reference, 0.1)


def test_form_is_name_order_type_and_shape() -> None:
    want: dict[str, Array] = {"a": np.zeros(2, np.float32), "b": np.zeros((), np.int64)}
    require_same_form({k: v + 1 for k, v in want.items()}, want)
    with pytest.raises(Mismatch, match="outputs"):
        require_same_form(dict(reversed(want.items())), want)
    with pytest.raises(Mismatch, match=r"float64\[2\], expected float32\[2\]"):
        require_same_form({**want, "a": np.zeros(2)}, want)
    with pytest.raises(Mismatch, match=r"int64\[1\], expected int64\[\]"):
        require_same_form({**want, "b": np.zeros(1, np.int64)}, want)


def test_same_bits_sees_the_last_one() -> None:
    one = np.array([1], np.float32)
    require_same_bits({"y": one}, {"y": one.copy()})
    with pytest.raises(Mismatch, match="not the same bits"):
        require_same_bits({"y": np.nextafter(one, np.float32(2))}, {"y": one})
