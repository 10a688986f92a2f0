"""Ahead-of-time compilation of the kernel list. Needs Triton and its ptxas; no GPU, no torch.

Triton names the target sm_90a, sm_100a, sm_120a where wgmma, tcgen05 and their kin need it, so a
pack for sm_90 and up runs on exactly that compute capability, never on a later one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moonpoly_ort.errors import MissingDependencyError, PackError

from . import conv_compiling, loading
from .kernel_list import specs
from .pack_format import VERSION, Descriptor, PackedKernel, Param
from .signature import PARAMETERS, launch_params
from .spec import (
    Dtype,
    Family,
    KernelSpec,
    Precision,
    can_launch_early,
    estimated_resources,
    is_wide,
    left_is_k_major,
    name,
    why_illegal,
    ws_register_limit,
)

TRITON_MINOR = "3.9"
SOURCES = {
    "gemm_tma": ("tiles.py", "activations.py", "gemm_tma.py"),
    "gemm_pointer": ("tiles.py", "activations.py", "gemm_pointer.py"),
    "gemm_dot": ("tiles.py", "activations.py", "gemm_dot.py"),
    "gemm_shallow": ("tiles.py", "activations.py", "gemm_shallow.py"),
    "gemv": ("tiles.py", "activations.py", "gemv.py"),
    "gemm_ws": (
        "gemm_ws.py",
        "ws_schedule.py",
        "ws_epilogue.py",
        "ws_finish.py",
        "ws_slices.py",
        "activations.py",
    ),
    "gemm_tma_masked": ("tiles.py", "activations.py", "gemm_tma.py", "gemm_tma_masked.py"),
    "copy_padded": ("tiles.py", "copy_padded.py"),
    "gemm_ws_x3": (
        "gemm_ws_x3.py",
        "ws_schedule.py",
        "ws_epilogue.py",
        "ws_finish.py",
        "ws_transposed.py",
        "activations.py",
    ),
    "conv": ("tiles.py", "activations.py", "conv.py", "conv_compiling.py"),
    "conv_depthwise": (
        "tiles.py",
        "activations.py",
        "conv.py",
        "conv_depthwise.py",
        "conv_compiling.py",
    ),
}
ELEMENT = {Dtype.F16: "fp16", Dtype.BF16: "bf16", Dtype.F32: "fp32"}

_LOCK = threading.Lock()
# Held while Triton parses kernel sources. CPython 3.11 counts the depth of `ast.parse` for all
# threads together, so that parsing in two of them can fail with "recursion depth mismatch".
_PARSING = threading.Lock()
_builds = 0  # threads inside _knobs
_scope = ExitStack()

Progress = Callable[[int, int, str], None]
"""Called with (kernels done, kernels in all, name of the last one)."""


def triton_version() -> str:
    """The installed Triton's version. Raises MissingDependencyError if it is absent or another."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"building kernels needs Triton {TRITON_MINOR}, which is not installed: "
            "pip install 'moonpoly-ort[tune]'"
        ) from error
    if not version.startswith(TRITON_MINOR + "."):
        raise MissingDependencyError(
            f"building kernels needs Triton {TRITON_MINOR}, found {version}: "
            "pip install 'moonpoly-ort[tune]'"
        )
    return version


def content_key(sm: int, triton: str, *, trial: bool = False) -> str:
    """The SHA-256 in hex of what a pack depends on: kernel sources, specs, Triton's version."""
    listed = specs(sm, trial=trial)
    sources = {source for spec in listed for source in SOURCES[spec.source]}
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in (*sorted(sources), "compiling.py"):
        digest.update((here / source).read_bytes())
    for spec in listed:
        digest.update(repr(spec).encode())
    digest.update(f"sm_{sm} triton {triton} pack {VERSION}".encode())
    return digest.hexdigest()


