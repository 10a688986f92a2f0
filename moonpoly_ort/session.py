"""A drop-in `onnxruntime.InferenceSession` that rewrites the model and runs it on MoonPoly's
kernels.

Where a CUDA provider and a GPU are there, the custom op library is registered. Elsewhere it is not:
ONNX Runtime then inlines the body of every `ai.moonpoly` op and runs its own kernels.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import dependencies, native, optimizing
from .errors import ArgumentError, DeviceError, MoonPolyError, PackError, RegistrationError
from .graph_cache import GraphCache, Places
from .graph_policy import GraphLimits
from .graph_runs import ENABLE, GraphRuns, capturing, is_refusal
from .graph_threads import gate
from .provider_settings import CUDA, for_changing_shapes

if TYPE_CHECKING:
    from .custom_ops.kernels.pack_format import PackInfo
    from .rewriting import Entry

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.InferenceSession")

Backend = Literal["auto", "cuda", "interpreter"]
Precision = Literal["tf32", "ieee"]
Shapes = Literal["changing", "repeating"]

INTERPRETED_SM = 90  # the richest kernel list
FOLDER = "session.model_external_initializers_file_folder_path"
FORMAT = "session.load_model_format"

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
_registered: weakref.WeakKeyDictionary[Any, Registration] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_said: set[str] = set()
_interpreted: PackInfo | None = None  # what the interpreter was installed with


def _say_once(message: str) -> None:
    with _lock:
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
    wanted = _resolve(backend, precision, pack, vendor, device_id)
    if wanted is None:
        return False
    with _lock:
        if session_options in _registered:
            raise RegistrationError(
                "the library is already registered on these SessionOptions, with "
                f"{_registered[session_options]}. Register once, or make new SessionOptions."
            )
        _register(session_options, wanted)
    return True


def _register(options: Any, wanted: Registration) -> None:
    present = _registered.get(options)
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
    _registered[options] = wanted


def _resolve(
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
    _check("backend", backend, ("auto", "cuda", "interpreter"))
    _check("precision", precision, ("tf32", "ieee"))
    _check_switch(vendor)
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
        _say_once(f"running on ONNX Runtime's own kernels: {error}")
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
    with _lock:
        if _interpreted is not None and _interpreted != info:
            raise RegistrationError(
                f"the interpreter of this process runs a pack for sm_{_interpreted.sm} already, "
                f"another than {path}. Use one pack per process."
            )
        interpreter.install(path)
        _interpreted = info
    return path


def _check(what: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ArgumentError(f"{what} = {value!r}; accepted: {', '.join(map(repr, accepted))}")


def _check_switch(vendor: object) -> None:
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
        _say_once(
            f"{found} holds no performance table for {device.name}: plans use the analytic model, "
            "which is less exact. `moonpoly tune` measures one, in some minutes."
        )
    return os.fspath(found)


class _Request(NamedTuple):
    """What a session was asked for; kept to make it again for other providers."""

    source: str | bytes | os.PathLike[str]
    options: Any
    backend: str
    precision: str
    rewrite: bool
    pack: str | os.PathLike[str] | None
    vendor: bool | None
    graphs: GraphLimits | None
    optimize: str | None
    shapes: str
    kwargs: dict[str, Any]


def _refuse_misspelt(options: Iterable[str]) -> None:
    """onnxruntime ignores keywords that it does not know: one that looks like ours is an error."""
    own = InferenceSession.__init__.__kwdefaults__
    for name in options:
        meant = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
        if meant:
            raise ArgumentError(f"{name}= is no option of a session; did you mean {meant[0]}=?")


class InferenceSession(GraphRuns, ort.InferenceSession):  # type: ignore[misc]
    """`onnxruntime.InferenceSession` with the products and convolutions on MoonPoly's kernels.

    Takes what the base class takes and returns what it returns. The keyword arguments below are
    added.

    `sess_options` are used as they are: where a CUDA provider is used, the library gets registered
    on them (they can serve several sessions, with the same settings).

    Args:
        backend, precision, pack: as for `register`.
        vendor: as for `register`; for shapes that repeat, by default wherever it can be had.
        rewrite: False loads the model as it is (for one that is already rewritten).
        cuda_graphs: how many CUDA graphs to keep, or their limits in full; 0 for none. A shape of
            inputs that is seen again is captured, and replayed from then on. Runs then take place
            one at a time, in all threads; models that ONNX Runtime cannot capture run without, as a
            warning says.
        optimize: a graph optimizer to run before the rewrite, as for `moonpoly_ort.rewrite`.
        shapes: what is to be expected of the inputs, where our kernels run on CUDA. `changing`
            keeps ONNX Runtime's fused attention from making a plan of cuDNN for every new length,
            which takes it 77 ms in a BERT-base, and products from cuBLASLt; `repeating` lets both,
            for few shapes that come again and again. The CUDA provider's own `sdpa_kernel` goes
            before it.

    Attributes:
        moonpoly_report: the report of the rewrite, None where nothing was rewritten.
        moonpoly_backend: `cuda`, `interpreter`, or `onnxruntime` where the library is not
        registered.
    """

    moonpoly_report: tuple[Entry, ...] | None
    moonpoly_backend: str

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        backend: Backend = "auto",
        precision: Precision = "tf32",
        rewrite: bool = True,
        pack: str | os.PathLike[str] | None = None,
        vendor: bool | None = None,
        cuda_graphs: int | GraphLimits = 0,
        optimize: str | None = None,
        shapes: Shapes = "changing",
        **kwargs: Any,
    ) -> None:
        _refuse_misspelt(kwargs)
        graphs = GraphLimits.of(cuda_graphs)
        optimizing.check(optimize)
        _check("shapes", shapes, ("changing", "repeating"))
        if optimize is not None and not rewrite:
            raise ArgumentError("optimize= belongs to the rewrite, which rewrite=False leaves out")
        self._request = _Request(
            path_or_bytes,
            sess_options,
            backend,
            precision,
            rewrite,
            pack,
            vendor,
            graphs,
            optimize,
            shapes,
            kwargs,
        )
        self._start(providers, provider_options)

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """As in the base class: the session is made again, for other providers."""
        self._start(providers, provider_options)

    def _start(self, providers: Any, provider_options: Any) -> None:
        _, _, backend, precision, _, pack, vendor, *_ = self._request
        device_id = _cuda_device(providers, provider_options, self._request.options)
        if backend == "cuda" and device_id is None:
            raise ArgumentError(
                f"backend='cuda' needs {CUDA!r} among the providers, not {providers!r}"
            )
        registration = None
        if backend == "interpreter" or device_id is not None:
            shapes = self._request.shapes
            registration = _resolve(backend, precision, pack, vendor, device_id or 0, shapes)
        else:
            _check("backend", backend, ("auto", "cuda", "interpreter"))
            _check("precision", precision, ("tf32", "ieee"))
            _check_switch(vendor)
            _say_once(f"running on ONNX Runtime's own kernels: {CUDA} is not among the providers.")
        try:
            self._load(providers, provider_options, registration)
        except Exception as error:
            if registration is None or not _no_kernel(error):
                raise
            message = "the execution provider of the `ai.moonpoly` kernels did not start"
            if backend != "auto":
                raise DeviceError(
                    f"{message}; ONNX Runtime's log above says why. {error}"
                ) from error
            _say_once(f"running on ONNX Runtime's own kernels: {message}; its log says why.")
            self._load(providers, provider_options, None)

    def _load(
        self, providers: Any, provider_options: Any, registration: Registration | None
    ) -> None:
        source, given = self._request.source, self._request.options
        options = ort.SessionOptions() if given is None else given
        with nullcontext() if given is None else _lock:
            if registration is not None:
                _register(options, registration)
            # Registered ops are never inlined: with such options only the untouched model runs
            # elsewhere.
            untouched = registration is None and options in _registered
            changing = self._request.shapes == "changing" and _adds_settings(
                registration, providers, options
            )
            ready = _Ready(source)
            if not _is_ort_format(source, options):
                if self._request.rewrite and not untouched:
                    ready = _rewritten(source, self._request.optimize, attention=changing)
                elif changing:
                    ready = _as_it_is(source)
            self.moonpoly_report = ready.report
            if changing:
                providers = for_changing_shapes(providers, provider_options, exposed=ready.exposed)
                provider_options = None
            try:
                with (
                    _external_data_in(options, ready.folder, restore=given is not None),
                    gate.run(),
                ):
                    self._create(ready.model, options, providers, provider_options)
            except Exception as error:
                if untouched and _no_kernel(error):
                    raise RegistrationError(
                        "the model is already rewritten, and the library is registered on these "
                        f"SessionOptions for the backend {_registered[options].backend}, which "
                        "this session does not use. Make new SessionOptions for it."
                    ) from error
                raise
        self.moonpoly_backend = registration.backend if registration else "onnxruntime"
        if ready.model is not source:  # the base class keeps it for set_providers, which is ours
            self._model_bytes = None
            self._model_path = None if isinstance(source, bytes) else os.fspath(source)

    def _create(self, model: Any, options: Any, providers: Any, provider_options: Any) -> None:
        """The base class's session, with CUDA graphs where they are asked for and can be had."""
        limits, kwargs = self._request.graphs, self._request.kwargs
        self._graphs = None
        device_id = _cuda_device(providers, provider_options, options)
        if limits is None or device_id is None:
            if limits is not None:
                _say_once(f"no CUDA graphs: {CUDA} is not among the providers.")
            super().__init__(model, options, providers, provider_options, **kwargs)
            return
        try:
            with_capture = capturing(providers, provider_options)
            super().__init__(model, options, with_capture, None, **kwargs)
        except Exception as error:
            if not is_refusal(error):
                raise
            log.warning("no CUDA graphs for this model, it runs without: %s", error)
            super().__init__(model, options, providers, provider_options, **kwargs)
            return
        if self.get_provider_options().get(CUDA, {}).get(ENABLE) != "1":
            return  # onnxruntime fell back to other providers, as it has said
        places = Places.of(self, device_id)
        if places is None:
            log.warning(
                "no CUDA graphs: onnxruntime %s does not tell which inputs are read on the host",
                ort.__version__,
            )
            super().__init__(model, options, providers, provider_options, **kwargs)
            return
        self._graphs = GraphCache(places, limits)


