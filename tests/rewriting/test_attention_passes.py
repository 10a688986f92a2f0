"""Passes over attention: each can be left out alone, and names itself on the nodes that it made."""

from __future__ import annotations

import onnx
import pytest
import test_merged_products
import test_zero_attention_bias
from equivalence import run
from moonpoly_ort.graph_passes import attention_passes
from moonpoly_ort.graph_passes.domain import rules_of

from moonpoly_ort import rewrite
from moonpoly_ort.errors import ProblemError


def stamped(model: onnx.ModelProto, name: str) -> list[str]:
    """The operators of the nodes that name a pass."""
    return [node.op_type for node in model.graph.node if name in rules_of(node)]


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def test_nodes_name_the_pass_that_made_them_and_then_the_rule() -> None:
    model = test_merged_products.model(biases="qkv")
    counts = attention_passes.apply(model, attention_passes.PACKED)
    assert counts["merged_products"] == 1
    made = stamped(model, "merged_products")
    assert sorted(made) == ["Add", "Concat", "Concat", "MatMul", "Split"]
    assert [n.op_type for n in model.graph.node if n.op_type in made and not rules_of(n)] == [
        "Concat",  # those of the cache
        "Concat",
    ]
    rewritten = rewrite(model).model
    (product,) = [node for node in rewritten.graph.node if node.op_type == "MatMulBias"]
    assert rules_of(product) == ["merged_products", "matmul", "bias"]
    assert rules_of(next(n for n in rewritten.graph.node if n.op_type == "Split")) == [
        "merged_products"
    ]


@pytest.mark.parametrize("left_out", attention_passes.NAMES)
def test_each_can_be_left_out_alone(left_out: str) -> None:
    names = [name for name, _ in attention_passes.PACKED]
    for model in (
        test_merged_products.model(biases="qkv"),
        test_zero_attention_bias.model(
            test_zero_attention_bias.ZEROS["where"], "MultiHeadAttention"
        ),
    ):
        alone = copied(model)
        counts = attention_passes.apply(model, attention_passes.PACKED, [left_out])
        assert list(counts) == [name for name in names if name != left_out]
        assert not stamped(model, left_out)
        everything = attention_passes.apply(alone, attention_passes.PACKED)
        assert bool(stamped(alone, "merged_products")) is bool(everything["merged_products"])


def test_results_stay_without_one() -> None:
    form = test_zero_attention_bias.ZEROS["where"]
    feeds = test_zero_attention_bias.feeds(2, 3)
    for disable in ((), ("zero_attention_bias",)):
        model = test_zero_attention_bias.model(form, "MultiHeadAttention")
        (wanted,) = run(model, feeds)
        counts = attention_passes.apply(model, attention_passes.LEAN, disable)
        assert ("zero_attention_bias" in counts) is not bool(disable)
        assert any("bias" in node.input for node in model.graph.node) is bool(disable)
        (got,) = run(model, feeds)
        assert abs(got - wanted).max() < 1e-5


def test_rewrite_takes_their_names_in_disable_alone() -> None:
    model = test_merged_products.model()
    assert rewrite(model, disable=["merged_products"]).taken
    with pytest.raises(ProblemError, match="padded_tokens"):
        rewrite(model, disable=["no_such_rule"])
    with pytest.raises(ProblemError, match="Unknown rules: merged_products"):
        rewrite(model, rules=["merged_products"])
