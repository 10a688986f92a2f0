"""A drop-in `onnxruntime.InferenceSession` that rewrites the model and runs it on MoonPoly's
kernels, where `registering` finds that they can run.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import dependencies, optimizing, registering
from .errors import ArgumentError, DeviceError, MoonPolyError, RegistrationError
from .graph_cache import GraphCache, Places
from .graph_policy import GraphLimits
from .graph_runs import ENABLE, GraphRuns, capturing, is_refusal
from .graph_threads import gate
from .provider_settings import CUDA, for_changing_shapes
from .registering import Backend, Precision, Registration

if TYPE_CHECKING:
    from .rewriting import Entry

ort: Any = dependencies.load("onnxruntime", "moonpoly_ort.InferenceSession")

Shapes = Literal["changing", "repeating"]

FOLDER = "session.model_external_initializers_file_folder_path"
FORMAT = "session.load_model_format"

log = logging.getLogger("moonpoly_ort")


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
    disable: tuple[str, ...]
    shapes: str
    kwargs: dict[str, Any]


def _refuse_misspelt(options: Iterable[str]) -> None:
    """onnxruntime ignores keywords that it does not know: one that looks like ours is an error."""
    own = InferenceSession.__init__.__kwdefaults__ or {}
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
        disable: the rules of the rewrite to leave out, as for `moonpoly_ort.rewrite`.
        shapes: what is to be expected of the inputs, where our kernels run on CUDA. `changing`
            keeps ONNX Runtime's fused attention from making a plan of cuDNN for every new length,
            which takes it 50 ms in a BERT-base, and products from cuBLASLt; `repeating` lets both,
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
        disable: Iterable[str] = (),
        shapes: Shapes = "changing",
        **kwargs: Any,
    ) -> None:
        _refuse_misspelt(kwargs)
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            raise TypeError(
                f"model is a {type(path_or_bytes).__name__}; a session takes a path or bytes "
                "(SerializeToString() of an onnx.ModelProto)"
            )
        graphs = GraphLimits.of(cuda_graphs)
        optimizing.check(optimize)
        registering.check_choice("shapes", shapes, ("changing", "repeating"))
        if optimize is not None and not rewrite:
            raise ArgumentError("optimize= belongs to the rewrite, which rewrite=False leaves out")
        left_out = _rules(disable)
        if left_out and not rewrite:
            raise ArgumentError("disable= belongs to the rewrite, which rewrite=False leaves out")
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
            left_out,
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
            registration = registering.resolve(
                backend, precision, pack, vendor, device_id or 0, shapes
            )
        else:
            registering.check_choice("backend", backend, ("auto", "cuda", "interpreter"))
            registering.check_choice("precision", precision, ("tf32", "ieee"))
            registering.check_switch(vendor)
            registering.say_once(
                f"running on ONNX Runtime's own kernels: {CUDA} is not among the providers."
            )
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
            registering.say_once(
                f"running on ONNX Runtime's own kernels: {message}; its log says why."
            )
            self._load(providers, provider_options, None)

    def _load(
        self, providers: Any, provider_options: Any, registration: Registration | None
    ) -> None:
        source, given = self._request.source, self._request.options
        options = ort.SessionOptions() if given is None else given
        with nullcontext() if given is None else registering.lock:
            if registration is not None:
                registering.attach(options, registration)
            # Registered ops are never inlined: with such options only the untouched model runs
            # elsewhere.
            other = None if registration is not None else registering.registered.get(options)
            changing = self._request.shapes == "changing" and _adds_settings(
                registration, providers, options
            )
            ready = _Ready(source)
            if not _is_ort_format(source, options):
                if self._request.rewrite and other is None:
                    request = self._request
                    ready = _rewritten(
                        source, request.optimize, request.disable, attention=changing
                    )
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
                if other is not None and _no_kernel(error):
                    raise RegistrationError(
                        "the model is already rewritten, and the library is registered on these "
                        f"SessionOptions for the backend {other.backend}, which "
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
                registering.say_once(f"no CUDA graphs: {CUDA} is not among the providers.")
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


def _rules(names: Iterable[str]) -> tuple[str, ...]:
    """The names of rules; one that is none is an error before anything is read."""
    if not names:  # as ever: nothing has to be imported for it
        return ()
    from .graph_passes import pipeline

    given = pipeline.names(names)
    pipeline.select(None, given)
    return tuple(given)


def _rewritten(
    source: str | bytes | os.PathLike[str],
    optimize: str | None,
    disable: Collection[str] = (),
    *,
    attention: bool = False,
) -> _Ready:
    """The rewritten graph; where nothing was optimized and no node was taken, the source itself.

    attention: whether to look at its attention, too.
    """
    from . import model_files
    from .graph_passes import aligned_keys, pipeline

    # Mapping the file is safe, since it is used here and now.
    read = model_files.read(source, mapped=True)
    model = optimizing.optimized(read, optimize, disable)
    exposed = attention and aligned_keys.is_exposed(model.light)
    report = pipeline.apply(
        model.light, model, static=False, enabled=pipeline.select(None, disable)
    )
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
