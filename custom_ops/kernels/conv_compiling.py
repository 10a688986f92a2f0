"""What `compiling` tells Triton of the arguments of conv kernels. A file of its own, so that a pack
without them keeps its content key when it changes.
"""

from __future__ import annotations

from .conv_spec import taps
from .pack_format import Param
from .signature import PARAMETERS
from .spec import KernelSpec


def signature(spec: KernelSpec, element: str) -> dict[str, str]:
    """The type of each run-time argument; `element` is Triton's name for the kernel's dtype."""

    def type_of(param: Param) -> str:
        if Param.CONV_X <= param <= Param.CONV_BIAS or param is Param.PTR_RESIDUAL:
            return f"*{element}"
        if param is Param.PTR_WORKSPACE:
            return "*fp32"
        if param is Param.PTR_COUNTERS:
            return "*i32"
        if param in (Param.ACT_ALPHA, Param.ACT_BETA):
            return "fp32"
        return "i64" if param >= Param.CONV_CHANNEL else "i32"

    return {argument: type_of(param) for argument, param in PARAMETERS[spec.source].items()}


def divisors(spec: KernelSpec) -> dict[str, int]:
    """What the compiler may assume that addresses (bytes) and strides (elements) are multiples
    of.
    """
    e = spec.dtype.bytes
    found = {"x": e, "w": spec.align_a, "y": e, "bias": e, "residual": e}
    if spec.family.depthwise:
        return found
    if spec.align_a == 16:
        strides = ("w_g", "w_k", "w_h", "w_w") if taps(spec.family) == 1 else ("w_g", "w_k", "w_h")
        found |= dict.fromkeys(strides, 16 // e)
        if taps(spec.family) > 1:
            found["w_c"] = taps(spec.family)
    return found | {"workspace": 16}
