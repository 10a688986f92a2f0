"""The rules in the order they are applied, and the one loop that applies them."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from moonpoly_ort.errors import ProblemError

from . import attention_passes, domain
from .activation import ActivationFusion
from .batch_normalization import BatchNormalizationFusion
from .bias import BiasFusion
from .cast import CastFusion
from .contrib import FusedConvRule, FusedGemmRule, FusedMatMulRule
from .conv import ConvRule
from .conv_transpose import ConvTransposeRule
from .flatten import FlattenFusion
from .fusing import fuse
from .fusion import Fusion
from .gated import GatedFusion
from .gemm import GemmRule
from .matmul import MatMulRule
from .offset import OffsetFusion
from .operators import OPERATORS
from .packed_gate import PackedGateFusion
from .report import Entry, Reason, Refusal
from .residual import ResidualFusion
from .rule import Rule, Scope
from .scale import ScaleFusion
from .stand_ins import CONTRIB
from .transpose import TransposeFusion
from .tree import Initializers, forest
from .typed_graph import typed_views, values_of_graphs, walk

RULES: tuple[Rule, ...] = (
    # One rule an operator, so that their order does not matter.
    MatMulRule(),
    GemmRule(),
    ConvRule(),
    ConvTransposeRule(),
    FusedMatMulRule(),
    FusedGemmRule(),
    FusedConvRule(),
)

FUSIONS: tuple[Fusion, ...] = (
    # Tried in this order at each product until none matches: the name of an operator says what is
    # applied first, and a vector that is added could pass for a residual of rank 1. One of two
    # products that are multiplied with each other could pass for a residual, too.
    BatchNormalizationFusion(),
    TransposeFusion(),
    FlattenFusion(),
    # Written out, it may begin with x + 3 or x * 0.2, which could pass for an offset or a scale.
    ActivationFusion(),
    BiasFusion(),
    OffsetFusion(),
    GatedFusion(),
    PackedGateFusion(),
    ResidualFusion(),
    ScaleFusion(),
    CastFusion(),
)

_NAMES = (*(rule.name for rule in RULES), *(fusion.name for fusion in FUSIONS))
"""Of all rules, in the order they are applied."""

_RULE_OF = {(rule.domain, rule.op_type): rule for rule in RULES}


def select(rules: Iterable[str] | None, disable: Iterable[str]) -> frozenset[str]:
    """The names of the rules to apply.

    Args:
        rules: The rules wanted; None means all.
        disable: Rules to leave out; those that are passes over attention are none of the result.

    Raises:
        ProblemError: A name is not that of a rule.
    """
    wanted = set(_NAMES if rules is None else names(rules))
    unwanted = set(names(disable))
    if unknown := sorted((wanted | unwanted.difference(attention_passes.NAMES)) - set(_NAMES)):
        raise ProblemError(
            f"Unknown rules: {', '.join(unknown)}. The rules are: {', '.join(_NAMES)}; "
            f"`disable` takes passes of optimize=, too: {', '.join(attention_passes.NAMES)}."
        )
    return frozenset(wanted - unwanted)


def described() -> list[tuple[str, str, str]]:
    """Name, operator and transformation of all rules, in the order they are applied."""
    rules: tuple[Rule | Fusion, ...] = (*RULES, *FUSIONS)
    return [(rule.name, rule.op_type, rule.transformation) for rule in rules]


def names(given: Iterable[str]) -> list[str]:
    """Those of `rules=` and `disable=`, which may be one alone."""
    return [given] if isinstance(given, str) else list(given)


def apply(
    model: onnx.ModelProto, initializers: Initializers, *, static: bool, enabled: frozenset[str]
) -> tuple[Entry, ...]:
    """Rewrites `model` in place and says what became of each candidate.

    Only nodes that a rule takes are touched, apart from the functions, the opset import and the IR
    version that those need; a model of which nothing is taken stays as it is. `initializers` are
    those of the main graph: folding BatchNormalization needs the weights, and replaces them.

    Raises:
        ModelError: The graph is not valid ONNX, or uses the domain `ai.moonpoly` for other things.
    """
    nodes = list(walk(model))
    domain.refuse_foreign_use(model, (node for _, _, node in nodes))
    typed = typed_views(model, initializers.external_data)
    views = typed.by_number
    trained = bool(model.training_info)  # which names initializers
    fusions = [r for r in FUSIONS if r.name in enabled and not (trained and r.changes_weights)]
    values = values_of_graphs(model, views) if fusions else []
    body_opset = _body_opset(model)
    overridden = frozenset(f.name for f in model.functions if domain.is_standard(f.domain))
    own = {(f.domain, f.name) for f in model.functions if f.domain == CONTRIB}
    report = []
    for number, (where, function, node) in enumerate(nodes):
        rule = None if (node.domain, node.op_type) in own else _rule_for(node, function)
        if rule is None:
            continue
        holder = model if function is None else function
        scope = Scope(
            opset=domain.imported_version(holder.opset_import),
            body_opset=body_opset,
            static=static,
            overridden=overridden,
        )
        refusal = _refuse(node, views[number], rule, enabled, scope)
        report.append(
            Entry(
                name=node.name,
                op_type=node.op_type,
                where=where,
                output=next(iter(node.output), ""),
                rule=rule.name,
                refusal=refusal,
            )
        )
        if refusal is None:
            for view in views[number]:
                rule.rewrite(view)
            _write_back(views[number], node, rule)
            domain.import_into(holder.opset_import)
    if fusions and body_opset is not None and any(n.domain == domain.DOMAIN for _, _, n in nodes):
        trees = forest(model, initializers)
        report += fuse(trees, values, typed.by_graph, fusions, model, body_opset)
    if any(entry.taken for entry in report) and body_opset is not None:
        domain.declare(model, sorted(_used(model)), body_opset)
    return tuple(report)


def _used(model: onnx.ModelProto) -> set[str]:
    """The operators of ours that the model calls."""
    return {node.op_type for _, _, node in walk(model) if node.domain == domain.DOMAIN}


def _rule_for(node: onnx.NodeProto, function: onnx.FunctionProto | None) -> Rule | None:
    """The rule whose candidate a node is or was; None for all other nodes."""
    if function is not None and function.domain == domain.DOMAIN:
        return None  # the body of an operator of ours
    if node.domain == domain.DOMAIN:
        return _RULE_OF["", OPERATORS[node.op_type].standard]
    return _RULE_OF.get(("" if domain.is_standard(node.domain) else node.domain, node.op_type))


def _body_opset(model: onnx.ModelProto) -> int | None:
    """The main graph's ai.onnx version or, if only functions use ai.onnx, the newest of theirs."""
    version = domain.imported_version(model.opset_import)
    if version is not None:
        return version
    imported = (domain.imported_version(function.opset_import) for function in model.functions)
    return max((version for version in imported if version is not None), default=None)