def _adds_settings(registration: Registration | None, providers: Any, options: Any) -> bool:
    """Providers that are set in the options come with settings that nobody can read."""
    on_cuda = registration is not None and registration.backend == "cuda"
    return on_cuda and bool(providers or not options.has_providers())


def _cuda_device(providers: Any, provider_options: Any, options: Any) -> int | None:
    """The device id asked of the CUDA provider, None where that provider is not asked for."""
    if not providers and not (options is not None and options.has_providers()):
        providers = ort.get_available_providers()  # ONNX Runtime's default
    for i, entry in enumerate(providers or ()):
        name, own = entry if isinstance(entry, tuple) else (entry, None)
        if name == CUDA:
            settings = own or (provider_options[i] if provider_options else {})
            return int(settings.get("device_id", 0))
    return None


def _no_kernel(error: Exception) -> bool:
    """Whether ONNX Runtime found no kernel for one of our ops among the session's providers."""
    return type(error).__name__ == "NotImplemented" and "moonpoly" in str(error)


def _is_ort_format(source: str | bytes | os.PathLike[str], options: Any) -> bool:
    """Models in ONNX Runtime's own format are optimized for good; they are run as they are."""
    if named := _config_entry(options, FORMAT):
        return named == "ORT"
    if isinstance(source, bytes):
        return source[4:8] == b"ORTM"
    return os.fspath(source).endswith(".ort")


