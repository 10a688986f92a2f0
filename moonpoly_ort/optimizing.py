"""Other projects' graph optimizers, run in front of the rewrite: `optimize=` of `rewrite` and of
`InferenceSession`.

They fuse what is not a product (attention, layer normalization, Gelu) into ONNX Runtime's own
`com.microsoft` operators; the products that they leave are then rewritten. See docs/optimizers.md.

Their result is used only if it is the same model from outside (inputs, outputs, types, symbolic
dimensions) and ONNX Runtime takes its graph as valid.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import onnx
from onnx import GraphProto, ValueInfoProto

from . import dependencies
from .errors import ArgumentError, MoonPolyError, OptimizerError
from .graph_passes import attention_passes, domain
from .graph_passes.typed_graph import walk
from .model_files import Source

log = logging.getLogger("moonpoly_ort")

MICROSOFT = "com.microsoft"
UNPACKED = "-mha"
_PASSES = {
    "-lean": attention_passes.LEAN,
    UNPACKED: attention_passes.UNPACKED,
    "-packed": attention_passes.PACKED,
}
"""What runs behind an optimizer, by the suffix of its name."""

# Families whose graphs ONNX Runtime's optimizer treats like one of its own model types.
_TYPES_OF_FAMILIES = {"roberta": "bert", "distilbert": "bert", "electra": "bert", "deit": "vit"}

_SUFFIXES = "|".join(_PASSES)
_ACCEPTED = re.compile(rf"auto|(onnxscript|ort)({_SUFFIXES})?|ort({_SUFFIXES})?:\w+")
_FAMILY = re.compile(r"transformers\.models\.(\w+)\.modeling_")

# Initializers up to this size stay in the graph that is checked: their values give shapes.
_CHECKED_BYTES = 1 << 12


def check(how: object) -> None:
    """Raises `ArgumentError` for a value of `optimize` that is not accepted."""
    if how is None or (isinstance(how, str) and _ACCEPTED.fullmatch(how)):
        return
    raise ArgumentError(
        f"optimize = {how!r}; accepted: None, 'auto', 'onnxscript', 'ort', 'ort:TYPE' with a model "
        f"type of ONNX Runtime's optimizer ('ort:bert'), and all but 'auto' with one of "
        f"{', '.join(_PASSES)} behind the library's name ('onnxscript-packed')."
    )


def optimized(source: Source, how: str | None, disable: Collection[str] = ()) -> Source:
    """The model as an optimizer leaves it; for None, and where `auto` finds none, as it came.

    Args:
        source: The model, not rewritten yet. Its external data is not copied.
        how: See docs/optimizers.md. `auto` takes onnxscript's fusions, else those of ONNX Runtime,
            whichever is installed, knows the model and leaves it whole, takes the products out
            of attention and cleans up around it; it never fails for an optimizer's sake.
        disable: Names of passes over attention to leave out; others say nothing here.

    Raises:
        ArgumentError: `how` is not accepted, or ONNX Runtime's optimizer does not know the type.
        MissingDependencyError: The library is not installed.
        OptimizerError: It failed, or what it made is not the same model or no valid graph.
    """
    check(how)
    if how is None:
        return source
    _refuse_rewritten(source)
    if how != "auto":
        return _run(source, how, disable)
    reasons = []
    for candidate in ("onnxscript-mha", "ort-mha"):
        try:
            result = _run(source, candidate, disable)
        except MoonPolyError as error:
            log.info("optimize='auto' leaves out %s: %s", candidate, error)
            reasons.append(str(error))
            continue
        if fused := _fused(result.light):
            log.info("optimize='auto' took %s: %s", candidate, dict(fused))
            return result
        reasons.append(f"{candidate} fuses nothing in this model.")
    log.warning("optimize='auto' changed nothing. %s", " ".join(reasons))
    return source


def _split(how: str) -> tuple[str, str, str]:
    """Library, suffix and model type of a value of `optimize`."""
    library, _, model_type = how.partition(":")
    name, dash, suffix = library.partition("-")
    return name, dash + suffix, model_type


def _refuse_rewritten(source: Source) -> None:
    if any(node.domain == domain.DOMAIN for _, _, node in walk(source.light)):
        raise OptimizerError(
            f"the model has {domain.DOMAIN} nodes already, whose functions an optimizer would "
            "inline. Optimize the model that it was rewritten from."
        )


def _run(source: Source, how: str, disable: Collection[str]) -> Source:
    library, suffix, model_type = _split(how)
    dependencies.load("onnxruntime", f"optimize={how!r}")
    before = _interface(source.light)
    run = _with_onnxscript if library == "onnxscript" else _with_onnxruntime
    model = run(source, how, suffix, model_type)
    if suffix:
        attention_passes.apply(model, _PASSES[suffix], disable)
    _declare(model)
    _forget_inferred(source.light.graph, model.graph.output)
    after = _interface(model)
    if after != before:
        was = [value for value in before if value not in after]
        now = [value for value in after if value not in before]
        raise OptimizerError(
            f"optimize={how!r} was refused: {library} changed the model's inputs or outputs from "
            f"{was or before} to {now or after}. Use another optimizer or none."
        )
    _refuse_invalid(model, how)
    return Source(model, source.path, source.folder)


def _with_onnxscript(source: Source, how: str, _suffix: str, _model_type: str) -> onnx.ModelProto:
    purpose = f"optimize={how!r}"
    ir = dependencies.load("onnx_ir", purpose)
    fusions = dependencies.load("onnxscript.rewriter.ort_fusions", purpose)
    try:
        model = ir.from_proto(source.model)
        if source.folder is not None:
            ir.external_data.set_base_dir(model.graph, source.folder)
        model, _ = fusions.optimize_for_ort(model)
        result: onnx.ModelProto = ir.to_proto(model)
    except Exception as error:  # whatever a rule of theirs stumbles over
        raise _failed(how, error) from error
    return result


def _with_onnxruntime(source: Source, how: str, suffix: str, model_type: str) -> onnx.ModelProto:
    purpose = f"optimize={how!r}"
    optimizer = dependencies.load("onnxruntime.transformers.optimizer", purpose)
    options_module = dependencies.load("onnxruntime.transformers.fusion_options", purpose)
    known = sorted(optimizer.MODEL_TYPES)
    wanted = model_type or _detected(source.light, known)
    if wanted not in known:
        said = f"does not know the model type {wanted!r}" if wanted else "needs a model type"
        raise ArgumentError(
            f"optimize={how!r}: ONNX Runtime's optimizer {said}"
            + ("" if wanted else ", and the model's metadata name none that it knows")
            + f". Say 'ort{suffix}:TYPE' with one of {', '.join(known)}."
        )
    options = options_module.FusionOptions(wanted)
    # A mask as one length a row, its default for BERT, holds only for padding on the right.
    options.use_raw_attention_mask(True)
    options.use_multi_head_attention = suffix == UNPACKED
    model = onnx.ModelProto()
    model.CopyFrom(source.model)  # which it changes in place
    try:
        if source.has_external_data:
            onnx.load_external_data_for_model(model, str(source.folder or ""))
        # Level 0: the fusions alone. Level 1 needs torch, and hid Gelu and SkipLayerNormalization
        # of an fp16 BERT from the fusions behind casts (onnxruntime 1.32).
        done = optimizer.optimize_model(model, wanted, optimization_options=options, opt_level=0)
        result: onnx.ModelProto = done.model
    except Exception as error:
        raise _failed(how, error) from error
    return result


def _failed(how: str, error: Exception) -> OptimizerError:
    return OptimizerError(
        f"optimize={how!r}: the optimizer failed with {type(error).__name__}: {error}. "
        "Use another one or none."
    )


def _detected(model: onnx.ModelProto, known: list[str]) -> str:
    """The model type by the transformers classes that torch's exporter names; empty if none."""
    found: Counter[str] = Counter()
    for _, _, node in walk(model):
        for entry in node.metadata_props:
            if entry.key == "namespace":
                found.update(set(_FAMILY.findall(entry.value)))
    for family, _ in found.most_common():
        model_type = _TYPES_OF_FAMILIES.get(family, family)
        if model_type in known:
            return model_type
    return ""


