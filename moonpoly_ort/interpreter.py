"""The interpreter backend: a plan's regions run on CPU buffers by the very kernels that a pack
holds, in Triton's interpreter. Slow (a millisecond or more per block): for verification and tests.

A kernel that Triton cannot interpret is stood in for by one that computes the same.
Differences from a GPU: products are exact in fp32 (TF32 operands are not rounded), blocks run one
after another, and shared-memory pipelining is not simulated.
"""

from __future__ import annotations

import copy as copy_module
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .custom_ops.kernels import loading, pack_format
from .custom_ops.kernels.pack_format import Param
from .custom_ops.kernels.signature import PARAMETERS
from .custom_ops.kernels.spec import Dtype, KernelSpec, interpreted, name
from .errors import MissingDependencyError, MoonPolyError
from .interpreted_conv import run_conv_region
from .native_structs import epilogue_code

if TYPE_CHECKING:
    from .native import Conv, Copy, Pack, Plan, Problem, Region

__all__ = ["install", "run", "run_conv", "run_conv_plan", "run_plan"]


def _torch() -> Any:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "the interpreter backend needs Triton and PyTorch (its CPU build will do), and "
            f"{error.name} is not installed: pip install 'moonpoly-ort[tune]' torch"
        ) from error
    return torch


class _Matrices:
    """A batch of row-major matrices at an address: exactly the elements that they reach."""

    def __init__(
        self, address: int, dtype: Dtype, entries: int, rows: int, columns: int, pitch: int,
        batch_stride: int,
    ) -> None:  # fmt: skip
        self.shape = (entries, rows, columns)
        # The stride of a single entry is never used, but a tensor map wants an aligned one.
        self.strides = (batch_stride if entries > 1 else rows * pitch, pitch, 1)
        empty = 0 in self.shape
        count = 0 if empty else 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )  # fmt: skip
        self.storage = _elements(address, dtype, count)

    def descriptor(self, rows: int, columns: int) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(
            self.storage, list(self.shape), list(self.strides), [1, rows, columns]
        )


def _elements(address: int, dtype: Dtype, count: int) -> Any:
    """`count` elements of host memory as a tensor, without a copy."""
    torch = _torch()
    element = {Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16, Dtype.F32: torch.float32}[
        dtype
    ]
    if count == 0:
        return torch.empty(0, dtype=element)
    buffer = (ctypes.c_char * (count * dtype.bytes)).from_address(address)
    return torch.frombuffer(buffer, dtype=element)


def _scratch(count: int, fill: float, dtype: Any) -> Any:
    return _torch().full((count,), fill, dtype=dtype)


def run_plan(
    specs: Sequence[KernelSpec] | Mapping[int, KernelSpec],
    problem: Problem,
    plan: Plan,
    a: int,
    b: int,
    bias: int | None,
    y: int,
    residual: int | None = None,
) -> None:
    """Computes a planned problem on host memory.

    Args:
        specs: the kernels by the indices of the plan.
        problem, plan: `mp_problem` and a plan for it.
        a, b, bias, y, residual: addresses of the operands, laid out as `problem` says; no bias or
            residual: None or 0.

    Raises:
        MissingDependencyError: Triton or torch is not installed.
        MoonPolyError: a kernel fails in the interpreter.
    """
    torch = _torch()
    copies = []  # kept alive until the regions have run
    with loading.TRITON, np.errstate(all="ignore"):  # NaN and Inf are data here
        for operand, copy in plan.copies:
            with _naming(specs[copy.kernel]):
                # As NaN first: padding that is not written would show.
                element = torch.float32 if specs[copy.kernel].dtype is Dtype.F32 else torch.float16
                elements = copy.bytes // specs[copy.kernel].dtype.bytes
                copies.append(_scratch(elements, float("nan"), element))
                source = a if operand == "a" else b
                _run_copy(specs[copy.kernel], problem, operand, copy, source, copies[-1])
            problem = _substituted(problem, operand, copy)
            if operand == "a":
                a = copies[-1].data_ptr()
            else:
                b = copies[-1].data_ptr()
        for region in plan.regions:
            with _naming(specs[region.kernel]):
                _run_region(specs[region.kernel], problem, region, a, b, bias, y, residual)


@contextmanager
def _naming(spec: KernelSpec) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise MoonPolyError(
            f"kernel {name(spec)} failed in Triton's interpreter: {error}"
        ) from error


