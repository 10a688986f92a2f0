"""Whole Conv nodes in ONNX Runtime sessions: ours against its own, host time included.

For a row of the convolution suite, a model of up to 16 equal Conv nodes side by side, each with a
constant weight of its own and one shared input. Rows of one layer share a model: images and their
size are dynamic. ONNX Runtime runs with its default search for algorithms (EXHAUSTIVE) and with
HEURISTIC; both are timed in their steady state, a size that was seen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort
import torch
from onnx import helper

from benchmarks.conv_kernel_only import KEY as KERNEL_KEY
from benchmarks.conv_kernel_only import SIZES, identity
from benchmarks.conv_suite import ConvRow, Layer
from benchmarks.csv_rows import timing_columns
from benchmarks.in_session import difference
from benchmarks.kernel_only import Found, one_line
from benchmarks.measuring import compare_calls
from benchmarks.operand_sets import matrices
from benchmarks.operands import DTYPES, NUMBERS, error_limit
from benchmarks.running import ELEMENTS, Bound, Provider, every_rule, our_session, plain_session
from moonpoly_ort import native
from moonpoly_ort.registering import Precision

KEY = KERNEL_KEY[:-1]
ORT_MODES = {"default": {}, "heuristic": {"cudnn_conv_algo_search": "HEURISTIC"}}
HEAD = [
    *KEY, *SIZES, "status", "note", "nodes", "difference", "ours_us", "ours_low_us",
    "ours_high_us", "default_us", "default_low_us", "default_high_us", "heuristic_us",
    "heuristic_low_us", "heuristic_high_us",
]  # fmt: skip
MOST_NODES = 16
MOST_OUTPUT_BYTES = 4 << 30  # of all nodes, for each of the three sessions


@dataclass(frozen=True)
class Group:
    """Rows that share a model."""

    layer: Layer
    rows: tuple[ConvRow, ...]
    nodes: int


def groups(rows: Sequence[ConvRow], element_bytes: int) -> list[Group]:
    """The models to make, in the order of the rows."""
    by_layer: dict[Layer, list[ConvRow]] = {}
    for row in rows:
        by_layer.setdefault(row.layer, []).append(row)
    return [
        Group(layer, tuple(sharing), nodes_for(sharing, element_bytes))
        for layer, sharing in by_layer.items()
    ]


def nodes_for(rows: Sequence[ConvRow], element_bytes: int) -> int:
    """Nodes of a model for these rows: at most 16, and less output than 4 GiB."""
    largest = max(math.prod(row.y_shape) for row in rows) * element_bytes
    return max(1, min(MOST_NODES, MOST_OUTPUT_BYTES // largest))


def model_of(layer: Layer, nodes: int, dtype: torch.dtype, seed: int = 0) -> bytes:
    """Y_i = Conv(x, W_i); images, height and width are dynamic."""
    c_in, c_out, kernel, stride, group = layer
    element, pad = ELEMENTS[dtype], kernel // 2
    generator = torch.Generator().manual_seed(seed)
    made, weights, outputs = [], [], []
    for i in range(nodes):
        w = torch.randn(c_out, c_in // group, kernel, kernel, generator=generator).to(dtype)
        raw = w.view(torch.uint8).numpy().tobytes()
        weights.append(helper.make_tensor(f"w{i}", element, list(w.shape), raw, raw=True))
        made.append(helper.make_node(
            "Conv", ["x", f"w{i}"], [f"y{i}"], name=f"conv_{i}", group=group,
            kernel_shape=[kernel, kernel], pads=[pad] * 4, strides=[stride, stride],
        ))  # fmt: skip
        outputs.append(
            helper.make_tensor_value_info(f"y{i}", element, ["n", c_out, f"oh{i}", f"ow{i}"])
        )
    graph = helper.make_graph(
        made, "side_by_side",
        [helper.make_tensor_value_info("x", element, ["n", c_in, "h", "w"])], outputs, weights,
    )  # fmt: skip
    # From opset 22 on Conv takes bf16.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    return bytes(model.SerializeToString())


class ConvInSession:
    """Measures groups of rows with one dtype."""

    def __init__(self, provider: Provider, dtype: str, seconds_per_row: float = 0.3) -> None:
        self.provider, self.dtype, self.seconds_per_row = provider, dtype, seconds_per_row
        name, precision = NUMBERS[dtype]
        self.element = DTYPES[name]
        self._precision: Precision = "ieee" if precision == "ieee" else "tf32"
        arena = {"arena_extend_strategy": "kSameAsRequested"} if provider.is_cuda else {}
        self._ours_asked = arena
        # TF32 is what ONNX Runtime does by itself.
        ieee = provider.is_cuda and precision == "ieee"
        self._plain_asked = arena | ({"use_tf32": "0"} if ieee else {})

    def measure(self, group: Group) -> Iterator[Found]:
        """The columns of each of the group's rows; where a session fails, why."""
        left = list(group.rows)
        try:
            sessions = self._sessions(model_of(group.layer, group.nodes, self.element))
            while left:
                measured = self._measure(left[0], group.nodes, sessions)
                left.pop(0)
                yield measured
        except Exception as error:  # onnxruntime's errors have no base of their own
            for row in left:
                yield identity(row, self.dtype) | {"status": "failed", "note": one_line(error)}
            self.provider.synchronize()  # raises after a fault on the GPU: then this is the end

    def _sessions(self, model: bytes) -> dict[str, ort.InferenceSession]:
        ours = our_session(
            model, self.provider, precision=self._precision, rules=every_rule(), **self._ours_asked
        )
        modes = ORT_MODES if self.provider.is_cuda else {"default": {}}
        return {"ours": ours} | {
            name: plain_session(model, self.provider, **self._plain_asked, **asked)
            for name, asked in modes.items()
        }

    def _measure(
        self, row: ConvRow, nodes: int, sessions: dict[str, ort.InferenceSession]
    ) -> Found:  # fmt: skip
        device = self.provider.torch_device
        x = torch.empty(row.n, row.c_in, row.h, row.w, dtype=self.element, device=device)
        x.normal_(generator=torch.Generator(device).manual_seed(1))
        outputs: dict[str, list[torch.Tensor]] = {}
        bound: dict[str, Bound] = {}
        for name, session in sessions.items():
            made = matrices(nodes, 1, 1, math.prod(row.y_shape), self.element, device)
            outputs[name] = [y.view(row.y_shape).fill_(torch.nan) for y in made]
            named = {f"y{i}": y for i, y in enumerate(outputs[name])}
            bound[name] = Bound(session, self.provider, {"x": x}, named)
        before = native.stats().launches
        for one in bound.values():
            one.run()
        launches = native.stats().launches - before
        name, precision = NUMBERS[self.dtype]
        apart = max(
            difference(outputs["ours"][i], outputs["default"][i], row.depth) for i in {0, nodes - 1}
        )
        limit = 2 * error_limit(name, precision, row.depth)  # each may be off, in opposite ways
        notes = []
        if not apart <= limit:
            notes.append(f"results differ by {apart:.3g}, limit {limit:.3g}")
        if self.provider.is_cuda and launches < nodes:
            notes.append(f"{launches} launches for {nodes} nodes: not all are ours")
        found = identity(row, self.dtype) | {
            "nodes": nodes, "difference": apart, "status": "wrong" if notes else "ok",
            "note": "; ".join(notes),
        }  # fmt: skip
        calls = {name: one.run for name, one in bound.items()}
        timings = compare_calls(calls, seconds=self.seconds_per_row)
        for name, timing in timings.items():
            columns: dict[str, Any] = timing_columns(name, timing)
            found |= {column: value / nodes for column, value in columns.items()}
        return found
