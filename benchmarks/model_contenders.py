"""Who runs a model in `bench_models`: ONNX Runtime, ours, torch; each in its own settings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.exported_models import DTYPES, PLAIN, Model, file_name
from benchmarks.running import Bound, Provider, our_session, plain_session
from moonpoly_ort.provider_settings import CHANGING_SHAPES

Tensors = Mapping[str, torch.Tensor]
Arrays = list[np.ndarray[Any, Any]]

GRAPHS = 12  # of the steady sizes, each with numpy arrays and bound
CONVOLUTIONAL = ("resnet", "mobilenet", "published")


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
    """

    name: str
    start: Callable[..., Running]
    repeats: bool = False  # is meant for sizes that come again: only its steady state counts


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


def contenders(
    model: Model,
    dtype: str,
    folder: Path,
    provider: Provider,
    *,
    eager: bool,
    compiled: bool,
) -> Iterator[Contender]:
    """All that apply to a model whose forms lie in `folder`.

    eager, compiled: torch too. Its module has random weights of its own: only its time counts.
    """
    plain = folder / f"{PLAIN}.onnx"
    forms = {how: folder / f"{file_name(how)}.onnx" for how in model.optimizers}
    present = {how: path for how, path in forms.items() if path.exists()}
    yield Contender("ort", partial(_plain, plain, provider))
    for how, path in present.items():
        yield Contender(f"ort+{how}", partial(_plain, path, provider))
        if provider.is_cuda and how.startswith("onnxscript"):  # which fuses attention
            yield Contender(f"ort+{how} sdpa", partial(_plain, path, provider, **CHANGING_SHAPES))
    if model.family in CONVOLUTIONAL and provider.is_cuda:
        heuristic = {"cudnn_conv_algo_search": "HEURISTIC"}
        yield Contender("ort heuristic", partial(_plain, plain, provider, **heuristic))
        channels_last = heuristic | {"prefer_nhwc": "1"}
        yield Contender("ort nhwc", partial(_plain, plain, provider, **channels_last))
    yield Contender("ours", partial(_ours, plain, provider))
    for how, path in present.items():
        yield Contender(f"ours+{how}", partial(_ours, path, provider))
    if provider.is_cuda:
        yield Contender("ours graphs", partial(_graphed, plain, provider), repeats=True)
        for how, path in present.items():
            name = f"ours+{how} graphs"
            yield Contender(name, partial(_graphed, path, provider), repeats=True)
    if model.family == "published":
        return
    if eager:
        yield Contender("torch", partial(_torch, model, dtype, provider))
    if compiled:
        compiling = partial(_torch, model, dtype, provider, compiled=True)
        yield Contender("torch.compile", compiling)


def reference(folder: Path, provider: Provider) -> Running:
    """The unmodified fp32 model in ONNX Runtime, without TF32."""
    options = {"use_tf32": "0"} if provider.is_cuda else {}
    return _plain(folder / f"{PLAIN}.onnx", provider, **options)


def _plain(
    path: Path, provider: Provider, options: ort.SessionOptions | None = None, **settings: str
) -> Running:
    return _Session(plain_session(path, provider, options, **settings), provider)


def _ours(path: Path, provider: Provider, options: ort.SessionOptions | None = None) -> Running:
    return _Session(our_session(path, provider, options), provider)


def _graphed(path: Path, provider: Provider, options: ort.SessionOptions | None = None) -> Running:
    return _Graphed(our_session(path, provider, options, cuda_graphs=GRAPHS), provider)


def _torch(model: Model, dtype: str, provider: Provider, *, compiled: bool = False) -> Running:
    module = _module(model, dtype, provider)
    return _Module(torch.compile(module, dynamic=True) if compiled else module, provider)


def _module(model: Model, dtype: str, provider: Provider) -> torch.nn.Module:
    gc.collect()
    with torch.device(provider.torch_device):
        module = model.module().to(DTYPES[dtype])
    inner = getattr(module, "model", None)
    if hasattr(inner, "set_attn_implementation"):
        inner.set_attn_implementation("sdpa")  # torch's fused attention; exports have single ops
    return module
