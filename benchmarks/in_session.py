"""Whole nodes in ONNX Runtime sessions: ours against its own CUDA MatMul, host time included.

For a row of the `gemm` suite, a model of up to 32 equal MatMul nodes side by side, each with a
constant weight of its own and one shared input. Rows of one weight size share a model: the number
of rows is dynamic. All weights of all models are views of one file of random numbers, a page
apart, so that making a session costs what loading its weights costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from onnx import helper

import moonpoly_ort
from benchmarks.csv_rows import CsvRows, timing_columns
from benchmarks.kernel_only import KEY, identity, key, one_line
from benchmarks.measuring import compare_calls
from benchmarks.operand_sets import matrices
from benchmarks.operands import DTYPES, NUMBERS, error_limit
from benchmarks.running import (
    ELEMENTS,
    Bound,
    Provider,
    plain_session,
)
from benchmarks.suites import Row
from moonpoly_ort import native
from moonpoly_ort.registering import Precision

HEAD = [
    *KEY, "class", "batch", "m", "n", "k", "core", "status", "note", "nodes",
    "weight_bytes", "difference", "ours_us", "ours_low_us", "ours_high_us", "ort_us",
    "ort_low_us", "ort_high_us",
]  # fmt: skip
PAGE = 4096  # between the starts of two weights in the file
WEIGHTS = "weights.bin"


@dataclass(frozen=True)
class Limits:
    """How large a model may be. Bytes of all its weights, and of all its outputs."""

    nodes: int = 32
    weight_bytes: int = 256 << 20
    output_bytes: int = 4 << 30

    def nodes_for(self, m: int, n: int, k: int, element_bytes: int) -> int:
        """Nodes of a model with these sizes; 0 where not even one fits."""
        weight, output = n * k * element_bytes, m * n * element_bytes
        return min(self.nodes, self.weight_bytes // weight, self.output_bytes // output)


@dataclass(frozen=True)
class Group:
    """Rows that share a model."""

    n: int
    k: int
    rows: tuple[Row, ...]
    nodes: int


def groups(rows: Sequence[Row], element_bytes: int, limits: Limits) -> list[Group]:
    """The models to make, those with small weights first.

    A weight above the limit is taken alone, if a model of it stays under 2 GB.
    """
    by_weight: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        by_weight.setdefault((row.n, row.k), []).append(row)
    found = []
    for (n, k), sharing in by_weight.items():
        nodes = limits.nodes_for(max(row.m for row in sharing), n, k, element_bytes)
        if nodes or n * k * element_bytes < 2e9:
            found.append(Group(n, k, tuple(sharing), max(nodes, 1)))
    return sorted(found, key=lambda group: group.n * group.k * group.nodes)


def weights_bytes(found: Sequence[Group], element_bytes: int) -> int:
    """Size of the file that serves all these models."""
    return max(
        (g.n * g.k * element_bytes + (g.nodes - 1) * PAGE for g in found), default=0
    )  # fmt: skip


def write_weights(folder: Path, size: int, dtype: torch.dtype, device: str) -> None:
    """Normal random numbers, at least `size` bytes of them."""
    elements = -(-size // dtype.itemsize)
    values = torch.empty(elements, dtype=dtype, device=device)
    values.normal_(generator=torch.Generator(device).manual_seed(0))
    values.cpu().view(torch.uint8).numpy().tofile(folder / WEIGHTS)


def write_model(folder: Path, group: Group, dtype: torch.dtype) -> Path:
    """Y_i (rows, n) = A (rows, k) @ W_i, rows dynamic; the weights lie in `WEIGHTS` beside it."""
    element, n, k = ELEMENTS[dtype], group.n, group.k
    nodes, weights, outputs = [], [], []
    for i in range(group.nodes):
        place = {"location": WEIGHTS, "offset": i * PAGE, "length": n * k * dtype.itemsize}
        weights.append(onnx.TensorProto(
            name=f"w{i}", data_type=element, dims=[k, n],
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=[
                onnx.StringStringEntryProto(key=key, value=str(value))
                for key, value in place.items()
            ],
        ))  # fmt: skip
        nodes.append(helper.make_node("MatMul", ["a", f"w{i}"], [f"y{i}"], name=f"matmul_{i}"))
        outputs.append(helper.make_tensor_value_info(f"y{i}", element, ["rows", n]))
    graph = helper.make_graph(
        nodes, "side_by_side", [helper.make_tensor_value_info("a", element, ["rows", k])], outputs,
        weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / f"{n}x{k}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


class InSession:
    """Measures groups of rows with one dtype; `folder` holds the models while they are used."""

    def __init__(
        self, provider: Provider, dtype: str, folder: Path, seconds_per_row: float = 0.3
    ) -> None:
        self.provider, self.dtype, self.folder = provider, dtype, folder
        self.seconds_per_row = seconds_per_row
        name, precision = NUMBERS[dtype]
        self.element = DTYPES[name]
        self._precision: Precision = "ieee" if precision == "ieee" else "tf32"
        self._asked = {"arena_extend_strategy": "kSameAsRequested"} if provider.is_cuda else {}
        # TF32 is what ONNX Runtime does by itself.
        self._plain_asked = self._asked | (
            {"use_tf32": "0"} if provider.is_cuda and precision == "ieee" else {}
        )
        self._keeper: Any = None

    def start(self, size: int) -> None:
        """Writes the weights, and makes a small session that keeps the kernels loaded."""
        write_weights(self.folder, max(size, 64 * 64 * 4), self.element, self.provider.torch_device)
        small = write_model(self.folder, Group(64, 64, (), 1), self.element)
        self._keeper = self._our_session(small)

    def measure(self, group: Group) -> Iterator[dict[str, Any]]:
        """The columns of each of the group's rows; where a session fails, why."""
        left = list(group.rows)
        try:
            path = write_model(self.folder, group, self.element)
            ours = self._our_session(path)
            plain = plain_session(path, self.provider, **self._plain_asked)
            path.unlink()
            while left:
                measured = self._measure(left[0], group, ours, plain)
                left.pop(0)
                yield measured
        except Exception as error:  # onnxruntime's errors have no base of their own
            for row in left:
                yield identity(row, self.dtype) | {"status": "failed", "note": one_line(error)}
            self.provider.synchronize()  # raises after a fault on the GPU: then this is the end

    def _our_session(self, path: Path) -> ort.InferenceSession:
        # With default options: those that are handed over get the folder of the weights set and
        # put back, and ONNX Runtime warns of both.
        return moonpoly_ort.InferenceSession(
            str(path), providers=self.provider.listed(**self._asked),
            backend="cuda" if self.provider.is_cuda else "auto", precision=self._precision,
            pack=self.provider.pack,
        )  # fmt: skip

    def _measure(
        self, row: Row, group: Group, ours: ort.InferenceSession, plain: ort.InferenceSession
    ) -> dict[str, Any]:
        device, nodes = self.provider.torch_device, group.nodes
        (a,) = matrices(1, 1, row.m, row.k, self.element, device)
        a.normal_(generator=torch.Generator(device).manual_seed(1))
        outputs: dict[str, list[torch.Tensor]] = {}
        bound: dict[str, Bound] = {}
        for name, session in (("ours", ours), ("ort", plain)):
            made = matrices(nodes, 1, row.m, row.n, self.element, device)
            outputs[name] = [y[0].fill_(torch.nan) for y in made]
            named = {f"y{i}": y for i, y in enumerate(outputs[name])}
            bound[name] = Bound(session, self.provider, {"a": a[0]}, named)
        before = plans_made()
        for one in bound.values():
            one.run()
        planned = plans_made() - before
        apart = max(
            difference(outputs["ours"][i], outputs["ort"][i], row.k) for i in {0, nodes - 1}
        )
        name, precision = NUMBERS[self.dtype]
        limit = 2 * error_limit(name, precision, row.k)  # each may be off, in opposite directions
        notes = []
        if not apart <= limit:
            notes.append(f"results differ by {apart:.3g}, limit {limit:.3g}")
        if self.provider.is_cuda and planned != nodes:
            notes.append(f"{planned} plans for {nodes} nodes: not all are ours")
        found = identity(row, self.dtype) | {
            "nodes": nodes, "weight_bytes": nodes * row.n * row.k * self.element.itemsize,
            "difference": apart, "status": "wrong" if notes else "ok", "note": "; ".join(notes),
        }  # fmt: skip
        calls = {name: one.run for name, one in bound.items()}
        for name, timing in compare_calls(calls, seconds=self.seconds_per_row).items():
            columns = timing_columns(name, timing)
            found |= {column: value / nodes for column, value in columns.items()}
        return found


