"""Runs a plan on host memory in float64 numpy: what the kernels compute, region by region."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import numpy.typing as npt

from moonpoly_ort import native
from tests.epilogues import finished, gated

DTYPES = {
    native.Dtype.F16: np.dtype(np.float16),
    native.Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    native.Dtype.F32: np.dtype(np.float32),
}


def view(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[np.generic]
) -> npt.NDArray[np.generic]:
    """The array of elements at a host address; strides count elements."""
    size = dtype.itemsize
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = (ctypes.c_char * (elements * size)).from_address(address)
    flat = np.frombuffer(raw, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * size for s in strides])


def interpret(
    p: native.Problem, plan: native.Plan, a: int, b: int, bias: int | None, residual: int | None,
    y: int,
) -> None:  # fmt: skip
    dtype = DTYPES[native.Dtype(p.dtype)]
    size = dtype.itemsize
    for r in plan.regions:
        for z in range(r.z0, r.z0 + r.z):
            a_base = a + z // p.a_div % p.a_mod * p.a_batch_stride * size
            b_base = b + z // p.b_div % p.b_mod * p.b_batch_stride * size
            a_strides = (1, p.lda) if p.trans_a else (p.lda, 1)
            b_strides = (1, p.ldb) if p.trans_b else (p.ldb, 1)
            left = view(a_base + r.m0 * a_strides[0] * size, (r.m, p.k), a_strides, dtype)
            right = view(b_base + r.n0 * b_strides[1] * size, (p.k, r.n), b_strides, dtype)
            value = p.alpha * (left.astype(np.float64) @ right.astype(np.float64))
            if p.bias:
                assert bias is not None
                strides = (p.bias_stride_m, p.bias_stride_n)
                at = bias + (r.m0 * strides[0] + r.n0 * strides[1]) * size
                value = value + p.beta * view(at, (r.m, r.n), strides, dtype).astype(np.float64)
            else:
                assert bias is None
            columns, first = r.n // (1 + p.gated), r.n0 // (1 + p.gated)
            out = np.dtype(np.float32) if p.wide else dtype
            start = (z * p.c_batch_stride + r.m0 * p.ldc + first) * out.itemsize
            other = None
            if p.residual:
                assert residual is not None
                other = view(residual + start, (r.m, r.n), (p.ldc, 1), dtype).astype(np.float64)
            else:
                assert residual is None
            if p.gated:
                value = gated(value, native.Activation(p.activation), p.act_alpha, p.act_beta)
            else:
                value = finished(value, p.activation, p.residual, p.act_alpha, p.act_beta, other)
            view(y + start, (r.m, columns), (p.ldc, 1), out)[...] = value.astype(dtype).astype(out)
