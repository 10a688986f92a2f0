"""Who runs a model in `bench_models`: ONNX Runtime, ours, torch; each in its own settings.

Names are `ort` or `ours`, `+FORM` where an optimizer ran first, and the setting:

    (none)   of ONNX Runtime its defaults; of ours for changing shapes, as sessions are made
    sdpa     ONNX Runtime with our choice for changing shapes: fused attention without cuDNN's plans
    cudnn    ours with `shapes="repeating"`: with these plans, as ONNX Runtime's default
    graphs   CUDA graphs of sizes that repeat; `cudnn graphs` with cuDNN's attention in them. Those
             of ONNX Runtime are kept by our session too, around its own kernels
    heuristic, nhwc   how ONNX Runtime's convolutions choose their algorithm, and their layout

Some run on request alone, so that a model takes a minute; they were rarely the best of their side:
ours as exported where a form has fused attention, or without the cleaning of `-lean`; CUDA graphs
of ours but in the form with most of our passes, of ONNX Runtime as exported where there is another
form. `ort` on a form with passes of ours is for information: no user of ONNX Runtime alone has it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
import torch

import moonpoly_ort
from benchmarks import contender_names
from benchmarks.exported_models import DTYPES, PLAIN, Model, file_name, fuses
from benchmarks.running import Bound, Provider, plain_session, session_options
from moonpoly_ort.provider_settings import CHANGING_SHAPES

Tensors = Mapping[str, torch.Tensor]
Arrays = list[np.ndarray[Any, Any]]

GRAPHS = 24  # of all steady sizes of a model, each with numpy arrays and bound
CONVOLUTIONAL = ("resnet", "mobilenet", "published")
ATTENTION = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention"})


class Prepared(Protocol):
    """A contender with one set of inputs on the device."""

    def run(self) -> None:
        """Runs once and waits for the result."""

    def fetch(self) -> Arrays:
        """Runs once; the outputs in the model's order."""


class Running(Protocol):
    """A contender that is ready to run."""

    def prepare(self, inputs: Tensors) -> Prepared:
        """Takes inputs that lie on the device."""


@dataclass(frozen=True)
class Contender:
    """`start` makes it ready, which is what its creation time covers; one in ONNX Runtime takes
    session options.

    repeats: is meant for sizes that come again; only its steady state counts.
    on_request: runs if it is named. beside: may be made ready while others are, as it takes long.
    """

    name: str
    start: Callable[..., Running]
    repeats: bool = False
    on_request: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Form:
    """A model as exported (no suffix) or as an optimizer left it, perhaps with fused attention."""

    suffix: str
    path: Path
    attention: bool

    @staticmethod
    def of(suffix: str, path: Path) -> Form | None:
        """None for a form that is as good as the exported one: nothing was fused."""
        model = onnx.load(path, load_external_data=False)
        if suffix and not fuses(model):
            return None
        return Form(suffix, path, any(node.op_type in ATTENTION for node in model.graph.node))

    @property
    def has_our_passes(self) -> bool:
        """Whether the optimizer's result was changed further by us."""
        return contender_names.has_our_passes(self.suffix)


@dataclass
class _Session:
    """An ONNX Runtime session, ours or plain."""

    session: Any
    provider: Provider

    def prepare(self, inputs: Tensors) -> Prepared:
        return Bound(self.session, self.provider, inputs)


@dataclass
class _Graphed:
    """A session that captures a CUDA graph per shape: all its outputs need memory of ours."""

    session: Any
    provider: Provider

    def prepare(self, inputs: Tensors) -> Prepared:
        feed = {name: tensor.cpu().numpy() for name, tensor in inputs.items()}
        names = [output.name for output in self.session.get_outputs()]
        outputs = {
            name: torch.from_numpy(value).to(self.provider.torch_device)
            for name, value in zip(names, self.session.run(None, feed), strict=True)
        }
        return Bound(self.session, self.provider, inputs, outputs)


@dataclass
class _Module:
    """A torch module; `run` waits for the device as ONNX Runtime's binding does."""

    module: Callable[..., Any]
    provider: Provider
    inputs: tuple[torch.Tensor, ...] = field(default=())

    def prepare(self, inputs: Tensors) -> Prepared:
        return _Module(self.module, self.provider, tuple(inputs.values()))

    def run(self) -> None:
        self._call()
        self.provider.synchronize()

    def fetch(self) -> Arrays:
        found = self._call()
        values = found if isinstance(found, tuple) else (found,)
        return [value.cpu().numpy() for value in values]

    @torch.inference_mode()
    def _call(self) -> Any:
        return self.module(*self.inputs)


def forms(model: Model, folder: Path) -> list[Form]:
    """Those of a model that lie in a folder and differ, the exported one first."""
    found = [Form.of("", folder / f"{PLAIN}.onnx")]
    for how in model.optimizers:
        path = folder / f"{file_name(how)}.onnx"
        found.append(Form.of(f"+{how}", path) if path.exists() else None)
    return [form for form in found if form is not None]


