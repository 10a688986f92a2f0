"""Registers the custom op library on session options: with what settings, and which kernel pack.

Where a CUDA provider and a GPU are there, `auto` registers it. Elsewhere it does not: ONNX Runtime
then inlines the body of every `ai.moonpoly` op and runs its own kernels.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import dependencies, native
from .errors import ArgumentError, DeviceError, MoonPolyError, PackError, RegistrationError
from .provider_settings import CUDA

if TYPE_CHECKING:
    from .custom_ops.kernels.pack_format import PackInfo

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.register")

Backend = Literal["auto", "cuda", "interpreter"]
Precision = Literal["tf32", "ieee"]

INTERPRETED_SM = 90  # the richest kernel list

log = logging.getLogger("moonpoly_ort")


@dataclass(frozen=True)
class Registration:
    """What the library was registered with: it reads its settings once, at registration."""

    backend: str
    precision: str
    pack: str
    vendor: str = "0"  # moonpoly.vendor

    def __str__(self) -> str:
        return (
            f"backend {self.backend}, precision {self.precision}, vendor {self.vendor}, "
            f"pack {self.pack}"
        )


# Options cannot be copied or unregistered, and registering twice fails inside ONNX Runtime, so that
# the state of every options object is kept here for as long as it lives.
registered: weakref.WeakKeyDictionary[Any, Registration] = weakref.WeakKeyDictionary()
lock = threading.RLock()
_said: set[str] = set()
_interpreted: PackInfo | None = None  # what the interpreter was installed with


def say_once(message: str) -> None:
    """Warns, but once in a process."""
    with lock:
        if message in _said:
            return
        _said.add(message)
    log.warning(message)


def register(
    session_options: Any,
    *,
    backend: Backend = "auto",
    precision: Precision = "tf32",
    pack: str | os.PathLike[str] | None = None,
    vendor: bool | None = None,
    device_id: int = 0,
) -> bool:
    """Registers the custom op library on `session_options`, for models that are already rewritten.

    Every session made from these options must then use the CUDA provider (backend `interpreter`:
    the CPU provider): a registered op is never inlined.

    Args:
        session_options: an `onnxruntime.SessionOptions`.
        backend: `auto` registers where ONNX Runtime has CUDA and there is a GPU of a supported
            architecture, and otherwise does nothing, with one warning in the log (a `pack` that is
            named must be one for the GPU);
            `cuda` is an error there; `interpreter` runs the kernels in Triton's interpreter on the
            CPU (slow).
        precision: how fp32 is multiplied: `tf32` as ONNX Runtime's CUDA provider does, or `ieee`.
        pack: a kernel pack (see `moonpoly pack`); by default it is found, or built into the cache.
        vendor: whether cuBLASLt is a candidate beside our kernels, by default not: a product that
            it has not seen costs the host 0.2 to 3 ms. True makes it an error where the pack does
            not hold its timings on this GPU, or the library is not there.
        device_id: the GPU that the session will use.

    Returns:
        Whether the library is registered now.

    Raises:
        ArgumentError: `session_options` are not options, or an argument is not accepted.
        RegistrationError: it is registered on these options already.
        DeviceError, PackError, MissingDependencyError, NativeLibraryError: it cannot run here.
    """
    if not isinstance(session_options, ort.SessionOptions):
        raise ArgumentError(
            f"session_options is a {type(session_options).__name__}; an onnxruntime.SessionOptions "
            "is needed"
        )
    wanted = resolve(backend, precision, pack, vendor, device_id)
    if wanted is None:
        return False
    with lock:
        if session_options in registered:
            raise RegistrationError(
                "the library is already registered on these SessionOptions, with "
                f"{registered[session_options]}. Register once, or make new SessionOptions."
            )
        attach(session_options, wanted)
    return True


def attach(options: Any, wanted: Registration) -> None:
    """Registers the library with these settings, if it is not yet.

    Raises:
        RegistrationError: it is registered with others, or ONNX Runtime does not take it.
    """
    present = registered.get(options)
    if present == wanted:
        return
    if present is not None:
        raise RegistrationError(
            f"the library is registered on these SessionOptions with {present}, and this session "
            f"wants {wanted}. Make new SessionOptions: a registration cannot be changed."
        )
    options.add_session_config_entry("moonpoly.backend", wanted.backend)
    options.add_session_config_entry("moonpoly.precision", wanted.precision)
    options.add_session_config_entry("moonpoly.pack", wanted.pack)
    options.add_session_config_entry("moonpoly.vendor", wanted.vendor)
    try:
        options.register_custom_ops_library(str(native.library_path()))
    except Exception as error:  # onnxruntime has no common base for its errors
        raise RegistrationError(f"ONNX Runtime did not take the library: {error}") from error
    registered[options] = wanted


def resolve(
    backend: str,
    precision: str,
    pack: str | os.PathLike[str] | None,
    vendor: bool | None,
    device_id: int,
    shapes: str = "changing",
) -> Registration | None:
    """The registration for this machine; None, said once, where `auto` leaves the ops to ONNX
    Runtime.
    """
    check_choice("backend", backend, ("auto", "cuda", "interpreter"))
    check_choice("precision", precision, ("tf32", "ieee"))
    check_switch(vendor)
    if backend == "interpreter":
        return Registration(backend, precision, _pack_for_interpreter(pack))
    switch = "auto" if shapes == "repeating" else "0"
    if vendor is not None:
        switch = str(int(vendor))
    try:
        return Registration("cuda", precision, _pack_for_device(pack, device_id), switch)
    except MoonPolyError as error:
        # A pack that the caller names is wanted: another one, or none, would go unnoticed.
        if backend == "cuda" or (pack is not None and isinstance(error, PackError)):
            raise
        say_once(f"running on ONNX Runtime's own kernels: {error}")
        return None


def _pack_for_interpreter(pack: str | os.PathLike[str] | None) -> str:
    """The pack or catalog that the interpreter runs: one for all sessions of the process, since
    plans name kernels by their place in it.
    """
    global _interpreted
    from . import interpreter, packs
    from .custom_ops.kernels.pack_format import read_info

    path = os.fspath(pack or packs.catalog(INTERPRETED_SM))
    info = read_info(path)
    with lock:
        if _interpreted is not None and _interpreted != info:
            raise RegistrationError(
                f"the interpreter of this process runs a pack for sm_{_interpreted.sm} already, "
                f"another than {path}. Use one pack per process."
            )
        interpreter.install(path)
        _interpreted = info
    return path


def check_choice(what: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raises ArgumentError for a value that is not among those that are accepted."""
    if value not in accepted:
        raise ArgumentError(f"{what} = {value!r}; accepted: {', '.join(map(repr, accepted))}")