def _declare(model: onnx.ModelProto) -> None:
    """Imports the domain of the fused operators, which ONNX Runtime's optimizer leaves out."""
    used = any(node.domain == MICROSOFT for _, _, node in walk(model))
    if used and all(entry.domain != MICROSOFT for entry in model.opset_import):
        model.opset_import.add(domain=MICROSOFT, version=1)


def _forget_inferred(given: GraphProto, made: Sequence[ValueInfoProto]) -> None:
    """Outputs keep what was declared of them, whatever the optimizer infers and writes down.

    That is no shape at all, or names that no input has, which torch's TorchScript exporter makes
    up for dimensions that it takes to be unknown. A name that an input has means its size: one
    that became a number stays, and the model is refused.
    """
    known = {dim.dim_param for value in given.input for dim in value.type.tensor_type.shape.dim}
    for old, new in zip(given.output, made, strict=False):
        if old.name != new.name or not old.type.HasField("tensor_type"):
            continue
        if not old.type.tensor_type.HasField("shape"):
            new.type.tensor_type.ClearField("shape")
            continue
        before, after = (value.type.tensor_type.shape.dim for value in (old, new))
        if len(before) != len(after):
            continue
        for was, now in zip(before, after, strict=True):
            if was.dim_param not in known:
                now.CopyFrom(was)


