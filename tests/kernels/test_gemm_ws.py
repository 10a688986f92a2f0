"""The warp-specialised kernel on a model of its machine: schedule, ring, epilogue and stream-K."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import gluon_model as model
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import (
    Dtype,
    Family,
    KernelSpec,
    Precision,
    interpreted,
    legal,
    why_illegal,
)

from moonpoly_ort.native_structs import Activation, Residual
from tests.epilogues import activated, finished
from tests.epilogues import gated as paired


@functools.cache
def module(name: str) -> Any:
    return model.source(name)


def items_of(
    block: int, blocks: int, tiles: int, steps: int, stream: bool
) -> list[tuple[int, int, int]]:
    """(tile, first step, end) of a block's work, in its order."""
    schedule = module("ws_schedule")
    whole, items, streamed, first, end = model.in_block(
        block, blocks, schedule.share_of, tiles, steps, stream
    )
    out = []
    for index in range(items):
        tile, begin, stop, end = model.in_block(
            block, blocks, schedule.item, index, end, whole, streamed, first, steps, stream
        )
        out.append((tile, begin, stop))
    return out


@given(
    tiles=st.integers(1, 60), steps=st.integers(1, 40), blocks=st.integers(1, 24),
    stream=st.booleans(),
)  # fmt: skip
@settings(max_examples=400)
def test_every_step_is_computed_once_and_every_part_is_added_once(
    tiles: int, steps: int, blocks: int, stream: bool
) -> None:
    blocks = min(blocks, tiles * steps if stream else tiles)
    work = [items_of(block, blocks, tiles, steps, stream) for block in range(blocks)]
    done = np.zeros((tiles, steps), int)
    parts: dict[int, int] = {}  # block -> tile that it leaves unfinished
    for block, items in enumerate(work):
        for place, (tile, begin, stop) in enumerate(items):
            assert begin < stop
            done[tile, begin:stop] += 1
            if stop < steps:
                assert place == 0, "a part must be published before the block waits for others"
                parts[block] = tile
    assert (done == 1).all()
    if not stream:
        assert not parts
    for block, items in enumerate(work):
        whole = model.in_block(block, blocks, module("ws_schedule").share_of, tiles, steps, stream)[
            0
        ]
        for tile, begin, stop in items:
            if stop == steps and begin > 0:
                first = model.in_block(
                    block,
                    blocks,
                    module("ws_schedule").owner_of,
                    (tile - whole) * steps,
                    tiles,
                    steps,
                )
                helpers = range(first, block)
                assert [parts.pop(helper) for helper in helpers] == [tile] * len(helpers)
    assert not parts, "parts that nobody adds"
    steps_of = [sum(stop - begin for _, begin, stop in items) for items in work]
    if stream:
        assert max(steps_of) - min(steps_of) <= 1


