"""What a rewrite may change in a model: the domain of the nodes that it takes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from .comparing import Mismatch

DOMAIN = "ai.moonpoly"
RULE_KEY = "moonpoly.rule"
_GEMM_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
_MIN_IR_VERSION = 8  # the first with model-local functions


def require_only_taken(original: ModelProto, rewritten: ModelProto) -> list[NodeProto]:
    """Requires that nothing but taken nodes changed; returns these, in the order of the model.

    A taken node keeps operator type (see `standard_type`), name, inputs, outputs and attributes,
    has domain `ai.moonpoly` and says which rule took it. Subgraphs and functions are compared too.
    Raises Mismatch.
    """
    _require_equal("model", _model_facts(original), _model_facts(rewritten))
    wanted_ir = original.ir_version
    if rewritten.domain != original.domain:
        raise Mismatch(f"model domain {rewritten.domain!r}, was {original.domain!r}")
    taken = list(_compare_graphs(original.graph, rewritten.graph, "graph"))
    own = {(f.domain, f.name): f for f in rewritten.functions if f.domain == DOMAIN}
    kept = [f for f in rewritten.functions if f.domain != DOMAIN]
    _require_equal("functions", [_key(f) for f in original.functions], [_key(f) for f in kept])
    for before, after in zip(original.functions, kept, strict=True):
        where = f"function {before.domain}.{before.name}"
        _require_equal(f"{where} inputs", list(before.input), list(after.input))
        _require_equal(f"{where} outputs", list(before.output), list(after.output))
        inside = list(_compare_nodes(before.node, after.node, where))
        _require_opsets(before.opset_import, after.opset_import, where, bool(inside))
        taken += inside
    _require_equal("own functions", sorted({(DOMAIN, n.op_type) for n in taken}), sorted(own))
    _require_opsets(original.opset_import, rewritten.opset_import, "model", bool(taken))
    if taken:
        wanted_ir = max(wanted_ir, _MIN_IR_VERSION)
    _require_equal("IR version", wanted_ir, rewritten.ir_version)
    return taken


def standard_type(taken: NodeProto) -> str:
    """The operator type that a taken node had: a convolution of two inputs changes its name."""
    return taken.op_type.removesuffix("NoBias") if _is_without_bias(taken) else taken.op_type


def _is_without_bias(node: NodeProto) -> bool:
    return node.op_type.startswith("Conv") and len(node.input) == 2


def operators(model: ModelProto) -> Iterator[tuple[str, str]]:
    """(domain, operator type) of every node, those of subgraphs and functions included."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from _operators(nodes)


def _operators(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for graph in _graphs(node):
            yield from _operators(graph.node)


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _model_facts(model: ModelProto) -> dict[str, Any]:
    return {
        "producer": (model.producer_name, model.producer_version),
        "model version": model.model_version,
        "doc string": model.doc_string,
        "metadata": sorted((p.key, p.value) for p in model.metadata_props),
    }


def _compare_graphs(before: GraphProto, after: GraphProto, where: str) -> Iterator[NodeProto]:
    _require_equal(f"{where} name", before.name, after.name)
    _require_equal(f"{where} doc string", before.doc_string, after.doc_string)
    for kind in ("input", "output"):
        values = [[_value_facts(v) for v in getattr(graph, kind)] for graph in (before, after)]
        _require_equal(f"{where} {kind}s", *values)
    tensors = [[_tensor_facts(t) for t in graph.initializer] for graph in (before, after)]
    _require_equal(f"{where} initializers", *tensors)
    yield from _compare_nodes(before.node, after.node, where)


def _compare_nodes(
    before: Sequence[NodeProto], after: Sequence[NodeProto], where: str
) -> Iterator[NodeProto]:
    # Outputs name a node: its own name may be empty or shared. Order is free where there was none.
    after_by_outputs = {tuple(node.output): node for node in after}
    keys = [tuple(node.output) for node in before]
    _require_equal(f"{where} nodes", sorted(keys), sorted(after_by_outputs))
    if _is_sorted(before):
        _require_equal(f"{where} node order", keys, list(after_by_outputs))
    for old in before:
        new = after_by_outputs[tuple(old.output)]
        place = f"{where} node {old.op_type} -> {list(old.output)}"
        is_taken = new.domain == DOMAIN and old.domain != DOMAIN
        _require_equal(place, _node_facts(old), _node_facts(new, taken=is_taken))
        if is_taken:
            if (new.op_type != old.op_type) != _is_without_bias(old):
                raise Mismatch(f"{place}: taken as {new.op_type}")
            if RULE_KEY not in {p.key for p in new.metadata_props}:
                raise Mismatch(f"{place}: taken, but no {RULE_KEY} in its metadata")
            yield new
        for number, (inner_old, inner_new) in enumerate(
            zip(_graphs(old), _graphs(new), strict=True)
        ):
            yield from _compare_graphs(inner_old, inner_new, f"{place} subgraph {number}")


def _is_sorted(nodes: Sequence[NodeProto]) -> bool:
    produced_later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if produced_later.intersection(node.input):
            return False
        produced_later.difference_update(node.output)
    return True


def _node_facts(node: NodeProto, taken: bool = False) -> dict[str, Any]:
    attributes = {a.name: _attribute_facts(a) for a in node.attribute}
    if node.op_type == "Gemm" and (taken or node.domain in ("", "ai.onnx")):
        for name, default in _GEMM_DEFAULTS.items():  # written out or left out: the same node
            attributes.setdefault(name, default)
    trimmed = list(node.input)
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return {
        "operator": (
            "" if taken or node.domain == "ai.onnx" else node.domain,
            standard_type(node) if taken else node.op_type,
        ),
        "name": node.name,
        "doc string": node.doc_string,
        "inputs": trimmed,
        "outputs": list(node.output),
        "attributes": attributes,
        "metadata": sorted(
            (p.key, p.value) for p in node.metadata_props if not (taken and p.key == RULE_KEY)
        ),
    }


def _attribute_facts(attribute: AttributeProto) -> Any:
    if attribute.ref_attr_name:
        return ("reference", attribute.ref_attr_name)
    if attribute.type == AttributeProto.TENSOR:
        return _tensor_facts(attribute.t)
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute.type  # compared by the caller, node by node
    value = onnx.helper.get_attribute_value(attribute)
    return value if isinstance(value, int | float | bytes) else list(value)


def _tensor_facts(tensor: TensorProto) -> Any:
    facts = (tensor.name, tensor.data_type, tuple(tensor.dims))
    if tensor.data_location == TensorProto.EXTERNAL:
        return facts, sorted((entry.key, entry.value) for entry in tensor.external_data)
    return facts, np.ascontiguousarray(onnx.numpy_helper.to_array(tensor)).tobytes()


def _value_facts(value: onnx.ValueInfoProto) -> Any:
    return value.name, value.doc_string, value.type.SerializeToString(deterministic=True)


def _key(function: onnx.FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


def _require_opsets(before: Any, after: Any, where: str, has_taken: bool) -> None:
    wanted = {entry.domain: entry.version for entry in before}
    if has_taken:
        wanted[DOMAIN] = 1
    _require_equal(f"{where} opset imports", wanted, {e.domain: e.version for e in after})


def _require_equal(what: str, before: Any, after: Any) -> None:
    if before != after:
        raise Mismatch(f"{what} changed: {_shortened(before)} became {_shortened(after)}")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 600 else f"{text[:600]}... ({len(text)} characters)"
