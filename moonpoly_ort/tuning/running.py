"""Tuning from beginning to end: `tune`. What each step does is in the module of its name."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from .. import native, packs, tables
from ..custom_ops.kernels import pack_format
from ..errors import ArgumentError, DeviceError, OutputError, TableError
from . import busy, conv_shapes, cuda, journal, shapes
from .candidates import VENDOR_NAME, Candidate, Kernels, promising, vendor
from .fitting import Fitted, Planner, Row, fit_all
from .gate import gate
from .measuring import CandidateFault, Effort, Measurer, bandwidth_gbps, launch_us
from .schedule import Group, Schedule
from .selecting import superfluous
from .shapes import LAYOUTS, NUMBERS
from .vendor_timings import vendor_costs
from .verifying import Verified, fresh, verify
from .weights import weights
from .work import AnyShape

SLOWEST = 2.5  # candidates predicted to take more times the best are not tried
LONGEST_US = 800.0  # longer products show nothing that shorter ones do not
MEMORY_SHARE = 0.5  # of the free device memory, that operands may take
COPIED_BYTES = 1 << 29  # to measure the bandwidth: far beyond L2
HEIGHTS, HEIGHTS_CHECKED = 12, 17  # row and pixel counts of a model's weights, measured and checked
VERIFY_SHARE = 0.1  # of the budget, on top of it
ROWS, PIXELS = (1, 4096), (64, 65536)

Report = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True)
class Options:
    """What to tune and how. Every field has the default of the command line."""

    gpu: int = 0
    numbers: tuple[str, ...] = ()  # keys of NUMBERS; empty: all, or those of the model
    layouts: tuple[str, ...] = ()  # of LAYOUTS; empty: all, or those of the model
    operations: tuple[str, ...] = ()  # of tables.OPERATIONS; empty: all, or those of the model
    model: Path | None = None
    rows: tuple[int, int] = ROWS  # range of M, with a model
    pixels: tuple[int, int] = PIXELS  # range of a convolution's output pixels, with a model
    minutes: float = 20.0
    output: Path | None = None  # folder of the table; None: the user's
    pack: Path | None = None  # None: the current one, built if need be
    trial: bool = False  # build the pack with families on trial
    only: str = ""  # kernels whose names contain it
    force: bool = False  # a busy GPU, too
    fresh: bool = False  # forget what was measured before
    keep_all: bool = False  # drop no kernel
    tuned_pack: Path | None = None  # where a copy of the pack with the table goes
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        for what, given, known in (("dtype", self.numbers, tuple(NUMBERS)),
                                   ("layout", self.layouts, LAYOUTS),
                                   ("operation", self.operations, tables.OPERATIONS)):  # fmt: skip
            if unknown := [name for name in given if name not in known]:
                raise ArgumentError(
                    f"unknown {what} {unknown[0]!r}; accepted are {', '.join(known)}"
                )
        if not self.minutes > 0:
            raise ArgumentError(f"a budget of {self.minutes} minutes: it must be positive")
        if (self.only or self.trial) and self.output is None:
            raise ArgumentError(
                "tuning some kernels only, or kernels on trial, needs --output: the table is not "
                "one for the sessions of this machine"
            )
        for what, (low, high) in (("rows", self.rows), ("pixels", self.pixels)):
            if not 1 <= low <= high < 1 << 31:
                raise ArgumentError(
                    f"{what} from {low} to {high}: a range from 1 up, below 2^31, is accepted"
                )
            if self.model is None and (low, high) != {"rows": ROWS, "pixels": PIXELS}[what]:
                raise ArgumentError(
                    f"{what} from {low} to {high}: they are those of a model's weights, and there "
                    "is no model; name one with --model"
                )

    @property
    def convolves(self) -> bool:
        """Whether convolutions are asked for: not where only a layout of products is."""
        return "conv" in (self.operations or ("conv",) * (not self.layouts))

    @property
    def multiplies(self) -> bool:
        """Whether products are asked for."""
        return "gemm" in (self.operations or tables.OPERATIONS)


@dataclass(frozen=True)
class Outcome:
    """What tuning found and wrote."""

    gpu: str
    table: Path
    journal: Path
    fitted: Fitted
    verified: Verified | None  # None: nothing was timed with the table
    shapes: int  # measured, those of earlier runs included
    left: int  # shapes for which the time did not suffice
    timings: int
    kernels: int  # with measured costs
    blocked: dict[str, str]  # kernel: what is wrong with it
    dropped: tuple[str, ...]
    vendor_wins: float | None  # share of shapes where the vendor's product was fastest, if timed
    seconds: float
    convolutions: Outcome | None = None  # where products were tuned too, which the rest is about

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        fitted: dict[str, Any] = {
            "bandwidth_gbps": self.fitted.bandwidth,
            "untuned": self.fitted.untuned,
        }
        for name in ("analytic", "own", "held_out"):
            quality = getattr(self.fitted, name)
            if quality is not None:
                fields = ("mean", "worst", "shapes", "untimed", "error")
                fitted[name] = {field: getattr(quality, field) for field in fields}
        if self.verified is not None:
            names = ("mean", "worst", "untuned", "untuned_share", "against_vendor", "allowed_share")
            fitted["verified"] = {name: getattr(self.verified, name) for name in names} | {
                "checks": [asdict(check) for check in self.verified.checks]
            }
        plain = {
            name: getattr(self, name)
            for name in ("gpu", "shapes", "left", "timings", "kernels", "blocked", "dropped",
                         "vendor_wins", "seconds")
        }  # fmt: skip
        plain |= {"table": str(self.table), "journal": str(self.journal), "quality": fitted}
        if self.convolutions is not None:
            plain["convolutions"] = self.convolutions.as_dict()
        return plain


def _silent(done: int, total: int, name: str) -> None:
    return None


def tune(
    options: Options, *, report: Report = _silent, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Measures the kernels of a pack on a GPU, fits their costs and writes the table.

    `report` hears how far the present step is, `say` of each step and of warnings. Interrupted, it
    goes on at the next call with the same pack, GPU and output.

    Raises:
        ArgumentError, ModelError, InputError: options or a model that cannot be used.
        OutputError: the table's folder cannot be written, or another process is tuning there.
        DeviceError: no GPU, one that is in use, or a kernel that faults.
        MissingDependencyError: no pack, and no Triton to build one.
        PackError, TableError: the pack or the journal cannot be used.
    """
    begun = time.monotonic()
    groups = _groups(options)
    folder = options.output or tables.user_folder()
    _writable(folder)
    if options.tuned_pack is not None:
        _writable(options.tuned_pack.absolute().parent)
    if not native.device_count():
        raise DeviceError(
            "tuning measures a GPU, and the driver offers none here; `moonpoly doctor` says what "
            "is missing. --refit JOURNAL works without one"
        )
    device = native.device_query(options.gpu)
    pack = _pack(options, device.sm, report)
    bus = cuda.bus_id(options.gpu)
    if warning := busy.refuse_busy(bus, options.gpu, force=options.force):
        say(f"warning: {warning}")
    key = pack_format.read_info(pack).key
    header = {
        "gpu": device.name, "pack_key": key, "driver": busy.state(bus)[0],
        "cuda": cuda.cuda_version(), "only": options.only,
        "device": {name: getattr(device, name) for name, *_ in device._fields_ if name != "_name"},
    }  # fmt: skip
    path = folder / journal.file_name(device.name, key, options.only)
    with (
        journal.Journal(path, header, fresh=options.fresh) as book,
        Bench(options, device, pack) as bench,
    ):
        if book.record.timings:
            say(f"{len(book.record.timings)} shapes were measured before ({path})")
        left = bench.measure(groups, book, begun + 60 * options.minutes, report, say)
        if not book.record.facts.get("clocks"):
            book.facts(book.record.facts | {"clocks": busy.state(bus)[1]})

        def verified(made: Sequence[tables.Table]) -> Verified | None:
            say("timing the plans that the table gives, on other shapes")
            return bench.verify(made, groups, book.record, report)

        return _conclude(options, book.record, path, pack, folder, left, begun, say, verified)


