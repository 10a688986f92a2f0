"""What the rewriter says about each candidate node: taken by which rule, or left alone and why."""

from __future__ import annotations

import dataclasses
import enum


class Reason(enum.StrEnum):
    """Why a candidate node was left as it is."""

    DISABLED = "disabled"
    ALREADY_REWRITTEN = "already-rewritten"
    OVERRIDDEN = "overridden"
    OPSET = "opset"
    FUNCTION_OPSET = "function-opset"
    INVALID = "invalid"
    DTYPE_UNKNOWN = "dtype-unknown"
    DTYPE_UNSUPPORTED = "dtype-unsupported"
    RANK_UNKNOWN = "rank-unknown"
    RANK_UNSUPPORTED = "rank-unsupported"
    CONSTANT = "constant"
    QUANTIZED = "quantized"
    STATIC = "static"
    NEVER_CALLED = "never-called"
    UNBOUND_ATTRIBUTE = "unbound-attribute"
    TRAINING = "training"
    OTHER_READERS = "other-readers"
    NOT_CONSTANT = "not-constant"
    DATA_UNREADABLE = "data-unreadable"
    INEXACT = "inexact"
    BROADCASTS = "broadcasts"
    SHAPE_UNPROVEN = "shape-unproven"
    NO_SUCH_OPERATOR = "no-such-operator"
    FORM_UNKNOWN = "form-unknown"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rule's answer for a node that it must not take."""

    reason: Reason
    detail: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One candidate node.

    Attributes:
        name: The node's name; may be empty or shared with another node.
        op_type: MatMul, Gemm, Conv or ConvTranspose; where their rules apply, FusedMatMul and the
            like, and what a rule looked at behind or in front of a node of ours:
            BatchNormalization, Add, Relu, Transpose and so on.
        where: The graph that holds the node, e.g. `graph`, `graph/If[cond].then_branch`,
            `function my.domain.Linear`.
        output: Name of the node's first output, unique in its graph; empty for a malformed node.
        rule: Name of the rule that is responsible for the node.
        refusal: None if the rule took the node.
        into: Where a node of ours absorbed this one, that node's output; else empty.
    """

    name: str
    op_type: str
    where: str
    output: str
    rule: str
    refusal: Refusal | None
    into: str = ""

    @property
    def taken(self) -> bool:
        return self.refusal is None

    @property
    def reason(self) -> Reason | None:
        """The code of the refusal; None if the node was taken."""
        return self.refusal.reason if self.refusal else None

    @property
    def detail(self) -> str:
        """The refusal in words, with the offending value; empty if the node was taken."""
        return self.refusal.detail if self.refusal else ""
