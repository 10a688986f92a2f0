"""The parameters of each kernel family, in order: what they mean to the launcher. Imports no
Triton.
"""

from __future__ import annotations

from .pack_format import Param
from .spec import KernelSpec

_COMMON = {
    "bias": Param.PTR_BIAS, "workspace": Param.PTR_WORKSPACE, "counters": Param.PTR_COUNTERS,
    "M": Param.M, "N": Param.N, "K": Param.K, "split": Param.SPLIT,
    "a_div": Param.A_DIV, "a_mod": Param.A_MOD, "b_div": Param.B_DIV, "b_mod": Param.B_MOD,
    "z0": Param.Z0,
}  # fmt: skip
# The grid does not tell how many tiles there are, and each block works out its own K steps.
_PERSISTENT = {argument: param for argument, param in _COMMON.items() if argument != "split"}
_PERSISTENT["batch"] = Param.BATCH
_UNSPLIT = {
    argument: param for argument, param in _COMMON.items()
    if argument not in ("workspace", "counters", "split")
}  # fmt: skip
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
# Of the operands themselves: where NaN shows, products are computed again from them.
_OPERANDS = {"a": Param.PTR_A, "b": Param.PTR_B}
_OPERAND_PITCHES = {
    "lda": Param.LDA, "ldb": Param.LDB, "a_batch": Param.A_BATCH, "b_batch": Param.B_BATCH,
}  # fmt: skip
# By the kernels' names, see `KernelSpec.source`.
PARAMETERS: dict[str, dict[str, Param]] = {
    "gemm_tma": {**_DESCRIPTORS, **_COMMON, "order": Param.ORDER, **_EPILOGUE},
    "gemm_pointer": {**_POINTERS, **_COMMON, **_PITCHES, **_EPILOGUE},
    "gemm_dot": {**_POINTERS, **_UNSPLIT, **_PITCHES, **_EPILOGUE},
    "gemm_ws": {**_DESCRIPTORS, **_RESULT, **_PERSISTENT, **_EPILOGUE},
    "gemm_tma_masked": {
        "a_desc": Param.DESC_A, "b_desc": Param.DESC_B, "y": Param.PTR_Y, **_COMMON,
        "order": Param.ORDER, "ldc": Param.LDC, "c_batch": Param.C_BATCH, **_EPILOGUE,
    },
    "copy_padded": {
        "a": Param.PTR_A, "y": Param.PTR_Y, "M": Param.M, "N": Param.N, "K": Param.K,
        "lda": Param.LDA, "ldc": Param.LDC, "a_batch": Param.A_BATCH, "c_batch": Param.C_BATCH,
    },
    "gemm_ws_x3": {
        **_DESCRIPTORS, **_OPERANDS, **_PERSISTENT, **_OPERAND_PITCHES, **_EPILOGUE,
    },
}  # fmt: skip


def launch_params(spec: KernelSpec) -> tuple[Param, ...]:
    """The parameter list of a compiled kernel; Triton appends two scratch pointers, null here."""
    return (*PARAMETERS[spec.source].values(), Param.NULL, Param.NULL)
