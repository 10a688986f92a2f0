"""Models whose large random weights travel as a recipe: `strip` here, `fill` where they run.

A stripped model refers to a data file; its recipe tells how to make that: name, type, shape, mean
and standard deviation of every weight, from which `fill` draws them anew, each seeded by its name,
the same on every machine. So the fp16 and the fp32 export of one model get the same weights,
rounded. Only for exports with random weights: a large float table that is computed (positions as
sines, say) would be replaced by noise of its mean and deviation.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Array = np.ndarray[Any, Any]
Recipe = list[dict[str, Any]]

LARGE = 1 << 10
"""Bytes above which a float initializer becomes a line of the recipe."""

INLINE = 1 << 18
"""Bytes up to which a form keeps a weight that an optimizer made (the biases of Q, K, V in one)."""

DATA = "weights.bin"

_ALIGNMENT = 4096
_DRAWN = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


def strip(path: Path, folder: Path, like: Sequence[Mapping[str, Any]] = ()) -> Recipe:
    """Writes a model into `folder` without its large weights, and returns their recipe.

    Args:
        path: The model; metadata of its nodes is left out.
        folder: Gets it under the same name.
        like: The recipe of the same model in another type, whose mean and deviation are taken over:
            rounding shifts them.

    Raises:
        ValueError: `like` has another shape for a weight.
    """
    others = {line["name"]: line for line in like}
    model = onnx.load(path)
    _bare(model)
    recipe: Recipe = []
    end = 0
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.data_type not in _DRAWN or array.nbytes <= LARGE:
            continue
        line: dict[str, Any] = {
            "name": tensor.name, "dtype": array.dtype.name, "dims": list(array.shape),
            "mean": _rounded(array.mean(dtype=np.float64)),
            "std": _rounded(array.std(dtype=np.float64)),
            "offset": end, "bytes": array.nbytes,
        }  # fmt: skip
        if other := others.get(tensor.name):
            if other["dims"] != line["dims"]:
                raise ValueError(f"{path}: {tensor.name!r} has another shape in another type")
            line |= {"mean": other["mean"], "std": other["std"]}
        recipe.append(line)
        end = -(-(end + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
        _refer(tensor, line)
    onnx.save(model, folder / path.name)
    return recipe


def adopt(path: Path, folder: Path, recipe: Recipe) -> None:
    """Writes another form of a stripped and filled model, its weights those of the same recipe.

    Raises:
        ValueError: The form has a large weight that is none of the recipe's.
    """
    lines = {line["name"]: line for line in recipe}
    model = onnx.load(path)
    _bare(model)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        line = lines.get(tensor.name)
        if line is not None and array.tobytes() == drawn(line).tobytes():
            _refer(tensor, line)
        elif array.nbytes > INLINE:
            raise ValueError(
                f"{path.name} has a weight of its own, {tensor.name!r}, {array.nbytes} bytes"
            )
    onnx.save(model, folder / path.name)


def fill(recipe: Recipe, folder: Path) -> None:
    """Draws the weights and writes the data file into `folder`, on all cores."""
    path = folder / DATA
    path.touch()

    def write(line: dict[str, Any]) -> None:
        with path.open("r+b") as file:
            file.seek(line["offset"])
            file.write(memoryview(drawn(line)).cast("B"))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, recipe))


def drawn(line: Mapping[str, Any]) -> Array:
    """One weight of a recipe: uniform, drawn in a quarter of the time of a normal one."""
    rng = np.random.default_rng(zlib.crc32(line["name"].encode()))
    values = rng.random(line["dims"], dtype=np.float32)
    values -= np.float32(0.5)
    values *= np.float32(line["std"] * 12**0.5)
    values += np.float32(line["mean"])
    return values.astype(line["dtype"])


def save(recipe: Recipe, path: Path) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in recipe) + "\n]\n")


def load(path: Path) -> Recipe:
    found: Recipe = json.loads(path.read_text())
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _bare(model: onnx.ModelProto) -> None:
    """Takes off what exporters note beside a model, several times its size."""
    for node in _nodes(model.graph):
        del node.metadata_props[:]
        node.doc_string = ""
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
        tensor.doc_string = ""
    for value in model.graph.value_info:  # of which the types stay: optimizers need them
        del value.metadata_props[:]


def _refer(tensor: onnx.TensorProto, line: Mapping[str, Any]) -> None:
    for field in ("raw_data", "float_data", "int32_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = (("location", DATA), ("offset", line["offset"]), ("length", line["bytes"]))
    for key, value in entries:
        tensor.external_data.add(key=key, value=str(value))


def _nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
