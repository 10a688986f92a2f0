"""MatMul: ranks, broadcasts, zero-sized dimensions, and what follows a MatMul."""

from __future__ import annotations

import numpy as np

from .case import Case, f32

_INF, _NAN = np.inf, np.nan

CASES = (
    Case(
        id="mm_k0",
        reports="microsoft/onnxruntime#21483",
        fault="an inner dimension of 0 raised an error or left the output unwritten",
        must="K = 0 gives zeros of shape [M, N]",
        text="g (float[M,K] a, float[K,N] b) => (float[M,N] y) { y = MatMul (a, b) }",
        feeds=[{"a": f32(4, 0), "b": f32(0, 5)}, {"a": f32(4, 3), "b": f32(3, 5)}],
        taken=("y",),
    ),
    Case(
        id="mm_m0",
        reports="microsoft/onnxruntime#4559",
        fault="a linear layer crashed on a batch of no rows",
        must="no rows in, no rows out, and the Add behind still works",
        text="""
            g (float[B,S,6] x) => (float[B,S,4] y) {
                t = MatMul (x, w)
                y = Add (t, b)
            }""",
        weights={"w": f32(6, 4), "b": f32(4)},
        feeds=[{"x": f32(1, 0, 6)}, {"x": f32(2, 3, 6)}],
        taken=("t",),
    ),
    Case(
        id="mm_0k_vec",
        reports="microsoft/onnxruntime#11895",
        fault="an empty matrix times a vector failed at run time",
        must="a 1-D right operand drops N, also when M = 0",
        text="g (float[M,K] a, float[K] b) => (float[M] y) { y = MatMul (a, b) }",
        feeds=[{"a": f32(0, 2), "b": f32(2)}, {"a": f32(3, 2), "b": f32(2)}],
        taken=("y",),
    ),
    Case(
        id="mm_1d_1d",
        reports="microsoft/onnxruntime#380",
        fault="the scalar that two vectors give was declared with shape [1]",
        must="two 1-D operands give rank 0",
        text="g (float[K] a) => (float y) { y = MatMul (a, w) }",
        weights={"w": f32(5)},
        feeds=[{"a": f32(5)}],
        taken=("y",),
    ),
    Case(
        id="mm_bcast0",
        reports="microsoft/onnxruntime#25663",
        fault="batch dimensions 0 and 1 were refused instead of broadcast",
        must="batch 0 against 1 gives 0, 1 against 5 gives 5",
        text="g (float[B,M,K] a, float[C,K,N] b) => (float[D,M,N] y) { y = MatMul (a, b) }",
        feeds=[
            {"a": f32(0, 2, 3), "b": f32(1, 3, 4)},
            {"a": f32(1, 2, 3), "b": f32(5, 3, 4)},
        ],
        taken=("y",),
    ),
    Case(
        id="mm_nan",
        reports="tenstorrent/tt-metal#22517, Reference-LAPACK/lapack#1077",
        fault="NaN and Inf were lost against zeros, or leaked from the padding of a tile",
        must="0 * Inf is NaN, and only the rows that hold NaN or Inf are touched",
        text="g (float[M,4] a) => (float[M,3] y) { y = MatMul (a, w) }",
        weights={
            "w": np.array(
                [[0.5, -0.0, 0.25], [-0.75, 0.0, -1.5], [1.25, -0.0, 0.375], [-2.0, 0.0, -0.625]],
                np.float32,
            )
        },
        feeds=[
            {
                "a": np.array(
                    [[1, 2, 3, 4], [_NAN, 0, 0, 0], [_INF, 1, 1, 1], [-_INF, 1, 1, 1]],
                    np.float32,
                )
            }
        ],
        taken=("y",),
    ),
    Case(
        id="mm_add_up",
        reports="microsoft/onnxruntime#3764",
        fault="an Add that broadcasts the product up to a larger shape was folded into a Gemm",
        must="an addend is a bias only if the sum has the shape of the product",
        text="""
            g (float[M,3] a, float[1,P] b) => (float[M,P] y) {
                t = MatMul (a, w)
                u = Mul (c, b)
                y = Add (t, u)
            }""",
        weights={"w": f32(3, 1), "c": np.array(2, np.float32)},
        feeds=[{"a": f32(3, 3), "b": f32(1, 4)}],
        taken=("t",),
    ),
    Case(
        id="mm_add_rank3",
        reports="microsoft/onnxruntime#22512",
        fault="a rank-3 product plus bias became a Gemm, which takes rank 2 only",
        must="a product of more than two dimensions keeps MatMul's meaning",
        text="""
            g (float[B,S,4] a) => (float[B,S,3] y) {
                t = MatMul (a, w)
                y = Add (b, t)
            }""",
        weights={"w": f32(4, 3), "b": f32(3)},
        feeds=[{"a": f32(2, 5, 4)}, {"a": f32(1, 1, 4)}],
        taken=("t",),
    ),
    Case(
        id="mm_add_second",
        reports="inisis/OnnxSlim#160",
        fault="fusing a product that is the second operand of Add cut off the sum's other reader",
        must="operand order does not matter, and every reader of the sum is still fed",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                t = MatMul (a, w)
                u = Add (b, t)
                r = Relu (u)
                y = Mul (u, r)
            }""",
        weights={"w": f32(4, 3), "b": f32(3)},
        feeds=[{"a": f32(2, 4)}, {"a": f32(5, 4)}],
        taken=("t",),
    ),
    Case(
        id="mm_is_output",
        reports="microsoft/onnxruntime#4110, #15109; inisis/OnnxSlim#330; kvark/meganeura#69",
        fault="a fusion swallowed a product that is itself a graph output",
        must="the outputs keep their names and their order",
        text="""
            g (float[M,4] a) => (float[M,3] t, float[M,3] y) {
                t = MatMul (a, w)
                y = Add (t, b)
            }""",
        weights={"w": f32(4, 3), "b": f32(3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t",),
    ),
    Case(
        id="mm_scale_add_gelu",
        reports="like robertknight/rten#708",
        fault="the erf form of Gelu reads its input twice, which matchers of chains miss",
        must="the fan-out inside Gelu survives",
        text="""
            g (float[B,S,4] a) => (float[B,S,3] y) {
                t = MatMul (a, w)
                scaled = Mul (t, s)
                u = Add (scaled, b)
                d = Div (u, root2)
                e = Erf (d)
                f = Add (e, one)
                g = Mul (u, f)
                y = Mul (g, half)
            }""",
        weights={
            "w": f32(4, 3),
            "s": np.array(0.5, np.float32),
            "b": f32(3),
            "root2": np.array(np.sqrt(2), np.float32),
            "one": np.array(1, np.float32),
            "half": np.array(0.5, np.float32),
        },
        feeds=[{"a": f32(2, 5, 4)}],
        taken=("t",),
    ),
    Case(
        id="mm_1d_add",
        reports="microsoft/onnxruntime#2407",
        fault="a vector times a matrix plus bias became a Gemm and gained a leading 1",
        must="the result of a 1-D left operand has rank 1",
        text="""
            g (float[4] a) => (float[3] y) {
                t = MatMul (a, w)
                y = Add (t, b)
            }""",
        weights={"w": f32(4, 3), "b": f32(3)},
        feeds=[{"a": f32(4)}],
        left={"MatMul": "static"},
    ),
    Case(
        id="mm_flops_2e32",
        reports="ml-explore/mlx#1051, #3611; microsoft/onnxruntime#14985, #18905",
        fault="M * N * K = 2^32 overflowed 32-bit arithmetic",
        must="sizes and costs are computed in 64 bits",
        text="g (float[M,K] a, float[K,N] b) => (float[M,N] y) { y = MatMul (a, b) }",
        feeds=[
            {
                "a": np.ones((2048, 1024), np.float32),
                "b": np.ones((1024, 2048), np.float32),
            }
        ],
        taken=("y",),
    ),
)
