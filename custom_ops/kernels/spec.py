"""What a compiled micro-kernel is, as plain data: the one description that the builder, the planner's
catalog, the interpreter and the tuner share. Imports neither Triton nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    GEMM_TMA = "gemm_tma"
    GEMM_POINTER = "gemm_pointer"


class Dtype(StrEnum):
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"


class Precision(StrEnum):
    TF32 = "tf32"
    IEEE = "ieee"


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One micro-kernel. Tile sizes in elements; `align_*` in bytes (16, 8, 4 or 2)."""

    family: Family
    dtype: Dtype
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    trans_a: bool = False
    trans_b: bool = False
    precision: Precision = Precision.TF32
    split_k: bool = False
    swap: bool = False
    bias_matrix: bool = False
    group_m: int = 8
    align_a: int = 16
    align_b: int = 16
    align_c: int = 16