def refit(
    source: Path, options: Options, *, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Fits costs to the journal of an earlier run and writes the table; needs no GPU.

    Raises TableError for a journal that was made with another pack than `options.pack`, and as
    `tune` for what cannot be read or written.
    """
    record = journal.read(source)
    if not record.header or not record.facts:
        raise TableError(f"{source} holds no measurements: run `moonpoly tune` on the GPU first")
    folder = options.output or tables.user_folder()
    _writable(folder)
    pack = options.pack or packs.find_pack(record.header["device"]["sm"])
    key = None if pack is None else pack_format.read_info(pack).key
    if pack is None or key != record.header["pack_key"]:
        raise TableError(
            f"{source} was measured with the kernels {record.header['pack_key'][:12]}, and "
            f"{pack or 'no pack'} holds {(key or 'none')[:12]}: name that pack with --pack"
        )
    return _conclude(options, record, source, pack, folder, 0, time.monotonic(), say)


def _groups(options: Options) -> dict[Group, list[AnyShape]]:
    """The shapes to measure by group, the most telling first."""
    if options.model is not None:
        return _of_model(options, HEIGHTS)
    return _synthetic(options, options.layouts or LAYOUTS, seed=0)


def _synthetic(options: Options, layouts: Sequence[str], seed: int) -> dict[Group, list[AnyShape]]:
    """Products, and convolutions where no layout of products is asked for by name."""
    found: dict[Group, list[AnyShape]] = {}
    for number in options.numbers or NUMBERS:
        if options.multiplies:
            for layout in layouts:
                found |= {g: list(s) for g, s in shapes.synthetic(number, layout, seed).items()}
        if options.convolves:
            found |= {g: list(s) for g, s in conv_shapes.synthetic(number, seed).items()}
    return found


def _of_model(options: Options, count: int) -> dict[Group, list[AnyShape]]:
    """The shapes of the model's weights that are asked for, at so many row and pixel counts."""
    assert options.model is not None
    numbers, layouts = options.numbers or tuple(NUMBERS), options.layouts or LAYOUTS
    both = {ieee for ieee in (False, True) if ("f32ieee" if ieee else "f32") in options.numbers}
    found: dict[Group, dict[AnyShape, None]] = {}
    rows, pixels = (shapes.heights(*r, count=count) for r in (options.rows, options.pixels))
    for ieee in sorted(both or {False}):
        own = weights(options.model, ieee)
        matrices = [w for w in own.matrices if w[0] in numbers and w[1] in layouts]
        layers = [layer for layer in own.layers if layer.number in numbers]
        for of_groups in (
            shapes.for_weights(matrices, rows), conv_shapes.for_layers(layers, pixels)
        ):  # fmt: skip
            for group, of_group in of_groups.items():
                wanted = options.convolves if _convolves(group) else options.multiplies
                if wanted and (_convolves(group) or group[1] in layouts):
                    found.setdefault(group, {}).update(dict.fromkeys(of_group))
    if not found:
        raise ArgumentError(
            f"no weight of {options.model} is of dtype {', '.join(numbers)}, layout "
            f"{', '.join(layouts)} and operation {', '.join(options.operations) or 'gemm, conv'}: "
            "leave --dtype, --layout and --op out to take all of them"
        )
    return {group: list(of_group) for group, of_group in found.items()}


def _others(
    options: Options, groups: Mapping[Group, list[AnyShape]]
) -> dict[Group, list[AnyShape]]:
    """Shapes to check the table with: of the same groups, or of the same weights."""
    if options.model is not None:
        found = _of_model(options, HEIGHTS_CHECKED)
        return {group: found[group] for group in groups if group in found}
    layouts = [layout for layout in options.layouts or LAYOUTS if layout not in shapes.LIGHT]
    found = _synthetic(options, layouts, seed=1)
    return {group: found[group] for group in groups if group in found}


def _writable(folder: Path) -> None:
    """Makes the folder and tries to write there now, not after minutes of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror or error}; name another folder"
        ) from error


def _pack(options: Options, sm: int, report: Report) -> Path:
    """The pack to measure; raises PackError for one without code."""
    if options.pack is not None:
        found = packs.find_pack(sm, options.pack)
        assert found is not None  # a named pack is found or refused
        return found
    return packs.ensure_pack(sm, progress=report, trial=options.trial)


class Bench:
    """A pack on a GPU, ready to be measured; a context manager."""

    def __init__(self, options: Options, device: native.Device, pack: Path) -> None:
        self.options, self.device = options, device
        self._stack = ExitStack()
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpoly-tune-"))
            self.loaded = stack.enter_context(native.Pack(pack))
            self.launcher = stack.enter_context(native.Launcher(self.loaded, options.gpu))
            self.gpu = stack.enter_context(cuda.Gpu(options.gpu))
            # The same kernels without a table: what was measured before must play no part.
            self._scratch = Path(scratch)
            planner = Planner(pack, device, 0.0, self._scratch)
            self.catalog = stack.enter_context(planner.without_table())
            self._stack = stack.pop_all()
        self._limit = int(self.gpu.free_bytes() * MEMORY_SHARE / 2)
        self._measurer = Measurer(self.gpu, self.launcher, device, options.effort)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(
        self, groups: Mapping[Group, list[AnyShape]], book: journal.Journal, deadline: float,
        report: Report, say: Callable[[str], None],
    ) -> int:  # fmt: skip
        """Checks kernels and times shapes until all are done or the time is up: how many are
        left."""
        if not book.record.facts:
            copied = min(COPIED_BYTES, self.gpu.free_bytes() // 8 // 4 * 4)
            facts = {"bandwidth_gbps": bandwidth_gbps(self.gpu, copied),
                     "launch_us": launch_us(self.gpu)}  # fmt: skip
            book.facts(facts)
        only = self.options.only
        wanted = [
            index for index, kernel in enumerate(self.catalog.kernels)
            if _concerns(kernel, groups) and only in kernel.name
        ]  # fmt: skip
        say(f"checking {len(wanted)} kernels against float64")
        gate(self.gpu, self.launcher, self.catalog, self.device, book, wanted, report)
        for name, fault in book.record.blocked.items():
            say(f"wrong, and never used: {name} ({fault})")
        kernels = self._kernels(book.record)
        schedule = Schedule(groups, book.record.timings)
        total = len(schedule)
        say(f"timing {total} shapes")
        while time.monotonic() < deadline and (shape := schedule.next()) is not None:
            started = time.monotonic()
            self._time(shape, kernels, book)
            schedule.spent(shape, time.monotonic() - started)
            report(total - len(schedule), total, str(shape))
        if len(schedule):
            say(f"the time is up: {len(schedule)} of {total} shapes are left for another run")
        return len(schedule)

    def verify(
        self, made: Sequence[tables.Table], groups: Mapping[Group, list[AnyShape]],
        record: journal.Record, report: Report,
    ) -> Verified | None:  # fmt: skip
        """Times the plans that tables give on shapes that the last one was not made from."""
        deadline = time.monotonic() + 60 * self.options.minutes * VERIFY_SHARE
        convolves = made[-1].operation == "conv"
        own = {g: s for g, s in groups.items() if _convolves(g) == convolves}
        wanted = fresh(_others(self.options, own), record.timings)
        # A pack with code: from a catalog the vendor's library is never chosen.
        path = packs.write_with_tables(self.loaded.path, self._scratch / "tuned.mpk", made)
        with native.Pack(path) as tuned:
            return verify(
                wanted, self._measurer, self._kernels(record), tuned, self.device, deadline,
                self._fits, self._vendor, report,
            )  # fmt: skip

    def _kernels(self, record: journal.Record) -> Kernels:
        only = self.options.only
        return Kernels(self.catalog, self.device, record.blocked, lambda name: only in name)

    def _fits(self, shape: AnyShape, chosen: list[Candidate]) -> bool:
        """Whether a shape is neither too large nor too slow to be timed."""
        short = bool(chosen) and chosen[0].plan.predicted_us <= LONGEST_US
        return short and sum(shape.operand_bytes) <= self._limit

    def _time(self, shape: AnyShape, kernels: Kernels, book: journal.Journal) -> None:
        """Times what may compute a shape, and notes it; nothing, where it does not fit."""
        problem = shape.problem()
        chosen = promising(kernels.legal(problem), SLOWEST)
        if not self._fits(shape, chosen):
            book.timed(shape, [])
            return
        if VENDOR_NAME not in book.record.blocked:
            chosen += self._vendor(shape)
        try:
            book.timed(shape, self._measurer.time(shape, chosen))
        except CandidateFault as fault:
            book.begin_check(fault.name)  # without an end: the second one blocks it
            raise

    def _vendor(self, shape: AnyShape) -> list[Candidate]:
        """The vendor library's candidate, if it runs: the one place where it joins the others."""
        candidate = vendor(self.catalog, self.device, shape.problem())
        if candidate is None or self._measurer.refusal(shape, candidate):
            return []
        return [candidate]


def _convolves(group: Group) -> bool:
    return group[1] in conv_shapes.KINDS


def _concerns(kernel: native.KernelRecord, groups: Mapping[Group, list[AnyShape]]) -> bool:
    """Whether a kernel computes shapes of some group."""
    if native.Family(kernel.family).convolves:
        return any(
            (kernel.dtype, kernel.precision) == NUMBERS[group[0]]
            for group in groups
            if _convolves(group)
        )
    return any(
        (kernel.dtype, kernel.precision, kernel.trans_a, kernel.trans_b)
        == (*NUMBERS[group[0]], group[1][0] == "t", group[1][1] == "t")
        for group in groups
        if not _convolves(group)
    )


def _conclude(
    options: Options, record: journal.Record, path: Path, pack: Path, folder: Path, left: int,
    begun: float, say: Callable[[str], None],
    verified: Callable[[Sequence[tables.Table]], Verified | None] = lambda made: None,
) -> Outcome:  # fmt: skip
    """For each operation: fits the costs, chooses the set, writes the table."""
    header, facts = record.header, record.facts
    device = native.Device(name=header["gpu"], **header["device"])
    launch = float(f"{facts['launch_us']:.4g}")
    with tempfile.TemporaryDirectory(prefix="moonpoly-tune-") as scratch:
        planner = Planner(pack, device, launch, Path(scratch))
        index = {name: i for i, name in enumerate(planner.names)}
        rows = [
            Row(shape, index[timed.name], timed.split, timed.us)
            for shape, timed in journal.rows(record)
            if timed.name in index and timed.name not in record.blocked
        ]
        if not rows:
            raise DeviceError(
                "no kernel was timed: every one is blocked, or the time was too short for a single "
                "shape. Allow more with --budget"
            )
        made: list[tables.Table] = []
        outcomes: list[Outcome] = []
        for operation in tables.OPERATIONS:
            own = [r for r in rows if tables.operation(planner.names[r.kernel]) == operation]
            if not own:
                continue
            say(f"fitting costs of {operation} kernels to {len(own)} timings")
            # One memory, and one head of what both tables become in a pack.
            bandwidth = made[0].bandwidth_gbps if made else None
            fitted = fit_all(planner, own, float(facts["bandwidth_gbps"]), bandwidth)
            partial = bool(options.model or options.only)  # timings that do not speak for all
            dropped = [] if options.keep_all or partial else _dropped(planner, record, operation)
            table = _table(planner, record, fitted, dropped, operation)
            if operation == "gemm":
                table = replace(table, vendor=vendor_costs(planner, table, record))
            made.append(table)
            tables.dump(table, folder / table.name)
            timings = {s: t for s, t in record.timings.items() if _convolves(s.group) == (
                operation == "conv")}  # fmt: skip
            best = [min(times, key=lambda t: t.us).name for times in timings.values() if times]
            seen = any(t.name == VENDOR_NAME for times in timings.values() for t in times)
            outcomes.append(
                Outcome(
                    gpu=device.name, table=folder / table.name, journal=path, fitted=fitted,
                    verified=verified(made), shapes=len(timings), left=left, timings=len(own),
                    kernels=len(table.costs), blocked=_of(operation, record.blocked),
                    dropped=tuple(dropped),
                    vendor_wins=best.count(VENDOR_NAME) / len(best) if seen else None,
                    seconds=time.monotonic() - begun,
                )
            )  # fmt: skip
    if options.tuned_pack is not None:
        packs.write_with_tables(pack, options.tuned_pack, made)
    if options.pack is None and options.output is None and not options.trial:
        packs.with_present_tables(pack, planner.info.sm)  # for programs without Python
    return replace(outcomes[0], convolutions=outcomes[1]) if outcomes[1:] else outcomes[0]


def _of(operation: str, blocked: Mapping[str, str]) -> dict[str, str]:
    """What is blocked among an operation's kernels; the vendor's library counts as a product."""
    return {name: why for name, why in blocked.items() if tables.operation(name) == operation}


def _dropped(planner: Planner, record: journal.Record, operation: str) -> list[str]:
    with planner.without_table() as catalog:
        found = superfluous(catalog.kernels, record.timings.items(), record.blocked)
    return [name for name in found if tables.operation(name) == operation]


def _table(
    planner: Planner, record: journal.Record, fitted: Fitted, dropped: Sequence[str],
    operation: str,
) -> tables.Table:  # fmt: skip
    left_out = {*record.blocked, *dropped}
    costs = tuple(
        tables.Cost(name, *(float(f"{value:.6g}") for value in cost.tolist()))
        for name, cost in zip(planner.names, fitted.costs, strict=True)
        if cost["step_us"] > 0 and name not in left_out
    )
    device, header, facts = planner.device, record.header, record.facts
    return tables.Table(
        gpu=device.name, sm=planner.info.sm, sm_count=device.sm_count,
        shared_per_block=device.shared_per_block, bandwidth_gbps=fitted.bandwidth,
        launch_us=planner.launch_us, triton=planner.info.triton, cuda=header["cuda"],
        driver=header["driver"], key=planner.info.key, date=datetime.date.today().isoformat(),
        clocks=facts.get("clocks", "unknown"), costs=costs,
        blocked=tuple(sorted(_of(operation, record.blocked).keys() & set(planner.names))),
        dropped=tuple(dropped),
    )  # fmt: skip
