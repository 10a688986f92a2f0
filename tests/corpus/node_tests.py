"""ONNX's own node tests of the candidates, as they are and with every input dimension dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.backend.test.case import node as node_cases

# Importing these modules makes their tests. The official collector imports the modules of all
# operators: slow, and some need packages that nothing else here does.
from onnx.backend.test.case.node import conv, convtranspose, gemm, matmul  # noqa: F401

Array = NDArray[Any]
OPERATORS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@dataclass(frozen=True)
class NodeTest:
    """A model of one node, one run's inputs and the outputs that ONNX expects of it."""

    id: str
    operator: str
    model: onnx.ModelProto
    feed: Mapping[str, Array]
    expected: Mapping[str, Array]

    def dynamic(self) -> onnx.ModelProto:
        """A copy with a name for each dimension of each input, and output dimensions unknown."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for value in model.graph.input:
            for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
                dimension.dim_param = f"{value.name}_{axis}"
        for value in model.graph.output:
            for dimension in value.type.tensor_type.shape.dim:
                dimension.Clear()
        return model


@cache
def collect() -> tuple[NodeTest, ...]:
    """All tests of these operators that the installed onnx has."""
    found = []
    for case in node_cases._NodeTestCases:  # what the official collector returns
        model = case.model
        operators = [node.op_type for node in model.graph.node]
        if len(operators) != 1 or operators[0] not in OPERATORS:
            continue
        inputs, outputs = case.data_sets[0]
        found.append(
            NodeTest(
                case.name,
                operators[0],
                model,
                dict(
                    zip((v.name for v in model.graph.input), map(np.asarray, inputs), strict=True)
                ),
                dict(
                    zip((v.name for v in model.graph.output), map(np.asarray, outputs), strict=True)
                ),
            )
        )
    return tuple(found)