def contenders(
    model: Model, dtype: str, folder: Path, provider: Provider, *, eager: bool
) -> Iterator[Contender]:
    """All that apply to a model whose forms lie in `folder`, those on request too.

    eager: torch too. Its module has random weights of its own: only its time counts.
    """
    found = [
        form for form in forms(model, folder)
        if provider.is_cuda or not form.suffix.endswith("-packed")
    ]  # fmt: skip  # no other provider computes attention of packed operands
    for form in found:
        yield from _theirs(form, provider, alone=len(found) == 1)
    if model.family in CONVOLUTIONAL and provider.is_cuda:
        plain = folder / f"{PLAIN}.onnx"
        heuristic = {"cudnn_conv_algo_search": "HEURISTIC"}
        yield Contender("ort heuristic", partial(_plain, plain, provider, **heuristic))
        channels_last = heuristic | {"prefer_nhwc": "1"}
        yield Contender("ort nhwc", partial(_plain, plain, provider, **channels_last))
    for form in found:
        yield from _mine(form, provider, found)
    if eager and model.family != "published":
        yield Contender("torch", partial(_torch, model, dtype, provider), beside=True)


def compiled(model: Model, dtype: str, provider: Provider) -> Contender:
    """torch.compile(dynamic=True): what was compiled before is forgotten when it starts."""

    def start(_options: Any = None) -> Running:
        torch.compiler.reset()
        module = torch.compile(_module(model, dtype, provider), dynamic=True)
        return _Module(module, provider)

    return Contender("torch.compile", start, beside=True)


def reference(folder: Path, provider: Provider) -> Running:
    """The unmodified fp32 model in ONNX Runtime, without TF32."""
    options = {"use_tf32": "0"} if provider.is_cuda else {}
    return _plain(folder / f"{PLAIN}.onnx", provider, **options)


def _theirs(form: Form, provider: Provider, *, alone: bool) -> Iterator[Contender]:
    """ONNX Runtime on a form. alone: the model has no other one."""
    name = f"ort{form.suffix}"
    plain = partial(_plain, form.path, provider)
    choosing = provider.is_cuda and form.attention  # how attention is computed
    sdpa = Contender(f"{name} sdpa", partial(plain, **CHANGING_SHAPES))
    if form.has_our_passes:
        most = form.suffix.endswith("-packed")
        yield replace(sdpa if choosing else Contender(name, plain), on_request=not most)
        return
    yield Contender(name, plain)
    if choosing:
        yield sdpa
    if provider.is_cuda:
        unchanged = partial(
            _ours, form.path, provider, rewrite=False, cuda_graphs=GRAPHS, shapes="repeating"
        )
        rarely = not form.suffix and not alone
        yield Contender(f"{name} graphs", unchanged, repeats=True, on_request=rarely)


def _mine(form: Form, provider: Provider, among: Sequence[Form]) -> Iterator[Contender]:
    """Ours on a form, which is one of several."""
    name = f"ours{form.suffix}"
    ours = partial(_ours, form.path, provider)
    suffixes = [other.suffix for other in among]
    fused = [other.suffix for other in among if other.attention]
    surpassed = f"{form.suffix}-lean" in suffixes or (not form.suffix and bool(fused))
    yield Contender(name, ours, on_request=surpassed)
    if not provider.is_cuda:
        return
    graphs, repeating = {"cuda_graphs": GRAPHS}, {"shapes": "repeating"}
    best = (fused or suffixes)[-1]  # of forms with passes of ours, the packed one is the last
    asked = form.suffix != best
    by_default = Contender(f"{name} graphs", partial(ours, **graphs), repeats=True)
    yield replace(by_default, on_request=asked or form.attention)
    if form.attention:
        plans = Contender(f"{name} cudnn", partial(ours, **repeating), repeats=True)
        yield replace(plans, on_request=True)
        both = partial(ours, **graphs, **repeating)
        yield Contender(f"{name} cudnn graphs", both, repeats=True, on_request=asked)


def _plain(
    path: Path, provider: Provider, options: ort.SessionOptions | None = None, **settings: str
) -> Running:
    return _Session(plain_session(path, provider, options, **settings), provider)


def _ours(
    path: Path, provider: Provider, options: ort.SessionOptions | None = None, **arguments: Any
) -> Running:
    session = moonpoly_ort.InferenceSession(
        path, options or session_options(), providers=provider.listed(), pack=provider.pack,
        backend="cuda" if provider.is_cuda else "auto", **arguments,
    )  # fmt: skip
    return (_Graphed if arguments.get("cuda_graphs") else _Session)(session, provider)


def _torch(model: Model, dtype: str, provider: Provider) -> Running:
    return _Module(_module(model, dtype, provider), provider)


def _module(model: Model, dtype: str, provider: Provider) -> torch.nn.Module:
    gc.collect()
    with torch.device(provider.torch_device):
        module = model.module().to(DTYPES[dtype])
    inner = getattr(module, "model", None)
    if hasattr(inner, "set_attn_implementation"):
        inner.set_attn_implementation("sdpa")  # torch's fused attention; exports have single ops
    return module