WHOLE, STREAM, SLICED, PINGPONG = range(4)  # how K is split; the last: not, tiles taken in turn
CASES = [
    # consumers, bm, bn, bk, stages, m, n, k, batch, blocks, split, trans_a, trans_b
    (2, 128, 256, 32, 2, 131, 261, 70, 1, 3, WHOLE, False, False),
    (2, 128, 128, 32, 3, 300, 200, 97, 1, 4, WHOLE, False, True),
    (1, 64, 64, 16, 2, 70, 130, 33, 3, 5, WHOLE, False, False),
    (1, 128, 64, 16, 4, 130, 64, 16, 1, 2, WHOLE, True, False),
    (3, 192, 128, 32, 2, 200, 140, 64, 2, 3, WHOLE, False, True),
    (2, 128, 256, 32, 3, 131, 261, 330, 1, 7, STREAM, False, False),
    (1, 64, 128, 16, 4, 100, 100, 500, 1, 9, STREAM, False, True),
    (3, 192, 128, 32, 2, 500, 500, 100, 1, 7, STREAM, False, False),
    (1, 128, 64, 16, 2, 300, 70, 60, 3, 4, STREAM, False, True),
    (2, 256, 128, 32, 2, 257, 129, 200, 1, 5, STREAM, False, False),
    (1, 64, 64, 16, 4, 61, 100, 500, 1, 16, SLICED, False, True),
    (2, 128, 128, 32, 2, 200, 130, 330, 2, 24, SLICED, False, False),
    (3, 192, 128, 32, 2, 100, 136, 97, 1, 6, SLICED, False, False),
    (1, 64, 64, 16, 2, 64, 64, 400, 1, 19, SLICED, True, False),
    (2, 128, 192, 32, 3, 300, 400, 100, 1, 4, WHOLE, False, False),
    (3, 192, 192, 16, 2, 200, 200, 70, 2, 5, WHOLE, False, True),
    (1, 64, 192, 16, 3, 60, 190, 300, 1, 7, SLICED, False, False),
    (2, 128, 160, 32, 3, 300, 400, 100, 1, 4, WHOLE, False, False),
    (1, 64, 96, 16, 2, 200, 200, 70, 2, 5, WHOLE, True, True),
    (2, 256, 160, 16, 2, 300, 170, 70, 1, 2, WHOLE, False, False),
    (2, 128, 160, 32, 2, 200, 130, 330, 2, 24, SLICED, False, True),
    (2, 128, 128, 32, 3, 300, 400, 97, 1, 2, PINGPONG, False, False),
    (2, 64, 256, 32, 2, 300, 400, 70, 1, 3, PINGPONG, False, True),
    (2, 128, 64, 16, 4, 130, 64, 16, 1, 1, PINGPONG, True, False),
    (2, 64, 64, 16, 3, 70, 130, 33, 3, 5, PINGPONG, False, True),
    (2, 64, 64, 16, 4, 60, 60, 100, 1, 1, PINGPONG, False, False),
    (2, 64, 192, 16, 3, 200, 200, 70, 2, 5, PINGPONG, True, True),
]