class _Ready(NamedTuple):
    """A model as a session is made of it.

    folder: of its external data, if it has some there. exposed: see `for_changing_shapes`.
    """

    model: str | bytes | os.PathLike[str]
    folder: Path | None = None
    report: tuple[Entry, ...] | None = None
    exposed: bool = False


def _rewritten(
    source: str | bytes | os.PathLike[str], optimize: str | None, *, attention: bool = False
) -> _Ready:
    """The rewritten graph; where nothing was optimized and no node was taken, the source itself.

    attention: whether to look at its attention, too.
    """
    from . import model_files
    from .graph_passes import aligned_keys, pipeline

    # Mapping the file is safe, since it is used here and now.
    read = model_files.read(source, mapped=True)
    model = optimizing.optimized(read, optimize)
    exposed = attention and aligned_keys.is_exposed(model.light)
    report = pipeline.apply(model.light, model, static=False, enabled=pipeline.select(None, ()))
    if model is read and not any(entry.taken for entry in report):
        return _Ready(source, None, report, exposed)
    folder = model.folder.absolute() if model.folder and model.has_external_data else None
    return _Ready(b"".join(model.serialized()), folder, report, exposed)


def _as_it_is(source: str | bytes | os.PathLike[str]) -> _Ready:
    """The source, whose attention was looked at."""
    from . import model_files
    from .graph_passes import aligned_keys

    try:
        light = model_files.read(source, mapped=True).light
    except MoonPolyError:  # ONNX Runtime takes it, or says itself what is wrong
        return _Ready(source)
    return _Ready(source, exposed=aligned_keys.is_exposed(light))


@contextmanager
def _external_data_in(options: Any, folder: Path | None, *, restore: bool) -> Iterator[None]:
    """Lets a model given as bytes find its external data; the caller's own setting is put back.

    Without `restore` it is not: ONNX Runtime warns of each entry that is set again.
    """
    if folder is None:
        yield
        return
    before = _config_entry(options, FOLDER)
    options.add_session_config_entry(FOLDER, str(folder))
    try:
        yield
    finally:
        if restore:
            options.add_session_config_entry(FOLDER, before)


def _config_entry(options: Any, key: str) -> str:
    """A session config entry; empty where it is not set, which means the same."""
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:
        return ""