def _signature(spec: KernelSpec) -> dict[str, str]:
    element = ELEMENT[spec.dtype]
    if spec.family.convolves:
        return conv_compiling.signature(spec, element)
    if spec.family is Family.COPY_PADDED:  # whatever the bits mean
        element = f"i{8 * spec.dtype.bytes}"
    y_box = spec.y_box
    # Of what passes through the left side of the tensor core, a consumer of gemm_ws loads its own.
    swapped = spec.persistent and spec.swap
    rows, columns = (spec.bm, y_box[1]) if swapped else (y_box[0], spec.b_columns)
    a_box = (spec.bk, rows) if spec.trans_a else (rows, spec.bk)
    b_box = (columns, spec.bk) if spec.trans_b else (spec.bk, columns)
    boxes = {Param.DESC_A: a_box, Param.DESC_B: b_box, Param.DESC_Y: y_box}

    def type_of(param: Param) -> str:
        if param in boxes:
            box = boxes[param]
            layout = f",{_shared_layout(spec.dtype, box)}" if spec.family is Family.GEMM_WS else ""
            return f"tensordesc<{element}[1, {box[0]}, {box[1]}]{layout}>"
        if param in (
            Param.PTR_A, Param.PTR_B, Param.PTR_Y, Param.PTR_BIAS, Param.PTR_RESIDUAL
        ):  # fmt: skip
            return f"*{element}"
        if param is Param.PTR_WORKSPACE:
            return "*fp32"
        if param is Param.PTR_COUNTERS:
            return "*i32"
        if param in (Param.ALPHA, Param.BETA, Param.ACT_ALPHA, Param.ACT_BETA):
            return "fp32"
        return "i64" if Param.LDA <= param <= Param.BIAS_N else "i32"

    return {argument: type_of(param) for argument, param in PARAMETERS[spec.source].items()}


def _rounded(spec: KernelSpec, sm: int) -> str:
    """The factors that a TF32 kernel rounds itself: those that reach the tensor core through
    registers, and were not rounded by a tensor map.
    """
    if spec.dtype is not Dtype.F32 or (spec.precision is Precision.IEEE and not spec.tf32x3):
        return "none"
    if spec.tf32x3:
        return "left" if is_wide(spec, sm) else "both"
    if is_wide(spec, sm):
        return "none" if left_is_k_major(spec) else "left"
    return "both" if spec.family is Family.GEMM_POINTER or spec.family.convolves else "none"


def _shared_layout(dtype: Dtype, box: tuple[int, int]) -> Any:
    """Where TMA puts a box in shared memory, as Gluon names it: a part of a tensor map's type."""
    from triton.experimental.gluon import language as gl

    element = gl.float32 if dtype is Dtype.F32 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, *box], element)


def _options(spec: KernelSpec) -> dict[str, Any]:
    if spec.family is not Family.GEMM_WS:
        return {"num_warps": spec.warps, "num_stages": spec.stages, "enable_fp_fusion": True}
    # The first consumer's warps; the compiler adds the other consumers and the loading warpgroup.
    return {"num_warps": 4, "maxnreg": ws_register_limit(spec), "enable_fp_fusion": True}


