"""ONNX Runtime sessions for the drivers: ours and plain, with torch tensors bound in place."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

import moonpoly_ort
from moonpoly_ort.registering import Precision

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
ELEMENTS = {
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float32: onnx.TensorProto.FLOAT,
    torch.int64: onnx.TensorProto.INT64,
}


@dataclass(frozen=True)
class Provider:
    """Where sessions run: an execution provider and, for CUDA, the device and the pack."""

    name: str = CUDA
    ordinal: int = 0
    pack: Path | None = None

    @property
    def is_cuda(self) -> bool:
        return self.name == CUDA

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.ordinal}" if self.is_cuda else "cpu"

    def listed(self, **options: str) -> list[Any]:
        """The `providers` argument of a session, with options for CUDA."""
        if not self.is_cuda:
            return [self.name]
        return [(self.name, {"device_id": str(self.ordinal), **options})]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.ordinal)


def session_options(optimize: bool = True) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def plain_session(
    model: bytes | Path,
    provider: Provider,
    options: ort.SessionOptions | None = None,
    **provider_options: str,
) -> ort.InferenceSession:
    """ONNX Runtime on the model as it is, without the library."""
    source = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(
        source, options or session_options(), providers=provider.listed(**provider_options)
    )


def our_session(
    model: bytes | Path,
    provider: Provider,
    options: ort.SessionOptions | None = None,
    precision: Precision = "tf32",
    cuda_graphs: int | moonpoly_ort.GraphLimits = 0,
    rules: Sequence[str] | None = None,
    vendor: bool | None = None,
    **provider_options: str,
) -> ort.InferenceSession:
    """`moonpoly_ort.InferenceSession`: the model is rewritten, by `rules` if they are named, and
    on CUDA the library registered.

    Raises where the library cannot be used on CUDA: a quiet fallback would measure ONNX Runtime
    itself.
    """
    source: str | bytes = str(model) if isinstance(model, Path) else model
    if rules is not None:
        source = moonpoly_ort.rewrite(source, rules=rules).model.SerializeToString()
    return moonpoly_ort.InferenceSession(
        source, options or session_options(), providers=provider.listed(**provider_options),
        backend="cuda" if provider.is_cuda else "auto", precision=precision, pack=provider.pack,
        vendor=vendor, cuda_graphs=cuda_graphs if provider.is_cuda else 0,
        rewrite=rules is None,
    )  # fmt: skip


def every_rule() -> tuple[str, ...]:
    """The names of all rules, those on request among them."""
    return tuple(rule.name for rule in moonpoly_ort.list_rules())


class Bound:
    """A session whose inputs and outputs are torch tensors on its device; `run` is synchronous.

    Outputs named in `outputs` are written in place (which also works for bf16, unknown to numpy);
    the others are allocated by ONNX Runtime and read back with `fetch`.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        provider: Provider,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.session = session
        self.binding = session.io_binding()
        self._keep = (dict(inputs), dict(outputs or {}))
        place = ("cuda", provider.ordinal) if provider.is_cuda else ("cpu", 0)
        for name, tensor in inputs.items():
            self.binding.bind_input(
                name, *place, ELEMENTS[tensor.dtype], list(tensor.shape), tensor.data_ptr()
            )
        for meta in session.get_outputs():
            target = (outputs or {}).get(meta.name)
            if target is None:
                self.binding.bind_output(meta.name, *place)
            else:
                self.binding.bind_output(
                    meta.name, *place, ELEMENTS[target.dtype], list(target.shape), target.data_ptr()
                )
        provider.synchronize()  # the inputs may still be on their way on torch's stream

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def fetch(self) -> list[np.ndarray]:
        """Runs once and returns the outputs as numpy arrays, in the model's order."""
        self.run()
        return list(self.binding.copy_outputs_to_cpu())


def executed_nodes(
    model: bytes | Path,
    provider: Provider,
    feeds: Mapping[str, np.ndarray],
    *,
    ours: bool,
) -> Counter[tuple[str, str]]:
    """The nodes that one run executes, by (operator, provider), from ONNX Runtime's profile."""
    with tempfile.TemporaryDirectory() as folder:
        options = session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        make = our_session if ours else plain_session
        session = make(model, provider, options)
        session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text())
    counts: Counter[tuple[str, str]] = Counter()
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") == "Node" and str(event["name"]).endswith("_kernel_time"):
            counts[arguments.get("op_name", "?"), arguments.get("provider", "?")] += 1
    return counts


def count_of(counts: Counter[tuple[str, str]], operators: Sequence[str]) -> int:
    """How many executed nodes are of one of these operators, on any provider."""
    return sum(number for (operator, _), number in counts.items() if operator in operators)
