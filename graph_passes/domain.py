"""The domain `ai.moonpoly` in a model: the functions that its nodes call, and the imports.

Each operator (`operators.py`) is a function whose body (`bodies.py`) consists of standard
operators, so that a rewritten model runs in an ONNX Runtime that lacks the custom op library: there
the function is inlined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

from moonpoly_ort.errors import ModelError

from . import bodies
from .operators import OPERATORS

DOMAIN = "ai.moonpoly"
VERSION = 1
RULE_KEY = "moonpoly.rule"
"""Key in the `metadata_props` of a node that rules or passes made; the value names them, with
commas between."""

MIN_IR_VERSION = 8
"""Model-local functions came with IR version 8."""


def rules_of(node: onnx.NodeProto) -> list[str]:
    """The rules that a node names."""
    return next((e.value.split(",") for e in node.metadata_props if e.key == RULE_KEY), [])


def stamp(node: onnx.NodeProto, *rules: str) -> None:
    """Adds to the rules that the node names those that it does not."""
    known = rules_of(node)
    value = ",".join([*known, *(rule for rule in rules if rule not in known)])
    for entry in node.metadata_props:
        if entry.key == RULE_KEY:
            entry.value = value
            return
    node.metadata_props.add(key=RULE_KEY, value=value)


def is_standard(domain: str) -> bool:
    """Whether `domain` is ai.onnx under either of its two names."""
    return domain in ("", "ai.onnx")


def imported_version(imports: Iterable[onnx.OperatorSetIdProto]) -> int | None:
    """The version of ai.onnx among opset imports, or None."""
    return next((entry.version for entry in imports if is_standard(entry.domain)), None)


def function(op_type: str, opset: int) -> onnx.FunctionProto:
    """The function of an `ai.moonpoly` operator over ai.onnx version `opset`."""
    operator = OPERATORS[op_type]
    return onnx.helper.make_function(
        DOMAIN,
        op_type,
        operator.inputs,
        ["Y"],
        bodies.nodes(operator, opset),
        [onnx.helper.make_opsetid("", opset)],
        attributes=list(operator.attributes),
    )


def refuse_foreign_use(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Raises ModelError if `model` uses the domain for anything but what this package writes.

    An import alone is no use: ONNX Runtime writes one of version 1000 into every model that it
    saves in a process where the library is registered.

    Args:
        model: The model, before it is rewritten.
        nodes: All its nodes, those in subgraphs and functions included.
    """
    other = [e.version for e in model.opset_import if e.domain == DOMAIN and e.version != VERSION]
    known = set()
    for candidate in model.functions:
        if candidate.domain != DOMAIN:
            continue
        if other:
            raise _foreign(f"it imports version {other[0]}")
        opset = imported_version(candidate.opset_import)
        if (
            candidate.name not in OPERATORS
            or opset is None
            or candidate != function(candidate.name, opset)
        ):
            raise _foreign(f"it has a function {candidate.name!r} with another body")
        known.add(candidate.name)
    for node in nodes:
        if node.domain == DOMAIN and other:
            raise _foreign(f"it imports version {other[0]}")
        if node.domain == DOMAIN and node.op_type not in known:
            raise _foreign(f"node {node.name!r} calls {node.op_type!r}, which has no function")


def _foreign(what: str) -> ModelError:
    return ModelError(
        f"The model already uses the domain {DOMAIN!r}, and not as this package does: {what}. "
        f"Accepted are version {VERSION} and the {len(OPERATORS)} functions that this version of "
        "moonpoly_ort writes (operators.py lists them). Rewrite the original model instead, or "
        "rename the domain."
    )


def declare(model: onnx.ModelProto, op_types: Iterable[str], opset: int) -> None:
    """Adds to `model` the functions of `op_types` that it lacks, and what they need.

    The IR version stays below 4 where initializers are graph inputs: there ONNX Runtime takes them
    for constants, from 4 on for inputs with a default, which it does not fold. It loads functions
    at any IR version (1.23 to 1.32), and so does onnx.checker.
    """
    present = {entry.name for entry in model.functions if entry.domain == DOMAIN}
    for op_type in op_types:
        if op_type not in present:
            model.functions.append(function(op_type, opset))
    inputs = {info.name for info in model.graph.input}
    constant_inputs = any(tensor.name in inputs for tensor in model.graph.initializer)
    if not (model.ir_version < 4 and constant_inputs):
        model.ir_version = max(model.ir_version, MIN_IR_VERSION)
    import_into(model.opset_import)


def import_into(imports: Any) -> None:
    """Has the opset imports of a model or a function name the domain once, in our version."""
    present = [entry for entry in imports if entry.domain == DOMAIN]
    for entry in present:
        entry.version = VERSION
    if not present:
        imports.add(domain=DOMAIN, version=VERSION)
