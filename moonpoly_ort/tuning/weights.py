"""The weight shapes of a model: what `moonpoly tune --model` measures.

Every MatMul and Gemm that MoonPoly takes and that multiplies by a constant matrix gives one
product (K and N fixed, M varies), in the layout in which the node computes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto

from ..errors import InputError
from ..explaining import DTYPES
from ..graph_passes.domain import DOMAIN
from ..rewriting import rewrite
from ..sizing import all_nodes

Weight = tuple[str, str, int, int]  # number, layout, n, k


def weights(model: str | os.PathLike[str] | ModelProto, ieee: bool = False) -> list[Weight]:
    """(number, layout, n, k) of each distinct constant matrix; fp32 is TF32 unless `ieee`.

    Raises:
        ModelError: the model cannot be read.
        InputError: no node multiplies by a constant matrix.
    """
    taken = rewrite(model, static=True).model
    constants = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in _tensors(taken)}
    found: dict[Weight, None] = {}
    for node in all_nodes(taken.graph.node):
        if node.domain != DOMAIN:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        trans_a, trans_b = bool(attributes.get("transA", 0)), bool(attributes.get("transB", 0))
        element, dims = constants.get(node.input[1], (0, []))
        number = DTYPES.get(element, "")
        if len(dims) != 2 or not number or 0 in dims:
            continue
        k, n = dims[::-1] if trans_b else dims
        number = "f32ieee" if number == "f32" and ieee else number
        found[number, "nt"[trans_a] + "nt"[trans_b], n, k] = None
    if not found:
        name = Path(model).name if isinstance(model, (str, os.PathLike)) else "the model"
        raise InputError(
            f"{name} has no MatMul or Gemm with a constant matrix that MoonPoly takes: there is "
            "nothing to tune for. `moonpoly rewrite MODEL --dry-run --report` says why; without "
            "--model, tuning covers all shapes."
        )
    return list(found)


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