def _fused(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for _, _, node in walk(model) if node.domain == MICROSOFT)


def _interface(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Names and types, symbolic dimensions included, of the inputs and outputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    values = [*inputs, *model.graph.output]
    return [(value.name, " ".join(str(value.type).split())) for value in values]


def _refuse_invalid(model: onnx.ModelProto, how: str) -> None:
    """Has ONNX Runtime check the graph; operators without a CPU kernel (fp16) are no fault.

    onnxscript 0.7.2, for one, puts a MultiHeadAttention of rank 3 in front of the rank-2 Gemm of
    a GPT-2; neither `onnx.checker` nor onnx's strict shape inference sees it. Nor does ONNX Runtime
    where the optimizer left the shape that the value had before: it merges the two and goes on,
    and then cannot run the node. So shapes that are written down are left out of what it checks.
    """
    ort: Any = dependencies.load("onnxruntime", f"optimize={how!r}")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        content = _without_weights(model).SerializeToString()
        ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no common base for its errors
        if type(error).__name__ == "NotImplemented":
            return
        raise OptimizerError(
            f"optimize={how!r} was refused: ONNX Runtime does not take what the optimizer made: "
            f"{error}. Use another one or none."
        ) from error


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for checking: its large weights are inputs, so that nothing of their size is read or
    copied, and shapes of values between nodes are left to be inferred."""
    light = onnx.ModelProto()
    graph = model.graph
    small = [t for t in graph.initializer if not _is_large(t)]
    for field in ("ir_version", "producer_name"):
        setattr(light, field, getattr(model, field))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = graph.name
    light.graph.node.extend(graph.node)
    light.graph.initializer.extend(small)
    light.graph.output.extend(graph.output)
    large = {t.name: t for t in graph.initializer if _is_large(t)}
    light.graph.input.extend(value for value in graph.input if value.name not in large)
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        for name, tensor in large.items()
    )
    return light


def _is_large(tensor: onnx.TensorProto) -> bool:
    external = tensor.data_location == onnx.TensorProto.EXTERNAL
    return external or tensor.ByteSize() > _CHECKED_BYTES
