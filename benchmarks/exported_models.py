"""The models of `bench_models`: their modules, exports, inputs, and streams of sizes.

    python -m benchmarks.exported_models FOLDER [--models bert_base,vit] [--reduced]

exports them with random weights and writes, for each, graphs without the weights and the recipe of
these (`weight_recipes`): less than a megabyte a model. It needs torch, transformers and
onnxscript, no GPU. Next to each export go its forms after the optimizers of `optimize=`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import moonpoly_ort
from benchmarks import cnns, weight_recipes
from benchmarks.recording import say
from tests.corpus import wheels

Size = tuple[int, ...]
Feed = dict[str, torch.Tensor]
DTYPES = {"f16": torch.float16, "f32": torch.float32}
PLAIN = "plain"  # the form as exported


@dataclass(frozen=True)
class Stream:
    """Sizes that arrive one after the other, each new, and three of them for the steady state."""

    name: str
    sizes: tuple[Size, ...]
    steady: tuple[Size, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """A model of the benchmark.

    family: says how it is built and fed. config: its size; reduced: the size of the CPU tests.
    dtypes: what is measured; fp32 is exported in any case, for the reference.
    optimizers: values of `optimize=` whose results become forms of their own.
    """

    id: str
    family: str
    config: Mapping[str, Any]
    reduced: Mapping[str, Any]
    dtypes: tuple[str, ...] = ("f16",)
    opset: int = 18
    optimizers: tuple[str, ...] = ()
    streams: Callable[[np.random.Generator], list[Stream]] = field(default=lambda _: [])

    def shrunk(self) -> Model:
        """The same at its reduced size."""
        return dataclasses.replace(self, config={**self.config, **self.reduced})

    def module(self) -> torch.nn.Module:
        """The module in fp32, with seeded random weights, ready for inference."""
        torch.manual_seed(0)
        module = _FAMILIES[self.family].build(self.config).train(False)
        with torch.no_grad():  # exporters drop biases of 0, which no trained model has
            for parameter in module.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return module

    def feed(self, size: Size, dtype: str, device: str = "cpu") -> Feed:
        """Inputs of one run in the order of the model's inputs, drawn on the device: on the host
        the cache of a decoder took seconds. They depend on size and device; types round them.
        """
        rng = torch.Generator(device).manual_seed(zlib.crc32(repr(size).encode()))
        values = _FAMILIES[self.family].feed(self.config, size, rng)
        return {
            name: value.to(DTYPES[dtype]) if value.is_floating_point() else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class _Family:
    """How a kind of model is built, fed and exported. dynamic: the dynamic axes of each input."""

    build: Callable[[Mapping[str, Any]], torch.nn.Module]
    feed: Callable[[Mapping[str, Any], Size, torch.Generator], Feed]
    dynamic: Callable[[str], Mapping[int, str]]
    example: Size


class _Decoder(torch.nn.Module):
    """A causal language model with its cache as plain tensors, keys and values layer by layer.

    Takes token ids [batch, length], a mask [batch, past + length], and 2 x layers tensors [batch,
    heads, past, head size]; returns the logits of the last token, and the cache with the new
    tokens.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        grown = [t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)]
        return (result.logits, *grown)


class _Tensors(torch.nn.Module):
    """A transformers model whose outputs are a tuple of named fields."""

    def __init__(self, model: torch.nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]):
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(**dict(zip(self.inputs, values, strict=True)))
        return tuple(getattr(result, name) for name in self.outputs)


def _bert(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**config, attn_implementation="eager"))
    return _Tensors(model, ("input_ids", "attention_mask"), ("last_hidden_state", "pooler_output"))


def _vit(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**config, attn_implementation="eager"))
    return _Tensors(model, ("pixel_values",), ("last_hidden_state", "pooler_output"))


def _gpt2(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"use_cache": False, "attn_implementation": "eager"}
    return _Tensors(GPT2LMHeadModel(GPT2Config(**config, **settings)), ("input_ids",), ("logits",))


