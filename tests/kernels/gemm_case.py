"""Random GEMM problems on host memory, run through the interpreter backend and compared with
float64.

Operands lie inside larger buffers full of NaN, so that a read of a neighbouring row, column or
batch entry shows in the result; the result lies inside a buffer of a sentinel, so that a stray
write shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from moonpoly_ort.custom_ops.kernels.pack_format import DTYPE_CODE, PRECISION_CODE
from moonpoly_ort.custom_ops.kernels.spec import Dtype, Family, KernelSpec, Precision

from moonpoly_ort.interpreter import run_plan
from moonpoly_ort.native_structs import Activation, Residual
from tests.epilogues import finished, gated

TORCH = {Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16, Dtype.F32: torch.float32}
SENTINEL = 77.0


def tolerance(spec: KernelSpec, k: int) -> float:
    """The relative Frobenius error that a kernel may have."""
    if spec.precision is Precision.IEEE:
        return 1e-6 * max(k, 1) ** 0.5
    return {Dtype.F16: 2e-3, Dtype.BF16: 1e-2, Dtype.F32: 1e-3}[spec.dtype]


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


class Buffer:
    """A batch of matrices with padding around rows and entries, inside a buffer of `fill`."""

    def __init__(
        self, values: torch.Tensor, align: int, slack: int, fill: float, *, offset: int = 1
    ) -> None:
        entries, rows, columns = values.shape
        unit = max(align // values.element_size(), 1)
        self.pitch = round_up(columns, unit) + slack * unit
        self.batch_stride = rows * self.pitch + slack * unit
        # 64 bytes and an odd number of units: aligned to `align` bytes and no better
        start = 64 // values.element_size() + offset * unit
        total = start + entries * self.batch_stride + 64
        raw = torch.empty(total + 64, dtype=values.dtype)
        shift = -raw.data_ptr() % 64 // values.element_size()
        self.raw = raw[shift : shift + total]
        self.raw.fill_(fill)
        self.start = start
        self.view = self.raw.as_strided(
            (entries, rows, columns),
            (self.batch_stride, self.pitch, 1),
            self.raw.storage_offset() + start,
        )
        self.view.copy_(values)

    @property
    def address(self) -> int:
        return self.raw.data_ptr() + self.start * self.raw.element_size()

    def untouched(self) -> bool:
        """Whether everything around the matrices is still SENTINEL."""
        around = self.raw.clone()
        around.as_strided(self.view.shape, self.view.stride(), self.start).fill_(SENTINEL)
        return bool((around == SENTINEL).all())


@dataclass
class Case:
    """One product for one kernel. `cuts` are the (m, n, z) boundaries between regions."""

    spec: KernelSpec
    m: int
    n: int
    k: int
    batch: int = 1
    a_map: tuple[int, int] = (1, 1)
    b_map: tuple[int, int] = (1, 1)
    split: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    bias: str = "none"  # none, scalar, row, column, matrix
    activation: Activation = Activation.NONE
    residual: Residual = Residual.NONE
    act_alpha: float = 0.0
    act_beta: float = 0.0
    gated: bool = False
    wide: bool = False
    slack: int = 1
    cuts: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        spec, dtype = self.spec, TORCH[self.spec.dtype]
        self.a = torch.randn(self.a_map[1], self.m, self.k).to(dtype)
        self.b = torch.randn(self.b_map[1], self.k, self.n).to(dtype)
        self.c: torch.Tensor | None = None
        shape = {
            "scalar": (1, 1),
            "row": (1, self.n),
            "column": (self.m, 1),
            "matrix": (self.m, self.n),
        }
        if self.bias != "none":
            self.c = torch.randn(shape[self.bias]).to(dtype)
        self.r: torch.Tensor | None = None
        if self.residual:
            self.r = torch.randn(self.batch, self.m, self.n).to(dtype)
        self.pointer = spec.family is Family.GEMM_POINTER

    def expected(self) -> np.ndarray[Any, Any]:
        """Y in float64."""
        a, b = self.a.double().numpy(), self.b.double().numpy()
        out = np.zeros((self.batch, self.m, self.n))
        for z in range(self.batch):
            a_z = z // self.a_map[0] % self.a_map[1]
            b_z = z // self.b_map[0] % self.b_map[1]
            with np.errstate(invalid="ignore"):
                out[z] = self.alpha * (a[a_z] @ b[b_z])
            if self.c is not None:
                out[z] += self.beta * self.c.double().numpy()
        if self.gated:
            return gated(out, self.activation, self.act_alpha, self.act_beta)
        r = None if self.r is None else self.r.double().numpy()
        return finished(out, self.activation, self.residual, self.act_alpha, self.act_beta, r)

    def _regions(self) -> list[SimpleNamespace]:
        def pieces(cuts: list[int], size: int) -> list[tuple[int, int]]:
            edges = sorted({0, size, *(c for c in cuts if 0 < c < size)})
            return [(low, high - low) for low, high in pairwise(edges)]

        out = []
        for m0, m in pieces(self.cuts[0], self.m):
            for n0, n in pieces(self.cuts[1], self.n):
                for z0, z in pieces(self.cuts[2], self.batch):
                    tiles = z * -(-m // self.spec.bm) * -(-n // self.spec.bn)
                    slices = tiles * self.split if self.spec.split_k else 0
                    out.append(SimpleNamespace(
                        kernel=0, split=self.split, m0=m0, m=m, n0=n0, n=n, z0=z0, z=z,
                        grid=tiles * self.split, counters=tiles if self.spec.split_k else 0,
                        workspace_bytes=slices * self.spec.bm * self.spec.bn * 4,
                    ))  # fmt: skip
        return out

    def run(self) -> torch.Tensor:
        """The product by the kernel; checks that nothing around the result was written."""
        spec = self.spec
        nan = float("nan")
        a = Buffer(self.a.mT if spec.trans_a else self.a, spec.align_a, self.slack, nan)
        b = Buffer(self.b.mT if spec.trans_b else self.b, spec.align_b, self.slack, nan)
        y_values = torch.full(
            (self.batch, self.m, self.n // (1 + self.gated)), nan,
            dtype=torch.float32 if self.wide else a.raw.dtype,
        )  # fmt: skip
        y = Buffer(y_values, spec.align_c, self.slack, SENTINEL)
        c = Buffer(self.c[None], 1, 0, nan) if self.c is not None else None
        # In NaN, as A and B; laid out as Y.
        r = Buffer(self.r, spec.align_c, self.slack, nan) if self.r is not None else None
        problem = SimpleNamespace(
            dtype=DTYPE_CODE[spec.dtype], precision=PRECISION_CODE[spec.precision],
            trans_a=spec.trans_a, trans_b=spec.trans_b,
            # What surrounds the rows is NaN: they are not padded with zeros.
            align_a=spec.dtype.bytes, align_b=spec.dtype.bytes,
            m=self.m, n=self.n, k=self.k, batch=self.batch,
            lda=a.pitch, ldb=b.pitch, ldc=y.pitch, a_batch_stride=a.batch_stride,
            b_batch_stride=b.batch_stride, c_batch_stride=y.batch_stride,
            a_div=self.a_map[0], a_mod=self.a_map[1], b_div=self.b_map[0], b_mod=self.b_map[1],
            alpha=self.alpha, beta=self.beta, activation=self.activation, residual=self.residual,
            act_alpha=self.act_alpha, act_beta=self.act_beta, gated=self.gated, wide=self.wide,
            bias_stride_m=c.pitch if c and self.bias in ("column", "matrix") else 0,
            bias_stride_n=1 if self.bias in ("row", "matrix") else 0,
        )  # fmt: skip
        plan = SimpleNamespace(regions=self._regions(), copies=[])
        run_plan(
            [spec], problem, plan, a.address, b.address, c.address if c else None, y.address,  # type: ignore[arg-type]
            r.address if r else None,
        )  # fmt: skip
        assert y.untouched(), "the kernel wrote outside the result"
        return y.view

    def check(self) -> None:
        """Runs the kernel and compares: the norm of the error, and where NaN and Inf are."""
        got, want = self.run().double().numpy(), self.expected()
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        error = np.linalg.norm(got[finite] - want[finite])
        scale = np.linalg.norm(want[finite])
        assert error <= tolerance(self.spec, self.k) * scale + 1e-30, (error, scale)