def _divisors(spec: KernelSpec) -> dict[str, int]:
    """What the compiler may assume of the run-time arguments: it decides how wide the loads are."""
    e = spec.dtype.bytes
    if spec.family.convolves:
        return conv_compiling.divisors(spec)
    if spec.family is Family.COPY_PADDED:
        return {"y": 16, "ldc": 16 // e, "c_batch": 16 // e, "N": 16 // e}
    divisors = {"workspace": 16} if "workspace" in PARAMETERS[spec.source] else {}
    if "Y" in spec.family.maps:
        divisors |= {"residual": 16, "ldc": 16 // e, "c_batch": 16 // e, "N": 16 // e}
        return divisors | ({} if spec.tf32x3 and spec.persistent else {"y": 16})
    if spec.family.tensor_maps:
        return divisors
    divisors["residual"] = spec.align_c
    for pointer, pitch, batch, length, align in (
        ("a", "lda", "a_batch", "M" if spec.trans_a else "K", spec.align_a),
        ("b", "ldb", "b_batch", "K" if spec.trans_b else "N", spec.align_b),
        ("y", "ldc", "c_batch", "N", spec.align_c),
    ):
        divisors[pointer] = align
        for argument in (pitch, batch, length):
            divisors[argument] = max(divisors.get(argument, 1), align // e)
    return {argument: divisor for argument, divisor in divisors.items() if divisor > 1}


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread) from the ELF's .nv.info section.

    Its records are: format byte, attribute byte, 16-bit size or value; format 4 is followed by
    `size` bytes, here a symbol index and a value.
    """
    shoff, = struct.unpack_from("<Q", cubin, 0x28)  # fmt: skip
    entry_bytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, shoff + i * entry_bytes) for i in range(count)]
    name_table = headers[names][4]
    registers = frame = None
    for header in headers:
        start = name_table + header[0]
        if cubin[start : start + 9] != b".nv.info\0":
            continue
        offset, end = header[4], header[4] + header[5]
        while offset < end:
            form, attribute, size = struct.unpack_from("<BBH", cubin, offset)
            offset += 4
            if form != 4:
                continue
            value = struct.unpack_from("<I", cubin, offset + 4)[0] if size >= 8 else 0
            if attribute == 0x2F:
                registers = value
            elif attribute == 0x11:
                frame = value
            offset += size
    if registers is None or frame is None:
        raise PackError(
            "the compiled kernel names no register count or frame size: unknown cubin format"
        )
    return registers, frame


@contextmanager
def _knobs() -> Iterator[None]:
    """Triton's switches as a build needs them, until the last of the threads inside has left."""
    import triton

    global _builds, _scope
    with _LOCK:
        if _builds == 0:
            if triton.knobs.runtime.interpret:  # then its own library is interpreted, too
                raise PackError(
                    "kernels cannot be compiled while TRITON_INTERPRET is set: unset it"
                )
            loading.TRITON.acquire()
            _scope = ExitStack()
            _scope.callback(loading.TRITON.release)
            _scope.enter_context(triton.knobs.compilation.scope())
            # Line information would bring paths of this machine, and a third of the bytes.
            triton.knobs.compilation.disable_line_info = True
            triton.knobs.compilation.store_binary_only = True
        _builds += 1
    try:
        yield
    finally:
        with _LOCK:
            _builds -= 1
            if _builds == 0:
                _scope.close()


def compile_spec(spec: KernelSpec, sm: int) -> PackedKernel:
    """Compiles one kernel for an architecture (90 for sm_90), through Triton's on-disk cache.

    Raises PackError for an illegal spec or a failing compiler, MissingDependencyError without
    Triton.
    """
    reason = why_illegal(spec, sm)
    if reason is not None:
        raise PackError(f"{name(spec)} cannot be compiled for sm_{sm}: {reason}")
    triton_version()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = loading.kernel(spec.source)
    dependent_launch = can_launch_early(spec, sm)
    constants = loading.constants(
        spec, rounded=_rounded(spec, sm), dependent_launch=dependent_launch
    )
    arguments = function.arg_names
    with _PARSING:
        function.cache_key  # noqa: B018 - computed once, by parsing
    source = (GluonASTSource if spec.family is Family.GEMM_WS else ASTSource)(
        function,
        {**_signature(spec), **dict.fromkeys(constants, "constexpr")},
        constants,
        {(arguments.index(a),): [["tt.divisibility", d]] for a, d in _divisors(spec).items()},
    )
    make_ir = source.make_ir

    def make_ir_alone(*args: Any) -> Any:
        with _PARSING:
            return make_ir(*args)

    source.make_ir = make_ir_alone
    with _knobs():
        try:
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", sm, 32),
                options=_options(spec),
            )
        except OSError as error:
            raise PackError(
                f"cannot compile {name(spec)}: {error}. Triton writes to {triton.knobs.cache.dir}; "
                "TRITON_CACHE_DIR names another folder."
            ) from error
        except Exception as error:
            raise PackError(f"Triton cannot compile {name(spec)} for sm_{sm}: {error}") from error
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise PackError(f"{name(spec)} needs scratch memory, which the launcher does not provide")
    if metadata.num_warps != spec.warps:
        raise PackError(f"{name(spec)} was compiled to {metadata.num_warps} warps")
    cubin = compiled.asm["cubin"]
    registers, frame = _resources(cubin)
    descriptors = tuple(
        Descriptor(tuple(d["block_size"]), d["swizzle"]) for d in metadata.tensordesc_meta or ()
    )
    return PackedKernel(
        spec,
        metadata.name,
        cubin,
        metadata.shared,
        registers,
        launch_params(spec),
        descriptors,
        frame,
        dependent_launch,
    )


def compile_specs(
    wanted: Sequence[KernelSpec],
    sm: int,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[PackedKernel]:
    """Compiles kernels in parallel, `workers` at a time (default: one per usable CPU), in the
    order given.

    Threads suffice: Triton releases the GIL in LLVM and runs ptxas as a process. Raises what
    `compile_spec` raises, at the first failure.
    """
    triton_version()
    workers = workers or len(os.sched_getaffinity(0))
    with _knobs(), ThreadPoolExecutor(workers, thread_name_prefix="moonpoly-compile") as pool:
        futures = [pool.submit(compile_spec, spec, sm) for spec in wanted]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                kernel = future.result()
                if progress is not None:
                    progress(done, len(futures), name(kernel.spec))
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def catalog_kernels(sm: int, *, trial: bool = False) -> list[PackedKernel]:
    """The kernel list without code, with estimated resources."""
    kernels = []
    for spec in specs(sm, trial=trial):
        shared, registers = estimated_resources(spec, sm)
        kernels.append(
            PackedKernel(
                spec,
                str(spec.family),
                b"",
                shared,
                registers,
                launch_params(spec),
                dependent_launch=can_launch_early(spec, sm),
            )
        )
    return kernels
