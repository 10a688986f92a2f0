"""What a rule is, and the refusals that the rules share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx
import onnx_ir as ir

from .report import Reason, Refusal
from .typed_graph import is_constant

MIN_OPSET = 7
DTYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a rule must know beyond the node.

    Attributes:
        opset: ai.onnx version of the graph or function that holds the node; None if not imported.
        body_opset: ai.onnx version that the bodies of `ai.moonpoly` functions import.
        static: Whether nodes whose shapes are all known are taken too.
        overridden: Standard operators for which the model has functions of its own.
    """

    opset: int | None
    body_opset: int | None
    static: bool
    overridden: frozenset[str]


class Rule(abc.ABC):
    """Replaces one kind of node. Rules hold no state.

    A node inside a model-local function is checked once for each signature it is called with, so
    its types are always those of one call.
    """

    name: ClassVar[str]
    """What selects the rule in `rules=` and `disable=`, and what is stamped on its nodes."""
    op_type: ClassVar[str]
    """The operator whose nodes are the rule's candidates."""
    domain: ClassVar[str] = ""
    """The domain of that operator."""
    transformation: ClassVar[str]
    """The rewrite with an arrow, in one line."""

    def check_original(self, node: onnx.NodeProto, view: ir.Node, scope: Scope) -> Refusal | None:
        """As `check`, for what a typed view does not show of an operator that is not standard."""
        return None

    @abc.abstractmethod
    def check(self, node: ir.Node, scope: Scope) -> Refusal | None:
        """The first reason why `node` must stay, or None."""

    def refuse_calls(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> Refusal | None:
        """Why the calls of the function around a node cannot have one replacement, each of which
        could have one.
        """
        return None

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> None:
        """Changes `node` in place; its name, inputs, outputs, doc string and metadata stay."""

    def adapt(self, node: onnx.NodeProto, views: Sequence[ir.Node]) -> None:
        """Changes a node, already of our domain, in what its typed views do not show."""
        return


def refuse_opset(node: ir.Node, scope: Scope, op_type: str = "") -> Refusal | None:
    """Before opset 7 operators differ (Gemm had `broadcast`); after onnx's newest, who knows.

    `op_type`: the operator that the replacement stands for, if it is not the node's own.
    """
    newest = onnx.defs.onnx_opset_version()
    op_type = op_type or node.op_type
    if op_type in scope.overridden:
        return Refusal(
            Reason.OVERRIDDEN, f"the model defines a function {op_type} of its own in ai.onnx"
        )
    if scope.opset is None or scope.body_opset is None:
        return Refusal(Reason.OPSET, "the model imports no version of ai.onnx")
    if scope.opset < MIN_OPSET:
        return Refusal(
            Reason.OPSET, f"ai.onnx version {scope.opset}; {MIN_OPSET} and later are supported"
        )
    if scope.opset > newest:
        return Refusal(
            Reason.OPSET,
            f"ai.onnx version {scope.opset} is newer than the installed onnx {onnx.__version__} "
            f"knows ({newest}); update onnx",
        )
    if _schema(op_type, scope.opset) != _schema(op_type, min(scope.body_opset, newest)):
        return Refusal(
            Reason.FUNCTION_OPSET,
            f"its function imports ai.onnx version {scope.opset} and the model {scope.body_opset}: "
            f"{op_type} differs between them",
        )
    return None


def refuse_malformed(node: ir.Node, scope: Scope, op_type: str = "") -> Refusal | None:
    """What the operator's schema forbids: number of operands, attributes, outputs, an overload.

    `op_type`: as for `refuse_opset`.
    """
    schema = onnx.defs.get_schema(op_type or node.op_type, scope.opset or MIN_OPSET)
    operands = len(node.inputs)
    if not schema.min_input <= operands <= schema.max_input:
        return _invalid(f"{operands} inputs; {schema.min_input} to {schema.max_input} are legal")
    if any(operand is None for operand in node.inputs[: schema.min_input]):
        return _invalid("a mandatory input is empty")
    if len(node.outputs) != 1 or not node.outputs[0].name:
        return _invalid("not exactly one output")
    if node.overload:
        return _invalid(f"overload {node.overload!r} of a standard operator")
    for name, attribute in node.attributes.items():
        if name not in schema.attributes:
            return _invalid(
                f"attribute {name!r} is unknown to {schema.name}-{schema.since_version}"
            )
        if int(attribute.type) != int(schema.attributes[name].type):  # type: ignore[call-overload]
            return _invalid(f"attribute {name!r} is of type {attribute.type.name}")
    return None


def refuse_dtype(node: ir.Node, scope: Scope, op_type: str = "") -> Refusal | None:
    """Operands and output of a product have one dtype, so that one known dtype proves the rest.

    `op_type`: as for `refuse_opset`.
    """
    found = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
    known = sorted(dtype for dtype in found if dtype not in (None, ir.DataType.UNDEFINED))
    if not known:
        return Refusal(Reason.DTYPE_UNKNOWN, "neither an operand nor the output has a known dtype")
    if len(known) > 1:
        return _invalid(f"operands of different dtypes: {', '.join(d.name for d in known)}")
    schema = onnx.defs.get_schema(op_type or node.op_type, scope.opset or MIN_OPSET)
    legal = schema.type_constraints[0].allowed_type_strs
    if known[0] not in DTYPES or f"tensor({_type_name(known[0])})" not in legal:
        return Refusal(
            Reason.DTYPE_UNSUPPORTED,
            f"dtype {known[0].name}; supported are {', '.join(d.name for d in DTYPES)}, as far as "
            f"{schema.name}-{schema.since_version} allows them",
        )
    return None


def refuse_inner(of_a: object, of_b: object) -> Refusal | None:
    """The dimensions that are summed over must agree, where both are known."""
    if isinstance(of_a, int) and isinstance(of_b, int) and of_a != of_b:
        return _invalid(f"inner dimensions differ: {of_a} in A, {of_b} in B")
    return None


def refuse_static(node: ir.Node, scope: Scope) -> Refusal | None:
    """ONNX Runtime folds constant products; for fixed shapes vendor libraries are well tuned."""
    activations = [
        value for value in node.inputs[:2] if value is not None and not is_constant(value)
    ]
    if not activations:
        return Refusal(Reason.CONSTANT, "all operands are constant")
    if scope.static or not all(is_static(value) for value in activations):
        return None
    shapes = " and ".join(f"{value.name}: {value.shape}" for value in activations)
    return Refusal(Reason.STATIC, f"every dimension is known ({shapes}); static=True takes it")


def is_static(value: ir.Value) -> bool:
    """Whether every dimension is a known positive number.

    Exporters write 0 and -1 for "unknown", so those do not count as known.
    """
    return value.shape is not None and all(
        isinstance(size, int) and size > 0 for size in value.shape
    )


def _schema(op_type: str, opset: int) -> int:
    return int(onnx.defs.get_schema(op_type, opset).since_version)


def _type_name(dtype: ir.DataType) -> str:
    return dtype.name.lower()


def _invalid(detail: str) -> Refusal:
    return Refusal(Reason.INVALID, detail)
