"""Models as ONNX text, and the one check that every rewrite must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from moonpoly_ort.rewriting import RewriteResult, list_rules, rewrite

Feeds = Mapping[str, np.ndarray]

RULE_OF = {rule.op_type: rule.name for rule in list_rules()}
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
    """Rewrites `model` by all rules and asserts all that must hold of any rewrite.

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


def refusals(result: RewriteResult) -> list[str]:
    """The reason codes of the nodes that were left alone."""
    return [str(entry.reason) for entry in result.report if not entry.taken]


def random(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
