"""Convolutions by staged images, in the interpreter against float64."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from benchmarks.convolutions import DTYPES, Convolution, reference
from benchmarks.operands import relative_error
from benchmarks.staged import Geometry, StagedConv, Tile

TILE = Tile(16, 32, 32, 4, 2)
GUARD = 64


@st.composite
def cases(draw: st.DrawFn) -> Convolution:
    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    size, kernel, strides, dilations = pair(1, 8), pair(1, 3), pair(1, 3), pair(1, 3)
    pads = pair(0, 2) + pair(0, 2)
    for axis in range(2):
        reach = dilations[axis] * (kernel[axis] - 1) + 1
        assume(size[axis] + pads[axis] + pads[axis + 2] >= reach)
    return Convolution(
        size, kernel, c=draw(st.sampled_from([1, 3, 8, 19, 40])),
        k=draw(st.sampled_from([1, 5, 16, 21])), n=draw(st.integers(1, 2)), strides=strides,
        dilations=dilations, pads=pads, bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["f16", "f32"])),
    )  # fmt: skip


def run(
    case: Convolution, tile: Tile, split: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, exact); checks that nothing beside Y was written and that counters are back at 0."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]
    x, w = (torch.randn(s, generator=generator).to(dtype) for s in (case.x_shape, case.w_shape))
    bias = torch.randn(case.k, generator=generator).to(dtype) if case.bias else None
    exact = reference(case, x, w, bias)
    storage = torch.full((exact.numel() + 2 * GUARD,), 7.0, dtype=dtype)
    y = storage[GUARD:-GUARD].view(exact.shape)
    y.fill_(torch.nan)
    conv = StagedConv(case, x, w, y, bias, interpret=True)
    workspace, counters = conv.scratch(tile, split)
    conv.stage()
    assert not conv.staged.isnan().any()  # every position is written, pads too
    conv.multiply(tile, split, workspace, counters)
    assert not counters.any()
    assert (storage[:GUARD] == 7).all()
    assert (storage[-GUARD:] == 7).all()
    return y, exact


@settings(max_examples=25, deadline=None)
@given(case=cases(), split=st.sampled_from([1, 1, 2, 3]), swap=st.booleans())
@example(
    case=Convolution((7, 7), (3, 3), 8, 16, strides=(2, 2), pads=(1, 1, 1, 1)), split=2, swap=True
)
@example(case=Convolution((5, 6), (1, 1), 19, 5, strides=(2, 3)), split=1, swap=False)
def test_results_are_right(case: Convolution, split: int, swap: bool) -> None:
    y, exact = run(case, Tile(16, 32, 32, 4, 2, swap), split)
    assert relative_error(y, exact) <= case.limit


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_shifts_reach_the_pixels(case: Convolution) -> None:
    """The position of each output, shifted by a tap, is the pixel that ONNX defines."""
    one = Geometry.of(case)
    strides, dilations, pads = case.strides, case.dilations, case.pads
    assert one.out == case.problem().output[2:]
    for h, w in ((0, 0), (one.out[0] - 1, one.out[1] - 1)):
        for tap_h in range(case.kernel[0]):
            for tap_w in range(case.kernel[1]):
                dh, dw = tap_h * dilations[0], tap_w * dilations[1]
                plane = dh % strides[0] * one.phases[1] + dw % strides[1]
                shift = plane * one.plane + dh // strides[0] * one.width + dw // strides[1]
                at = h * one.width + w + shift
                assert at < one.rows
                phase, q = divmod(at, one.plane)
                row = q // one.width * strides[0] + phase // one.phases[1] - pads[0]
                column = q % one.width * strides[1] + phase % one.phases[1] - pads[1]
                assert (row, column) == (
                    h * strides[0] - pads[0] + dh,
                    w * strides[1] - pads[1] + dw,
                )
    assert one.channels * (4 if case.dtype == "f32" else 2) % 16 == 0
    assert math.prod(one.phases) * one.plane == one.rows


def test_a_wrong_shift_is_seen() -> None:
    case = Convolution((6, 6), (3, 3), 8, 16, pads=(1, 1, 1, 1))
    y, exact = run(case, TILE, 1)
    assert relative_error(y, exact) <= case.limit
    assert relative_error(y, exact.roll(1, dims=3)) > 0.5


@pytest.mark.parametrize(
    "case",
    [
        Convolution((6, 6), (3, 3), 1, 1, groups=4),
        Convolution((6,), (3,), 4, 4),
        Convolution((6, 6), (3, 3), 4, 4, transposed=True),
    ],
    ids=["groups", "1-D", "transposed"],
)
def test_others_are_refused(case: Convolution) -> None:
    with pytest.raises(ValueError, match="staged images serve 2-D Conv of one group"):
        Geometry.of(case)
