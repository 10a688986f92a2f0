"""Products to check kernels with: operands inside NaN, results inside guards, exact references.

A `Product` says what is multiplied and how it lies in memory, down to the exact alignment;
`Operands` puts it on a device. Everything outside an operand (in front, behind, between its rows
and batch entries) is NaN, so a read out of bounds shows in the result; everything outside the
result, and the result itself before the run, is a fixed NaN pattern, so a stray or missing store
shows too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.epilogues import ALPHA, BETA, STEEPEST, activated, finished, gated
from moonpoly_ort import native
from moonpoly_ort.errors import ProblemError
from moonpoly_ort.tuning import Shape

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
CODES = {"f16": 0, "bf16": 1, "f32": 2}
PRECISIONS = {"tf32": 0, "ieee": 1}
# How numbers are held and multiplied, by the names that timings go by.
NUMBERS = {
    "f16": ("f16", "tf32"), "bf16": ("bf16", "tf32"), "f32": ("f32", "tf32"),
    "f32ieee": ("f32", "ieee"),
}  # fmt: skip
BIAS_CODES = {"none": 0, "scalar": 1, "row": 1, "column": 1, "matrix": 2}
# A NaN in every dtype, and no NaN that arithmetic makes: what unwritten memory is recognised by.
PATTERNS = {"f16": 0x7E5A, "bf16": 0x7FDA, "f32": 0x7FDA5A5A}
BITS = {"f16": torch.int16, "bf16": torch.int16, "f32": torch.int32}
GUARD = 2048  # elements in front of and behind an operand


def error_limit(dtype: str, precision: str, k: int) -> float:
    """The largest relative Frobenius error that a product of depth `k` may have."""
    if dtype == "f32" and precision == "ieee":
        return 1e-6 * math.sqrt(max(k, 1))
    return {"f16": 2e-3, "bf16": 1e-2, "f32": 1.3e-3}[dtype]


@dataclass(frozen=True)
class Product:
    """Y[z] = act(alpha * op(A[(z // a_div) % a_mod]) @ op(B[(z // b_div) % b_mod]) + beta * C),
    and R as `residual` says; gated and wide as in `mp_problem`.

    `align_*` are exact: the largest power of two, in bytes and up to 16, that divides the base
    pointer, the row pitch, the batch stride and the length of a stored row; `fitted` makes the
    sizes agree. `bias` is one of `BIAS_CODES`.
    """

    m: int
    n: int
    k: int
    dtype: str = "f16"
    precision: str = "tf32"
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = False
    a_map: tuple[int, int] = (1, 1)
    b_map: tuple[int, int] = (1, 1)
    align_a: int = 16
    align_b: int = 16
    align_c: int = 16
    bias: str = "none"
    alpha: float = 1.0
    beta: float = 1.0
    packed: bool = False  # as in a runtime: aligned base, rows back to back where `align` allows
    special: bool = False  # NaN, Inf and -Inf among the operands
    activation: native.Activation = native.Activation.NONE
    residual: native.Residual = native.Residual.NONE
    gated: bool = False
    wide: bool = False

    @property
    def y_dtype(self) -> str:
        return "f32" if self.wide else self.dtype

    @property
    def y_columns(self) -> int:
        return self.n // 2 if self.gated else self.n

    @property
    def limit(self) -> float:
        return error_limit(self.dtype, self.precision, self.k)

    def fitted(self) -> Product:
        """The product with sizes rounded up to what the alignment of its stored rows asks for."""
        units = [align // DTYPES[self.dtype].itemsize for align in self.aligns]
        m = _round_up(self.m, units[0] if self.trans_a else 1)
        unit_n = units[2] * (2 if self.gated else 1)
        n = _round_up(self.n, max(unit_n, 1 if self.trans_b else units[1]))
        k = _round_up(self.k, max(1 if self.trans_a else units[0], units[1] if self.trans_b else 1))
        return replace(self, m=m, n=n, k=k)

    @property
    def aligns(self) -> tuple[int, int, int]:
        return self.align_a, self.align_b, self.align_c

    def __str__(self) -> str:
        parts = [f"{self.m}x{self.n}x{self.k}", self.dtype]
        if self.dtype == "f32":
            parts.append(self.precision)
        parts.append(("t" if self.trans_a else "n") + ("t" if self.trans_b else "n"))
        if self.batch != 1:
            parts.append(f"batch={self.batch} a={self.a_map} b={self.b_map}")
        parts.append(f"align={self.align_a},{self.align_b},{self.align_c}")
        if self.bias != "none":
            parts.append(f"bias={self.bias}")
        if self.special:
            parts.append("special")
        if self.activation:
            parts.append(self.activation.name.lower())
        if self.residual:
            parts.append(f"residual {self.residual.name.lower()}")
        parts += [name for name in ("gated", "wide") if getattr(self, name)]
        return " ".join(parts)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def pitch_for(columns: int, element_bytes: int, align: int, slack: int = 1) -> int:
    """The least row pitch >= columns + slack, in elements, of exactly that alignment in bytes."""
    pitch = max(columns + slack, 1)
    while math.gcd(pitch * element_bytes, 16) != align:
        pitch += 1
    return pitch


@dataclass
class Stack:
    """`count` matrices of rows x columns inside one guarded buffer."""

    storage: torch.Tensor
    start: int
    pitch: int
    stride: int
    view: torch.Tensor

    @property
    def pointer(self) -> int:
        return self.storage.data_ptr() + self.start * self.storage.element_size()

    @staticmethod
    def allocate(
        count: int, rows: int, columns: int, dtype: str, align: int, packed: bool, device: str,
        of: str = "",
    ) -> Stack:  # fmt: skip
        """A stack filled with the pattern; not packed, its base lies off every alignment above. Its
        rows have their alignment as if they were of the type `of`, by default of their own.
        """
        size = DTYPES[of or dtype].itemsize
        slack = 0 if packed else 1 + rows % 3
        pitch = pitch_for(columns, size, align, slack)
        stride = rows * pitch + (0 if packed else pitch_for(1, size, align))
        start = GUARD + (0 if packed else max(1, align // DTYPES[dtype].itemsize))
        elements = start + count * stride + GUARD
        bits = torch.full((elements,), PATTERNS[dtype], dtype=BITS[dtype], device=device)
        storage = bits.view(DTYPES[dtype])
        view = storage.as_strided((count, rows, columns), (stride, pitch, 1), start)
        return Stack(storage, start, pitch, stride, view)

    def fill(self, generator: torch.Generator, special: bool = False) -> None:
        """Normal random values, and with `special` one NaN, one Inf and one -Inf."""
        shape = self.view.shape
        values = torch.randn(shape, generator=generator, device=self.view.device)
        if special and values.numel() >= 8:
            flat = values.view(-1)
            for at, value in ((1, math.nan), (flat.numel() // 2, math.inf), (-1, -math.inf)):
                flat[at] = value
        self.view.copy_(values)

    def stray_writes(self, dtype: str) -> int:
        """Elements outside the matrices that no longer hold the pattern."""
        bits = self.storage.view(BITS[dtype])
        changed = bits != PATTERNS[dtype]
        inside = changed.as_strided(self.view.shape, self.view.stride(), self.start)
        return int(changed.sum()) - int(inside.sum())

    def unwritten(self, dtype: str) -> int:
        """Elements of the matrices that still hold the pattern."""
        bits = self.storage.view(BITS[dtype])
        inside = bits.as_strided(self.view.shape, self.view.stride(), self.start)
        return int((inside == PATTERNS[dtype]).sum())

    def magnitudes(self) -> Stack:
        """A copy that holds absolute values."""
        storage = self.storage.abs()
        view = storage.as_strided(self.view.shape, self.view.stride(), self.start)
        return replace(self, storage=storage, view=view)

    def poison(self, dtype: str) -> None:
        self.storage.view(BITS[dtype]).fill_(PATTERNS[dtype])


@dataclass
class Operands:
    """A product on a device: its stacks, its `mp_problem`, its reference."""

    product: Product
    a: Stack
    b: Stack
    y: Stack
    c: Stack | None
    r: Stack | None
    problem: native.Problem
    _maps: tuple[torch.Tensor, torch.Tensor] = field(repr=False)

    @staticmethod
    def allocate(product: Product, device: str, seed: int = 0) -> Operands:
        p = product
        generator = torch.Generator(device=device).manual_seed(seed)
        a_rows, a_columns = (p.k, p.m) if p.trans_a else (p.m, p.k)
        b_rows, b_columns = (p.n, p.k) if p.trans_b else (p.k, p.n)
        # The fewest matrices that the map can name.
        a_count = min(p.a_map[1], -(-p.batch // p.a_map[0])) if p.batch else 0
        b_count = min(p.b_map[1], -(-p.batch // p.b_map[0])) if p.batch else 0
        a = Stack.allocate(a_count, a_rows, a_columns, p.dtype, p.align_a, p.packed, device)
        b = Stack.allocate(b_count, b_rows, b_columns, p.dtype, p.align_b, p.packed, device)
        y = Stack.allocate(
            p.batch, p.m, p.y_columns, p.y_dtype, p.align_c, p.packed, device, p.dtype
        )
        a.fill(generator, p.special)
        b.fill(generator)
        c = None
        if p.bias != "none":
            rows = p.m if p.bias in ("column", "matrix") else 1
            columns = p.n if p.bias in ("row", "matrix") else 1
            # Any element alignment will do for C; a column must be dense, since its stride is 1.
            if p.bias == "column":
                rows, columns = 1, rows
            size = DTYPES[p.dtype].itemsize
            c = Stack.allocate(1, rows, columns, p.dtype, size, True, device)
            c.fill(generator)
        r = None
        if p.residual:  # laid out as Y
            r = Stack.allocate(p.batch, p.m, p.n, p.dtype, p.align_c, p.packed, device)
            r.fill(generator)
        z = torch.arange(p.batch, device=device)
        maps = ((z // p.a_map[0]) % p.a_map[1], (z // p.b_map[0]) % p.b_map[1])
        problem = native.Problem(**_fields(p, a, b, y, c))
        return Operands(p, a, b, y, c, r, problem, maps)

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """A, B, bias (0: none) and Y."""
        bias = 0 if self.c is None else self.c.pointer
        return self.a.pointer, self.b.pointer, bias, self.y.pointer

    @property
    def residual(self) -> int:
        """The address of R, 0 where there is none."""
        return 0 if self.r is None else self.r.pointer

    def reference(self, rows: slice = slice(None)) -> torch.Tensor:
        """Y in float64, of shape (batch, rows, n), or half as many columns."""
        p = self.product
        if p.gated:
            return gated(self._linear(rows), p.activation)
        r = None if self.r is None else self.r.view[:, rows].double()
        return finished(self._linear(rows), p.activation, p.residual, r)

    def _linear(self, rows: slice = slice(None)) -> torch.Tensor:
        p = self.product
        a = self.a.view.mT if p.trans_a else self.a.view
        b = self.b.view.mT if p.trans_b else self.b.view
        a, b = a[self._maps[0]][:, rows].double(), b[self._maps[1]].double()
        y = p.alpha * torch.matmul(a, b)
        if self.c is not None:
            c = self.c.view[0].double()
            y = y + p.beta * (
                c.mT[rows] if p.bias == "column" else c[rows] if p.bias == "matrix" else c
            )
        return y

    def limit(self, reference: torch.Tensor) -> float:
        """The largest relative error that Y may have against its `reference`.

        TF32 keeps 10 bits of each operand's mantissa, so a product may be off by 2^-10 |A| |B|
        however it is computed. Over a few outputs whose sums happen to cancel that exceeds any
        fixed share of the outputs: there, it is the bound.

        An activation may leave less of the outputs than of their errors.
        """
        p = self.product
        if not (p.activation or p.residual or p.gated):
            return self._linear_limit(reference)
        linear = self._linear()
        if p.gated:
            return self._gated_limit(linear, reference)
        through = linear * self.r.view.double() if self.r and p.residual == 3 else linear
        out, inside = (float(x.nan_to_num(0, 0, 0).norm()) for x in (reference, through))
        least = self._linear_limit(linear)
        return least * (1 + STEEPEST * inside / out) if out else math.inf

    def _gated_limit(self, linear: torch.Tensor, reference: torch.Tensor) -> float:
        """Each factor's error counts with the other one, the gate's by its activation's slope."""
        activation = self.product.activation
        gates, values = linear[..., 0::2], linear[..., 1::2]
        above, below = (activated(gates + step, activation) for step in (1e-4, -1e-4))
        parts = ((above - below) / 2e-4 * values, activated(gates, activation), linear, reference)
        slopes, shares, sums, out = (float(x.nan_to_num(0, 0, 0).norm()) for x in parts)
        typical = sums / max(linear.numel(), 1) ** 0.5
        least = self._linear_limit(linear)
        return least * (1 + typical * math.hypot(slopes, shares) / out) if out else math.inf

    def _linear_limit(self, reference: torch.Tensor) -> float:
        p = self.product
        if p.dtype != "f32" or p.precision != "tf32" or reference.numel() > 64:
            return p.limit
        scale = float(reference.nan_to_num(0, 0, 0).norm())
        if scale == 0:
            return p.limit
        magnitudes = replace(self, a=self.a.magnitudes(), b=self.b.magnitudes(), c=None)._linear()
        return max(p.limit, 2**-10 * float(magnitudes.nan_to_num(0, 0, 0).norm()) / scale)


def _fields(p: Product, a: Stack, b: Stack, y: Stack, c: Stack | None) -> dict[str, Any]:
    strides = {"none": (0, 0), "scalar": (0, 0), "row": (0, 1), "column": (1, 0)}
    bias_m, bias_n = (c.pitch, 1) if c and p.bias == "matrix" else strides[p.bias]
    return {
        "dtype": CODES[p.dtype], "precision": PRECISIONS[p.precision],
        "trans_a": int(p.trans_a), "trans_b": int(p.trans_b),
        "m": p.m, "n": p.n, "k": p.k, "batch": p.batch,
        "lda": a.pitch, "ldb": b.pitch, "ldc": y.pitch,
        "a_batch_stride": a.stride, "b_batch_stride": b.stride, "c_batch_stride": y.stride,
        "a_div": p.a_map[0], "a_mod": p.a_map[1], "b_div": p.b_map[0], "b_mod": p.b_map[1],
        "align_a": p.align_a, "align_b": p.align_b, "align_c": p.align_c,
        "bias": BIAS_CODES[p.bias], "bias_stride_m": bias_m, "bias_stride_n": bias_n,
        "alpha": p.alpha, "beta": p.beta if c else 0.0,
        "activation": p.activation, "residual": p.residual, "act_alpha": ALPHA, "act_beta": BETA,
        "gated": int(p.gated), "wide": int(p.wide),
    }  # fmt: skip


@dataclass(frozen=True)
class Repacked:
    """A product whose constant B was repacked. `pointers` are those of A, B, bias (0: none), Y."""

    problem: native.Problem
    pointers: tuple[int, int, int, int]
    copy: torch.Tensor = field(repr=False)


def repack(operands: Operands, pack: native.Pack, launcher: native.Launcher | None) -> Repacked:
    """Copies B as `Pack.repacked` describes, on torch's current stream, or without a launcher on
    the CPU. Raises ProblemError where a copy of B has no use.
    """
    problem, size = pack.repacked(operands.problem)
    if size == 0:
        raise ProblemError(f"B of {operands.product} is used as it is stored")
    b = operands.b.view
    copy = torch.empty((problem.n, problem.ldb), dtype=b.dtype, device=b.device)
    if launcher is None:
        copy.zero_()
        copy[:, : problem.k] = b[0] if operands.product.trans_b else b[0].mT
    else:
        stream = torch.cuda.current_stream().cuda_stream
        launcher.repack(
            operands.problem, b=operands.b.pointer, packed=copy.data_ptr(), stream=stream
        )
    a, _, bias, y = operands.pointers
    return Repacked(problem, (a, copy.data_ptr(), bias, y), copy)


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """||y - reference|| / ||reference|| over finite entries; Inf when NaN or Inf lie elsewhere.

    `reference` is float64 and is rounded to y's dtype before the places of Inf are compared, so
    that an overflow of the dtype counts as Inf on both sides.
    """
    if y.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(y.shape)} and {tuple(reference.shape)}")
    rounded = reference.to(y.dtype)
    finite = torch.isfinite(rounded)
    if not torch.equal(torch.isfinite(y), finite):
        return math.inf
    if not torch.equal(torch.isnan(y), torch.isnan(rounded)):
        return math.inf
    if not torch.equal(y == math.inf, rounded == math.inf):
        return math.inf
    zero = torch.zeros((), dtype=torch.float64, device=y.device)
    difference = torch.where(finite, y.double() - reference, zero)
    scale = float(torch.where(finite, reference, zero).norm())
    error = float(difference.norm())
    if scale == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / scale


def dense(
    m: int, n: int, k: int, dtype: str, layout: str = "nn", precision: str = "tf32", batch: int = 1
) -> Product:
    """A product of dense matrices at aligned addresses, as the runtime hands them over: with a
    single row or column of Y, what is one row of memory is described as one.

    `layout` is two of n (stored as multiplied) and t (stored transposed), for A and for B.
    """
    size = DTYPES[dtype].itemsize
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    if n == 1 and m > 1:
        m, n, trans_a, trans_b = n, m, not trans_b, not trans_a
    trans_a, trans_b = trans_a and m > 1, trans_b or n == 1
    columns = (m if trans_a else k, k if trans_b else n, n)
    align_a, align_b, align_c = (math.gcd(count * size, 16) for count in columns)
    return Product(
        m, n, k, dtype, precision, batch, trans_a=trans_a, trans_b=trans_b,
        a_map=(1, batch), b_map=(1, batch),
        align_a=align_a, align_b=align_b, align_c=align_c, packed=True,
    )  # fmt: skip


def dense_problem(
    m: int, n: int, k: int, dtype: str, layout: str = "nn", precision: str = "tf32", batch: int = 1
) -> native.Problem:
    """The `mp_problem` of `dense`, for planning only: nothing is allocated."""
    number = "f32ieee" if precision == "ieee" else dtype
    p = dense(m, n, k, dtype, layout, precision, batch)
    own = "nt"[p.trans_a] + "nt"[p.trans_b]
    return Shape(number, own, p.m, p.n, p.k, batch).problem()
