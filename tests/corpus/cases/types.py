"""Element types: fp16 beside fp32, bf16, and integers that only look like a MatMul."""

from __future__ import annotations

import numpy as np

from .case import Case, bf16, f16, f32, i8, u8

CASES = (
    Case(
        id="fp16_mixed",
        reports="microsoft/onnxruntime#32186, #28392",
        fault="an fp32 kernel was put on an fp16 node between Casts",
        must="each node keeps its own type, the Casts stay",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                ah = Cast <to = 10> (a)
                t = MatMul (ah, w)
                u = Add (t, b)
                y = Cast <to = 1> (u)
            }""",
        weights={"w": f16(4, 3), "b": f16(3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t",),
    ),
    Case(
        id="bf16",
        reports="microsoft/onnxruntime#26311, #20630, #28768",
        fault="the CPU provider has no bf16 MatMul, so that the model does not load there",
        must="bf16 is taken; the fault of the CPU provider stays what it is",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                ab = Cast <to = 16> (a)
                t = MatMul (ab, w)
                y = Cast <to = 1> (t)
            }""",
        weights={"w": bf16(4, 3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t",),
        runs=False,
        runs_with_library=True,
    ),
    Case(
        id="mmint_zp",
        reports="microsoft/onnxruntime#7524",
        fault="uint8 times int8 saturated in 16 bits on some CPUs",
        must="MatMulInteger is not a MatMul: left alone, exact",
        text="""
            g (uint8[M,3] a) => (int32[M,3] y) { y = MatMulInteger (a, b, az, bz) }""",
        weights={"b": i8(3, 3), "az": np.array(42, np.uint8), "bz": np.array(-26, np.int8)},
        feeds=[{"a": u8(3, 3)}],
    ),
)
