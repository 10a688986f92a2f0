"""Models in memory and where they came from: large weights stay in the bytes that were read."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import threading
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from .errors import ModelError, OutputError
from .graph_passes.detached_weights import LARGE, Weight, attach, detach
from .graph_passes.payload import UnreadableError, is_external, tensors
from .graph_passes.skeleton import keeps_payload
from .graph_passes.tree import Columns

PROTOBUF_LIMIT = 2**31 - 2**26
"""Payload above which a model is written with external data: 2 GB less room for the graph."""

_WIDTHS: Mapping[int, int] = {
    onnx.TensorProto.FLOAT16: 2,
    onnx.TensorProto.BFLOAT16: 2,
    onnx.TensorProto.FLOAT: 4,
}
"""Bytes of an element of the types that products have."""


class Source:
    """A model in memory and where it came from; external data stays on disk.

    The large weights of a model that came as bytes or as a file stay in those bytes, until someone
    asks for the whole model.

    Attributes:
        path: The model's file, or None.
        folder: What locations of external data are relative to; None if unknown.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        path: Path | None,
        folder: Path | None,
        weights: dict[int, Weight] | None = None,
    ) -> None:
        self.path = path
        self.folder = folder
        self._light = model
        self._weights = weights or {}
        self._lock = threading.Lock()

    @property
    def light(self) -> onnx.ModelProto:
        """The model, of whose initializers large ones may lack their payload.

        Anything but the initializers may be changed in it; of those, more may be appended, and
        `complete` and `remove` serve the rest.
        """
        return self._light

    @property
    def model(self) -> onnx.ModelProto:
        """The whole model, which belongs to the caller: from now on it is the light one too."""
        with self._lock:
            if self._weights:
                whole = onnx.ModelProto()
                whole.CopyFrom(self._light)
                for index, weight in self._weights.items():
                    _put(weight, whole.graph.initializer[index])
                self._light, self._weights = whole, {}
            return self._light

    def complete(self, index: int) -> None:
        """Gives an initializer of the light model the payload that it may lack."""
        with self._lock:
            weight = self._weights.pop(index, None)
            if weight is not None:
                _put(weight, self._light.graph.initializer[index])

    def remove(self, indices: Collection[int]) -> None:
        """Deletes initializers of the main graph."""
        with self._lock:
            for index in sorted(indices, reverse=True):
                del self._light.graph.initializer[index]
            self._weights = {
                index - sum(removed < index for removed in indices): weight
                for index, weight in self._weights.items()
                if index not in indices
            }

    def external_data(self, tensor: onnx.TensorProto) -> bytes:
        """The payload of a tensor that is in another file.

        Raises:
            UnreadableError: The file is not there, too short, or outside the model's folder; or the
                folder is not known.
        """
        what = f"{tensor.name!r}" if tensor.name else "a constant"
        try:
            location, offset, length = place_of_data(tensor)
            if self.folder is None:
                raise UnreadableError(
                    f"{what} has its data in {location!r}, and the model was not given as a path: "
                    "pass base_dir"
                )
            elements = math.prod(tensor.dims)
            itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            length = length or elements * itemsize
            with open(self.folder / location, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        except ModelError as error:
            raise UnreadableError(str(error)) from error
        except OSError as error:
            raise UnreadableError(
                f"{what} has its data in {location!r}, which cannot be read: {error.strerror}"
            ) from error
        if len(data) < length:
            raise UnreadableError(
                f"{what} has its data in {location!r}, which is truncated: {len(data)} of its "
                f"{length} bytes are there"
            )
        return data

    def why_not_alternating(self, one: Columns, other: Columns) -> str:
        """Why columns of matrices cannot take turns; empty if they can, and will fit."""
        with self._lock:
            tensors = [self._initializer(columns.matrix)[1] for columns in (one, other)]
            names = " and ".join(dict.fromkeys(repr(tensor.name) for tensor in tensors))
            if tensors[0].data_type != tensors[1].data_type:
                return f"{names} are of different types"
            size = 0
            for tensor, columns in zip(tensors, (one, other), strict=True):
                width = _WIDTHS.get(tensor.data_type)
                if width is None:
                    return f"{tensor.name!r} is of type {tensor.data_type}"
                size += width * math.prod(tensor.dims) // columns.parts
                if is_external(tensor):
                    try:
                        self._check_length(tensor, width * math.prod(tensor.dims))
                    except (ModelError, OSError) as error:
                        return f"the data of {tensor.name!r} cannot be read: {error}"
            # Of those in other files the new ones are kept here.
            held = sum(len(weight.payload) for weight in self._weights.values())
            if any(map(is_external, tensors)) and held + size > PROTOBUF_LIMIT:
                return (
                    f"with {names}, {held + size} bytes of weights would be in the "
                    f"model's own file; {PROTOBUF_LIMIT} fit"
                )
            return ""

    def add_alternating(self, one: Columns, other: Columns, name: str) -> onnx.TensorProto:
        """Appends the initializer `name`: columns of matrices in turn, `one` first.

        Raises:
            ValueError: A tensor is malformed.
            UnreadableError: External data is missing.
        """
        with self._lock:
            first = self._initializer(one.matrix)[1]
            rows, count = first.dims[0], first.dims[1] // one.parts
            element = np.dtype(f"u{_WIDTHS[first.data_type]}")
            both = np.empty((rows, count, 2), element)
            for side, columns in enumerate((one, other)):
                index, tensor = self._initializer(columns.matrix)
                if index in self._weights:
                    data = np.frombuffer(self._weights[index].payload, element)
                elif is_external(tensor):
                    data = np.frombuffer(self.external_data(tensor), element)
                else:
                    data = onnx.numpy_helper.to_array(tensor).reshape(-1).view(element)
                parts = data.reshape(rows, columns.parts, count)
                both[:, :, side] = parts[:, columns.part]
            initializers = self._light.graph.initializer
            new: onnx.TensorProto = initializers.add(name=name, data_type=first.data_type)
            new.dims.extend((rows, 2 * count))
            payload = both.reshape(-1).view(np.uint8).data
            if len(payload) < LARGE:
                new.raw_data = payload.tobytes()
            else:
                number = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
                self._weights[len(initializers) - 1] = Weight(number, payload)
            return new

    def _check_length(self, tensor: onnx.TensorProto, size: int) -> None:
        location, offset, length = place_of_data(tensor)
        if self.folder is None:
            raise ModelError("its folder is not known: pass base_dir")
        if length not in (0, size) or (self.folder / location).stat().st_size < offset + size:
            raise ModelError(f"{location!r} has not the {size} bytes that its shape says")

    def _initializer(self, name: str) -> tuple[int, onnx.TensorProto]:
        tensors = enumerate(self._light.graph.initializer)
        return next((index, tensor) for index, tensor in tensors if tensor.name == name)

    @property
    def has_external_data(self) -> bool:
        """Whether some of the weights are in other files."""
        return any(map(is_external, tensors(self._light)))

    def serialized(self) -> list[memoryview]:
        """The whole model in binary form, in pieces of which the large ones are not copies.

        Raises:
            OutputError: Protobuf cannot serialize it: it exceeds 2 GB.
        """
        with self._lock:
            light, weights = self._light, self._weights
        try:
            data = memoryview(light.SerializeToString())
        except (EncodeError, ValueError) as error:
            raise OutputError(f"The model cannot be serialized: {error}") from error
        return attach(data, weights) if weights else [data]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self._whole() == other._whole()

    def __reduce__(self) -> tuple[object, ...]:
        return Source, self._whole()

    def _whole(self) -> tuple[onnx.ModelProto, Path | None, Path | None]:
        return self.model, self.path, self.folder


def read(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    folder: str | os.PathLike[str] | None = None,
    *,
    mapped: bool = False,
) -> Source:
    """Reads a model without its external data.

    Args:
        model: A path, a serialized model, or a ModelProto, which is copied.
        folder: Where external data lies, if not beside the model's file.
        mapped: Leave large weights in the file. It must then stay as it is until the result has
            been used.

    Raises:
        ModelError: There is no such file, it cannot be read, or it holds no ONNX model.
        TypeError: `model` is of another type.
    """
    base = None if folder is None else Path(folder)
    if isinstance(model, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        _refuse_empty(copy, "The ModelProto")
        return Source(copy, None, base)
    if isinstance(model, bytes | bytearray | memoryview):
        proto, weights = _parse(bytes(model), f"What was given as {len(model)} bytes")
        return Source(proto, None, base, weights)
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"model is a {type(model).__name__}; a path, bytes or an onnx.ModelProto is accepted"
        )
    path = Path(model)
    try:
        data = _map(path) if mapped else path.read_bytes()
    except OSError as error:
        raise ModelError(f"Cannot read the model {str(path)!r}: {error.strerror}.") from error
    proto, weights = _parse(data, f"{str(path)!r} ({len(data)} bytes)")
    return Source(proto, path, path.parent if base is None else base, weights)


def _map(path: Path) -> bytes | mmap.mmap:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size:
            with contextlib.suppress(OSError):  # some file systems cannot; they can be read
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def _parse(data: bytes | mmap.mmap, what: str) -> tuple[onnx.ModelProto, dict[int, Weight]]:
    """The model and those of its weights that it lacks, as views of `data`."""
    # A model that is nearly too large for protobuf may have to be taken apart to be written.
    light = detach(memoryview(data)) if len(data) <= PROTOBUF_LIMIT else None
    content, weights = light or (data[:], {})
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        hint = (
            " No ONNX file can exceed 2 GB: larger models store their weights as external data."
            if len(data) >= 2**31
            else ""
        )
        raise ModelError(
            f"{what} is not an ONNX model, or is corrupt or truncated.{hint} "
            "Accepted is an ONNX ModelProto in binary form, as onnx.save writes it."
        ) from error
    _refuse_empty(model, what)
    for index, tensor in enumerate(model.graph.initializer):
        if index in weights and keeps_payload(tensor):
            _put(weights.pop(index), tensor)
    return model, weights


def _put(weight: Weight, tensor: onnx.TensorProto) -> None:
    tensor.MergeFromString(b"".join(weight.pieces()))


def _refuse_empty(model: onnx.ModelProto, what: str) -> None:
    # Protobuf takes empty input, and much that is not ONNX, for a message without fields.
    if model.ir_version <= 0 or not model.HasField("graph"):
        raise ModelError(
            f"{what} is not an ONNX model: it has no "
            f"{'graph' if model.ir_version > 0 else 'IR version'}. Accepted is an ONNX ModelProto "
            "in binary form, as onnx.save writes it."
        )


def place_of_data(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """Where external data is: location, offset and length, 0 where the file's rest is meant.

    Raises:
        ModelError: It is malformed, or the location is outside of the model's folder.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        offset, length = (int(entries.get(key, 0)) for key in ("offset", "length"))
    except ValueError as error:
        raise ModelError(
            f"Tensor {tensor.name!r} has a malformed offset or length of external data: {error}"
        ) from error
    if not location or PurePath(location).is_absolute() or ".." in PurePath(location).parts:
        raise ModelError(
            f"Tensor {tensor.name!r} has its data in {location!r}; accepted are paths inside the "
            "model's folder."
        )
    return location, offset, length
