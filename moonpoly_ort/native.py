"""libmoonpoly_ort.so through ctypes: thin classes over the functions of
`custom_ops/runtime/moonpoly.h`, whose structs are in `native_structs` and signatures in
`native_functions`.

Importing this module needs no library; the first call loads it, checks its API version and the size
of every struct, and raises `NativeLibraryError` with the build command if it is missing or does not
match.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .errors import (
    DeviceError,
    KernelMissingError,
    MoonPolyError,
    NativeLibraryError,
    PackError,
    ProblemError,
)
from .native_functions import SIGNATURES, InterpretConvFn, InterpretFn
from .native_structs import (
    MAX_REGIONS,
    STRUCTS,
    VENDOR,
    Activation,
    AutoPad,
    Bias,
    Conv,
    ConvAttributes,
    Copy,
    Cost,
    DescShape,
    Device,
    Dtype,
    Family,
    KernelRecord,
    PackHeader,
    Plan,
    PlanFlag,
    Precision,
    Problem,
    Region,
    Residual,
    Stats,
    Table,
    VendorCost,
    VendorTile,
)

__all__ = [
    "API_VERSION",
    "MAX_REGIONS",
    "STRUCTS",
    "VENDOR",
    "Activation",
    "AutoPad",
    "Bias",
    "Conv",
    "ConvAttributes",
    "ConvInterpreter",
    "ConvProblem",
    "Copy",
    "Cost",
    "DescShape",
    "Device",
    "Dtype",
    "Family",
    "Interpreter",
    "KernelRecord",
    "Launcher",
    "Pack",
    "PackHeader",
    "Plan",
    "PlanFlag",
    "Precision",
    "Problem",
    "Region",
    "Residual",
    "Stats",
    "Table",
    "VendorCost",
    "VendorTile",
    "blocks_per_sm",
    "conv_pack",
    "conv_packed",
    "conv_problem",
    "device_count",
    "device_query",
    "gemm_problem",
    "library_path",
    "matmul_problem",
    "set_interpreter",
    "stats",
]

API_VERSION = 5

# The same for a convolution: (conv, plan, addresses of X, W, bias or None, R or None, Y).
ConvInterpreter = Callable[[Conv, Plan, int, int, int | None, int | None, int], None]
# One launch of the interpreter: (problem, plan, addresses of A, B, bias or None, R or None, Y).
Interpreter = Callable[[Problem, Plan, int, int, int | None, int | None, int], None]

_ERRORS: dict[int, type[MoonPolyError]] = {
    1: ProblemError,
    2: DeviceError,
    3: PackError,
    4: KernelMissingError,
    5: DeviceError,
    6: NativeLibraryError,
}


def library_path() -> Path:
    """Path of libmoonpoly_ort.so, for `SessionOptions.register_custom_ops_library`.

    Raises:
        NativeLibraryError: it has not been built.
    """
    path = Path(__file__).resolve().parent / "libmoonpoly_ort.so"
    if not path.is_file():
        raise NativeLibraryError(
            f"the native runtime {path} is missing; build it with `pip install .` (or "
            "`pip install -e .` in a checkout), which needs a C++17 compiler such as g++"
        )
    return path


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"the native runtime {path} cannot be loaded: {error}; rebuild it with `pip install .`"
        ) from error
    version = library.mp_api_version()
    if version != API_VERSION:
        raise NativeLibraryError(
            f"{path} has API version {version}, this package needs {API_VERSION}; "
            "rebuild it with `pip install .`"
        )
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, struct in STRUCTS.items():
        size = library.mp_struct_size(name.encode())
        if size != ctypes.sizeof(struct):
            raise NativeLibraryError(
                f"{path}: {name} has {size} bytes, this package expects {ctypes.sizeof(struct)}; "
                "rebuild it with `pip install .`"
            )
    return library


def _check(status: int) -> None:
    if status:
        text = _library().mp_last_error().decode(errors="replace")
        raise _ERRORS.get(status, NativeLibraryError)(text)


class _Owner(ABC):
    """Owns an object of the library, until `close`, the end of a `with`, or its own end."""

    _handle: c_void_p

    @abstractmethod
    def _release(self) -> None: ...

    def close(self) -> None:
        if self._handle:
            self._release()
            self._handle = c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


class Pack(_Owner):
    """An open kernel pack or catalog; a context manager.

    Raises:
        PackError: the file is missing, truncated, corrupt or of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle = c_void_p()
        _check(_library().mp_pack_open(bytes(self.path), ctypes.byref(self._handle)))
        count = _library().mp_pack_kernel_count(self._handle)
        self._kernels = [
            KernelRecord.from_buffer_copy(_library().mp_pack_kernel(self._handle, i).contents)
            for i in range(count)
        ]

    @property
    def handle(self) -> c_void_p:
        if not self._handle:
            raise PackError(f"kernel pack '{self.path}' is closed")
        return self._handle

    @property
    def kernels(self) -> list[KernelRecord]:
        return self._kernels

    @property
    def header(self) -> PackHeader:
        return PackHeader.from_buffer_copy(_library().mp_pack_info(self.handle).contents)

    def plan(
        self, device: Device, problem: Problem, *, kernel: int = -1, split: int = 0, flags: int = 0
    ) -> Plan:
        """The plan for a problem on a device; `kernel` >= 0 and `split` >= 1 force a choice, and
        `kernel` `VENDOR` cuBLASLt; a forced choice is one region. `flags`: `PlanFlag`s, what to do
        without.

        Raises:
            ProblemError: an illegal problem, or a split that the forced kernel cannot make.
            KernelMissingError: no kernel (or not the forced one) covers it.
            PackError: the pack is for another architecture.
        """
        plan = Plan()
        _check(
            _library().mp_plan_problem(
                self.handle, ctypes.byref(device), ctypes.byref(problem), kernel, split,
                flags, ctypes.byref(plan),
            )
        )  # fmt: skip
        return plan

    def repacked(self, problem: Problem) -> tuple[Problem, int]:
        """The problem for a copy of a constant B that suits the kernels better, and the copy's
        bytes; the problem itself and 0 where none does. Their plans say which is faster.

        Raises ProblemError for an illegal problem.
        """
        packed, size = Problem(), c_int64()
        _check(
            _library().mp_repacked_problem(
                self.handle, ctypes.byref(problem), ctypes.byref(packed), ctypes.byref(size)
            )
        )
        return packed, size.value

    def plan_conv(
        self, device: Device, conv: Conv, *, kernel: int = -1, split: int = 0, flags: int = 0
    ) -> Plan:
        """The plan for a convolution, as `plan`; raises what it raises."""
        plan = Plan()
        _check(
            _library().mp_plan_conv(
                self.handle, ctypes.byref(device), ctypes.byref(conv), kernel, split, flags,
                ctypes.byref(plan),
            )
        )  # fmt: skip
        return plan

    def _release(self) -> None:
        _library().mp_pack_close(self._handle)

    def __iter__(self) -> Iterator[KernelRecord]:
        return iter(self._kernels)


