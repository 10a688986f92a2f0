"""Products between DequantizeLinear and QuantizeLinear: what is taken, and what ONNX Runtime still
makes of the rest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence import LEVELS, op_types, parse, random, refusals, run

from moonpoly_ort.rewriting import rewrite

HEAD = "(y) <float s = {0.02}, float r = {0.01}, int8 z = {0}, float o = {0.05}>"
CONV = f"""g (float[n, 4, h, w] x) => {HEAD} {{
    xq = QuantizeLinear (x, s, z)  xd = DequantizeLinear (xq, s, z)  kd = DequantizeLinear (k, r, z)
    t = Conv <pads = [1, 1, 1, 1]> (xd, kd, b)  u = Relu (t)
    q = QuantizeLinear (u, o, z)  y = DequantizeLinear (q, o, z) }}"""
LINEAR = f"""g (float[n, m, 6] x) => {HEAD} {{
    xq = QuantizeLinear (x, s, z)  xd = DequantizeLinear (xq, s, z)  wd = DequantizeLinear (w, r, z)
    t = MatMul (xd, wd)
    q = QuantizeLinear (t, o, z)  y = DequantizeLinear (q, o, z) }}"""
ATTENTION = f"""g (float[n, m, 6] x, float[n, 6, m] v) => {HEAD} {{
    xq = QuantizeLinear (x, s, z)  xd = DequantizeLinear (xq, s, z)
    vq = QuantizeLinear (v, s, z)  vd = DequantizeLinear (vq, s, z)
    t = MatMul (xd, vd)
    q = QuantizeLinear (t, o, z)  y = DequantizeLinear (q, o, z) }}"""
FEEDS = {
    CONV: {"x": random(2, 4, 5, 6)},
    LINEAR: {"x": random(2, 3, 6)},
    ATTENTION: {"x": random(2, 3, 6), "v": random(2, 6, 3)},
}


def model_of(text: str) -> onnx.ModelProto:
    model = parse(text)
    integers = np.random.default_rng(0).integers(-99, 99, 300).astype(np.int8)
    values = {
        "k": integers[: 8 * 4 * 9].reshape(8, 4, 3, 3),
        "w": integers[:30].reshape(6, 5),
        "b": random(8),
    }
    read = {name for node in model.graph.node for name in node.input}
    for name, value in values.items():
        if name in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def optimized(model: onnx.ModelProto, level: ort.GraphOptimizationLevel, path: Path) -> list[str]:
    """The operators that ONNX Runtime runs on the CPU, by name."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return sorted(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(("text", "op"), [(CONV, "ConvRelu"), (ATTENTION, "MatMul")])
def test_taken_like_others(text: str, op: str, tmp_path: Path) -> None:
    """There is no integer kernel for them on CUDA; on the CPU they become what they did before."""
    model = model_of(text)
    after = rewrite(model).model
    assert f"ai.moonpoly.{op}" in op_types(after)
    for level in LEVELS:
        lists = [optimized(m, level, tmp_path / "o.onnx") for m in (model, after)]
        assert lists[0] == lists[1]
    for got, wanted in zip(run(after, FEEDS[text]), run(model, FEEDS[text]), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_constant_of_integers_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    model = model_of(LINEAR)
    result = rewrite(model)
    assert refusals(result) == ["quantized"]
    assert "INT8" in result.report[0].detail
    assert result.model == model


@pytest.mark.parametrize("kind", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4])
def test_blocks_of_four_bits(kind: int, tmp_path: Path) -> None:
    """ONNX Runtime's own operator for both nodes is a candidate on the GPU too."""
    helper = onnx.helper
    packed = bytes(range(32)) * 32
    weight = helper.make_tensor("w", kind, [64, 32], packed, raw=True)
    scales = onnx.numpy_helper.from_array(random(2, 32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], axis=0, block_size=32),
        helper.make_node("MatMul", ["a", "wd"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("a", 1, ["m", 64])],
        [helper.make_tensor_value_info("y", 1, ["m", 32])], [weight, scales],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    result = rewrite(model)
    assert refusals(result) == ["quantized"]
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert optimized(result.model, level, tmp_path / "o.onnx") == ["MatMulNBits"]


@pytest.mark.parametrize("change", ["computed", "input", "other operand"])
def test_other_operands_are_taken(change: str) -> None:
    """Integers that the graph computes or is given, and constants in front of the product."""
    model = model_of(LINEAR)
    if change == "computed":
        model.graph.node[2].input[0] = "vq"
        model.graph.input.append(onnx.helper.make_tensor_value_info("v", 1, [6, 5]))
        quantize = onnx.helper.make_node("QuantizeLinear", ["v", "s", "z"], ["vq"])
        model.graph.node.insert(0, quantize)
    elif change == "input":
        model.graph.input.append(onnx.helper.make_tensor_value_info("w", 3, [6, 5]))
    else:
        model.graph.node[3].input[:] = ["wd", "xd"]
        del model.graph.input[0].type.tensor_type.shape.dim[0]
        dims = model.graph.input[0].type.tensor_type.shape.dim
        dims[0].dim_value, dims[1].dim_param = 5, "m"
    assert "ai.moonpoly.MatMul" in op_types(rewrite(model).model)
