"""Models as ONNX text, and the one check that every rewrite must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from moonpoly_ort.graph_passes import pipeline

from moonpoly_ort.rewriting import RewriteResult, list_rules, rewrite

Feeds = Mapping[str, np.ndarray]

RULE_OF = {rule.op_type: rule.name for rule in pipeline.RULES}
"""The rules that turn one node into one of ours."""

ALL_RULES = tuple(rule.name for rule in list_rules())
LEVELS = tuple(ort.GraphOptimizationLevel.__members__.values())


def parse(
    graph: str, *, opset: int = 17, ir_version: int = 8, imports: str = "", functions: str = ""
) -> onnx.ModelProto:
    """A model from the text of its graph; `imports` like `, "my.domain" : 1`."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}{imports}]>'
    model = onnx.parser.parse_model(f"{header}\n{graph}\n{functions}")
    model.metadata_props.add(key="author", value="somebody")
    return model


def all_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g.node)


def op_types(model: onnx.ModelProto) -> list[str]:
    """The operators of the main graph and its subgraphs, with their domain unless ai.onnx."""
    return [
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in all_nodes(model.graph.node)
    ]


def node_of(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    """The node of the main graph that makes a value."""
    return next(node for node in model.graph.node if output in node.output)


def make_an_input(model: onnx.ModelProto, constant: str) -> None:
    """Has the caller give what was an initializer."""
    tensor = next(t for t in model.graph.initializer if t.name == constant)
    info = onnx.helper.make_tensor_value_info(constant, tensor.data_type, list(tensor.dims))
    model.graph.input.append(info)
    model.graph.initializer.remove(tensor)


def normal_feeds(
    model: onnx.ModelProto, seed: Sequence[int], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Random fp32 inputs, with these sizes of symbolic dimensions."""
    rng = np.random.default_rng(seed)
    return {
        value.name: rng.standard_normal(
            [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }


def run(
    model: onnx.ModelProto | bytes,
    feeds: Feeds,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def passes_checker(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def check(
    model: onnx.ModelProto, *feeds: Feeds, static: bool = False, taken: int | None = None
) -> RewriteResult:
    """Rewrites `model` node by node and asserts all that must hold of any such rewrite.

    Args:
        model: The model, which must stay as it is.
        feeds: Inputs for which both models must give the same bits.
        static: As for `rewrite`.
        taken: How many nodes must be taken.
    """
    before = model.SerializeToString()
    result = rewrite(model, static=static, rules=RULE_OF.values())
    after = result.model
    assert model.SerializeToString() == before

    if taken is not None:
        assert len(result.taken) == taken, result.report
    if not result.taken:
        assert after.SerializeToString() == before
    for field in ("name", "input", "output", "initializer", "value_info", "doc_string"):
        assert getattr(after.graph, field) == getattr(model.graph, field), field
    assert after.metadata_props == model.metadata_props
    for old, new in zip(all_nodes(model.graph.node), all_nodes(after.graph.node), strict=True):
        rewritten = new.domain == "ai.moonpoly" != old.domain
        without_bias = rewritten and old.op_type.startswith("Conv") and len(old.input) == 2
        assert new.name == old.name
        assert new.op_type == old.op_type + ("NoBias" if without_bias else "")
        assert (new.input, new.output, new.doc_string) == (old.input, old.output, old.doc_string)
        stamp = {entry.key: entry.value for entry in new.metadata_props}.get("moonpoly.rule")
        if rewritten:
            assert stamp == RULE_OF[old.op_type]
        elif not any(attribute.HasField("g") for attribute in new.attribute):
            assert new == old

    if passes_checker(model):
        onnx.checker.check_model(after, full_check=True)
    again = rewrite(after, static=static, rules=RULE_OF.values())
    assert again.model.SerializeToString() == after.SerializeToString()
    assert not again.taken

    for feed in feeds:
        for expected, actual in zip(run(model, feed), run(after, feed), strict=True):
            np.testing.assert_array_equal(actual, expected, strict=True)
    return result


def check_fused(
    model: onnx.ModelProto,
    *feeds: Feeds,
    ops: Sequence[str],
    missed: Sequence[str] = (),
    rules: Sequence[str] = ALL_RULES,
    tolerance: float = 1e-5,
) -> RewriteResult:
    """Rewrites `model` with fusing rules and asserts all that must hold of it then.

    Args:
        model: The model, which must stay as it is.
        feeds: Inputs for which both models must give close values of the same shapes.
        ops: The operators of the rewritten model, `ai.moonpoly.` left out, `Constant` too.
        missed: What must have been a near miss, as "rule: reason".
        rules: The rules to apply.
        tolerance: Relative to the largest value of an output.
    """
    before = model.SerializeToString()
    result = rewrite(model, rules=rules)
    after = result.model
    assert model.SerializeToString() == before
    names = [name.removeprefix("ai.moonpoly.") for name in op_types(after)]
    assert [name for name in names if name != "Constant"] == list(ops), result.report
    fusing = {fusion.name for fusion in pipeline.FUSIONS}
    left = [e for e in result.report if not e.taken and e.rule in fusing and e.rule in rules]
    assert [f"{e.rule}: {e.reason}" for e in left] == list(missed), left
    assert all(entry.detail for entry in left)
    for field in ("name", "input", "output", "doc_string"):
        assert getattr(after.graph, field) == getattr(model.graph, field), field
    outputs = {output for node in all_nodes(after.graph.node) for output in node.output}
    for entry in result.taken:
        assert not entry.into or entry.into in outputs
    for node in all_nodes(after.graph.node):
        if node.domain == "ai.moonpoly":
            stamp = {entry.key: entry.value for entry in node.metadata_props}["moonpoly.rule"]
            assert set(stamp.split(",")) <= set(rules)

    if passes_checker(model):
        onnx.checker.check_model(after, full_check=True)
    again = rewrite(after, rules=rules)
    assert not again.taken
    assert again.model.SerializeToString() == after.SerializeToString()

    for feed in feeds:
        for level in LEVELS[:1] + LEVELS[-1:]:
            for expected, actual in zip(run(model, feed), run(after, feed, level), strict=True):
                assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
                size = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
                np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size)
    return result


def refusals(result: RewriteResult) -> list[str]:
    """The reason codes of the nodes that were left alone."""
    return [str(entry.reason) for entry in result.report if not entry.taken]


def random(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
