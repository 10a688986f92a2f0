"""Models exported on the spot: random weights, dynamic shapes, opsets 18 to 23.

An export needs torch, transformers and onnxscript, takes seconds, and is kept in the model folder
under a key of its configuration and of the versions that made it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from .wheels import MODEL_FOLDER

Array = NDArray[Any]
Feed = dict[str, Array]

_MAKERS = ("torch", "transformers", "onnxscript", "onnx")
# Attention as single operators, or as one call that becomes Attention from opset 23.
_EAGER: Mapping[str, Any] = {"attn_implementation": "eager", "use_cache": False}
_FUSED: Mapping[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_TEXT = {"vocab_size": 128, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Export:
    """One model to export.

    family: key of `_FAMILIES`. config: arguments of its transformers configuration.
    half: weights and activations in float16.
    sizes: (batch, length) of each run; for images (batch, height and width in pixels).
    """

    id: str
    family: str
    opset: int
    config: Mapping[str, Any]
    sizes: tuple[tuple[int, int], ...]
    half: bool = False

    def path(self) -> Path:
        """The model file, exported if it is not there yet."""
        folder = MODEL_FOLDER / "exports"
        path = folder / f"{self.id}-{self._key()}" / "model.onnx"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path.parent}.lock"):
            if not path.exists():  # another process was faster
                with tempfile.TemporaryDirectory(dir=folder) as name:
                    _export(self, Path(name) / "made" / "model.onnx")
                    os.replace(Path(name) / "made", path.parent)
        return path

    def feeds(self) -> list[Feed]:
        """Arrays for one run per entry of `sizes`, seeded."""
        return [self.feed(*size) for size in self.sizes]

    def feed(self, batch: int, length: int) -> Feed:
        """Arrays for one run; the first sentence of a batch is padded to half its length."""
        return _FAMILIES[self.family].inputs(self, batch, length)

    def _key(self) -> str:
        versions = {name: importlib.metadata.version(name) for name in _MAKERS}
        what = [self.family, self.opset, self.half, dict(self.config), versions]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Family:
    """How a family is built from its configuration, and what it takes in."""

    module: Callable[[Mapping[str, Any]], Any]
    inputs: Callable[[Export, int, int], Feed]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


def _bert(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.BertModel(transformers.BertConfig(**config, **_EAGER))


def _vit(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(**config, **_EAGER))


def _llama(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **_FUSED))


def _modernbert(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.ModernBertModel(transformers.ModernBertConfig(**config, **_EAGER))


def _phi3(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**config, **_FUSED))


def _gpt2(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **_EAGER))


def _resnet(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.ResNetModel(transformers.ResNetConfig(**config))


def _mobilenet(config: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.MobileNetV2Model(transformers.MobileNetV2Config(**config))


def _sentences(export: Export, batch: int, length: int) -> Feed:
    generator = np.random.default_rng([batch, length])
    mask = np.ones((batch, length), np.int64)
    mask[0, (length + 1) // 2 :] = 0
    ids = generator.integers(0, export.config["vocab_size"], (batch, length))
    return {"input_ids": ids, "attention_mask": mask}


def _token_ids(export: Export, batch: int, length: int) -> Feed:
    return {"input_ids": _sentences(export, batch, length)["input_ids"]}


def _images(export: Export, batch: int, size: int) -> Feed:
    generator = np.random.default_rng([batch, size])
    pixels = generator.standard_normal((batch, export.config["num_channels"], size, size))
    return {"pixel_values": pixels.astype(np.float16 if export.half else np.float32)}


_TEXT_DIMENSIONS = {0: "batch", 1: "length"}
_IMAGE_DIMENSIONS = {0: "batch", 2: "height", 3: "width"}
_FAMILIES = {
    "bert": _Family(
        _bert,
        _sentences,
        {"input_ids": _TEXT_DIMENSIONS, "attention_mask": _TEXT_DIMENSIONS},
    ),
    "vit": _Family(_vit, _images, {"pixel_values": {0: "batch"}}),
    "resnet": _Family(_resnet, _images, {"pixel_values": _IMAGE_DIMENSIONS}),
    "mobilenet": _Family(_mobilenet, _images, {"pixel_values": _IMAGE_DIMENSIONS}),
    "llama": _Family(_llama, _token_ids, {"input_ids": _TEXT_DIMENSIONS}),
    "modernbert": _Family(
        _modernbert,
        _sentences,
        {"input_ids": _TEXT_DIMENSIONS, "attention_mask": _TEXT_DIMENSIONS},
    ),
    "phi3": _Family(_phi3, _token_ids, {"input_ids": _TEXT_DIMENSIONS}),
    "gpt2": _Family(_gpt2, _token_ids, {"input_ids": _TEXT_DIMENSIONS}),
}


def _export(export: Export, path: Path) -> None:
    import torch

    family = _FAMILIES[export.family]
    torch.manual_seed(0)
    module = family.module(export.config).eval()
    if export.half:
        module = module.half()
    example = {k: torch.from_numpy(v) for k, v in export.feed(*export.sizes[-1]).items()}
    names = {name for axes in family.dynamic.values() for name in axes.values()}
    dims = {name: torch.export.Dim(name) for name in sorted(names)}
    shapes = {
        tensor: {axis: dims[name] for axis, name in axes.items()}
        for tensor, axes in family.dynamic.items()
    }
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():  # torch announces deprecations of its own parts
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (),
            kwargs=example,
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=export.opset,
            verbose=False,
        )
    assert program is not None
    program.save(path)


def bert_base(*, half: bool = False, opset: int = 18) -> Export:
    """BERT-base at full size (12 layers of 768): 440 MB in float32, half of that in float16."""
    name = f"bert_base_{'f16' if half else 'f32'}_op{opset}"
    config = {"vocab_size": 30522}
    return Export(name, "bert", opset, config, ((1, 128), (2, 37)), half)


_BERT = {**_TINY, **_TINY_TEXT, "intermediate_size": 96}
_VIT = {**_TINY, "intermediate_size": 96, "image_size": 32, "patch_size": 8, "num_channels": 3}
_LLAMA = {**_TINY, **_TINY_TEXT, "intermediate_size": 96, "num_key_value_heads": 2}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Gates and values of the feed-forward layers of these two are the halves of one product.
_PHI3 = {**_LLAMA, **_MARKS}
_MODERNBERT = {**_BERT, **_MARKS, "cls_token_id": 1, "sep_token_id": 2}
_MODERNBERT |= {"global_attn_every_n_layers": 2, "local_attention": 8}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
_RESNET50 = {"embedding_size": 8, "hidden_sizes": [16, 32, 48, 64], "num_channels": 3}
# tf_padding pads to the size of the example, which would fix height and width.
_MOBILENET = {"depth_multiplier": 0.25, "num_channels": 3, "tf_padding": False}
_SIZES = ((1, 64), (2, 96))
_TEXTS = ((1, 5), (3, 12), (2, 7))

ALL = (
    Export("bert_op18", "bert", 18, _BERT, _TEXTS),
    Export("bert_op20_f16", "bert", 20, _BERT, _TEXTS, half=True),
    Export("vit_op18", "vit", 18, _VIT, ((1, 32), (3, 32))),
    Export("resnet50_op18", "resnet", 18, _RESNET50, _SIZES),
    Export("mobilenet_op18", "mobilenet", 18, _MOBILENET, _SIZES),
    Export("llama_op21", "llama", 21, _LLAMA, _TEXTS),
    Export("modernbert_op18", "modernbert", 18, _MODERNBERT, _TEXTS),
    Export("phi3_op21", "phi3", 21, _PHI3, _TEXTS),
    # Batch 1, as the caches that RotaryEmbedding is exported with: ONNX Runtime wants them equal.
    Export("llama_op23", "llama", 23, _LLAMA, ((1, 5), (1, 12))),
    Export("gpt2_op22", "gpt2", 22, _GPT2, _TEXTS),
)
