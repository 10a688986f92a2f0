"""cuBLASLt as a baseline: products of row-major matrices, with each algorithm it proposes.

A binding of its own, independent of what the library does with the vendor's kernels. Y = A @ B of
row-major matrices is Y^T = B^T @ A^T of column-major ones, which is how it is put to cuBLASLt, as
cuBLAS' users do. fp32 accumulation, a workspace of 32 MiB; batches by strides. B may be stored
transposed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpoly_ort.errors import DeviceError

WORKSPACE_BYTES = 32 << 20
MAJORS = (13, 12)  # of CUDA: what follows .so in the library's name

# cudaDataType and cublasComputeType_t, by the names that timings go by.
DATA_TYPES = {"f16": 2, "bf16": 14, "f32": 0, "f32ieee": 0}
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
COMPUTE_TYPES = {
    "f16": COMPUTE_32F, "bf16": COMPUTE_32F, "f32": COMPUTE_32F_FAST_TF32, "f32ieee": COMPUTE_32F,
}  # fmt: skip
SCALE_TYPE = 0  # CUDA_R_32F
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
OPERATION_TRANS_A, TRANSPOSED = 3, 1  # cublasLtMatmulDescAttributes_t, cublasOperation_t
PREFERENCE_WORKSPACE, PREFERENCE_REDUCTION = 1, 3  # cublasLtMatmulPreferenceAttributes_t
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of its A, B, C and D, in bytes
# cublasLtMatmulAlgoConfigAttributes_t: code and type of what `Algorithm.settings` tells.
SETTINGS: dict[str, tuple[int, Any]] = {
    "algorithm": (0, c_int32), "tile": (1, c_uint32), "split": (2, c_uint32),
    "reduction": (3, c_uint32), "swizzle": (4, c_uint32), "custom": (5, c_uint32),
    "stages": (6, c_uint32), "inner": (7, c_uint16), "cluster": (8, c_uint16),
}  # fmt: skip
# Partial sums of a split K stay fp32, as ours and as torch's cuBLAS is asked to; the others are
# "in place" and "output type", which would round them to the halves. Algorithms without a split
# are allowed by every mask.
REDUCTION_IN_COMPUTE_TYPE = 2
NOT_SUPPORTED = 15
STATUSES = {
    1: "not initialized: is there a GPU?", 3: "allocation failed", 7: "invalid value",
    8: "architecture mismatch", 11: "mapping error", 13: "execution failed",
    14: "internal error", NOT_SUPPORTED: "not supported",
}  # fmt: skip


class Refused(Exception):
    """cuBLASLt has no algorithm for this product."""


class Algorithm(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: an algorithm, opaque, and what it needs."""

    _fields_ = [
        ("data", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    ]


@dataclass(frozen=True)
class Sizes:
    """Y (batch, m, n) = A (batch, m, k) @ B (batch, k, n), row-major, rows back to back.

    Batch strides count elements.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    a_stride: int = 0
    b_stride: int = 0
    y_stride: int = 0

    @staticmethod
    def dense(m: int, n: int, k: int, batch: int = 1) -> Sizes:
        """Matrices of a batch back to back, too."""
        return Sizes(m, n, k, batch, m * k, k * n, m * n)


def find_library() -> list[str]:
    """Where to look, the best first: beside torch's CUDA packages, then by name.

    Of several versions the one of torch's own CUDA comes first, so that both cuBLAS baselines are
    of one version.
    """
    found = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += [str(path) for path in Path(folder).glob("*/lib/libcublasLt.so.*")]
    majors = sorted(MAJORS, key=lambda major: major != _torch_major())
    named = [path for major in majors for path in sorted(found) if path.endswith(f".so.{major}")]
    return named + [f"libcublasLt.so.{major}" for major in majors]


def _torch_major() -> int:
    import torch

    digits = re.match(r"\d+", torch.version.cuda or "")
    return int(digits.group()) if digits else MAJORS[0]


class CublasLt:
    """An open cuBLASLt on the current device.

    Raises:
        DeviceError: the library is not found, or it does not start (no GPU).
    """

    def __init__(self, names: list[str] | None = None) -> None:
        self._library = _load(find_library() if names is None else names)
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._one, self._zero = c_float(1), c_float(0)

    @property
    def version(self) -> int:
        """For example 130100: major * 10000 + minor * 100 + patch."""
        function = self._library.cublasLtGetVersion
        function.restype = c_size_t
        return int(function())

    def close(self) -> None:
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def product(self, sizes: Sizes, dtype: str, trans_b: bool = False) -> Product:
        """A product to run with any algorithm; `dtype` is a name of `DATA_TYPES`. With `trans_b`, B
        is stored as (batch, n, k).
        """
        return Product(self, sizes, dtype, trans_b)

    def settings(self, algorithm: Algorithm) -> dict[str, int]:
        """What the algorithm consists of, by the names of `SETTINGS`, in cuBLASLt's codes; those
        that this version does not know are left out.
        """
        found = {}
        for name, (code, kind) in SETTINGS.items():
            value, written = kind(), c_size_t()
            status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
                byref(algorithm), code, byref(value), ctypes.sizeof(value), byref(written)
            )
            if status == 0:
                found[name] = int(value.value)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == NOT_SUPPORTED:
            raise Refused(f"{name}: not supported")
        if status:
            meaning = STATUSES.get(status, "unknown status")
            raise DeviceError(f"{name} failed: {meaning} ({status})")


class Product:
    """The descriptors of one product; they live as long as it does."""

    def __init__(self, owner: CublasLt, sizes: Sizes, dtype: str, trans_b: bool = False) -> None:
        self._owner, self._halves = owner, dtype in ("f16", "bf16")
        self._operation = c_void_p()
        self._layouts: list[c_void_p] = []
        owner._call(
            "cublasLtMatmulDescCreate", byref(self._operation), COMPUTE_TYPES[dtype], SCALE_TYPE
        )
        if trans_b:
            transposed = c_int32(TRANSPOSED)
            owner._call(
                "cublasLtMatmulDescSetAttribute", self._operation, OPERATION_TRANS_A,
                byref(transposed), ctypes.sizeof(transposed),
            )  # fmt: skip
        # Column-major, so transposed: B^T is n x k, A^T is k x m, Y^T is n x m.
        b_sides = (sizes.k, sizes.n) if trans_b else (sizes.n, sizes.k)
        for rows, columns, stride in (
            (*b_sides, sizes.b_stride),
            (sizes.k, sizes.m, sizes.a_stride),
            (sizes.n, sizes.m, sizes.y_stride),
        ):
            layout = c_void_p()
            owner._call(
                "cublasLtMatrixLayoutCreate", byref(layout), DATA_TYPES[dtype], rows, columns, rows
            )
            self._layouts.append(layout)
            if sizes.batch > 1:
                self._set(layout, LAYOUT_BATCH_COUNT, c_int32(sizes.batch))
                self._set(layout, LAYOUT_BATCH_STRIDE, c_int64(stride))

    def algorithms(self, most: int, alignment: int | None = None) -> list[Algorithm]:
        """What the heuristic proposes, the most promising first; at least one, at most `most`.
        `alignment`: bytes that all addresses are a multiple of; cuBLASLt takes 256 for granted.

        Raises:
            Refused: there is none for this product.
        """
        owner, preference = self._owner, c_void_p()
        owner._call("cublasLtMatmulPreferenceCreate", byref(preference))
        wishes: dict[int, Any] = {PREFERENCE_WORKSPACE: c_uint64(WORKSPACE_BYTES)}
        if self._halves:
            wishes[PREFERENCE_REDUCTION] = c_uint32(REDUCTION_IN_COMPUTE_TYPE)
        if alignment is not None:
            wishes |= dict.fromkeys(PREFERENCE_ALIGNMENTS, c_uint32(alignment))
        for attribute, value in wishes.items():
            owner._call(
                "cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value),
                ctypes.sizeof(value),
            )  # fmt: skip
        results, count = (Algorithm * most)(), c_int32()
        b, a, y = self._layouts
        try:
            owner._call(
                "cublasLtMatmulAlgoGetHeuristic", owner._handle, self._operation, b, a, y, y,
                preference, most, results, byref(count),
            )  # fmt: skip
        finally:
            owner._call("cublasLtMatmulPreferenceDestroy", preference)
        found = [result for result in results[: count.value] if result.status == 0]
        if not found:
            raise Refused("the heuristic of cuBLASLt proposes no algorithm")
        return found

    def run(
        self, algorithm: Algorithm, a: int, b: int, y: int, workspace: int, stream: int
    ) -> None:
        """Enqueues the product on device addresses; `workspace` has `WORKSPACE_BYTES` bytes."""
        owner = self._owner
        layout_b, layout_a, layout_y = self._layouts
        owner._call(
            "cublasLtMatmul", owner._handle, self._operation, byref(owner._one), b, layout_b,
            a, layout_a, byref(owner._zero), y, layout_y, y, layout_y, byref(algorithm),
            workspace, WORKSPACE_BYTES, stream,
        )  # fmt: skip

    def close(self) -> None:
        for layout in self._layouts:
            self._owner._call("cublasLtMatrixLayoutDestroy", layout)
        self._layouts = []
        if self._operation:
            self._owner._call("cublasLtMatmulDescDestroy", self._operation)
            self._operation = c_void_p()

    def _set(self, layout: c_void_p, attribute: int, value: Any) -> None:
        self._owner._call(
            "cublasLtMatrixLayoutSetAttribute", layout, attribute, byref(value),
            ctypes.sizeof(value),
        )  # fmt: skip


def _load(names: list[str]) -> ctypes.CDLL:
    tried = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        for function, arguments in SIGNATURES.items():
            getattr(library, function).argtypes = arguments
        return library
    raise DeviceError(
        "cuBLASLt, a baseline of this benchmark, is not found; it comes with a CUDA build of torch "
        f"or the package nvidia-cublas. Tried: {'; '.join(tried) or 'nothing'}"
    )


SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtDestroy": [c_void_p],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int32, c_int32],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int32, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int32, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatrixLayoutSetAttribute": [c_void_p, c_int32, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int32, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [
        *[c_void_p] * 7, c_int32, POINTER(Algorithm), POINTER(c_int32),
    ],
    "cublasLtMatmulAlgoConfigGetAttribute": [
        POINTER(Algorithm), c_int32, c_void_p, c_size_t, POINTER(c_size_t),
    ],
    "cublasLtMatmul": [*[c_void_p] * 13, c_void_p, c_size_t, c_void_p],
}  # fmt: skip