class Launcher(_Owner):
    """A pack loaded on one GPU: runs plans on raw device addresses and a stream.

    Raises:
        DeviceError: no driver, no such GPU, or a driver call failed.
        PackError: a catalog, or a pack for another architecture.
    """

    def __init__(self, pack: Pack, ordinal: int = 0) -> None:
        self._handle = c_void_p()
        _check(_library().mp_launcher_create(pack.handle, ordinal, ctypes.byref(self._handle)))

    def launch(
        self,
        problem: Problem,
        plan: Plan,
        *,
        a: int,
        b: int,
        y: int,
        bias: int | None = None,
        residual: int | None = None,
        workspace: int | None = None,
        counters: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Enqueues the plan, without waiting. `counters` are zeroed int32 and are left zero."""
        _check(
            _library().mp_launch(
                self._handle, ctypes.byref(problem), ctypes.byref(plan), a, b, bias, residual, y,
                workspace, counters, stream,
            )
        )  # fmt: skip

    def repack(self, problem: Problem, *, b: int, packed: int, stream: int | None = None) -> None:
        """Enqueues the copy of B that `Pack.repacked` describes, to the 16-byte aligned address
        `packed`. Raises ProblemError where it says 0 bytes.
        """
        _check(_library().mp_repack(self._handle, ctypes.byref(problem), b, packed, stream))

    def launch_conv(
        self,
        conv: Conv,
        plan: Plan,
        *,
        x: int,
        w: int,
        y: int,
        bias: int | None = None,
        residual: int | None = None,
        workspace: int | None = None,
        counters: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Enqueues the plan of a convolution, as `launch`."""
        _check(
            _library().mp_launch_conv(
                self._handle, ctypes.byref(conv), ctypes.byref(plan), x, w, bias, residual, y,
                workspace, counters, stream,
            )
        )  # fmt: skip

    def _release(self) -> None:
        _library().mp_launcher_destroy(self._handle)


def device_count() -> int:
    """GPUs that the driver offers; 0 without a driver."""
    count = c_int32()
    _check(_library().mp_device_count(ctypes.byref(count)))
    return count.value


def device_query(ordinal: int) -> Device:
    """Attributes of a GPU.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """
    device = Device()
    _check(_library().mp_device_query(ordinal, ctypes.byref(device)))
    return device


def blocks_per_sm(kernel: KernelRecord, device: Device) -> int:
    """Blocks of a kernel that one SM holds, by CUDA's occupancy rules; 0: it does not fit."""
    return int(_library().mp_blocks_per_sm(ctypes.byref(kernel), ctypes.byref(device)))


def _dims(shape: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * max(1, len(shape)))(*shape)


def matmul_problem(
    a: Sequence[int],
    b: Sequence[int],
    dtype: Dtype,
    precision: Precision = Precision.TF32,
    *,
    trans_b: bool = False,
) -> tuple[Problem, int]:
    """The problem that ONNX MatMul is at the shapes `a` and `b`, and how often it is launched.

    `trans_b`: the last two axes of B, whose shape is that as stored, change places first. Buffers
    are taken to start 16-byte aligned. Raises `ProblemError` for shapes that do not fit.
    """
    problem, launches = Problem(), c_int64()
    _check(
        _library().mp_matmul_problem(
            dtype, precision, len(a), _dims(a), len(b), _dims(b), trans_b, ctypes.byref(problem),
            ctypes.byref(launches),
        )
    )  # fmt: skip
    return problem, launches.value


def gemm_problem(
    a: Sequence[int],
    b: Sequence[int],
    c: Sequence[int] | None,
    dtype: Dtype,
    precision: Precision = Precision.TF32,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Problem:
    """The problem that ONNX Gemm amounts to at the shapes `a`, `b` (as stored) and `c`.

    Raises `ProblemError` for shapes that do not fit.
    """
    if len(a) != 2 or len(b) != 2:
        raise ProblemError(f"Gemm takes matrices, got A {list(a)} and B {list(b)}")
    problem = Problem()
    _check(
        _library().mp_gemm_problem(
            dtype, precision, _dims(a), _dims(b), len(c or ()), None if c is None else _dims(c),
            trans_a, trans_b, alpha, beta, ctypes.byref(problem),
        )
    )  # fmt: skip
    return problem


@dataclass(frozen=True)
class ConvProblem:
    """What a Conv or ConvTranspose node amounts to: the shape of Y and either a convolution or a
    matrix product, whose A is then W, or B if not `w_is_a`.
    """

    output: tuple[int, ...]
    conv: Conv
    product: Problem | None
    w_is_a: bool


def conv_problem(
    x: Sequence[int],
    w: Sequence[int],
    attributes: ConvAttributes,
    dtype: Dtype,
    precision: Precision = Precision.TF32,
    *,
    bias: bool = False,
) -> ConvProblem:
    """The work of ONNX Conv or ConvTranspose at the shapes `x` and `w`, as stored.

    Raises `ProblemError` for shapes or attributes that do not fit.
    """
    conv, problem, pointwise, w_is_a = Conv(), Problem(), c_int32(), c_int32()
    output = (c_int64 * max(1, len(x)))()
    _check(
        _library().mp_conv_problem(
            dtype, precision, ctypes.byref(attributes), len(x), _dims(x), len(w), _dims(w), bias,
            output, ctypes.byref(conv), ctypes.byref(problem), ctypes.byref(pointwise),
            ctypes.byref(w_is_a),
        )
    )  # fmt: skip
    product = problem if pointwise.value else None
    return ConvProblem(tuple(output[: len(x)]), conv, product, bool(w_is_a.value))


def conv_packed(conv: Conv) -> tuple[Conv, int]:
    """`conv` with W stored for loads of 16 bytes, and the bytes of that W; 0: it has no use."""
    out, size = Conv(), c_int64()
    _check(_library().mp_conv_packed(ctypes.byref(conv), ctypes.byref(out), ctypes.byref(size)))
    return out, size.value


def conv_pack(conv: Conv, w: int, packed: int) -> None:
    """Stores W at the host address `w` anew at `packed`, as `conv_packed` describes."""
    _check(_library().mp_conv_pack(ctypes.byref(conv), w, packed))


def stats() -> Stats:
    """Counters since the library was loaded, over all sessions."""
    out = Stats()
    _library().mp_get_stats(ctypes.byref(out))
    return out


_installed: dict[str, object] = {}  # keeps the C callbacks alive


def set_interpreter(function: Interpreter | None, conv: ConvInterpreter | None = None) -> None:
    """Installs what the interpreter backend's CPU ops call for products and for convolutions, or
    removes it. An exception that a function raises becomes the error of the session's run.
    """
    _install("mp_set_interpreter", InterpretFn, function)
    _install("mp_set_conv_interpreter", InterpretConvFn, conv)


def _install(setter: str, kind: Any, function: Callable[..., None] | None) -> None:
    if function is None:
        getattr(_library(), setter)(kind())
        return

    def call(
        problem: Any,
        plan: ctypes._Pointer[Plan],
        first: int | None,
        second: int | None,
        bias: int | None,
        residual: int | None,
        y: int | None,
        error: ctypes._Pointer[c_char],
        error_bytes: int,
    ) -> int:
        try:
            # ctypes gives None for null, which an empty tensor's address may be.
            addresses = first or 0, second or 0, bias, residual, y or 0
            function(problem.contents, plan.contents, *addresses)
        except Exception as caught:
            text = f"{type(caught).__name__}: {caught}".encode()[: error_bytes - 1]
            ctypes.memmove(error, text + b"\0", len(text) + 1)
            return 1
        return 0

    callback = kind(call)
    getattr(_library(), setter)(callback)
    _installed[setter] = callback
