"""What a case is: ONNX text, weights and feeds drawn from a seed, and what must hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

Array = NDArray[np.generic]

DEFAULT_HEADER = '<ir_version: 10, opset_import: ["": 18]>'


@dataclass(frozen=True)
class Random:
    """A tensor to draw: standard normal for floats, uniform over the type's range for integers."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic] = field(default_factory=lambda: np.dtype(np.float32))

    def draw(self, generator: np.random.Generator) -> Array:
        if issubclass(self.dtype.type, np.integer):
            limits = np.iinfo(self.dtype.type)
            return generator.integers(limits.min, limits.max, self.shape, self.dtype, endpoint=True)
        return np.asarray(generator.standard_normal(self.shape)).astype(self.dtype)


def f32(*shape: int) -> Random:
    return Random(shape)


def f16(*shape: int) -> Random:
    return Random(shape, np.dtype(np.float16))


def bf16(*shape: int) -> Random:
    return Random(shape, np.dtype(ml_dtypes.bfloat16))


def i8(*shape: int) -> Random:
    return Random(shape, np.dtype(np.int8))


def u8(*shape: int) -> Random:
    return Random(shape, np.dtype(np.uint8))


Tensor = Random | Array


@dataclass(frozen=True)
class External:
    """Where one weight lies in a data file: `offset` bytes behind the start of `location`."""

    tensor: str
    location: str
    offset: int


@dataclass(frozen=True)
class Case:
    """One model with its inputs.

    text: ONNX text; IR 10 and opset 18 where it has no header of its own. Weights are not in it.
    weights: initializers by name, in the order in which the model lists them.
    feeds: one mapping of input name to tensor per run; the shapes differ from run to run.
    taken: names of the outputs of the nodes that a rewrite with default options must take.
    left: operator type -> reason code, for each candidate that it must leave.
    checker: onnx.checker accepts the model.
    runs: ONNX Runtime's CPU provider loads and runs it.
    runs_with_library: it runs on the CPU once the interpreter's operators are registered; None: as
        without them.
    """

    id: str
    reports: str
    fault: str
    must: str
    text: str
    feeds: Sequence[Mapping[str, Tensor]]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    checker: bool = True
    runs: bool = True
    runs_with_library: bool | None = None
    external: External | None = None

    def model(self) -> onnx.ModelProto:
        """The model, all weights inside it; drawn afresh, always the same."""
        text = self.text.strip()
        model = onnx.parser.parse_model(text if text[0] == "<" else f"{DEFAULT_HEADER}\n{text}")
        for name, weight in self.weights.items():
            model.graph.initializer.append(
                onnx.numpy_helper.from_array(self._array(name, weight), name)
            )
        return model

    def inputs(self) -> Iterator[dict[str, Array]]:
        """The arrays of each feed, always the same."""
        for index, feed in enumerate(self.feeds):
            yield {name: self._array(f"{index}/{name}", tensor) for name, tensor in feed.items()}

    def save(self, folder: Path) -> Path:
        """Writes `<id>.onnx` (and its data file, if it has one) into `folder`; returns its path."""
        model = self.model()
        if self.external is not None:
            _move_out(model, self.external, folder)
        path = folder / f"{self.id}.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    def _array(self, name: str, tensor: Tensor) -> Array:
        if not isinstance(tensor, Random):
            return tensor
        return tensor.draw(np.random.default_rng(zlib.crc32(f"{self.id}/{name}".encode())))


def _move_out(model: onnx.ModelProto, external: External, folder: Path) -> None:
    """Moves one weight into a data file whose bytes before `offset` read as NaN, like those of
    another tensor that a tool which forgets the offset would pick up."""
    tensor = next(t for t in model.graph.initializer if t.name == external.tensor)
    raw = tensor.raw_data
    (folder / external.location).write_bytes(b"\xff" * external.offset + raw)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = {"location": external.location, "offset": external.offset, "length": len(raw)}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
