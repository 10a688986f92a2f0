"""What must hold for every model that is rewritten, one function per promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from moonpoly_ort.graph_passes import pipeline
from numpy.typing import NDArray

import moonpoly_ort
from moonpoly_ort.sizing import all_nodes
from tests.corpus.comparing import Precision, require_close, require_same_bits, require_same_form
from tests.corpus.interface import require_only_taken, standard_type
from tests.corpus.references import outputs_of, plain_session

Array = NDArray[Any]
Feeds = Iterable[Mapping[str, Array]]

FOLDING = "batch_normalization"
"""The rule that changes weights, and so the bits of results."""

ALL_RULES = tuple(rule.name for rule in pipeline.RULES)
"""The rules that take one node for one."""

FUSING_RULES = tuple(rule.name for rule in moonpoly_ort.list_rules() if rule.name != FOLDING)
"""Those and the rules that fuse nodes."""


@dataclass(frozen=True)
class Rewritten:
    """A model before and after `moonpoly_ort.rewrite`, as files and in memory.

    taken: the nodes that were taken. refused: how many candidates of which operator type were left
    for which reason.
    """

    before: Path
    after: Path
    original: onnx.ModelProto
    model: onnx.ModelProto
    taken: tuple[onnx.NodeProto, ...]
    refused: Mapping[tuple[str, str], int]

    @property
    def taken_types(self) -> Counter[str]:
        """The operator types that the taken nodes had."""
        return Counter(map(standard_type, self.taken))

    @property
    def taken_outputs(self) -> list[str]:
        return sorted(node.output[0] for node in self.taken)


def rewrite_file(path: Path, folder: Path, **options: Any) -> Rewritten:
    """Rewrites `path` into `folder`, by all rules that keep weights unless `options` say which;
    requires that only taken nodes changed, and a true report.
    """
    after = folder / "rewritten.onnx"
    options.setdefault("rules", ALL_RULES)
    result = moonpoly_ort.rewrite(path, after, **options)
    original = onnx.load(path, load_external_data=False)
    model = onnx.load(after, load_external_data=False)
    assert model == result.model
    taken = require_only_taken(original, model)
    reported = sorted((e.op_type, e.output) for e in result.report if e.taken)
    assert reported == sorted((standard_type(node), node.output[0]) for node in taken)
    refused = [entry for entry in result.report if not entry.taken]
    assert all(entry.detail for entry in refused)
    counts = Counter((entry.op_type, str(entry.reason)) for entry in refused)
    return Rewritten(path, after, original, model, tuple(taken), counts)


def check_valid(rewritten: Rewritten) -> None:
    """onnx.checker accepts the rewritten model wherever it accepts the original."""
    for full in (False, True):
        try:
            onnx.checker.check_model(rewritten.before, full_check=full)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            continue
        onnx.checker.check_model(rewritten.after, full_check=full)


def check_idempotent(rewritten: Rewritten, folder: Path, **options: Any) -> None:
    """Rewriting the rewritten model takes nothing and changes no byte."""
    again = folder / "again.onnx"
    options.setdefault("rules", ALL_RULES)
    result = moonpoly_ort.rewrite(rewritten.after, again, **options)
    assert not [entry for entry in result.report if entry.taken]
    assert again.read_bytes() == rewritten.after.read_bytes()


def check_fixed_point(path: Path) -> None:
    """All rules find all there is in one rewrite, and the report names nodes that are there."""
    first = moonpoly_ort.rewrite(path)
    again = moonpoly_ort.rewrite(first.model, base_dir=first.base_dir)
    assert not again.taken
    assert again.model == first.model
    outputs = {output for node in _nodes(first.model) for output in node.output}
    assert outputs >= {entry.into for entry in first.taken if entry.into}


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for body in (model.graph, *model.functions) for node in all_nodes(body.node)]


def check_without_library(rewritten: Rewritten, feeds: Feeds) -> None:
    """Plain ONNX Runtime gives the same bits before and after: the function bodies are inlined."""
    for optimize in (False, True):
        before = plain_session(rewritten.before, optimize=optimize)
        after = plain_session(rewritten.after, optimize=optimize)
        assert _interface(before) == _interface(after)
        for feed in feeds:
            require_same_bits(outputs_of(after, feed), outputs_of(before, feed))


def check_session(rewritten: Rewritten, feeds: Feeds) -> None:
    """`moonpoly_ort.InferenceSession` on the original: the bits of onnxruntime's on the CPU.

    Where it folds weights, they are those of onnxruntime on the folded model; where it fuses nodes,
    those on the rewritten one, whose function bodies compute what `check_fused` compares.
    """
    before = plain_session(rewritten.before)
    session = moonpoly_ort.InferenceSession(
        str(rewritten.before), _plain_options(), providers=["CPUExecutionProvider"]
    )
    assert _interface(session) == _interface(before)
    changing = {FOLDING, *(fusion.name for fusion in pipeline.FUSIONS)}
    if any(entry.taken and entry.rule in changing for entry in session.moonpoly_report or ()):
        before = plain_session(moonpoly_ort.rewrite(rewritten.before).model)
    for feed in feeds:
        require_same_bits(outputs_of(session, feed), outputs_of(before, feed))


def check_fused(rewritten: Rewritten, feeds: Feeds, limit: float) -> None:
    """With all rules but folding: plain ONNX Runtime computes the same but for roundings."""
    before = plain_session(rewritten.before)
    after = plain_session(moonpoly_ort.rewrite(rewritten.before, rules=FUSING_RULES).model)
    for feed in feeds:
        wanted = outputs_of(before, feed)
        check_outputs(outputs_of(after, feed), wanted, wanted, limit)


def interpreted(path: Path, feeds: Feeds, precision: Precision = "ieee") -> list[dict[str, Array]]:
    """Outputs of the original model with every product run by the kernels in the interpreter."""
    session = moonpoly_ort.InferenceSession(
        str(path),
        _plain_options(),
        providers=["CPUExecutionProvider"],
        backend="interpreter",
        precision=precision,
    )
    return [outputs_of(session, feed) for feed in feeds]


def check_outputs(
    got: Mapping[str, Array],
    exact: Mapping[str, Array],
    plain: Mapping[str, Array] | None,
    limit: float,
) -> None:
    """Close to the float64 outputs, and of the form of plain ONNX Runtime's (None: unknown)."""
    require_close(got, exact, limit)
    if plain is not None:
        require_same_form(got, plain)


def _plain_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


def _interface(session: Any) -> Any:
    values = [
        [(value.name, value.type, value.shape) for value in kind]
        for kind in (session.get_inputs(), session.get_outputs())
    ]
    metadata = session.get_modelmeta()
    return values, metadata.custom_metadata_map, metadata.producer_name, metadata.graph_name


def largest_k(model: onnx.ModelProto, feeds: Feeds) -> int:
    """An upper bound for the inner size of any product: the longest side of any weight or input."""
    sides = [1]
    for tensor in model.graph.initializer:
        sides += tensor.dims
    for feed in feeds:
        for array in feed.values():
            sides += np.shape(array)
    return max(sides)