EPILOGUES = [
    # bias, activation, residual
    ("none", Activation.NONE, Residual.NONE),
    ("row", Activation.NONE, Residual.NONE),
    ("column", Activation.RELU, Residual.BEFORE),
    ("scalar", Activation.LEAKY_RELU, Residual.MULTIPLIED),
    ("none", Activation.NONE, Residual.AFTER),
]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: tuple[Any, ...], epilogue: tuple[str, Activation, Residual]) -> None:
    check_product(case, *epilogue)


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.RELU, Activation.LEAKY_RELU])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_product(case: tuple[Any, ...], activation: Activation) -> None:
    even = (*case[:6], case[6] + case[6] % 2, *case[7:])
    check_product(even, "row", activation, Residual.NONE, gated=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wide_product(case: tuple[Any, ...]) -> None:
    check_product(case, "row", Activation.NONE, Residual.NONE, wide=True)


def check_product(
    case: tuple[Any, ...], bias: str, activation: Activation, residual: Residual, *,
    gated: bool = False, wide: bool = False,
) -> None:  # fmt: skip
    consumers, bm, bn, bk, stages, m, n, k, batch, blocks, split, trans_a, trans_b = case
    early = blocks % 2 == 1
    rng = np.random.default_rng(blocks)
    # Small integers: every sum is exact, so that any order of adding up is held to equality.
    a, b = (
        rng.integers(-3, 4, shape).astype(np.float16) for shape in ((batch, m, k), (batch, k, n))
    )
    columns = n // 2 if gated else n
    y = np.full((batch, m, columns), np.nan, np.float32 if wide else np.float16)
    rows = bm if split == PINGPONG else bm // consumers
    part = bn & -bn
    width = min(part if part == bn else 32, 4096 // rows)
    a_desc = model.Descriptor(
        a.swapaxes(1, 2) if trans_a else a,
        (1, bk, rows) if trans_a else (1, rows, bk),
        model.float16,
    )
    b_desc = model.Descriptor(
        b.swapaxes(1, 2) if trans_b else b,
        (1, part, bk) if trans_b else (1, bk, part),
        model.float16,
    )
    y_desc = model.Descriptor(y, (1, rows, width), model.float16)
    y_pointer = model.Pointer(y.reshape(-1), 0, model.float16)
    workspace = np.full(blocks * bm * bn, np.nan, np.float32)
    counters = np.zeros(blocks * consumers, np.int32)
    strides = {"row": (0, 1), "column": (1, 0)}.get(bias, (0, 0))
    c = np.arange(1, 1000, dtype=np.float16) % 7
    alpha, beta = 0.5, 0.0 if bias == "none" else 2.0
    r = rng.integers(-3, 4, y.shape).astype(np.float16)
    r_pointer = model.Pointer(r.ravel() if residual else None)
    code = activation | residual << 8 | gated << 16 | wide << 17
    after = y_pointer if gated or wide else r_pointer, code, 0.5, 0.0
    model.launch(
        module("gemm_ws").gemm_ws, blocks, a_desc, b_desc, y_desc,
        y_pointer, columns, m * columns,
        model.Pointer(None if bias == "none" else c), model.Pointer(workspace),
        model.Pointer(counters),
        m, n, k, 1, batch, 1, batch, 0, batch, *strides, alpha, beta, *after,
        bm, bn, bk, 8, trans_a, trans_b, split == STREAM, consumers, stages,
        early, split == SLICED, split == PINGPONG, early=early,
    )  # fmt: skip
    exact = alpha * (a.astype(np.float32) @ b.astype(np.float32))
    at = np.arange(m)[:, None] * strides[0] + np.arange(n)[None, :] * strides[1]
    exact = (exact + beta * c[at]).astype(np.float64)
    if gated:
        exact = paired(exact, activation, 0.5)
    else:
        exact = finished(exact, activation, residual, 0.5, 0.0, r)
    np.testing.assert_array_equal(y, exact.astype(np.float16).astype(y.dtype))
    assert not counters.any()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("activation", list(Activation)[1:])
def test_activations_of_chunks(activation: Activation) -> None:
    """To 2e-6 of the larger of 1 and |x|; NaN and infinities as the formula says."""
    alpha, beta = (1.702, 0.0) if activation is Activation.QUICK_GELU else (0.25, 0.75)
    dense = np.concatenate([np.linspace(-12, 12, 9000), np.geomspace(1e-8, 1e4, 500)])
    special = [np.nan, np.inf, -np.inf, 0.0, 1e-30, 3e38, -3e38, 88.8, -104.0]
    x = np.concatenate([dense, -dense[-500:], special]).astype(np.float32)
    got = module("ws_finish").activate(
        model.tensor(x), activation, np.float32(alpha), np.float32(beta)
    )
    want = activated(x.astype(np.float64), activation, np.float32(alpha), np.float32(beta))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    limit = np.finfo(np.float32).max
    bounded, size = np.clip(want, -limit, limit), np.maximum(1, np.abs(np.clip(x, -limit, limit)))
    there = ~np.isnan(want)
    error = np.abs(np.clip(got.astype(np.float64), -limit, limit) - bounded)
    assert (error[there] <= 2e-6 * size[there]).all()


SPLIT_CASES = [
    # bn, bk, stages, m, n, k, batch, blocks, stream
    (128, 32, 2, 131, 261, 70, 1, 3, False),
    (128, 32, 3, 300, 200, 97, 2, 4, False),
    (64, 16, 2, 70, 130, 33, 3, 5, False),
    (64, 32, 4, 131, 261, 330, 1, 7, True),
    (128, 16, 3, 300, 70, 60, 3, 4, True),
]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_product_of_split_factors(case: tuple[Any, ...], swap: bool, special: bool) -> None:
    other, bk, stages, m, n, k, batch, blocks, stream = case
    consumers, rows, width = 2, 64, 32
    bm, bn = (other, 128) if swap else (128, other)
    rng = np.random.default_rng(blocks)
    a = rng.standard_normal((batch, m, k)).astype(np.float32)
    b = rng.standard_normal((batch, k, n)).astype(np.float32)
    if special:
        a[0, 3, k - 1], a[0, 5, 0], b[0, 1, 7], b[0, k // 2, 9] = np.inf, -np.inf, np.nan, np.inf
        b[0, 0, 11] = 0  # times Inf
        b[0, k - 1] = 2  # Its lower part is 0, and so must not meet an Inf.
    y = np.full((batch, m, n), np.nan, np.float32)
    c = np.arange(1, 1000, dtype=np.float32) % 7
    b_stored = b if swap else np.ascontiguousarray(b.swapaxes(1, 2))
    workspace = np.full(blocks * bm * bn, np.nan, np.float32)
    counters = np.zeros(blocks * consumers, np.int32)
    f32 = model.float32
    r = rng.standard_normal(y.shape).astype(np.float32)
    after = model.Pointer(r.ravel()), Residual.AFTER << 8, 0.0, 0.0
    model.launch(
        module("gemm_ws_x3").gemm_ws_x3, blocks,
        model.Descriptor(a, (1, bm, bk) if swap else (1, rows, bk), f32),
        model.Descriptor(b_stored, (1, bk, rows) if swap else (1, bn, bk), f32),
        model.Descriptor(y, (1, width, rows) if swap else (1, rows, width), f32),
        model.Pointer(a.ravel()), model.Pointer(b_stored.ravel()), model.Pointer(c),
        model.Pointer(workspace), model.Pointer(counters), m, n, k, 1, batch, 1, batch, 0,
        batch, k, n if swap else k, m * k, n * k, n, m * n, 0, 1, 0.5, 2.0, *after,
        bm, bn, bk, 8, False, not swap, swap, stream, consumers, stages,
    )  # fmt: skip
    wide = 0.5 * (a.astype(np.float64) @ b.astype(np.float64)) + 2 * c[:n].astype(np.float64) + r
    scale = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) + 20
    finite = np.isfinite(wide)
    assert finite.all() != special
    np.testing.assert_array_equal(y[~finite], wide[~finite].astype(np.float32))
    error = np.abs(y[finite] - wide[finite]) / scale[finite]
    assert error.max() < 16 * 2**-24
    assert not counters.any()


SPEC = KernelSpec(Family.GEMM_WS, Dtype.F16, 128, 256, 64, 12, 4)


@pytest.mark.parametrize(
    ("changes", "sm", "reason"),
    [
        ({}, 100, "sm_90, not sm_100"),
        ({"warps": 4}, 90, "4 warps"),
        ({"bm": 192}, 90, "bm = 192: each of 2 consumers takes 64 or 128 rows"),
        ({"bm": 256}, 90, "more than 160 registers"),
        ({"swap": True}, 90, "upright"),
        ({"bias_matrix": True}, 90, "vector C"),
        ({"dtype": Dtype.F32, "bk": 32}, 90, "layout nt only"),
        ({"stages": 5}, 90, "shared memory exceed"),
        ({"align_c": 2}, 90, "16 bytes"),
        ({"pingpong": True}, 90, "more than 160 registers"),
        ({"pingpong": True, "bn": 64, "warps": 8, "bm": 64}, 90, "in turn by two consumers"),
        ({"pingpong": True, "bn": 64, "split_k": True}, 90, "in turn by two consumers, and whole"),
    ],
)
def test_illegal_specs_say_why(changes: dict[str, Any], sm: int, reason: str) -> None:
    assert legal(SPEC, 90)
    assert reason in (why_illegal(replace(SPEC, **changes), sm) or "")


def test_the_family_is_for_sm_90_and_each_kernel_has_a_stand_in() -> None:
    for sm in (80, 86, 89, 100, 120):
        assert not any(spec.persistent for spec in specs(sm, trial=True))
    own = [spec for spec in specs(90, trial=True) if spec.persistent]
    assert {(s.dtype, s.trans_b, s.sliced) for s in own if not s.tf32x3} == {
        *product((Dtype.F16, Dtype.BF16), (False, True), (False,)),
        (Dtype.F32, True, False),
        *product(Dtype, (True,), (True,)),  # those of NN are in LEFT_OUT
    }
    split_factors = [s for s in specs(90) if s.persistent and s.tf32x3]
    assert {(s.dtype, s.precision, s.trans_a, s.trans_b, s.sliced) for s in split_factors} == {
        (Dtype.F32, Precision.IEEE, False, trans_b, False) for trans_b in (False, True)
    }
    for spec in own:
        other = interpreted(spec)
        assert other.family is Family.GEMM_TMA
        assert other.bm & (other.bm - 1) == 0  # Triton's tiles are powers of two
        assert (other.dtype, other.trans_a, other.trans_b) == (
            spec.dtype,
            spec.trans_a,
            spec.trans_b,
        )
        assert not other.split_k