def _refuse(
    node: onnx.NodeProto,
    views: list[ir.Node],
    rule: Rule,
    enabled: frozenset[str],
    scope: Scope,
) -> Refusal | None:
    if node.domain == domain.DOMAIN:
        return Refusal(Reason.ALREADY_REWRITTEN, "an ai.moonpoly node already")
    if rule.name not in enabled:
        return Refusal(Reason.DISABLED, f"rule {rule.name!r} is switched off")
    if not views:
        return Refusal(
            Reason.NEVER_CALLED, "its function is never called, so its types are unknown"
        )
    refusals = []
    for view in views:
        for attribute in node.attribute:
            bound = view.attributes.get(attribute.name)
            if attribute.ref_attr_name and (bound is None or bound.is_ref()):
                return Refusal(
                    Reason.UNBOUND_ATTRIBUTE,
                    f"a call of its function gives no value for {attribute.ref_attr_name!r}",
                )
        refusals.append(rule.check_original(node, view, scope) or rule.check(view, scope))
    # One dynamic call is enough to profit; any other refusal stands for all calls.
    binding = [r for r in refusals if r and r.reason is not Reason.STATIC]
    if binding:
        return binding[0]
    return rule.refuse_calls(node, views) if None in refusals else refusals[0]


def _write_back(views: list[ir.Node], node: onnx.NodeProto, rule: Rule) -> None:
    """Carries a rewritten view over to the node of the model, attribute references included."""
    view = views[0]
    node.domain = view.domain
    node.op_type = view.op_type
    present = {attribute.name for attribute in node.attribute}
    node.attribute.extend(
        ir.to_proto(attribute) for name, attribute in view.attributes.items() if name not in present
    )
    rule.adapt(node, views)
    passes = [name for name in domain.rules_of(node) if name in attention_passes.NAMES]
    stale = [entry for entry in node.metadata_props if entry.key == domain.RULE_KEY]
    for entry in stale:
        node.metadata_props.remove(entry)
    domain.stamp(node, *passes, rule.name)
