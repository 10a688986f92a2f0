"""Chains of MatMul nodes with a dynamic row count: the model of the host-bound figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx
import torch
from onnx import helper

from benchmarks.running import ELEMENTS


@dataclass(frozen=True)
class Chain:
    """Y = X @ W_0 @ W_1 ...; X is (M, K) with M dynamic."""

    model: bytes
    weights: list[torch.Tensor]  # on the CPU, in the chain's dtype
    dtype: torch.dtype

    @staticmethod
    def make(sizes: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Chain:
        """One MatMul for each neighbouring pair of `sizes`; weights keep their input's scale."""
        generator = torch.Generator().manual_seed(seed)
        pairs = list(pairwise(sizes))
        weights = [(torch.randn(k, n, generator=generator) / k**0.5).to(dtype) for k, n in pairs]
        element = ELEMENTS[dtype]
        last = len(pairs) - 1
        nodes, initializers = [], []
        for i, weight in enumerate(weights):
            raw = weight.view(torch.uint8).numpy().tobytes()
            initializers.append(
                helper.make_tensor(f"w{i}", element, list(weight.shape), raw, raw=True)
            )
            source, target = f"h{i}" if i else "x", "y" if i == last else f"h{i + 1}"
            nodes.append(
                helper.make_node("MatMul", [source, f"w{i}"], [target], name=f"matmul_{i}")
            )
        graph = helper.make_graph(
            nodes, "chain",
            [helper.make_tensor_value_info("x", element, ["rows", sizes[0]])],
            [helper.make_tensor_value_info("y", element, ["rows", sizes[-1]])],
            initializers,
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        return Chain(model.SerializeToString(), weights, dtype)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The chain in float64, with nothing rounded between its nodes."""
        y = x.double()
        for weight in self.weights:
            y = y @ weight.to(x.device).double()
        return y

    @property
    def depth(self) -> int:
        return len(self.weights)