def check_switch(vendor: object) -> None:
    """Raises ArgumentError for what is neither True nor False nor left to us."""
    if vendor is not None and not isinstance(vendor, bool):
        raise ArgumentError(f"vendor = {vendor!r}; accepted: None, False, True")


def _pack_for_device(pack: str | os.PathLike[str] | None, device_id: int) -> str:
    """The pack for one GPU, found or built. Raises what says why this machine cannot use one."""
    if CUDA not in ort.get_available_providers():
        raise DeviceError(
            f"this onnxruntime {ort.__version__} has no {CUDA}. "
            'With an NVIDIA GPU, install "moonpoly-ort[gpu]" in place of onnxruntime.'
        )
    count = native.device_count()
    if not 0 <= device_id < count:
        raise DeviceError(
            f"there is no GPU {device_id}: the CUDA driver offers {count} device(s). "
            "`moonpoly doctor` shows what it found."
        )
    from . import packs
    from .progress import progress

    device = native.device_query(device_id)
    sm = device.sm
    found = packs.find_pack(sm, pack)
    if found is None:
        log.warning(
            "building the kernels for sm_%d into %s: minutes, once. `moonpoly pack` does it ahead.",
            sm,
            packs.cache_dir(),
        )
        with progress(f"building kernels for sm_{sm}") as report:
            found = packs.ensure_pack(sm, progress=report)
    else:
        found = packs.with_present_tables(found, sm, pack)
    if not packs.is_tuned(found, device.name, device.sm_count):
        say_once(
            f"{found} holds no performance table for {device.name}: plans use the analytic model, "
            "which is less exact. `moonpoly tune` measures one, in some minutes."
        )
    return os.fspath(found)
