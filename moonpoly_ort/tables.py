"""Performance tables: what each micro-kernel costs on one GPU, as measured there.

One readable JSON file per (operation, GPU), `gemm__nvidia-h200.json`: a header, then one kernel a
line, sorted by name, so that a new measurement is a readable diff, and where cuBLASLt was measured
too, one class of problems a line. Convolutions have a table of their own,
`conv__nvidia-h200.json`. Tables are looked for in the user's folder, then among those shipped in
`tuned/`; the pack builder bakes those of an architecture into its pack.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tuned
from .errors import OutputError, TableError
from .files import replacing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .custom_ops.kernels.pack_format import CostTable

SCHEMA = 1
OPERATIONS = ("gemm", "conv")  # each has a file of its own
_LISTS = ("costs", "vendor", "blocked", "dropped")
NEVER = -1.0  # `blocks_per_sm` of a kernel that the planner must not choose
VENDOR_TILES = 8  # at most, as in moonpoly.h
VENDOR_NODES = 5  # of the correction, along each of M, N and K


@dataclass(frozen=True, order=True)
class Cost:
    """Measured costs of one kernel at its native occupancy, as `mp_cost` in moonpoly.h."""

    kernel: str
    fixed_us: float  # one wave without its K loop
    step_us: float  # one K step of a full wave
    single_step_us: float  # the same where no SM holds more than one block, or few SMs work
    blocks_per_sm: float


@dataclass(frozen=True, order=True)
class LogFactors:
    """Logs of factors, as `mp_log_factors` in moonpoly.h. By default all factors are 1."""

    misaligned: tuple[tuple[float, ...], ...] = ((0.0,) * 3,) * 3  # A, B, Y at 2, 4, 8 bytes
    nodes: tuple[float, ...] = (0.0,) * VENDOR_NODES**3  # in log2 of M, N, K; K fastest


@dataclass(frozen=True, order=True)
class VendorCost:
    """The fitted time of cuBLASLt on one class of problems, as `mp_vendor_cost` in moonpoly.h."""

    dtype: str  # f16, bf16, f32
    precision: str  # tf32, ieee
    layout: str  # nn, nt, tn, tt: A, then B, stored as multiplied or transposed
    aligned: int  # 1: A, B and Y at 16 bytes; 0: not all of them
    batched: int  # 1: more than one product
    margin: float  # it is chosen where this times its prediction is below that of the other plan
    fixed_us: float
    epilogue_us: float  # of a wave, for each 64 x 64 elements of a tile
    split_us: float
    slice_us: float  # of a slice of K, for each 64 x 64 elements of a tile
    lone_share: float  # of a wave's time, where few SMs work
    bandwidth_gbps: float
    tiles: tuple[tuple[int, int, float], ...]  # rows, columns, microseconds of a K step of 64
    correction: LogFactors
    promise: LogFactors  # what other plans took, over what they promised


@dataclass(frozen=True)
class Table:
    """A table. `gpu` is the exact device name; `key` the pack key of the kernels that were
    measured.
    """

    gpu: str
    sm: int
    sm_count: int
    shared_per_block: int  # bytes
    bandwidth_gbps: float  # of the memory, as the timings show it
    launch_us: float  # an empty kernel, back to back on one stream
    triton: str
    cuda: str
    driver: str
    key: str
    date: str  # ISO 8601 day
    clocks: str  # e.g. "locked 1980 MHz" or "free"
    costs: tuple[Cost, ...]
    vendor: tuple[VendorCost, ...] = ()  # empty: cuBLASLt was not measured, and is never chosen
    # Kernels that are never chosen on this GPU: wrong there, or not worth planning with.
    blocked: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        """`gemm` or `conv`: what the kernels that it lists compute."""
        return operation(self.costs[0].kernel)

    @property
    def name(self) -> str:
        return file_name(self.gpu, self.operation)


def operation(kernel: str) -> str:
    """`gemm` or `conv`, by a kernel's name: whose table lists it."""
    return "conv" if kernel.startswith("conv") else "gemm"


def file_name(gpu: str, operation: str = "gemm") -> str:
    """`gemm__nvidia-h200.json` for the device name `NVIDIA H200`."""
    return f"{operation}__{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def dump(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes the table aside and renames it into place. Raises `OutputError`."""
    target = Path(path)
    header = {"schema": SCHEMA} | {k: v for k, v in asdict(table).items() if k not in _LISTS}
    for name in ("blocked", "dropped"):
        header[name] = sorted(getattr(table, name))
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in header.items()]
    rows = [f"    {json.dumps(asdict(cost))}" for cost in sorted(table.costs)]
    if table.vendor:
        classes = [f"    {json.dumps(asdict(cost))}" for cost in sorted(table.vendor)]
        lines += ['  "vendor": [', ",\n".join(classes), "  ],"]
    text = "\n".join(["{", *lines, '  "costs": [', ",\n".join(rows), "  ]", "}"]) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {target.parent}: {error.strerror}") from error
    with replacing(target) as file:
        file.write(text.encode())


