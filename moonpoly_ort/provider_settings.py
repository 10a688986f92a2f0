"""What a session asks of the CUDA provider beside what its caller does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import dependencies

__all__ = ["ANY_LENGTHS", "CHANGING_SHAPES", "CUDA", "for_changing_shapes", "with_settings"]

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.InferenceSession")

CUDA = "CUDAExecutionProvider"

# A sum of bits, one for each way in which ONNX Runtime computes fused attention: flash 1, memory
# efficient 2, TensorRT's 4, cuDNN's 8, unfused 16, TensorRT's flash 32 and cross 64. These are all
# but cuDNN's, which onnxruntime prefers from sm_90 on where nothing is asked for: it makes a plan
# for every new length: 50 ms a run of a BERT-base at batch 8 on an H200, 2.3 when it comes again.
CHANGING_SHAPES = {"sdpa_kernel": str(1 + 2 + 4 + 16 + 32 + 64)}

# Without memory-efficient attention, which fails for some lengths of keys behind a cache
# (`graph_passes/aligned_keys.py`).
ANY_LENGTHS = {"sdpa_kernel": str(1 + 4 + 16 + 32 + 64)}


def with_settings(
    providers: Sequence[Any] | None,
    provider_options: Sequence[Mapping[Any, Any]] | None,
    settings: Mapping[str, str],
) -> list[tuple[str, dict[Any, Any]]]:
    """A session's providers, each with its options, and CUDA's with `settings` on top."""
    listed = []
    for i, entry in enumerate(providers or ort.get_available_providers()):
        name, own = entry if isinstance(entry, tuple) else (entry, None)
        options = dict(own or (provider_options[i] if provider_options else {}))
        listed.append((name, options | dict(settings) if name == CUDA else options))
    return listed


def for_changing_shapes(
    providers: Sequence[Any] | None,
    provider_options: Sequence[Mapping[Any, Any]] | None,
    *,
    exposed: bool = False,
) -> list[tuple[str, dict[Any, Any]]]:
    """The providers with what suits shapes that do not repeat, where the caller did not choose.

    exposed: the model's attention would fail for some lengths if it were memory-efficient.
    """
    settings = ANY_LENGTHS if exposed else CHANGING_SHAPES
    listed = with_settings(providers, provider_options, {})
    return [(name, settings | options if name == CUDA else options) for name, options in listed]
