"""Convolutions for the drivers: cases as torch tensors between guards, their float64 results, and
models of Conv nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import helper

from benchmarks.operands import error_limit
from benchmarks.running import ELEMENTS
from moonpoly_ort import native

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
CODES = {
    "f16": native.Dtype.F16, "bf16": native.Dtype.BF16, "f32": native.Dtype.F32,
}  # fmt: skip
GUARD = 4096  # elements of poison around each operand
SENTINEL = 12345.0  # what surrounds Y; each of the three types holds it, rounded


@dataclass(frozen=True)
class Convolution:
    """Sizes of a Conv, or a ConvTranspose, of 1 to 3 spatial axes; c and k are those of one group.
    `pads` are all begins, then all ends.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    c: int
    k: int
    n: int = 1
    groups: int = 1
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    transposed: bool = False
    bias: bool = False
    packed: bool = True
    dtype: str = "f16"
    precision: str = "tf32"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.groups * self.c, *self.size)

    @property
    def w_shape(self) -> tuple[int, ...]:
        outer = (
            (self.groups * self.c, self.k) if self.transposed else (self.groups * self.k, self.c)
        )
        return (*outer, *self.kernel)

    @property
    def attributes(self) -> dict[str, Any]:
        lists = {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}
        return {"group": self.groups} | {name: list(v) for name, v in lists.items() if v}

    def problem(self) -> native.ConvProblem:
        attributes = native.ConvAttributes.of_node(self.transposed, **self.attributes)
        precision = native.Precision.IEEE if self.precision == "ieee" else native.Precision.TF32
        return native.conv_problem(
            self.x_shape, self.w_shape, attributes, CODES[self.dtype], precision, bias=self.bias
        )

    @property
    def limit(self) -> float:
        return error_limit(self.dtype, self.precision, self.c * math.prod(self.kernel))


def reference(
    case: Convolution, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """In float64, through PyTorch's own kernels; pads by hand, since its are symmetric."""
    rank = len(case.size)
    ones = (1,) * rank
    options = {
        "stride": case.strides or ones, "dilation": case.dilations or ones, "groups": case.groups,
    }  # fmt: skip
    pads = case.pads or (0,) * (2 * rank)
    begins, ends = pads[:rank], pads[rank:]
    wide = None if bias is None else bias.double()
    with torch.backends.cudnn.flags(enabled=False):
        if not case.transposed:
            around = [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair]
            function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
            return function(F.pad(x.double(), around), w.double(), wide, **options)
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        whole = function(x.double(), w.double(), wide, **options)
    crop = [slice(b, size - e) for b, e, size in zip(begins, ends, whole.shape[2:], strict=True)]
    return whole[(slice(None), slice(None), *crop)]


class Guarded:
    """A tensor within poison; `start` elements behind a 16-byte boundary."""

    def __init__(self, values: torch.Tensor, poison: float, start: int = 0) -> None:
        count = values.numel()
        self.storage = torch.full(
            (2 * GUARD + start + count,), poison, dtype=values.dtype, device=values.device
        )
        self.inside = slice(GUARD + start, GUARD + start + count)
        self.storage[self.inside] = values.reshape(-1)
        self.shape = values.shape

    @property
    def view(self) -> torch.Tensor:
        return self.storage[self.inside].view(self.shape)

    @property
    def address(self) -> int:
        return self.storage[self.inside].data_ptr()

    def stray_writes(self, poison: float) -> int:
        held = torch.tensor(poison, dtype=self.storage.dtype, device=self.storage.device)
        changed = self.storage != held
        changed[self.inside] = False
        return int(changed.sum())


@dataclass
class ConvOperands:
    """A convolution's tensors on a device. W is stored anew where the case says so."""

    case: Convolution
    conv: native.Conv
    x: Guarded
    w: Guarded
    bias: torch.Tensor | None
    y: Guarded
    stored: torch.Tensor  # W as ONNX has it

    @staticmethod
    def allocate(case: Convolution, device: str, seed: int = 0) -> ConvOperands:
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[case.dtype]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        problem = case.problem()
        x, w = random(*case.x_shape), random(*case.w_shape)
        bias = random(case.groups * case.k) if case.bias else None
        conv, own = problem.conv, w
        start = 0 if conv.w_taps else seed % 5
        if case.packed:
            packed, size = native.conv_packed(conv)
            if size:
                host, out = w.cpu().contiguous(), torch.empty(size, dtype=torch.int8)
                native.conv_pack(conv, host.data_ptr(), out.data_ptr())
                conv, start, own = packed, 0, out.view(dtype).to(device)
        y = torch.full(problem.output, float("nan"), dtype=dtype, device=device)
        return ConvOperands(
            case, conv, Guarded(x, math.nan, seed % 3), Guarded(own, math.nan, start), bias,
            Guarded(y, SENTINEL, seed % 7), w,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """The result in float64."""
        return reference(self.case, self.x.view, self.stored, self.bias)

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """Addresses of X, W, the bias (0: none) and Y."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.x.address, self.w.address, bias, self.y.address


@dataclass(frozen=True)
class ConvChain:
    """Conv nodes one behind the other, each 3 x 3 with pads of 1, on images of any size."""

    model: bytes  # ai.onnx
    rewritten: bytes  # ai.moonpoly, without function bodies: for sessions with the library
    weights: list[torch.Tensor]
    dtype: torch.dtype

    @staticmethod
    def make(depth: int, channels: int, dtype: torch.dtype, seed: int = 0) -> ConvChain:
        generator = torch.Generator().manual_seed(seed)
        scale = (9 * channels) ** -0.5
        weights = [
            (torch.randn(channels, channels, 3, 3, generator=generator) * scale).to(dtype)
            for _ in range(depth)
        ]
        return ConvChain(
            _chain(weights, dtype, ""), _chain(weights, dtype, "ai.moonpoly"), weights, dtype
        )

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The chain in float64, with nothing rounded between its nodes."""
        y = x.double()
        with torch.backends.cudnn.flags(enabled=False):
            for weight in self.weights:
                y = F.conv2d(y, weight.to(x.device).double(), padding=1)
        return y


def _chain(weights: Sequence[torch.Tensor], dtype: torch.dtype, domain: str) -> bytes:
    element = ELEMENTS[dtype]
    channels = weights[0].shape[0]
    nodes, initializers = [], []
    for i, weight in enumerate(weights):
        raw = weight.view(torch.uint8).numpy().tobytes()
        initializers.append(helper.make_tensor(f"w{i}", element, list(weight.shape), raw, raw=True))
        source, target = f"h{i}" if i else "x", "y" if i == len(weights) - 1 else f"h{i + 1}"
        nodes.append(
            helper.make_node(
                "Conv", [source, f"w{i}"], [target], name=f"conv_{i}", domain=domain,
                pads=[1, 1, 1, 1], kernel_shape=[3, 3],
            )
        )  # fmt: skip
    shape = ["n", channels, "h", "w"]
    graph = helper.make_graph(
        nodes, "chain",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        initializers,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    if not domain:
        onnx.checker.check_model(model)
    return model.SerializeToString()
