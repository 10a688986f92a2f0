"""The weights of a model: what `moonpoly tune --model` measures.

Every MatMul and Gemm that MoonPoly takes and that multiplies by a constant matrix gives one
product (K and N fixed, M varies), in the layout in which the node computes it; every Conv and
ConvTranspose of a constant W gives a layer (all but its images fixed).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import GraphProto, ModelProto

from ..errors import InputError
from ..explaining import DTYPES
from ..graph_passes.domain import DOMAIN
from ..graph_passes.operators import BASES, OPERATORS
from ..rewriting import rewrite
from ..sizing import all_nodes
from .conv_shapes import TRIPLE, Layer

Weight = tuple[str, str, int, int]  # number, layout, n, k


class Weights(NamedTuple):
    """Those of a model, each once."""

    matrices: tuple[Weight, ...]  # (number, layout, n, k)
    layers: tuple[Layer, ...]


def weights(model: str | os.PathLike[str] | ModelProto, ieee: bool = False) -> Weights:
    """The distinct constant matrices and layers; fp32 is TF32 unless `ieee`.

    Raises:
        ModelError: the model cannot be read.
        InputError: no node multiplies by a constant.
    """
    taken = rewrite(model, static=True).model
    constants = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in _tensors(taken)}
    matrices: dict[Weight, None] = {}
    layers: dict[Layer, None] = {}
    for node in all_nodes(taken.graph.node):
        if node.domain != DOMAIN:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        element, dims = constants.get(node.input[1], (0, []))
        number = DTYPES.get(element, "")
        if not number or 0 in dims:
            continue
        number = "f32ieee" if number == "f32" and ieee else number
        op = OPERATORS[node.op_type].standard
        if op in ("Conv", "ConvTranspose"):
            layers[_layer(number, op == "ConvTranspose", dims, attributes)] = None
        elif len(dims) == 2:
            turned = BASES[OPERATORS[node.op_type].base].turned
            trans_a = bool(attributes.get("transA"))
            trans_b = bool(attributes.get("transB", turned))
            k, n = dims[::-1] if trans_b else dims
            matrices[number, "nt"[trans_a] + "nt"[trans_b], n, k] = None
    if not (matrices or layers):
        name = Path(model).name if isinstance(model, (str, os.PathLike)) else "the model"
        raise InputError(
            f"{name} has no MatMul, Gemm, Conv or ConvTranspose with a constant weight that "
            "MoonPoly takes: there is nothing to tune for. `moonpoly rewrite MODEL --dry-run "
            "--report` says why; without --model, tuning covers all shapes."
        )
    return Weights(tuple(matrices), tuple(layers))


def _layer(number: str, transposed: bool, dims: Sequence[int], attributes: dict[str, Any]) -> Layer:
    axes, groups = len(dims) - 2, int(attributes.get("group", 1))

    def triple(name: str) -> TRIPLE:
        values = [1] * (3 - axes) + list(attributes.get(name) or [1] * axes)
        return values[0], values[1], values[2]

    one = (1,) * (3 - axes)
    kernel = (*one, *dims[2:])
    c, k = (dims[0] // groups, dims[1]) if transposed else (dims[1], dims[0] // groups)
    padded = any(attributes.get("pads", ()))
    return Layer(
        number, transposed, axes, groups, c, k, (kernel[0], kernel[1], kernel[2]),
        triple("strides"), triple("dilations"), padded,
    )  # fmt: skip


def _tensors(model: ModelProto) -> Iterator[onnx.TensorProto]:
    graphs: list[GraphProto] = [model.graph]
    while graphs:
        graph = graphs.pop()
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                graphs.extend(attribute.graphs)
                if node.op_type == "Constant" and attribute.HasField("t"):
                    tensor = onnx.TensorProto(name=node.output[0], dims=attribute.t.dims)
                    tensor.data_type = attribute.t.data_type
                    yield tensor