def plans_made() -> int:
    """How many products the library has been asked for in this process."""
    stats = native.stats()
    return int(stats.plan_hits + stats.plan_misses)


def difference(ours: torch.Tensor, other: torch.Tensor, k: int) -> float:
    """||ours - other|| over the norm that products of depth k of normal numbers have on average;
    infinite where there is a NaN or Inf."""
    distance = float((ours.double() - other.double()).norm()) / math.sqrt(k * ours.numel())
    return distance if math.isfinite(distance) else math.inf


def run(
    rows: Sequence[Row], dtype: str, provider: Provider, out: CsvRows, folder: Path,
    limits: Limits, deadline: float, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Measures the rows that `out` does not hold yet, until `deadline` (of `time.monotonic`)."""
    bench = InSession(provider, dtype, folder)
    found = groups(rows, bench.element.itemsize, limits)
    left = [g for g in found if not all(out.has(*key(row, dtype)) for row in g.rows)]
    if not left:
        return
    bench.start(weights_bytes(left, bench.element.itemsize))
    for count, group in enumerate(left):
        if time.monotonic() > deadline:
            say(f"the time is up; {len(left) - count} of {len(left)} weights of {dtype} are left")
            return
        for measured in bench.measure(group):
            if not out.has(*(str(measured[column]) for column in KEY)):
                out.write(measured)
        if count % 20 == 0:
            say(f"{dtype}, weight {count + 1} of {len(left)}: {group.n}x{group.k}")