def _entries(p: Problem, operand: str) -> int:
    div, mod = (p.a_div, p.a_mod) if operand == "a" else (p.b_div, p.b_mod)
    return int(min(mod, -(-p.batch // div)))


def _run_copy(
    spec: KernelSpec, p: Problem, operand: str, copy: Copy, source: int, target: Any
) -> None:
    """Copies A or B to `target`, its rows along K and padded."""
    entries = _entries(p, operand)
    if operand == "a":
        rows, pitch, stride = p.m, p.lda, p.a_batch_stride
    else:
        rows, pitch, stride = p.n, p.ldb, p.b_batch_stride
    stored = (p.k, rows) if copy.transposed else (rows, p.k)
    integer = _torch().int32 if spec.dtype is Dtype.F32 else _torch().int16
    values: dict[Param, Any] = {
        Param.PTR_A: _Matrices(source, spec.dtype, entries, *stored, pitch, stride).storage.view(
            integer
        ),
        Param.PTR_Y: target.view(integer),
        Param.M: rows, Param.N: copy.pitch, Param.K: p.k,
        Param.LDA: pitch, Param.LDC: copy.pitch,
        Param.A_BATCH: stride, Param.C_BATCH: copy.batch_stride,
    }  # fmt: skip
    function = loading.kernel(spec.source, interpret=True)
    function[(copy.grid,)](
        *(values[param] for param in PARAMETERS[spec.source].values()),
        **loading.constants(spec),
    )


def _substituted(problem: Problem, operand: str, copy: Copy) -> Problem:
    """The problem that regions see behind a copy of A or B."""
    out = copy_module.copy(problem)
    if operand == "a":
        out.trans_a, out.lda, out.a_batch_stride, out.align_a = 0, copy.pitch, copy.batch_stride, 16
    else:
        out.trans_b, out.ldb, out.b_batch_stride, out.align_b = 1, copy.pitch, copy.batch_stride, 16
    return out


def _padded(columns: int, align: int, e: int) -> int:
    """What a tensor map spans of a row: zeros up to the next 16 bytes belong to an aligned one."""
    return -(-columns * e // 16) * 16 // e if align == 16 else columns


def run_conv_plan(
    specs: Sequence[KernelSpec] | Mapping[int, KernelSpec],
    conv: Conv,
    plan: Plan,
    x: int,
    w: int,
    bias: int | None,
    y: int,
    residual: int | None = None,
) -> None:
    """Computes a planned convolution on host memory; arguments and errors as of `run_plan`."""
    torch = _torch()
    with loading.TRITON, np.errstate(all="ignore"):
        for region in plan.regions:
            spec = specs[region.kernel]
            with _naming(spec):
                run_conv_region(torch, _elements, spec, conv, region, x, w, bias, y, residual)


def _run_region(
    spec: KernelSpec, p: Problem, r: Region, a: int, b: int, bias: int | None, y: int,
    residual: int | None,
) -> None:  # fmt: skip
    torch = _torch()
    split, grid = r.split, r.grid
    stand_in = interpreted(spec)
    if stand_in is not spec:
        spec = stand_in
        split, grid = 1, r.z * -(-r.m // spec.bm) * -(-r.n // spec.bn)
    e = spec.dtype.bytes
    a_entries, b_entries = _entries(p, "a"), _entries(p, "b")
    a_shape = (p.k, r.m) if p.trans_a else (r.m, p.k)
    b_shape = (r.n, p.k) if p.trans_b else (p.k, r.n)
    a_shape = a_shape[0], _padded(a_shape[1], p.align_a, e)
    b_shape = b_shape[0], _padded(b_shape[1], p.align_b, e)
    a_start = r.m0 if p.trans_a else r.m0 * p.lda
    b_start = r.n0 * p.ldb if p.trans_b else r.n0

    def like_y(base: int) -> _Matrices:
        # A product knows fp32 by pairs of elements of its own type.
        scale, shared_by = 1 + p.wide, 1 + p.gated
        start = base + (r.m0 * p.ldc + r.n0 // shared_by) * e * scale
        return _Matrices(
            start, spec.dtype, p.batch, r.m, r.n // shared_by * scale, p.ldc * scale,
            p.c_batch_stride * scale,
        )  # fmt: skip

    operands = {
        "a": _Matrices(a + a_start * e, spec.dtype, a_entries, *a_shape, p.lda, p.a_batch_stride),
        "b": _Matrices(b + b_start * e, spec.dtype, b_entries, *b_shape, p.ldb, p.b_batch_stride),
        "y": like_y(y),
    }
    bias_count = 0
    if bias and p.beta != 0:
        bias_count = 1 + (r.m - 1) * p.bias_stride_m + (r.n - 1) * p.bias_stride_n
        bias += (r.m0 * p.bias_stride_m + r.n0 * p.bias_stride_n) * e

    # The workspace starts as NaN: reading what no slice wrote would show.
    workspace = _scratch(r.workspace_bytes // 4, float("nan"), torch.float32)
    counters = _scratch(r.counters, 0, torch.int32)
    a_box = (spec.bk, spec.bm) if spec.trans_a else (spec.bm, spec.bk)
    b_box = (spec.bn, spec.bk) if spec.trans_b else (spec.bk, spec.bn)
    values: dict[Param, Any] = {
        Param.PTR_A: operands["a"].storage, Param.PTR_B: operands["b"].storage,
        Param.PTR_Y: operands["y"].storage,
        Param.PTR_BIAS: _elements(bias or 0, spec.dtype, bias_count),
        Param.PTR_WORKSPACE: workspace, Param.PTR_COUNTERS: counters,
        Param.M: r.m, Param.N: r.n, Param.K: p.k, Param.SPLIT: split,
        Param.A_DIV: p.a_div, Param.A_MOD: p.a_mod, Param.B_DIV: p.b_div, Param.B_MOD: p.b_mod,
        Param.Z0: r.z0, Param.LDA: p.lda, Param.LDB: p.ldb, Param.LDC: p.ldc,
        Param.A_BATCH: p.a_batch_stride, Param.B_BATCH: p.b_batch_stride,
        Param.C_BATCH: p.c_batch_stride,
        Param.BIAS_M: p.bias_stride_m, Param.BIAS_N: p.bias_stride_n,
        Param.PTR_RESIDUAL: (
            like_y(residual).storage
            if residual and p.residual
            else _elements(0, spec.dtype, 0)
        ),
        Param.ACTIVATION: epilogue_code(p),
        Param.ACT_ALPHA: p.act_alpha, Param.ACT_BETA: p.act_beta,
        Param.ORDER: 0,  # one launch after the other here
        Param.ALPHA: p.alpha, Param.BETA: p.beta if bias_count else 0.0,
    }  # fmt: skip
    boxes = {"A": a_box, "B": b_box, "Y": (spec.bm, spec.bn)}
    for operand in spec.family.maps:
        values[Param[f"DESC_{operand}"]] = operands[operand.lower()].descriptor(*boxes[operand])
    function = loading.kernel(spec.source, interpret=True)
    function[(grid,)](
        *(values[param] for param in PARAMETERS[spec.source].values()),
        **loading.constants(spec),
    )


def run(
    pack: Pack, problem: Problem, plan: Plan, a: int, b: int, bias: int | None, y: int,
    residual: int | None = None,
) -> None:  # fmt: skip
    """`run_plan` for a plan made from an open pack or catalog."""
    run_plan(_specs(pack, plan), problem, plan, a, b, bias, y, residual)


def run_conv(
    pack: Pack, conv: Conv, plan: Plan, x: int, w: int, bias: int | None, y: int,
    residual: int | None = None,
) -> None:  # fmt: skip
    """`run_conv_plan` for a plan made from an open pack or catalog."""
    run_conv_plan(_specs(pack, plan), conv, plan, x, w, bias, y, residual)


def _specs(pack: Pack, plan: Plan) -> dict[int, KernelSpec]:
    records = pack.kernels
    launches = [*plan.regions, *(copy for _, copy in plan.copies)]
    used = {launch.kernel: records[launch.kernel] for launch in launches}
    return {i: pack_format.decode_spec(partial(getattr, record)) for i, record in used.items()}


def install(pack: str | os.PathLike[str] | None = None) -> None:
    """Makes the CPU ops of `moonpoly.backend=interpreter` run plans made from this pack or catalog,
    by default the catalog for sm_90. One pack at a time, for all sessions of the process.

    Raises PackError for a bad pack, MissingDependencyError without Triton or torch.
    """
    from . import native, packs

    _torch()
    kernels = pack_format.read_pack(pack or packs.catalog(90)).kernels
    specs = [kernel.spec for kernel in kernels]

    def interpret(
        problem: Problem, plan: Plan, a: int, b: int, bias: int | None, residual: int | None, y: int
    ) -> None:
        run_plan(specs, problem, plan, a, b, bias, y, residual)

    def convolve(
        conv: Conv, plan: Plan, x: int, w: int, bias: int | None, residual: int | None, y: int
    ) -> None:
        run_conv_plan(specs, conv, plan, x, w, bias, y, residual)

    native.set_interpreter(interpret, convolve)
