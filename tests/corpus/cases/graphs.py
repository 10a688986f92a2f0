"""Graphs: shared and overridable weights, names, order, subgraphs, functions, data files."""

from __future__ import annotations

import numpy as np

from .case import Case, External, f32

CASES = (
    Case(
        id="init_shared",
        reports="Tencent/TNN#808, onnx/optimizer#178",
        fault="a weight was edited in place for one reader and changed under the others",
        must="a weight with several readers stays as it is",
        text="""
            g (float[4,4] a) => (float[4,4] y) {
                t = MatMul (a, w)
                u = Relu (t)
                v = MatMul (u, w)
                y = Add (v, w)
            }""",
        weights={"w": f32(4, 4)},
        feeds=[{"a": f32(4, 4)}],
        left={"MatMul": "static"},
    ),
    Case(
        id="init_as_input",
        reports="microsoft/onnxruntime#1324, #3449, #4507",
        fault="a weight that is also a graph input was treated as constant",
        must="it is a default that a run may override",
        text="g (float[M,4] a, float[4,3] w) => (float[M,3] y) { y = MatMul (a, w) }",
        weights={"w": f32(4, 3)},
        feeds=[{"a": f32(2, 4)}, {"a": f32(2, 4), "w": f32(4, 3)}],
        taken=("y",),
    ),
    Case(
        id="const_node_w",
        reports="onnx/optimizer#133, #178",
        fault="weights in Constant nodes (all of them in Paddle exports) were not seen as weights",
        must="a Constant node is a weight, and stays in front of its reader",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                w = Constant <value: tensor = float[4,3] weight {
                    -0.875, -0.75, 0.0625, -0.625, 1.25, -1.8125,
                    1.625, -2.0, -0.03125, -1.0625, 0.8125, -0.78125}> ()
                y = MatMul (a, w)
            }""",
        feeds=[{"a": f32(2, 4)}],
        taken=("y",),
    ),
    Case(
        id="names_empty",
        reports="microsoft/onnxruntime#28716",
        fault="names made from the operator type collided when no node had a name",
        must="tensor names stay unique",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                t = MatMul (a, w)
                y = MatMul (t, w2)
            }""",
        weights={"w": f32(4, 4), "w2": f32(4, 3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t", "y"),
    ),
    Case(
        id="names_dup",
        reports="microsoft/onnxruntime#14142, #8811, #7865",
        fault="a table keyed by node name lost one of two nodes that share a name",
        must="nodes are told apart by what they write; the runtime refuses such a model by itself",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                [n] t = MatMul (a, w)
                [n] u = Relu (t)
                [m] y = MatMul (u, w2)
            }""",
        weights={"w": f32(4, 4), "w2": f32(4, 3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t", "y"),
        runs=False,
    ),
    Case(
        id="unsorted",
        reports="onnx/onnx#3533, onnxsim#352, microsoft/onnxruntime-genai#707",
        fault="nodes out of order: the checker refuses them, the runtime accepts them",
        must="sorted or not, the model still works afterwards",
        text="""
            g (float[M,4] a) => (float[M,3] y) {
                y = Add (t, b)
                t = MatMul (a, w)
            }""",
        weights={"w": f32(4, 3), "b": f32(3)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t",),
        checker=False,
    ),
    Case(
        id="stale_vinfo",
        reports="microsoft/onnxruntime#2756, #20375, #10197",
        fault="a recorded shape contradicted the real one, and a buffer was reused for it",
        must="recorded shapes of intermediate tensors are not trusted",
        # t is recorded as [N, 3], and so is its slice [P, 3] of another length.
        text="""
            g (float[N,4] a) => (float[P,3] y) <float[N,3] t> {
                t = MatMul (a, w)
                y = Slice (t, start, end, axis)
            }""",
        weights={
            "w": f32(4, 3),
            "start": np.array([1], np.int64),
            "end": np.array([100], np.int64),
            "axis": np.array([0], np.int64),
        },
        feeds=[{"a": f32(5, 4)}, {"a": f32(2, 4)}],
        taken=("t",),
    ),
    Case(
        id="dimnames",
        reports="microsoft/onnxruntime#15521, onnx/onnx#3896",
        fault="names of dynamic dimensions were merged or renamed",
        must="inputs and outputs keep their dimension names, and different names stay different",
        text="""
            g (float[batch,seq_q,d] a, float[batch_k,d,seq_k] b) => (float[batch,seq_q,seq_k] y) {
                y = MatMul (a, b)
            }""",
        feeds=[
            {"a": f32(2, 3, 4), "b": f32(1, 4, 5)},
            {"a": f32(2, 3, 4), "b": f32(2, 4, 5)},
        ],
        taken=("y",),
    ),
    Case(
        id="if_capture",
        reports="robertknight/rten#1359, microsoft/onnxruntime#28608, #28690, #10096",
        fault="a tensor and a weight that only a branch reads were taken for unused",
        must="what a branch reads from outside counts as read",
        text="""
            g (float[M,4] a, bool c) => (float[M,4] y) {
                t = MatMul (a, w)
                y = If (c) <
                    then_branch = then () => (float[M,4] o1) { o1 = MatMul (t, w) },
                    else_branch = else () => (float[M,4] o2) { o2 = Add (t, bias) }
                >
            }""",
        weights={"w": f32(4, 4), "bias": f32(4)},
        feeds=[
            {"a": f32(2, 4), "c": np.array(True)},
            {"a": f32(3, 4), "c": np.array(False)},
        ],
        taken=("t", "o1"),
    ),
    Case(
        id="functions",
        reports="microsoft/onnxruntime#28716, #11731; microsoft/onnxscript#1511; onnxsim#1393",
        fault="a product inside a model-local function was overlooked, or its function lost",
        must="function bodies are visited, functions kept, with their own opset imports",
        text="""
            <ir_version: 10, opset_import: ["": 18, "local": 1]>
            g (float[M,4] a) => (float[M,4] y) {
                t = local.Lin (a, w, b)
                y = local.Lin (t, w, b)
            }
            <domain: "local", opset_import: ["": 18]>
            Lin (x, w, b) => (y) {
                t = MatMul (x, w)
                y = Add (t, b)
            }""",
        weights={"w": f32(4, 4), "b": f32(4)},
        feeds=[{"a": f32(2, 4)}],
        taken=("t",),
    ),
    Case(
        id="external",
        reports="microsoft/onnxruntime#12359, #12882, #17098; onnx/onnx#3275",
        fault="the place of a weight in a shared data file was lost when the model was saved",
        must="data files are found from any folder, offsets are kept, a model can move elsewhere",
        text="g (float[M,64] a) => (float[M,64] y) { y = MatMul (a, w) }",
        weights={"w": f32(64, 64)},
        feeds=[{"a": f32(2, 64)}],
        taken=("y",),
        external=External(tensor="w", location="external.data", offset=64 * 64 * 4),
    ),
)