def _llama(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _Decoder(LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")))


def _text(config: Mapping[str, Any], size: Size, rng: torch.Generator) -> Feed:
    batch, length = size
    ids = _ids(config.get("vocab_size", 30522), size, rng)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, (length + 1) // 2 :] = 0  # a shorter sentence among the others
    return {"input_ids": ids, "attention_mask": mask}


def _tokens(config: Mapping[str, Any], size: Size, rng: torch.Generator) -> Feed:
    return {"input_ids": _ids(config.get("vocab_size", 50257), size, rng)}


def _image(config: Mapping[str, Any], size: Size, rng: torch.Generator) -> Feed:
    batch, height, width = size
    return {"pixel_values": _normal((batch, 3, height, width), rng)}


def _generation(config: Mapping[str, Any], size: Size, rng: torch.Generator) -> Feed:
    batch, length, past = size
    ids = _ids(config["vocab_size"], (batch, length), rng)
    mask = torch.ones((batch, past + length), dtype=torch.int64, device=rng.device)
    feed = {"input_ids": ids, "attention_mask": mask}
    head = config["hidden_size"] // config["num_attention_heads"]
    shape = (batch, config["num_key_value_heads"], past, head)
    for layer in range(config["num_hidden_layers"]):
        for part in ("key", "value"):
            feed[f"past_{layer}_{part}"] = _normal(shape, rng)
    return feed


def _page(_config: Mapping[str, Any], size: Size, rng: torch.Generator) -> Feed:
    batch, height, width = size
    pixels = torch.rand((batch, 3, height, width), generator=rng, device=rng.device)
    return {"x": 2 * pixels - 1}


def _ids(words: int, size: Size, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(words, size, generator=rng, device=rng.device)


def _normal(shape: Size, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def _not_built(_config: Mapping[str, Any]) -> torch.nn.Module:
    raise ValueError("a published model has no module: it is read from a file")


def _text_axes(_name: str) -> Mapping[int, str]:
    return {0: "batch", 1: "length"}


def _generation_axes(name: str) -> Mapping[int, str]:
    if name.startswith("past"):
        return {0: "batch", 2: "past"}
    return {0: "batch", 1: "length" if name == "input_ids" else "total"}


_FAMILIES = {
    "bert": _Family(_bert, _text, _text_axes, (2, 8)),
    "vit": _Family(_vit, _image, lambda _: {0: "batch"}, (2, 224, 224)),
    "gpt2": _Family(_gpt2, _tokens, _text_axes, (2, 8)),
    "llama": _Family(_llama, _generation, _generation_axes, (2, 3, 5)),
    "resnet": _Family(
        lambda config: cnns.resnet50(**config), _image,
        lambda _: {0: "batch", 2: "height", 3: "width"}, (2, 96, 128),
    ),
    "mobilenet": _Family(
        lambda config: cnns.mobilenet_v2(**config), _image,
        lambda _: {0: "batch", 2: "height", 3: "width"}, (2, 96, 128),
    ),
    "published": _Family(_not_built, _page, lambda _: {}, (1, 64, 96)),
}  # fmt: skip


def _lengths(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Different lengths in random order."""
    return [int(n) for n in rng.choice(np.arange(low, high + 1), count, replace=False)]


def _bert_streams(rng: np.random.Generator) -> list[Stream]:
    return [
        Stream(
            f"batch {batch}", tuple((batch, n) for n in _lengths(rng, 5, 500, 150)),
            ((batch, 16), (batch, 128), (batch, 384)),
        )
        for batch in (1, 8)
    ]  # fmt: skip


def _vit_streams(rng: np.random.Generator) -> list[Stream]:
    sizes = tuple((n, 224, 224) for n in _lengths(rng, 1, 64, 64))
    return [Stream("batches", sizes, ((1, 224, 224), (8, 224, 224), (32, 224, 224)))]


def _gpt2_streams(rng: np.random.Generator) -> list[Stream]:
    sizes = tuple((1, n) for n in _lengths(rng, 5, 1024, 100))
    return [Stream("batch 1", sizes, ((1, 16), (1, 128), (1, 768)))]


def _llama_streams(rng: np.random.Generator) -> list[Stream]:
    prompts = tuple((1, n, 0) for n in _lengths(rng, 5, 2048, 100))
    streams = [Stream("prefill", prompts, ((1, 32, 0), (1, 512, 0), (1, 2000, 0)))]
    for batch in (1, 4, 16):
        sizes = tuple((batch, 1, n) for n in _lengths(rng, 5, 2048, 100))
        streams.append(
            Stream(f"decode {batch}", sizes, ((batch, 1, 100), (batch, 1, 500), (batch, 1, 1500)))
        )
    return streams


def _image_streams(rng: np.random.Generator) -> list[Stream]:
    sizes = {(1, int(h), int(w)) for h, w in rng.integers(160, 481, (100, 2))}
    shuffled = tuple(sorted(sizes, key=lambda _: rng.random()))
    return [Stream("sizes", shuffled, ((1, 160, 160), (1, 224, 224), (1, 384, 320)))]


def _pages(rng: np.random.Generator) -> list[Stream]:
    """Sides are multiples of 32, as the model needs them."""
    sizes = tuple((1, 32 * int(h), 32 * int(w)) for h, w in rng.integers(10, 41, (100, 2)))
    return [Stream("pages", sizes, ((1, 320, 320), (1, 640, 480), (1, 960, 1280)))]


def _text_lines(rng: np.random.Generator) -> list[Stream]:
    pairs = zip(rng.integers(1, 9, 200), rng.integers(32, 801, 200), strict=True)
    sizes = tuple((int(batch), 48, int(width)) for batch, width in pairs)
    return [Stream("lines", sizes, ((1, 48, 320), (6, 48, 320), (8, 48, 800)))]


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 96}  # fmt: skip
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
               "intermediate_size": 4096}  # fmt: skip
_LLAMA = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
          "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
          "max_position_embeddings": 4096}  # fmt: skip
_ATTENTION = ("onnxscript", "onnxscript-lean", "onnxscript-mha", "onnxscript-packed")

ALL = (
    Model("bert_base", "bert", {}, {**_SMALL, "vocab_size": 128}, ("f16", "f32"), 18,
          (*_ATTENTION, "ort:bert"), _bert_streams),
    Model("bert_large", "bert", _BERT_LARGE, {**_SMALL, "vocab_size": 128}, ("f16",), 18,
          (*_ATTENTION, "ort:bert"), _bert_streams),
    Model("vit_b16", "vit", {}, _SMALL, ("f16", "f32"), 18, (*_ATTENTION, "ort:vit"), _vit_streams),
    Model("gpt2", "gpt2", {}, {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128,
          "bos_token_id": 0, "eos_token_id": 0}, ("f16",), 18,
          ("onnxscript", "ort:gpt2", "ort:bert"), _gpt2_streams),
    Model("llama_1b", "llama", _LLAMA, {**_SMALL, "num_key_value_heads": 2, "vocab_size": 128},
          ("f16",), 21, _ATTENTION, _llama_streams),
    Model("resnet50", "resnet", {}, {"width": 0.125, "classes": 10}, streams=_image_streams),
    Model("mobilenet_v2", "mobilenet", {}, {"width": 0.25, "classes": 10}, streams=_image_streams),
)  # fmt: skip


PUBLISHED = {
    Model("pp_ocr_v4_det", "published", {}, {}, ("f32",), streams=_pages): wheels.PP_OCR_DETECTION,
    Model("pp_ocr_v4_rec", "published", {}, {}, ("f32",), streams=_text_lines):
        wheels.PP_OCR_RECOGNITION,
}  # fmt: skip
"""Read from a folder of models as tests/ unpack them; not exported."""


def import_for(model: Model) -> None:
    """Imports what builds a model, seconds of transformers. Nothing is computed: a process that has
    used OpenMP must not fork.
    """
    if model not in PUBLISHED:
        with torch.device("meta"):
            _FAMILIES[model.family].build(model.shrunk().config)


def named(identifiers: str, among: Sequence[Model] = ALL) -> list[Model]:
    """The models of a comma-separated list; empty: all. Raises ValueError for unknown names."""
    known = {model.id: model for model in among}
    wanted = [name for name in identifiers.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no model {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def export(model: Model, dtype: str, path: Path) -> None:
    """Writes one model in one type, weights included, in a data file beside it if large."""
    family = _FAMILIES[model.family]
    example = model.feed(family.example, dtype)
    names = list(example)
    axes = [dict.fromkeys(family.dynamic(name), torch.export.Dim.DYNAMIC) for name in names]
    module = model.module().to(DTYPES[dtype])
    variadic = model.family not in ("resnet", "mobilenet")
    shapes: Any = _shapes_of_arguments(axes, variadic, model.family == "llama")
    with warnings.catch_warnings():  # torch announces deprecations of its own parts
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, tuple(example.values()), dynamo=True,
            opset_version=model.opset, dynamic_shapes=shapes, input_names=names, verbose=False,
        )  # fmt: skip
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    program.save(str(path), external_data=True)


def _shapes_of_arguments(axes: list[dict[int, Any]], variadic: bool, cached: bool) -> Any:
    """`dynamic_shapes` mirrors the signature: variadic arguments are one tuple."""
    if not variadic:
        return tuple(axes)
    if not cached:
        return (tuple(axes),)
    return (*axes[:2], tuple(axes[2:]))


def prepare(model: Model, folder: Path, *, reduced: bool = False) -> None:
    """Exports a model in all its types and forms; weights become recipes.

    Writes FOLDER/ID/DTYPE/FORM.onnx, DTYPE/recipe.json and notes.json: whether it is the reduced
    one, seconds that each optimizer took, or why it was refused.
    """
    target = folder / model.id
    notes: dict[str, Any] = {"reduced": reduced}
    if reduced:
        model = model.shrunk()
    recipe: weight_recipes.Recipe = []
    for dtype in ("f32", *(name for name in model.dtypes if name != "f32")):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            whole = Path(name) / f"{PLAIN}.onnx"
            started = time.monotonic()
            export(model, dtype, whole)
            notes[f"{dtype} export s"] = round(time.monotonic() - started, 2)
            say(f"{model.id} {dtype}: exported in {time.monotonic() - started:.1f} s")
            made = target / dtype
            made.mkdir(parents=True, exist_ok=True)
            recipe = weight_recipes.strip(whole, made, like=recipe)
            weight_recipes.save(recipe, made / "recipe.json")
            if dtype in model.dtypes and model.optimizers:
                notes |= _optimize_all(model, dtype, made, recipe, Path(name))
    (target / "notes.json").write_text(json.dumps(notes, indent=1) + "\n")


def _optimize_all(
    model: Model, dtype: str, folder: Path, recipe: weight_recipes.Recipe, scratch: Path
) -> dict[str, Any]:
    """The forms after each optimizer, beside the plain one, on the weights that will be drawn."""
    from moonpoly_ort import model_files, model_writing, optimizing

    filled = scratch / "filled"
    filled.mkdir()
    plain = shutil.copy(folder / f"{PLAIN}.onnx", filled)
    weight_recipes.fill(recipe, filled)
    notes: dict[str, Any] = {}
    for how in model.optimizers:
        started = time.monotonic()
        form = filled / f"{file_name(how)}.onnx"
        try:
            optimized = optimizing.optimized(model_files.read(plain), how)
            if not fuses(optimized.light):
                raise ValueError(f"{how} fuses nothing in this model")
            notes[f"{dtype} {how} s"] = round(time.monotonic() - started, 2)
            model_writing.write(optimized, form)
            weight_recipes.adopt(form, folder, recipe)
        except (moonpoly_ort.MoonPolyError, ValueError) as error:
            notes[f"{dtype} {how} refused"] = str(error)
            say(f"{model.id} {dtype}: {error}")
    return notes


def fuses(graph: onnx.ModelProto) -> bool:
    """Whether an optimizer made operators of ONNX Runtime's own in a model."""
    return any(node.domain == "com.microsoft" for node in graph.graph.node)


def file_name(how: str) -> str:
    """The name of the form that an optimizer makes."""
    return how.replace(":", "_")


def prepared(model: Model, folder: Path) -> Model | None:
    """The model as it was exported into a folder, at full or reduced size; None: it was not."""
    notes = folder / model.id / "notes.json"
    if not notes.exists():
        return None
    return model.shrunk() if json.loads(notes.read_text())["reduced"] else model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="", help="which, separated by commas; default: all")
    parser.add_argument("--reduced", action="store_true", help="two narrow layers, for rehearsals")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        models = named(arguments.models)
    except ValueError as error:
        parser.error(str(error))
    for model in models:
        prepare(model, arguments.folder, reduced=arguments.reduced)


if __name__ == "__main__":
    main()
