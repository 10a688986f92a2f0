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
_FINISH = {
    "residual": Param.PTR_RESIDUAL, "activation": Param.ACTIVATION,
    "act_alpha": Param.ACT_ALPHA, "act_beta": Param.ACT_BETA,
}  # fmt: skip
_EPILOGUE |= _FINISH
_LIKE_Y = {"ldc": Param.LDC, "c_batch": Param.C_BATCH}  # R is addressed as Y
_DESCRIPTORS = {"a_desc": Param.DESC_A, "b_desc": Param.DESC_B, "y_desc": Param.DESC_Y}
_RESULT = {"y": Param.PTR_Y, **_LIKE_Y}
_POINTERS = {"a": Param.PTR_A, "b": Param.PTR_B, "y": Param.PTR_Y}
# Of the operands themselves: where NaN shows, products are computed again from them.
_OPERANDS = {"a": Param.PTR_A, "b": Param.PTR_B}
_OPERAND_PITCHES = {
    "lda": Param.LDA, "ldb": Param.LDB, "a_batch": Param.A_BATCH, "b_batch": Param.B_BATCH,
}  # fmt: skip
# By the kernels' names, see `KernelSpec.source`.
PARAMETERS: dict[str, dict[str, Param]] = {
    "gemm_tma": {
        **_DESCRIPTORS, "y": Param.PTR_Y, **_COMMON, "order": Param.ORDER, **_LIKE_Y, **_EPILOGUE,
    },
    "gemm_pointer": {**_POINTERS, **_COMMON, **_PITCHES, **_EPILOGUE},
    "gemm_dot": {**_POINTERS, **_UNSPLIT, **_PITCHES, **_EPILOGUE},
    "gemm_shallow": {**_POINTERS, **_UNSPLIT, **_PITCHES, **_EPILOGUE},
    "gemv": {**_POINTERS, **_COMMON, **_PITCHES, **_EPILOGUE},
    "gemm_ws": {**_DESCRIPTORS, **_RESULT, **_PERSISTENT, **_EPILOGUE},
    "gemm_tma_masked": {
        "a_desc": Param.DESC_A, "b_desc": Param.DESC_B, "y": Param.PTR_Y, **_COMMON,
        "order": Param.ORDER, **_LIKE_Y, **_EPILOGUE,
    },
    "copy_padded": {
        "a": Param.PTR_A, "y": Param.PTR_Y, "M": Param.M, "N": Param.N, "K": Param.K,
        "lda": Param.LDA, "ldc": Param.LDC, "a_batch": Param.A_BATCH, "c_batch": Param.C_BATCH,
    },
    "gemm_ws_x3": {
        **_DESCRIPTORS, **_OPERANDS, **_PERSISTENT, **_OPERAND_PITCHES, **_LIKE_Y,
        **_EPILOGUE,
    },
}  # fmt: skip

_CONV_SHAPE = {
    "in_d": Param.CONV_IN_D, "in_h": Param.CONV_IN_H, "in_w": Param.CONV_IN_W,
    "out_h": Param.CONV_OUT_H, "out_w": Param.CONV_OUT_W,
    "kernel_d": Param.CONV_KERNEL_D, "kernel_h": Param.CONV_KERNEL_H,
    "kernel_w": Param.CONV_KERNEL_W,
    "stride_d": Param.CONV_STRIDE_D, "stride_h": Param.CONV_STRIDE_H,
    "stride_w": Param.CONV_STRIDE_W,
    "dilation_d": Param.CONV_DILATION_D, "dilation_h": Param.CONV_DILATION_H,
    "dilation_w": Param.CONV_DILATION_W,
    "pad_d": Param.CONV_PAD_D, "pad_h": Param.CONV_PAD_H, "pad_w": Param.CONV_PAD_W,
    "channel": Param.CONV_CHANNEL,
}  # fmt: skip
_CONV_OPERANDS = {
    "x": Param.CONV_X, "w": Param.CONV_W, "y": Param.CONV_Y, "bias": Param.CONV_BIAS,
}  # fmt: skip
_CONV_W = {
    "w_g": Param.CONV_W_G, "w_k": Param.CONV_W_K, "w_c": Param.CONV_W_C, "w_h": Param.CONV_W_H,
    "w_w": Param.CONV_W_W,
}  # fmt: skip
_CONV = {
    **_CONV_OPERANDS, "workspace": Param.PTR_WORKSPACE, "counters": Param.PTR_COUNTERS,
    "M": Param.M, "N": Param.N, "C": Param.CONV_C, "split": Param.SPLIT,
    "groups": Param.CONV_GROUPS, "z0": Param.Z0, "has_bias": Param.CONV_HAS_BIAS,
    **_CONV_SHAPE, **_CONV_W, "pixels": Param.CONV_PIXELS, **_FINISH,
}  # fmt: skip
_CONV_DEPTHWISE = {
    **_CONV_OPERANDS, "M": Param.M, "N": Param.N, "multiplier": Param.CONV_K, "z0": Param.Z0,
    "has_bias": Param.CONV_HAS_BIAS, **_CONV_SHAPE,
    **{argument: param for argument, param in _CONV_W.items() if argument != "w_c"},
    **_FINISH,
}  # fmt: skip
PARAMETERS |= {"conv": _CONV, "conv_depthwise": _CONV_DEPTHWISE}


def launch_params(spec: KernelSpec) -> tuple[Param, ...]:
    """The parameter list of a compiled kernel; Triton appends two scratch pointers, null here."""
    return (*PARAMETERS[spec.source].values(), Param.NULL, Param.NULL)
