"""The C++ shape rules against onnx's own inference, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from moonpoly_ort import native
from moonpoly_ort.errors import ProblemError

F16, F32 = native.Dtype.F16, native.Dtype.F32


def work(
    x: list[int], w: list[int], *, transposed: bool = False, bias: bool = False,
    dtype: native.Dtype = F32, **attributes: Any,
) -> native.ConvProblem:  # fmt: skip
    of_node = native.ConvAttributes.of_node(transposed, **attributes)
    return native.conv_problem(x, w, of_node, dtype, bias=bias)


def inferred(x: list[int], w: list[int], op: str, attributes: dict[str, Any]) -> tuple[int, ...]:
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], **attributes)], "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, x),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, w),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    (output,) = model.graph.output
    return tuple(d.dim_value for d in output.type.tensor_type.shape.dim)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[int], list[int], str, dict[str, Any]]:
    rank = draw(st.integers(1, 3))

    def axes(least: int, most: int) -> list[int]:
        return [draw(st.integers(least, most)) for _ in range(rank)]

    op = draw(st.sampled_from(["Conv", "ConvTranspose"]))
    group = draw(st.integers(1, 3))
    c, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kernel, size = axes(1, 5), axes(1, 20)
    attributes: dict[str, Any] = {}
    if group > 1 or draw(st.booleans()):
        attributes["group"] = group
    if draw(st.booleans()):
        attributes["kernel_shape"] = kernel
    if draw(st.booleans()):
        attributes["strides"] = axes(1, 4)
    if draw(st.booleans()):
        attributes["dilations"] = axes(1, 3)
    mode = draw(st.sampled_from(["pads", "auto", "none", "shape"]))
    if mode == "pads":
        attributes["pads"] = axes(0, 3) + axes(0, 3)
    elif mode == "auto":
        attributes["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    if op == "ConvTranspose":
        # Beside auto_pad onnx adds it to the size, ONNX Runtime takes it away again.
        if mode != "auto" and draw(st.booleans()):
            attributes["output_padding"] = axes(0, 2)
        if mode == "shape":
            attributes["output_shape"] = axes(1, 60)
    channels = [group * c, k] if op == "ConvTranspose" else [group * k, c]
    n = draw(st.integers(0, 3))
    return [n, group * c, *size], [*channels, *kernel], op, attributes


@settings(max_examples=400)
@given(node=nodes())
@example(node=([0, 3, 8, 8], [4, 3, 3, 3], "Conv", {"pads": [1, 1, 1, 1]}))
def test_shapes_are_those_of_onnx(
    node: tuple[list[int], list[int], str, dict[str, Any]],
) -> None:
    x, w, op, attributes = node
    try:
        expected = inferred(x, w, op, attributes)
    except Exception:  # onnx has its reasons, too, among them sizes of 0
        assume(False)
    try:
        got = work(x, w, transposed=op == "ConvTranspose", **attributes).output
    except ProblemError:
        assert "output_shape" in attributes or min(expected[2:]) <= 0, "refused without reason"
        return
    if "output_shape" in attributes:  # onnx infers its sizes alone, without images and channels
        assert list(got[2:]) == attributes["output_shape"]
    elif min(got) > 0:  # onnx takes a size of 0 for one that is not known
        assert got == expected


@pytest.mark.parametrize(
    ("x", "w", "attributes", "message"),
    [
        ([1, 3], [4, 3], {}, "must have the same rank, 3 to 5"),
        ([1, 3, 5], [4, 3, 3, 3], {}, "X [1, 3, 5] and W [4, 3, 3, 3] must have the same rank"),
        ([1, 3, 5, 5, 5, 5], [4, 3, 1, 1, 1, 1], {}, "3 to 5"),
        ([1, 4, 5, 5], [4, 3, 3, 3], {}, "do not fit each other in 1 groups"),
        ([1, 6, 5, 5], [5, 3, 3, 3], {"group": 2}, "do not fit each other in 2 groups"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"kernel_shape": [3, 2]}, "kernel_shape says 2"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"strides": [1]}, "strides has 1 values"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"strides": [1, 0]}, "strides holds 0"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"dilations": [0, 1]}, "dilations holds 0"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"pads": [0, -1, 0, 0]}, "pads holds -1"),
        ([1, 3, 5, 5], [4, 3, 3, 3], {"group": 0}, "group holds 0"),
        ([1, 3, 2, 5], [4, 3, 4, 3], {}, "a kernel of 4 with dilation 1 does not fit 2 pixels"),
        ([1, 3, 5, 5], [4, 3, 0, 3], {}, "the kernel holds 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    x: list[int], w: list[int], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        work(x, w, **attributes)


def test_pads_that_leave_nothing_of_a_transposed_convolution_are_refused() -> None:
    with pytest.raises(ProblemError, match="pads of 4 and 4 leave nothing of 7 output pixels"):
        work([1, 2, 5], [2, 3, 3], transposed=True, pads=[4, 4])


def test_an_output_shape_out_of_reach_is_refused() -> None:
    for size in (3, 7, 8):
        assert work([1, 1, 3], [1, 1, 3], transposed=True, strides=[2], output_shape=[size])
    with pytest.raises(ProblemError, match=r"output_shape holds 9, .* give at most 8"):
        work([1, 1, 3], [1, 1, 3], transposed=True, strides=[2], output_shape=[9])


def test_a_kernel_one_step_too_long_gives_no_output() -> None:
    assert work([1, 3, 2, 5], [4, 3, 3, 3]).output == (1, 4, 0, 3)


@pytest.mark.parametrize(
    ("x", "w", "attributes", "expected"),
    [
        # images are batch entries, W their common A
        ([2, 24, 5, 7], [40, 24, 1, 1], {}, {"m": 40, "n": 35, "k": 24, "batch": 2, "trans_b": 0}),
        # a pixel an image: images are rows
        ([2, 24, 1, 1], [40, 24, 1, 1], {}, {"m": 2, "n": 40, "k": 24, "batch": 1, "trans_b": 1}),
        ([2, 24, 7], [40, 12, 1], {"group": 2}, {"m": 20, "n": 7, "k": 12, "batch": 4, "a_mod": 2}),
    ],
)
def test_kernels_of_one_pixel_are_matrix_products(
    x: list[int], w: list[int], attributes: dict[str, Any], expected: dict[str, int]
) -> None:
    product = work(x, w, dtype=F16, **attributes).product
    assert product is not None
    assert {name: getattr(product, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("w", "attributes", "bias"),
    [
        ([40, 24, 1, 1], {"strides": [1, 2]}, False),
        ([40, 24, 1, 1], {"pads": [1, 0, 0, 0]}, False),
        ([40, 12, 1, 1], {"group": 2}, True),  # each group has a bias of its own
        ([24, 1, 1, 1], {"group": 24}, False),  # depthwise
        ([40, 24, 1, 3], {}, False),
    ],
)
def test_others_are_not(w: list[int], attributes: dict[str, Any], bias: bool) -> None:
    assert work([2, 24, 5, 7], w, bias=bias, **attributes).product is None


@pytest.mark.parametrize(
    ("w", "group", "taps"),
    [
        ([64, 64, 3, 3], 1, 1),
        ([64, 3, 7, 7], 1, 8),
        ([32, 3, 3, 3], 1, 4),
        ([16, 1, 256], 1, 8),
        ([64, 20, 1, 1], 1, 1),
        ([60, 5, 3, 3], 6, 4),
    ],
)
def test_weights_are_stored_for_the_kernels_that_waste_least(
    w: list[int], group: int, taps: int
) -> None:
    axes = len(w) - 2
    x = [1, group * w[1], *[300] * axes]
    conv = work(x, w, group=group, strides=[2] * axes, dtype=F16).conv
    packed, size = native.conv_packed(conv)
    assert packed.w_taps == taps
    assert size == conv.groups * packed.w_g * 2
    for stride in (packed.w_g, packed.w_k, packed.w_h):
        assert stride * 2 % 16 == 0


def test_kernels_of_one_tap_are_stored_well_where_channels_fill_16_bytes() -> None:
    conv = work([1, 24, 9, 9], [40, 24, 1, 1], strides=[2, 2], dtype=F16).conv
    assert (conv.w_taps, conv.w_c, conv.w_k) == (1, 1, 24)
    assert native.conv_packed(conv)[1] == 0
    assert work([1, 20, 9, 9], [40, 20, 1, 1], strides=[2, 2], dtype=F16).conv.w_taps == 0


@pytest.mark.parametrize("precision", list(native.Precision))
def test_packed_weights_are_those_of_the_node(precision: native.Precision) -> None:
    """In every layout; fp32 rounded to the nearest TF32 where it is multiplied so."""
    values = np.random.default_rng(0).standard_normal(2 * 5 * 3 * 2 * 6).astype(np.float32)
    values[:4] = np.inf, np.nan, np.finfo(np.float32).max, -(1 + 2.0**-11)
    attributes = native.ConvAttributes.of_node(False, group=2)
    conv = native.conv_problem(
        [1, 6, 9, 9], [10, 3, 2, 6], attributes, native.Dtype.F32, precision
    ).conv
    packed, size = native.conv_packed(conv)
    assert packed.w_taps == 4
    out = np.full(size // 4, np.nan, np.float32)
    native.conv_pack(conv, values.ctypes.data, out.ctypes.data)
    strides = [4 * s for s in (packed.w_g, packed.w_k, packed.w_c, packed.w_h, packed.w_w)]
    seen = np.lib.stride_tricks.as_strided(out, (2, 5, 3, 2, 6), strides)
    want = values.reshape(2, 5, 3, 2, 6)
    if precision == native.Precision.IEEE:
        np.testing.assert_array_equal(seen, want)
    else:
        assert not (seen[np.isfinite(seen)].view(np.uint32) & 0x1FFF).any()
        np.testing.assert_allclose(seen, want, rtol=2.0**-10)
        finite = np.isfinite(want) & (abs(want) < 1e30)
        assert (abs(seen[finite] - want[finite]) <= abs(want[finite]) * 2.0**-11).all()
        assert abs(np.mean(abs(seen[finite]) / abs(want[finite])) - 1) < 1e-4
    assert np.count_nonzero(out) == np.count_nonzero(values)  # zeros fill it up


def test_depthwise_weights_stay_as_they_are() -> None:
    conv = work([1, 8, 9, 9], [16, 1, 3, 3], group=8).conv
    packed, size = native.conv_packed(conv)
    assert (size, packed.w_taps, packed.w_k) == (0, 0, 9)
