"""The model that most tests here use."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import parser

MLP = """
<ir_version: 8, opset_import: ["" : 18]>
mlp (float[batch, 64] x) => (float[batch, 16] y) <float[64, 32] w, float[32, 16] v, float[16] c>
{
  [first] h = MatMul (x, w)
  r = Relu (h)
  [second] y = Gemm (r, v, c)
}
"""


def mlp() -> onnx.ModelProto:
    """x [batch, 64] -> MatMul -> Relu -> Gemm -> y [batch, 16], with random weights."""
    model = parser.parse_model(MLP)
    generator = np.random.default_rng(7)
    del model.graph.initializer[:]
    for name, shape in {"w": (64, 32), "v": (32, 16), "c": (16,)}.items():
        values = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model
