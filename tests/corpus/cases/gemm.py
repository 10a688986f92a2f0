"""Gemm: every form of C, transposed operands, zero-sized dimensions, the definition of opset 6."""

from __future__ import annotations

import numpy as np

from .case import Case, f32

CASES = (
    Case(
        id="gemm_dyn_m",
        reports="microsoft/onnxruntime#31153",
        fault="a dynamic M was taken for 1, and a Reshape further on failed",
        must="the output has as many rows as the input of this run",
        text="""
            g (float[M,4] a) => (float[Q,5,3] y) {
                g = Gemm (a, b, c)
                y = Reshape (g, s)
            }""",
        weights={"b": f32(4, 3), "c": f32(3), "s": np.array([-1, 5, 3], np.int64)},
        feeds=[{"a": f32(5, 4)}, {"a": f32(10, 4)}],
        taken=("g",),
    ),
    Case(
        id="gemm_ta_scalarC",
        reports="microsoft/onnxruntime#28541, #28542",
        fault="a C of rank 0 crashed",
        must="C may be a scalar; transA, alpha and beta count",
        text="""
            g (float[K,M] a) => (float[M,3] y) {
                y = Gemm <transA = 1, alpha = 0.5, beta = 2.0> (a, b, c)
            }""",
        weights={"b": f32(4, 3), "c": np.array(1.5, np.float32)},
        feeds=[{"a": f32(4, 2)}, {"a": f32(4, 7)}],
        taken=("y",),
    ),
    Case(
        id="gemm_noC",
        reports="microsoft/onnxruntime#8737",
        fault="a Gemm with two inputs was read as if it had three",
        must="C may be absent",
        text="g (float[M,4] a) => (float[M,3] y) { y = Gemm <transB = 1> (a, b) }",
        weights={"b": f32(3, 4)},
        feeds=[{"a": f32(2, 4)}],
        taken=("y",),
    ),
    Case(
        id="gemm_m0",
        reports="microsoft/onnxruntime#348",
        fault="a detection head failed when nothing was detected",
        must="M = 0 gives an empty [0, N]",
        text="g (float[M,4] a) => (float[M,3] y) { y = Gemm (a, b, c) }",
        weights={"b": f32(4, 3), "c": f32(3)},
        feeds=[{"a": f32(0, 4)}, {"a": f32(1, 4)}],
        taken=("y",),
    ),
    Case(
        id="gemm_k0",
        reports="microsoft/onnxruntime#21525, apache/tvm#19578",
        fault="K = 0 returned whatever was in memory",
        must="K = 0 gives beta * C, broadcast",
        text="g (float[M,K] a, float[K,3] b) => (float[M,3] y) { y = Gemm <beta = 2.0> (a, b, c) }",
        weights={"c": f32(3)},
        feeds=[{"a": f32(2, 0), "b": f32(0, 3)}],
        taken=("y",),
    ),
    Case(
        id="gemm_id_transpose",
        reports="microsoft/onnxruntime#32228, #32417, #32418",
        fault="a Transpose that keeps the order was folded as one that swaps: wrong when square",
        must="perm decides, not the operator type",
        text="""
            g (float[M,4] a) => (float[M,4] y) {
                at = Transpose <perm = [0, 1]> (a)
                t = MatMul (at, w)
                y = Add (t, b)
            }""",
        weights={"w": f32(4, 4), "b": f32(4)},
        feeds=[{"a": f32(4, 4)}, {"a": f32(2, 4)}],
        taken=("t",),
    ),
    Case(
        id="gemm_transposedC",
        reports="microsoft/onnxruntime#12071",
        fault="two rules undid each other for ever, and names grew with each round",
        must="rewriting ends, and a second time changes nothing",
        text="""
            g (float[M,4] a, float[3,M] c) => (float[M,3] y) {
                ct = Transpose <perm = [1, 0]> (c)
                y = Gemm (a, b, ct)
            }""",
        weights={"b": f32(4, 3)},
        feeds=[{"a": f32(2, 4), "c": f32(3, 2)}],
        taken=("y",),
    ),
    Case(
        id="gemm_op6",
        reports="microsoft/onnxruntime#7244; ONNX's Gemm of opset 6",
        fault="the attribute broadcast of old Gemm was dropped",
        must="an older definition is kept as it is",
        text="""
            <ir_version: 3, opset_import: ["": 6]>
            g (float[M,4] a, float[4,3] b, float[3] c) => (float[M,3] y) {
                y = Gemm <broadcast = 1> (a, b, c)
            }""",
        weights={"b": f32(4, 3), "c": f32(3)},
        feeds=[{"a": f32(2, 4)}],
        left={"Gemm": "opset"},
        runs=False,
    ),
)
