"""Conv: padding, ranks, what is and what is not a bias."""

from __future__ import annotations

import numpy as np

from .case import Case, f32

CASES = (
    Case(
        id="conv_same_upper",
        reports="microsoft/onnxruntime#495, onnx/onnx#2043",
        fault="SAME padding with a stride was computed from the wrong size",
        must="the padding follows the size of this run, even or odd",
        text="""
            g (float[N,3,H,W] x) => (float[N,4,OH,OW] y) {
                y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w, b)
            }""",
        weights={"w": f32(4, 3, 3, 3), "b": f32(4)},
        feeds=[{"x": f32(1, 3, 7, 5)}, {"x": f32(2, 3, 8, 6)}],
        taken=("y",),
    ),
    Case(
        id="conv_same_dil",
        reports="microsoft/onnxscript#3037, microsoft/onnxruntime#20582",
        fault="SAME padding with dilation: refused by the CPU provider, padded wrongly elsewhere",
        must="the padding is that of the dilated kernel",
        text="""
            g (float[N,3,H,W] x) => (float[N,4,OH,OW] y) {
                y = Conv <auto_pad = "SAME_UPPER", dilations = [2, 2]> (x, w)
            }""",
        weights={"w": f32(4, 3, 3, 3)},
        feeds=[{"x": f32(1, 3, 9, 11)}],
        runs=False,
        taken=("y",),
    ),
    Case(
        id="conv_asym",
        reports="exports of Paddle and TensorFlow",
        fault="padding was assumed to be the same at both ends",
        must="begin and end may differ",
        text="""
            g (float[N,3,H,W] x) => (float[N,4,OH,OW] y) {
                y = Conv <pads = [0, 0, 1, 1], strides = [2, 2]> (x, w, b)
            }""",
        weights={"w": f32(4, 3, 3, 3), "b": f32(4)},
        feeds=[{"x": f32(1, 3, 9, 11)}],
        taken=("y",),
    ),
    Case(
        id="conv1d",
        reports="microsoft/onnxruntime#14869",
        fault="without kernel_shape the rank was assumed to be 2",
        must="the rank comes from the weight",
        text="g (float[N,3,L] x) => (float[N,4,OL] y) { y = Conv <pads = [2, 2]> (x, w, b) }",
        weights={"w": f32(4, 3, 5), "b": f32(4)},
        feeds=[{"x": f32(1, 3, 9)}, {"x": f32(2, 3, 33)}],
        taken=("y",),
    ),
    Case(
        id="conv3d",
        reports="NVIDIA/TensorRT#321",
        fault="dynamic depth, height and width were refused",
        must="three spatial dimensions, all dynamic",
        text="""
            g (float[N,3,D,H,W] x) => (float[N,4,OD,OH,OW] y) {
                y = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w)
            }""",
        weights={"w": f32(4, 3, 3, 3, 3)},
        feeds=[{"x": f32(1, 3, 4, 5, 6)}, {"x": f32(2, 3, 6, 5, 4)}],
        taken=("y",),
    ),
    Case(
        id="conv_dyn_w",
        reports="microsoft/onnxruntime#16235, #14869",
        fault="a weight that is a graph input was packed ahead of time",
        must="the weight of this run counts",
        text="""
            g (float[N,3,H,W] x, float[4,3,3,3] w) => (float[N,4,OH,OW] y) {
                y = Conv <pads = [1, 1, 1, 1]> (x, w)
            }""",
        feeds=[{"x": f32(1, 3, 9, 8), "w": f32(4, 3, 3, 3)}],
        taken=("y",),
    ),
    Case(
        id="conv_empty_bias",
        reports="microsoft/onnxruntime#1978",
        fault="the empty name of an absent bias was looked up as a tensor",
        must="an empty name means absent; the Add behind stays",
        text="""
            g (float[N,3,H,W] x) => (float[N,4,OH,OW] y) {
                t = Conv <pads = [1, 1, 1, 1]> (x, w, "")
                y = Add (t, c)
            }""",
        weights={"w": f32(4, 3, 3, 3), "c": f32(4, 1, 1)},
        feeds=[{"x": f32(1, 3, 6, 6)}],
        taken=("t",),
    ),
    Case(
        id="conv_add_group",
        reports="microsoft/onnxruntime#12498",
        fault="a whole tensor that is added was fused as if it were a bias per channel",
        must="only a constant per channel is a bias",
        text="""
            g (float[N,8,6,6] x) => (float[N,8,6,6] y) {
                t = Conv <group = 4> (x, w, b)
                y = Add (t, c)
            }""",
        weights={"w": f32(8, 2, 1, 1), "b": f32(8), "c": f32(1, 8, 6, 6)},
        feeds=[{"x": f32(1, 8, 6, 6)}, {"x": f32(3, 8, 6, 6)}],
        taken=("t",),
    ),
    Case(
        id="conv_relu_fanout",
        reports="microsoft/onnxruntime#28543, #28544; onera/acetone#56",
        fault="Relu was fused although the unclipped value has another reader",
        must="a value with two readers is not fused away",
        text="""
            g (float[N,3,H,W] x) => (float[N,4,OH,OW] y) {
                t = Conv (x, w)
                r = Relu (t)
                y = Add (t, r)
            }""",
        weights={"w": f32(4, 3, 1, 1)},
        feeds=[{"x": f32(1, 3, 6, 6)}],
        taken=("t",),
    ),
    Case(
        id="conv_norank",
        reports="microsoft/onnxruntime#27912",
        fault="an input of unknown rank (reshaped to a shape known at run time only) was refused",
        must="unknown rank is legal: MatMul takes its rank from the run",
        text="""
            g (float[T] x, int64[R] shape) => (float[N,4,H,W] y, float[N,3,H,5] z) {
                x4 = Reshape (x, shape)
                y = Conv (x4, w)
                z = MatMul (x4, wm)
            }""",
        weights={"w": f32(4, 3, 1, 1), "wm": f32(4, 5)},
        feeds=[
            {"x": f32(96), "shape": np.array([2, 3, 4, 4], np.int64)},
            {"x": f32(24), "shape": np.array([1, 3, 2, 4], np.int64)},
        ],
        taken=("y", "z"),
    ),
)
