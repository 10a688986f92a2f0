"""What `explain --graph` says of a model before and after it is rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from typer.testing import CliRunner

import moonpoly_ort
from moonpoly_ort import explain
from moonpoly_ort.cli import app
from moonpoly_ort.graph_explaining import FusedNode, explain_graph

RULES = ("matmul", "bias", "residual", "activation")


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """Two products: the first fuses all that follows, the second is read twice."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 8] x, float[8, 8] w, float[8] b, float[8, 4] v) => (y, z)
        {   [lin] t = MatMul (x, w)  u = Add (t, b)  s = Sigmoid (u)  r = Mul (u, s)
            [head] o = MatMul (r, v)  y = Relu (o)  z = Neg (o) }"""
    )
    onnx.save(model, tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def test_says_what_was_absorbed_and_what_was_left(block: Path) -> None:
    explained = explain_graph(block, rules=RULES)
    assert explained.before == {"Add": 1, "MatMul": 2, "Mul": 1, "Neg": 1, "Relu": 1, "Sigmoid": 1}
    assert explained.after == {
        "Neg": 1, "Relu": 1, "ai.moonpoly.MatMul": 1, "ai.moonpoly.MatMulBiasSilu": 1,
    }  # fmt: skip
    absorbed = ("Add u", "Sigmoid s", "Mul r")
    rules = ("matmul", "bias", "activation")
    assert explained.fused == (FusedNode("lin", "MatMulBiasSilu", rules, absorbed),)
    (missed,) = explained.near_misses
    assert (missed.name, missed.op, missed.rule) == ("y", "Relu", "activation")
    assert missed.reason == "other-readers"
    assert "'o'" in missed.detail


def test_a_rule_switched_off_is_not_applied(block: Path) -> None:
    explained = explain_graph(block, rules=RULES, disable=["bias"])
    assert not explained.fused
    assert explained.after["Add"] == 1


def test_a_folded_normalization_is_shown() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 3, h, w] x) => (y) <float[4, 3, 1, 1] k = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3},
            float[4] s = {1, 2, 3, 4}, float[4] z = {0, 0, 0, 0}, float[4] v = {1, 1, 2, 2}>
        { t = Conv (x, k)  u = BatchNormalization (t, s, z, z, v)  y = Relu (u) }"""
    )
    explained = explain_graph(model)
    rules = ("conv", "batch_normalization", "activation")
    absorbed = ("BatchNormalization u", "Relu y")
    assert explained.fused == (FusedNode("y", "ConvRelu", rules, absorbed),)
    assert not explain_graph(model, disable=["batch_normalization"]).fused


def test_command(block: Path) -> None:
    words = ["explain", str(block), "--graph", *(w for rule in RULES for w in ("--rules", rule))]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for part in ("MatMulBiasSilu", "Add u, Sigmoid s, Mul r", "matmul, bias, activation", "'o' is"):
        assert part in result.output
    data = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert data["fused"][0]["op"] == "MatMulBiasSilu"
    assert CliRunner().invoke(app, [*words, "--dim", "n=1"]).exit_code == 2
    assert CliRunner().invoke(app, ["explain", str(block), "--rules", "bias"]).exit_code == 2


def test_plans_of_a_fused_model_are_those_of_its_products(block: Path, tmp_path: Path) -> None:
    fused = moonpoly_ort.rewrite(block, tmp_path / "fused.onnx", rules=RULES)
    assert fused.taken
    plans = [explain(path, {"n": 5}, gpu="H200") for path in (block, tmp_path / "fused.onnx")]
    assert plans[0] == plans[1]
    assert [(plan.m, plan.n, plan.k) for plan in plans[1]] == [(5, 8, 8), (5, 4, 8)]


def test_plans_of_a_scaled_product_are_those_of_the_product(tmp_path: Path) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 8] x, float[8, 4] v, float[4] b) => (y) <float s = {0.25}>
        { t = MatMul (x, v)  u = Add (t, b)  y = Mul (u, s) }"""
    )
    onnx.save(model, tmp_path / "model.onnx")
    fused = moonpoly_ort.rewrite(model, tmp_path / "fused.onnx")
    assert [node.op_type for node in fused.model.graph.node] == ["ScaledMatMulBias"]
    plans = [
        explain(tmp_path / name, {"n": 5}, gpu="H200") for name in ("model.onnx", "fused.onnx")
    ]
    assert plans[0] == plans[1]
    assert [(plan.m, plan.n, plan.k) for plan in plans[1]] == [(5, 4, 8)]


def test_behind_a_graph_optimizer(tmp_path: Path) -> None:
    """`explain --optimize`, of the graph and of plans, and `run --optimize`."""
    pytest.importorskip("onnxscript.rewriter.ort_fusions")
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[b, s, 8] x, float[b, s, 8] r) => (float[b, s, 4] y)
        <float[8] c = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] d = {1, 2, 3, 4, 5, 6, 7, 8}>
        {   t = Add (x, r)
            u = LayerNormalization <axis = -1> (t, c, d)
            [product] y = MatMul (u, w) }"""
    )
    weight = np.arange(32, dtype=np.float32).reshape(8, 4)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = str(tmp_path / "model.onnx")
    onnx.save(model, path)
    words = ["--optimize", "onnxscript"]

    def said(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*arguments, *words, "--json"])
        assert result.exit_code == 0, result.output
        data: dict[str, Any] = json.loads(result.stdout)
        return data

    graph = said("explain", path, "--graph")
    assert graph["before"] == {"Add": 1, "LayerNormalization": 1, "MatMul": 1}
    skip, product = "com.microsoft.SkipLayerNormalization", "ai.moonpoly.MatMul"
    assert graph["after"] == {skip: 1, product: 1}
    sizes = ["--dim", "b=2", "--dim", "s=5"]
    (plan,) = said("explain", path, *sizes, "--gpu", "H200")["plans"]
    assert (plan["name"], plan["dtype"], plan["m"]) == ("product", "f32", 10)
    assert said("run", path, *sizes)["outputs"] == {"y": [2, 5, 4]}
    for arguments in (["explain", path, "--graph"], ["explain", path], ["run", path, *sizes]):
        wrong = CliRunner().invoke(app, [*arguments, "--optimize", "mha"])
        assert (wrong.exit_code, "'onnxscript'" in wrong.output) == (2, True)