def load(path: str | os.PathLike[str], *, gpu: str | None = None) -> Table:
    """Reads and checks a table; with `gpu`, one measured on another device is refused.

    Raises `TableError`, which names the file, the field and the value.
    """
    source = Path(path)
    try:
        data = json.loads(source.read_text())
    except OSError as error:
        raise TableError(f"cannot read the table {source}: {error.strerror or error}") from error
    except ValueError as error:
        raise TableError(f"{source} is no performance table: not JSON ({error})") from error
    table = _parse(data, source)
    if gpu is not None and table.gpu != gpu:
        raise TableError(
            f"{source} was measured on {table.gpu!r}, not on {gpu!r}, so that its costs would "
            f"mislead the planner. Remove it, or use one named {file_name(gpu)}."
        )
    return table


def _parse(data: Any, source: Path) -> Table:
    if not isinstance(data, dict):
        raise TableError(f"{source} is no performance table: a JSON object is expected")
    if data.get("schema") != SCHEMA:
        raise TableError(
            f"{source} has schema {data.get('schema')!r}; this version reads schema {SCHEMA}. "
            "Tune again."
        )
    rows = data.get("costs")
    if not isinstance(rows, list) or not rows:
        raise TableError(
            f"{source}: `costs` must be a list with one entry per kernel, not {rows!r:.80}"
        )
    classes = data.get("vendor", [])
    if not isinstance(classes, list):
        raise TableError(f"{source}: `vendor` must be a list, not {classes!r:.80}")
    header = {key: value for key, value in data.items() if key not in ("schema", *_LISTS)}
    header["vendor"] = tuple(
        _vendor_cost(row, f"{source}: vendor[{i}]") for i, row in enumerate(classes)
    )
    for name in ("blocked", "dropped"):
        listed = data.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(kernel, str) for kernel in listed):
            raise TableError(f"{source}: `{name}` must be a list of kernel names")
        header[name] = tuple(listed)
    costs = tuple(_record(Cost, row, f"{source}: costs[{i}]") for i, row in enumerate(rows))
    names = [cost.kernel for cost in costs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableError(f"{source}: the kernel {twice!r} is listed more than once")
    if len(kinds := {operation(name) for name in (*names, *header["blocked"])}) > 1:
        raise TableError(
            f"{source} lists kernels of {' and '.join(sorted(kinds))}: one is expected"
        )
    table: Table = _record(Table, header | {"costs": costs}, str(source))
    return table


def _vendor_cost(values: Any, where: str) -> VendorCost:
    if isinstance(values, dict):
        values = {key: _as_tuple(value) for key, value in values.items()}
        for name in ("correction", "promise"):
            if name in values:
                values[name] = _log_factors(values[name], f"{where}: {name}")
    cost: VendorCost = _record(VendorCost, values, where)
    names = {
        "dtype": ("f16", "bf16", "f32"), "precision": ("tf32", "ieee"),
        "layout": ("nn", "nt", "tn", "tt"), "aligned": (0, 1), "batched": (0, 1),
    }  # fmt: skip
    for name, known in names.items():
        if getattr(cost, name) not in known:
            raise TableError(
                f"{where}: {name} = {getattr(cost, name)!r}; accepted: {', '.join(map(str, known))}"
            )
    tiles_fit = 0 < len(cost.tiles) <= VENDOR_TILES
    if not tiles_fit or not all(_numbers(tile, 3) and min(tile) > 0 for tile in cost.tiles):
        raise TableError(
            f"{where}: tiles are 1 to {VENDOR_TILES} lists of rows, columns and microseconds"
        )
    return cost


def _log_factors(values: Any, where: str) -> LogFactors:
    if isinstance(values, dict):
        values = {key: _as_tuple(value) for key, value in values.items()}
    factors: LogFactors = _record(LogFactors, values, where)
    rows = factors.misaligned
    if len(rows) != 3 or not all(_numbers(row, 3) for row in rows):
        raise TableError(f"{where}: misaligned is three lists of three numbers")
    if not _numbers(factors.nodes, VENDOR_NODES**3):
        raise TableError(f"{where}: nodes are {VENDOR_NODES**3} numbers")
    return factors


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(entry) for entry in value) if isinstance(value, list) else value


def _numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) == count
        and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    )


def _record(cls: type[Any], values: Any, where: str) -> Any:
    """A frozen dataclass from JSON: every field there, none besides, types right, costs finite and
    >= 0.
    """
    if not isinstance(values, dict):
        raise TableError(f"{where}: an object is expected, not {values!r:.80}")
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
    kinds["LogFactors"] = LogFactors
    known = {field.name: kinds.get(str(field.type), tuple) for field in fields(cls)}
    if unknown := sorted(values.keys() - known.keys()):
        raise TableError(f"{where}: unknown field {unknown[0]!r}")
    for name, kind in known.items():
        if name not in values:
            raise TableError(f"{where}: the field {name!r} is missing")
        value = values[name]
        number = isinstance(value, (int, float))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TableError(f"{where}: {name} = {value!r:.80} is not of the right type")
        if number and not 0 <= value < float("inf"):
            raise TableError(f"{where}: {name} = {value!r} must be finite and not negative")
    return cls(**values)


