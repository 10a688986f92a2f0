"""Rewriting a model: standard MatMul, Gemm and Conv nodes become `ai.moonpoly` nodes.

    result = rewrite("model.onnx", "rewritten.onnx")
    for entry in result.report:
        print(entry.where, entry.name, entry.rule if entry.taken else entry.detail)

The rewritten model runs in any ONNX Runtime: each new node carries the standard operator as its
function body. Everything else in the model stays as it was. See docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import onnx

from . import model_files, model_writing, optimizing
from .graph_passes import pipeline
from .graph_passes.report import Entry, Reason, Refusal

__all__ = ["Entry", "Reason", "Refusal", "RewriteResult", "RuleInfo", "list_rules", "rewrite"]


@dataclasses.dataclass(frozen=True)
class RuleInfo:
    """A rule that `rewrite` applies: its name, the operator it replaces, and how."""

    name: str
    op_type: str
    transformation: str


def list_rules() -> tuple[RuleInfo, ...]:
    """The rules, in the order they are applied."""
    return tuple(RuleInfo(*rule) for rule in pipeline.described())


@dataclasses.dataclass(frozen=True)
class RewriteResult:
    """What `rewrite` returns.

    Attributes:
        report: One entry per MatMul, Gemm, Conv and ConvTranspose node and per such node of ONNX
            Runtime's own, in the model's order: the main graph with its subgraphs, then the
            functions. Behind them one per node that a fusing rule absorbed or nearly did.
        output: The file written, or None.
    """

    report: tuple[Entry, ...]
    output: Path | None
    _source: model_files.Source = dataclasses.field(repr=False)

    @property
    def model(self) -> onnx.ModelProto:
        """The rewritten model. External data stays on disk, relative to `base_dir`."""
        return self._source.model

    @property
    def base_dir(self) -> Path | None:
        """The folder that locations of external data in `model` are relative to, if known."""
        return self._source.folder

    @property
    def has_external_data(self) -> bool:
        """Whether some of the weights are in other files."""
        return self._source.has_external_data

    @property
    def taken(self) -> tuple[Entry, ...]:
        """The entries of the nodes that were rewritten."""
        return tuple(entry for entry in self.report if entry.taken)

    def save(self, output: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes the rewritten model, as `rewrite(model, output)` does."""
        return model_writing.write(self._source, output, overwrite=overwrite)


def rewrite(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    static: bool = False,
    rules: Iterable[str] | None = None,
    disable: Iterable[str] = (),
    overwrite: bool = False,
    base_dir: str | os.PathLike[str] | None = None,
    optimize: str | None = None,
) -> RewriteResult:
    """Replaces the MatMul, Gemm, Conv and ConvTranspose nodes of a model whose shapes vary by
    `ai.moonpoly` nodes.

    Taken is every node of dtype fp16, bf16 or fp32, opset 7 or later, with an activation that has
    a dynamic or unknown dimension: in the main graph, in subgraphs and in model-local functions. A
    node that cannot be proven safe stays as it is, with its reason in the report. Rewriting a
    rewritten model changes nothing.

    A BatchNormalization behind a convolution that is taken is folded into its weights, the one
    change that moves the last bits of results; `disable=["batch_normalization"]` leaves it out.

    Args:
        model: A path, a serialized model, or a ModelProto (which is copied, not changed).
        output: Where to write the rewritten model; a file that exists is replaced. External data is
            copied into the same folder under its own names, in pieces, unless it is there already.
            Nothing appears under these names before all of it is complete.
        static: Take nodes whose shapes are all known, too.
        rules: Names of the rules to apply (`list_rules`); None: all of them.
        disable: Names of rules to leave out, and of passes that `optimize` would run behind an
            optimizer (see docs/optimizers.md).
        overwrite: Replace data files in the output's folder that have other content.
        base_dir: Folder of the external data of a model that is not given as a path.
        optimize: A graph optimizer to run first, which fuses attention, normalization and Gelu into
            ONNX Runtime's own operators: `auto`, `onnxscript`, `ort` or `ort:TYPE`, or one of these
            with passes of ours behind it, `onnxscript-packed` (see docs/optimizers.md). The result
            runs in ONNX Runtime only.

    Raises:
        ArgumentError: `optimize` is not accepted, or the type of the model is not known.
        MissingDependencyError, OptimizerError: The optimizer is not installed, or it failed, or
            what it made is not the same model.
        ModelError: The model cannot be read, is not valid ONNX, lacks its external data when
            `output` is given (else, what needed it is a near miss), or uses `ai.moonpoly` for other
            things.
        OutputError: `output` is the input, or cannot be written.
        ProblemError: A name in `rules` or `disable` is not that of a rule.
        TypeError: `model` is of another type.
    """
    unwanted = pipeline.names(disable)
    enabled = pipeline.select(rules, unwanted)
    source = optimizing.optimized(model_files.read(model, base_dir), optimize, unwanted)
    report = pipeline.apply(source.light, source, static=static, enabled=enabled)
    written = None if output is None else model_writing.write(source, output, overwrite=overwrite)
    return RewriteResult(report, written, source)
