"""The parameters of each kernel family, in order: what they mean to the launcher. Imports no
Triton.
"""

from __future__ import annotations

from .pack_format import Param
from .spec import Family

_COMMON = {
    "bias": Param.PTR_BIAS, "workspace": Param.PTR_WORKSPACE, "counters": Param.PTR_COUNTERS,
    "M": Param.M, "N": Param.N, "K": Param.K, "split": Param.SPLIT,
    "a_div": Param.A_DIV, "a_mod": Param.A_MOD, "b_div": Param.B_DIV, "b_mod": Param.B_MOD,
    "z0": Param.Z0,
}  # fmt: skip
# The grid does not tell how many tiles there are, and each block works out its own K steps.
_PERSISTENT = {argument: param for argument, param in _COMMON.items() if argument != "split"}
_PERSISTENT["batch"] = Param.BATCH
_PITCHES = {
    "lda": Param.LDA, "ldb": Param.LDB, "ldc": Param.LDC,
    "a_batch": Param.A_BATCH, "b_batch": Param.B_BATCH, "c_batch": Param.C_BATCH,
}  # fmt: skip
_EPILOGUE = {
    "bias_stride_m": Param.BIAS_M, "bias_stride_n": Param.BIAS_N,
    "alpha": Param.ALPHA, "beta": Param.BETA,
}  # fmt: skip
_DESCRIPTORS = {"a_desc": Param.DESC_A, "b_desc": Param.DESC_B, "y_desc": Param.DESC_Y}
_RESULT = {"y": Param.PTR_Y, "ldc": Param.LDC, "c_batch": Param.C_BATCH}
_POINTERS = {"a": Param.PTR_A, "b": Param.PTR_B, "y": Param.PTR_Y}
PARAMETERS: dict[Family, dict[str, Param]] = {
    Family.GEMM_TMA: {**_DESCRIPTORS, **_COMMON, **_EPILOGUE},
    Family.GEMM_POINTER: {**_POINTERS, **_COMMON, **_PITCHES, **_EPILOGUE},
    Family.GEMM_WS: {**_DESCRIPTORS, **_RESULT, **_PERSISTENT, **_EPILOGUE},
}


def launch_params(family: Family) -> tuple[Param, ...]:
    """The parameter list of a compiled kernel; Triton appends two scratch pointers, null here."""
    return (*PARAMETERS[family].values(), Param.NULL, Param.NULL)