def user_folder() -> Path:
    """Where the user's own tables lie: `MOONPOLY_TABLES`, else the user data folder."""
    import platformdirs

    named = os.environ.get("MOONPOLY_TABLES")
    return Path(named) if named else platformdirs.user_data_path("moonpoly_ort") / "tables"


def folders() -> list[Path]:
    """The folders searched, first match first."""
    return [user_folder(), Path(tuned.__path__[0])]


def find(gpu: str, operation: str = "gemm") -> Table | None:
    """The table of exactly that device name, or None: then the planner uses its analytic model."""
    for folder in folders():
        path = folder / file_name(gpu, operation)
        if path.is_file():
            return load(path, gpu=gpu)
    return None


def for_architecture(sm: int, operation: str = "gemm") -> list[Table]:
    """All tables of an architecture, sorted by GPU; the user's replace shipped ones of a GPU."""
    tables: dict[str, Table] = {}
    for folder in reversed(folders()):
        for path in sorted(folder.glob(f"{operation}__*.json")):
            table = load(path)
            if path.name != table.name:
                raise TableError(
                    f"{path} has {table.operation} kernels measured on {table.gpu!r}, so its name "
                    f"must be {table.name}. Rename or remove it."
                )
            if table.sm == sm:
                tables[table.gpu] = table
    return [tables[gpu] for gpu in sorted(tables)]


def cost_tables(sm: int, *, trial: bool = False) -> list[CostTable]:
    """The tables of an architecture as the pack builder takes them: one cost row per kernel of
    `specs(sm, trial=trial)`, those of products and of convolutions together. Raises `TableError` as
    `cost_table` does.
    """
    from .custom_ops.kernels.kernel_list import specs
    from .custom_ops.kernels.spec import name

    names = [name(spec) for spec in specs(sm, trial=trial)]
    return merged([t for kind in OPERATIONS for t in for_architecture(sm, kind)], names)


def merged(tables: Sequence[Table], kernels: Sequence[str]) -> list[CostTable]:
    """Tables as a pack with these kernels holds them: one for each GPU, in the order of names."""
    of_gpu: dict[str, list[Table]] = {}
    for table in tables:
        of_gpu.setdefault(table.gpu, []).append(table)
    return [cost_table(of_gpu[gpu], kernels) for gpu in sorted(of_gpu)]


def cost_table(tables: Sequence[Table], kernels: Sequence[str]) -> CostTable:
    """The tables of one GPU as a pack with these kernels holds them: one cost row per kernel.

    Kernels that no table lists get a row of zeros, for which the planner uses its analytic model,
    and those it blocks or drops one that is never chosen. Memory bandwidth and launch time are
    those of the table of products, where there is one. Raises `TableError` for a table that lists
    none of the kernels: it belongs to others.
    """
    import numpy as np

    from .custom_ops.kernels.pack_format import COST, CostTable

    place = {name: i for i, name in enumerate(kernels)}
    costs = np.zeros(len(place), COST)
    ordered = sorted(tables, key=lambda table: OPERATIONS.index(table.operation))
    for table in ordered:
        known = [cost for cost in table.costs if cost.kernel in place]
        if not known:
            raise TableError(
                f"the table {table.name} lists no kernel of this version, but others such as "
                f"{table.costs[0].kernel!r}. Tune again, or remove it."
            )
        for cost in known:
            costs[place[cost.kernel]] = (
                cost.fixed_us,
                cost.step_us,
                cost.single_step_us,
                cost.blocks_per_sm,
            )
        for name in (*table.blocked, *table.dropped):
            if name in place:
                costs[place[name]] = (0, 0, 0, NEVER)
    head = ordered[0]
    return CostTable(
        head.gpu, head.sm_count, head.bandwidth_gbps, head.launch_us, costs,
        packed_vendor(head.vendor),
    )  # fmt: skip


def packed_vendor(costs: Sequence[VendorCost]) -> npt.NDArray[np.void]:
    """What tables say of cuBLASLt, as a pack holds it."""
    import numpy as np

    from .custom_ops.kernels.pack_format import DTYPE_CODE, PRECISION_CODE, VENDOR
    from .custom_ops.kernels.spec import Dtype, Precision

    rows = np.zeros(len(costs), VENDOR)
    for row, cost in zip(rows, costs, strict=True):
        for field in fields(cost):
            if field.type in ("int", "float"):
                row[field.name] = getattr(cost, field.name)
        row["dtype"] = DTYPE_CODE[Dtype(cost.dtype)]
        row["precision"] = PRECISION_CODE[Precision(cost.precision)]
        row["trans_a"], row["trans_b"] = (side == "t" for side in cost.layout)
        row["tile_count"] = len(cost.tiles)
        row["tiles"][: len(cost.tiles)] = list(cost.tiles)  # of tuples: numpy takes them for rows
        for name in ("correction", "promise"):
            factors: LogFactors = getattr(cost, name)
            row[name]["misaligned"] = factors.misaligned
            row[name]["nodes"] = np.reshape(factors.nodes, (VENDOR_NODES,) * 3)
    return rows
