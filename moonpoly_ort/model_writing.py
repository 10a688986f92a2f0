"""Writing models with their external data: streamed, aside, then renamed.

A model file and its data files appear under their names only when all of them are complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import onnx

from . import model_files
from .errors import ModelError, OutputError
from .graph_passes.payload import copy_message, is_external, tensors
from .model_files import Source, place_of_data

_EXTERNAL_BYTES = 1024  # smaller tensors stay in the model file
_ALIGNMENT = 4096  # offsets in a data file, for memory mapping
_CHUNK = 1 << 24


def write(source: Source, output: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Writes a model and, into the same folder, the external data that it refers to.

    Data files keep their names, so in the source's own folder they serve both models. A model whose
    weights are in memory and exceed 2 GB gets a new data file, `<output>.data`.

    Args:
        source: The model.
        output: The model's file; one that exists is replaced.
        overwrite: Replace data files that exist with other content too.

    Returns:
        The path written.

    Raises:
        ModelError: External data is missing or too short, or lies outside of the model's folder.
        OutputError: `output` is the source or one of its data files, or cannot be written.
    """
    target = Path(output)
    data_files = _data_files(source)
    try:
        _refuse_target(target, source, data_files)
        with _Staging() as staging:
            for location, data in data_files.items():
                _stage_data(staging, data, target.parent / location, target, overwrite)
            _stage_model(staging, source, target, set(data_files))
            staging.commit()
    except OSError as error:
        why = error.strerror or error  # the name in it is that of a temporary file
        raise OutputError(f"Cannot write {str(target)!r}: {why}.") from error
    return target


def _stage_data(staging: _Staging, data: Path, copy: Path, target: Path, overwrite: bool) -> None:
    if _same_file(copy, target):
        raise OutputError(
            f"The output {str(target)!r} has the name of a data file of the model. Choose another "
            "name."
        )
    if copy.exists():
        if _same_file(copy, data) or _same_content(copy, data):
            return
        if not overwrite:
            raise OutputError(
                f"{str(copy)!r} exists and differs from the model's data file of that name. Choose "
                "an empty folder, or say overwrite=True (--overwrite) to replace it."
            )
    with open(data, "rb") as reader, staging.open(copy) as writer:
        _copy_sparse(reader, writer)


def _stage_model(staging: _Staging, source: Source, target: Path, locations: set[str]) -> None:
    # Weights that are not in the light model are few enough: see `_parse`.
    if sum(len(tensor.raw_data) for tensor in tensors(source.light)) > model_files.PROTOBUF_LIMIT:
        name = f"{target.name}.data"
        while name in locations:
            name += ".data"
        with staging.open(target.with_name(name)) as writer:
            source = Source(_externalized(source.model, name, writer), None, None)
    pieces = source.serialized()
    with staging.open(target) as writer:
        writer.writelines(pieces)


def _data_files(source: Source) -> dict[str, Path]:
    """The model's data files by location, each checked to be there and long enough."""
    needed: dict[str, int] = {}
    for tensor in tensors(source.light):
        if is_external(tensor):
            location, offset, length = place_of_data(tensor)
            needed[location] = max(needed.get(location, 0), offset + length)
    if needed and source.folder is None:
        raise ModelError(
            f"The model has external data ({', '.join(sorted(needed))}) and was not given as a "
            "path, so its place is unknown. Pass base_dir, the folder that holds it."
        )
    files = {location: Path(source.folder or "") / location for location in sorted(needed)}
    for location, path in files.items():
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelError(
                f"The model's external data {str(path)!r} cannot be read: {error.strerror}. Put it "
                "beside the model."
            ) from error
        if not path.is_file() or size < needed[location]:
            raise ModelError(
                f"The model's external data {str(path)!r} has {size} bytes, {needed[location]} are "
                "needed: it is truncated or belongs to another model."
            )
    return files


def _refuse_target(target: Path, source: Source, data_files: dict[str, Path]) -> None:
    if not target.parent.is_dir():
        raise OutputError(
            f"The folder of the output {str(target)!r} does not exist. Create it first."
        )
    if target.is_dir() or not target.name:
        raise OutputError(f"The output {str(target)!r} is a folder; a file name is needed.")
    if target.exists() and not target.is_file():
        raise OutputError(
            f"The output {str(target)!r} is a device or a pipe, which a file would replace. Choose "
            "the name of a file."
        )
    if source.path is not None and _same_file(target, source.path):
        raise OutputError(
            f"The output {str(target)!r} is the input itself. Choose another name; the original is "
            "never changed."
        )
    for path in data_files.values():
        if _same_file(target, path):
            raise OutputError(
                f"The output {str(target)!r} is a data file of the input. Choose another name."
            )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return one.resolve() == other.resolve()


def _same_content(one: Path, other: Path) -> bool:
    if not one.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    with open(one, "rb") as a, open(other, "rb") as b:
        while block := a.read(_CHUNK):
            if block != b.read(_CHUNK):
                return False
    return True


def _copy_sparse(reader: IO[bytes], writer: IO[bytes]) -> None:
    """Copies a file in pieces; holes stay holes where the file system knows them."""
    size = os.fstat(reader.fileno()).st_size
    position = 0
    while position < size:
        try:
            start = os.lseek(reader.fileno(), position, os.SEEK_DATA)
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nothing but a hole up to the end
                raise
            break
        writer.seek(start)
        while start < end:
            block = os.pread(reader.fileno(), min(_CHUNK, end - start), start)
            if not block:
                raise OSError(errno.EIO, "the data file shrank while it was copied", reader.name)
            writer.write(block)
            start += len(block)
        position = end
    writer.truncate(size)


def _externalized(model: onnx.ModelProto, location: str, writer: IO[bytes]) -> onnx.ModelProto:
    """A copy of `model` whose large tensors lie in `writer`, one after the other."""

    def move(tensor: onnx.TensorProto, copy: onnx.TensorProto) -> None:
        data = tensor.raw_data  # protobuf copies it at each access
        if len(data) < _EXTERNAL_BYTES:
            copy.CopyFrom(tensor)
            return
        writer.write(bytes(-writer.tell() % _ALIGNMENT))
        copy.name, copy.data_type, copy.doc_string = (
            tensor.name,
            tensor.data_type,
            tensor.doc_string,
        )
        copy.dims.extend(tensor.dims)
        copy.metadata_props.extend(tensor.metadata_props)
        copy.data_location = onnx.TensorProto.EXTERNAL
        copy.external_data.add(key="location", value=location)
        copy.external_data.add(key="offset", value=str(writer.tell()))
        copy.external_data.add(key="length", value=str(len(data)))
        writer.write(data)

    result = onnx.ModelProto()
    copy_message(model, result, move)
    return result


class _Staging:
    """Files written under temporary names: `commit` renames them, else they are removed."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, Path]] = []

    def __enter__(self) -> _Staging:
        return self

    def __exit__(self, *_: object) -> None:
        for aside, _target in self._files:
            aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def open(self, target: Path) -> Iterator[IO[bytes]]:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        with open(aside, "xb") as file:
            self._files.append((aside, target))
            yield file

    def commit(self) -> None:
        while self._files:
            os.replace(*self._files[0])
            del self._files[0]
