"""The domain `ai.moonpoly`: its operators and the function body that each carries.

The body is the standard operator, so that a rewritten model runs in an ONNX Runtime that lacks the
custom op library: there the function is inlined. Attribute references (`alpha=@alpha`) carry the
attributes of each node into the body. A reference to an attribute that the node lacks leaves it out
of the body, in ONNX Runtime and by the standard, so that the operator's own default holds: Conv
needs that, whose defaults depend on the rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import onnx

from moonpoly_ort.errors import ModelError

DOMAIN = "ai.moonpoly"
VERSION = 1
RULE_KEY = "moonpoly.rule"
"""Key in a rewritten node's `metadata_props`; the value is the name of the rule."""

MIN_IR_VERSION = 8
"""Model-local functions came with IR version 8."""

_Attributes = Mapping[str, onnx.AttributeProto.AttributeType]
_KIND = onnx.AttributeProto


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of the domain: the standard one that is its body, its inputs and attributes."""

    standard: str
    inputs: tuple[str, ...]
    attributes: _Attributes


_GEMM: _Attributes = {
    "transA": _KIND.INT,
    "transB": _KIND.INT,
    "alpha": _KIND.FLOAT,
    "beta": _KIND.FLOAT,
}
_CONV: _Attributes = {
    "auto_pad": _KIND.STRING,
    "dilations": _KIND.INTS,
    "group": _KIND.INT,
    "kernel_shape": _KIND.INTS,
    "pads": _KIND.INTS,
    "strides": _KIND.INTS,
}
_CONV_TRANSPOSE = {**_CONV, "output_padding": _KIND.INTS, "output_shape": _KIND.INTS}

# An input that a node lacks is an empty name in the inlined body. For ONNX Runtime's CPU provider a
# Conv with such a third input is no candidate of its fusions and layouts (1.23 to 1.32), so that a
# Conv of two inputs has an operator of its own. Overloads would do, but 1.23 mixes them up.
OPERATORS: Mapping[str, Operator] = {
    "MatMul": Operator("MatMul", ("A", "B"), {}),
    "Gemm": Operator("Gemm", ("A", "B", "C"), _GEMM),
    "Conv": Operator("Conv", ("X", "W", "B"), _CONV),
    "ConvNoBias": Operator("Conv", ("X", "W"), _CONV),
    "ConvTranspose": Operator("ConvTranspose", ("X", "W", "B"), _CONV_TRANSPOSE),
    "ConvTransposeNoBias": Operator("ConvTranspose", ("X", "W"), _CONV_TRANSPOSE),
}


def is_standard(domain: str) -> bool:
    """Whether `domain` is ai.onnx under either of its two names."""
    return domain in ("", "ai.onnx")


def imported_version(imports: Iterable[onnx.OperatorSetIdProto]) -> int | None:
    """The version of ai.onnx among opset imports, or None."""
    return next((entry.version for entry in imports if is_standard(entry.domain)), None)


def function(op_type: str, opset: int) -> onnx.FunctionProto:
    """The function of an `ai.moonpoly` operator over ai.onnx version `opset`."""
    operator = OPERATORS[op_type]
    body = onnx.helper.make_node(operator.standard, operator.inputs, ["Y"])
    for name, kind in operator.attributes.items():
        body.attribute.add(name=name, ref_attr_name=name, type=kind)
    return onnx.helper.make_function(
        DOMAIN,
        op_type,
        operator.inputs,
        ["Y"],
        [body],
        [onnx.helper.make_opsetid("", opset)],
        attributes=list(operator.attributes),
    )


def refuse_foreign_use(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Raises ModelError if `model` uses the domain for anything but what this package writes.

    Args:
        model: The model, before it is rewritten.
        nodes: All its nodes, those in subgraphs and functions included.
    """
    for entry in model.opset_import:
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise _foreign(f"it imports version {entry.version}")
    known = set()
    for candidate in model.functions:
        if candidate.domain != DOMAIN:
            continue
        opset = imported_version(candidate.opset_import)
        if (
            candidate.name not in OPERATORS
            or opset is None
            or candidate != function(candidate.name, opset)
        ):
            raise _foreign(f"it has a function {candidate.name!r} with another body")
        known.add(candidate.name)
    for node in nodes:
        if node.domain == DOMAIN and node.op_type not in known:
            raise _foreign(f"node {node.name!r} calls {node.op_type!r}, which has no function")


def _foreign(what: str) -> ModelError:
    return ModelError(
        f"The model already uses the domain {DOMAIN!r}, and not as this package does: {what}. "
        f"Accepted are version {VERSION} and the functions {', '.join(sorted(OPERATORS))} as "
        "written by this version of moonpoly_ort. Rewrite the original model instead, or rename "
        "the domain."
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
    """Adds the domain to the opset imports of a model or a function, once."""
    if all(entry.domain != DOMAIN for entry in imports):
        imports.add(domain=DOMAIN, version=VERSION)
