"""Imports the kernel sources, compiled or interpreted.

Whether `triton.jit` compiles or interprets is decided when a kernel module is imported. So that
one process can do both, the sources are imported once per mode, under two package names, whatever
TRITON_INTERPRET says.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from functools import cache
from pathlib import Path
from typing import Any

from .conv_spec import is_transposed, taps
from .spec import Dtype, Family, KernelSpec

# The interpreter replaces functions of `triton.language` while a kernel runs, so it and a
# compilation exclude each other, and so do two interpretations.
TRITON = threading.Lock()
_IMPORT = threading.Lock()


@cache
def kernel(source: str, *, interpret: bool = False) -> Any:
    """The Triton function that `KernelSpec.source` names: a `triton.JITFunction`, or an interpreted
    function.

    Raises ImportError where Triton is not installed, ValueError to interpret `gemm_ws`: Gluon has
    no interpreter, and `spec.interpreted` names the kernel that stands in.
    """
    import triton

    if interpret and source.startswith("gemm_ws"):
        raise ValueError("gemm_ws cannot be interpreted: take the one that spec.interpreted names")
    package = __package__ + (".interpreted" if interpret else ".compiled")
    with _IMPORT, triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(Path(__file__).parent)]
            sys.modules[package] = module
        return getattr(importlib.import_module(f"{package}.{source}"), source)


def constants(
    spec: KernelSpec, *, rounded: str = "none", dependent_launch: bool = False
) -> dict[str, Any]:
    """The compile-time arguments of a kernel; `rounded` names the TF32 factors it rounds itself."""
    if spec.family.convolves:
        return _conv_constants(spec, rounded)
    early = {"DEPENDENT_LAUNCH": dependent_launch}
    if spec.family is Family.COPY_PADDED:
        return {"BM": spec.bm, "BN": spec.bn, "TRANS_A": spec.trans_a, **early}
    common: dict[str, Any] = {
        "BM": spec.bm, "BN": spec.bn, "BK": spec.bk, "GROUP_M": spec.group_m,
    }  # fmt: skip
    if spec.source == "gemm_ws_x3":
        return common | {
            "TRANS_A": spec.trans_a, "TRANS_B": spec.trans_b, "SWAP": spec.swap,
            "STREAM_K": spec.split_k, "CONSUMERS": spec.consumers, "STAGES": spec.stages,
        }  # fmt: skip
    if spec.family is Family.GEMM_DOT:
        return common | {"STAGES": spec.stages, **early}
    if spec.family is Family.GEMV:
        return common | {
            "STAGES": spec.stages, "SPLIT_K": spec.split_k, "AT_ONCE": spec.slices_at_once, **early,
        }  # fmt: skip
    common |= {"TRANS_A": spec.trans_a, "TRANS_B": spec.trans_b}
    if spec.family is Family.GEMM_SHALLOW:
        return common | early
    if spec.family is Family.GEMM_WS:
        return common | {
            "STREAM_K": spec.split_k and not spec.sliced,
            "CONSUMERS": spec.consumers, "STAGES": spec.stages,
            "DEPENDENT_LAUNCH": dependent_launch, "SLICED": spec.sliced,
            "PINGPONG": spec.pingpong,
        }  # fmt: skip
    common |= {
        "SPLIT_K": spec.split_k, "SWAP": spec.swap, "BIAS_MATRIX": spec.bias_matrix,
        "PRECISION": "tf32x3" if spec.tf32x3 else str(spec.precision), "ROUND": rounded,
        "AT_ONCE": spec.slices_at_once, "CHUNKS": spec.chunks,
    }  # fmt: skip
    return common | early


def _conv_constants(spec: KernelSpec, rounded: str) -> dict[str, Any]:
    if spec.family.depthwise:
        return {
            "BM": spec.bm, "BN": spec.bn, "GROUP_M": spec.group_m,
            "TRANSPOSED": is_transposed(spec.family), "WIDTH": spec.bk if spec.bk > 1 else 0,
            "ROWS": spec.stages,
        }  # fmt: skip
    return {
        "BM": spec.bm, "BN": spec.bn, "BK": spec.bk, "GROUP_M": spec.group_m,
        "TAPS": taps(spec.family), "TRANSPOSED": is_transposed(spec.family),
        "PACKED": spec.align_a == 16, "PREFETCH": spec.dtype is not Dtype.F32,
        "SPLIT_K": spec.split_k, "SWAP": spec.swap, "PRECISION": str(spec.precision),
        "ROUND": rounded, "UNIT": 16 // spec.dtype.bytes, "CHUNKS": spec.chunks,
    }  # fmt: skip
