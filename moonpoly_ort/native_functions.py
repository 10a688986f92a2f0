"""The signatures of the functions of `custom_ops/runtime/moonpoly.h`, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_float, c_int32, c_int64, c_void_p

from .native_structs import (
    Conv,
    ConvAttributes,
    Device,
    KernelRecord,
    PackHeader,
    Plan,
    Problem,
    Stats,
)

_pointer = ctypes.POINTER
_shape = _pointer(c_int64)

InterpretFn = ctypes.CFUNCTYPE(
    c_int32, ctypes.POINTER(Problem), ctypes.POINTER(Plan), c_void_p, c_void_p, c_void_p, c_void_p,
    c_void_p, ctypes.POINTER(c_char), c_int32,
)  # fmt: skip

InterpretConvFn = ctypes.CFUNCTYPE(
    c_int32, ctypes.POINTER(Conv), ctypes.POINTER(Plan), c_void_p, c_void_p, c_void_p, c_void_p,
    c_void_p, ctypes.POINTER(c_char), c_int32,
)  # fmt: skip

SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mp_last_error": (ctypes.c_char_p, []),
    "mp_struct_size": (c_int32, [ctypes.c_char_p]),
    "mp_pack_open": (c_int32, [ctypes.c_char_p, _pointer(c_void_p)]),
    "mp_pack_close": (None, [c_void_p]),
    "mp_pack_kernel_count": (c_int32, [c_void_p]),
    "mp_pack_kernel": (_pointer(KernelRecord), [c_void_p, c_int32]),
    "mp_pack_info": (_pointer(PackHeader), [c_void_p]),
    "mp_device_count": (c_int32, [_pointer(c_int32)]),
    "mp_device_query": (c_int32, [c_int32, _pointer(Device)]),
    "mp_blocks_per_sm": (c_int32, [_pointer(KernelRecord), _pointer(Device)]),
    "mp_plan_problem": (
        c_int32,
        [c_void_p, _pointer(Device), _pointer(Problem), *[c_int32] * 3, _pointer(Plan)],
    ),
    "mp_launcher_create": (c_int32, [c_void_p, c_int32, _pointer(c_void_p)]),
    "mp_launcher_destroy": (None, [c_void_p]),
    "mp_launch": (c_int32, [c_void_p, _pointer(Problem), _pointer(Plan), *[c_void_p] * 8]),
    "mp_repacked_problem": (
        c_int32,
        [c_void_p, _pointer(Problem), _pointer(Problem), _pointer(c_int64)],
    ),
    "mp_repack": (c_int32, [c_void_p, _pointer(Problem), *[c_void_p] * 3]),
    "mp_set_interpreter": (None, [InterpretFn]),
    "mp_set_conv_interpreter": (None, [InterpretConvFn]),
    "mp_get_stats": (None, [_pointer(Stats)]),
    "mp_conv_problem": (
        c_int32,
        [
            *[c_int32, c_int32, _pointer(ConvAttributes), c_int32, _shape, c_int32, _shape],
            *[c_int32, _shape, _pointer(Conv), _pointer(Problem), *[_pointer(c_int32)] * 2],
        ],
    ),
    "mp_conv_packed": (c_int32, [_pointer(Conv), _pointer(Conv), _shape]),
    "mp_conv_pack": (c_int32, [_pointer(Conv), c_void_p, c_void_p]),
    "mp_plan_conv": (
        c_int32,
        [c_void_p, _pointer(Device), _pointer(Conv), *[c_int32] * 3, _pointer(Plan)],
    ),
    "mp_launch_conv": (c_int32, [c_void_p, _pointer(Conv), _pointer(Plan), *[c_void_p] * 8]),
    "mp_matmul_problem": (
        c_int32,
        [c_int32, c_int32, *[c_int32, _shape] * 2, c_int32, _pointer(Problem), _shape],
    ),
    "mp_gemm_problem": (
        c_int32,
        [
            *[c_int32, c_int32, _shape, _shape, c_int32, _shape, c_int32, c_int32],
            *[c_float, c_float, _pointer(Problem)],
        ],
    ),
}
"""What each returns, and its arguments."""
