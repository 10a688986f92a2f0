"""Whole models over sizes that never repeat: ONNX Runtime, its optimizers, ours, torch.

    python -m benchmarks.exported_models FOLDER                      # once, anywhere
    python -m benchmarks.bench_models FOLDER --output RESULTS [--models bert_base,llama_1b]

The first command needs no GPU; what it writes is small, and the weights are drawn anew where the
second one runs. That one needs a GPU (`--provider CPUExecutionProvider` rehearses without), and
writes RESULTS/models.csv, a row as it is found, then summary.json, what it amounts to, printed too
(`model_summaries`), and a picture per model and type. `--published FOLDER` adds PP-OCRv4 from a
folder of models as tests/ unpack them.

Each contender (`model_contenders` tells their names) has a process of its own, as a user's session
has: in one process, the first session of ONNX Runtime loads cuBLAS's kernels for all others, and
looked a quarter slower than they for it. This process has no CUDA; it draws the weights, lets the
processes start side by side, makes their sessions one after the other, and then lets one at a time
run a few sizes, in an order that turns, so that a drift of clocks hits all alike.

Each model in each type has an even share of the time that is left, in which it does its streams,
then steady states, then the checks. Started again, it goes on with the parts that are not done; of
rows that are there twice, the last holds.

Rows: `create_s`, `first_run_ms`, `memory_mib`, `kernels` and `error` of each contender, `failed`
where it did not start, died, or did not answer, and for each stream `new_ms` of every size, their
sum `stream_ms`, that of a second pass `again_stream_ms`, medians of both, and `steady_ms` of three
sizes. Times include the host; inputs and outputs stay on the GPU. A contender that is slow leaves a
stream early, and its note tells from how many sizes its sum is estimated.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import exported_models, model_contenders, model_summaries
from benchmarks.contender_runs import ContenderRuns
from benchmarks.csv_rows import CsvRows
from benchmarks.exported_models import Model, Size, Stream
from benchmarks.machine import pack_of, unpacked
from benchmarks.model_contenders import Contender
from benchmarks.model_rows import HEAD, KEY, Measured
from benchmarks.own_process import CallFailed, OwnProcess
from benchmarks.placed_models import Places
from benchmarks.recording import say
from benchmarks.running import CUDA, Provider

SEED = 2026
START, STREAMS, STEADY = 0.4, 0.78, 0.92  # when, in a model's share of the time, these must end
PATIENT = 1.5  # times --compile, in which torch.compile may run a stream
COMPILING = 300  # seconds for torch.compile to answer: five sizes, of which two are compiled


class Run:
    """One model in one type: the parts of it that have no row yet."""

    def __init__(self, arguments: argparse.Namespace, model: Model, dtype: str, seconds: float):
        self.arguments, self.model, self.dtype = arguments, model, dtype
        self.provider = Provider(arguments.provider, arguments.device, arguments.pack)
        self.rows = CsvRows(arguments.output / "models.csv", HEAD, KEY)
        self.measured = Measured(model, dtype, self.rows.write, arguments.limit)
        self.streams = streams_of(model, arguments.sizes, arguments.streams)
        self.left = parts_left(self.rows, model, dtype, self.streams, arguments)
        self.started = time.monotonic()
        compiling = sum(part == "compile_s" for _, part in self.left)
        self.seconds = max(seconds - compiling * (PATIENT * arguments.compile + 10), 0.4 * seconds)

    def all(self, folder: Path) -> None:
        """Everything, in the order of its weight."""
        try:
            if any(part != "compile_s" for _, part in self.left):
                self._all(folder)
        finally:
            self.measured.stop()
        for stream in self._due("compile_s"):
            self._part(stream.name, "compile_s", self._compiled, stream)
        self.rows.close()

    def _all(self, folder: Path) -> None:
        own = folder / self.dtype
        self.arguments.places.put_graphs(self.model, self.dtype, own)
        chosen = self._chosen(own)
        if not chosen:
            say(f"{self.model.id} {self.dtype}: has none of the contenders")
            return
        exact = self._load(chosen, folder)
        steady = [size for stream in self.streams for size in stream.steady]
        largest = max(steady, key=lambda size: np.prod(np.maximum(size, 1)))
        names = [one.name for one in sorted(chosen, key=lambda one: one.repeats)]
        ready = self.measured.start(names, largest, self._by(START))
        repeating = {one.name for one in chosen if one.repeats}
        fresh = [name for name in ready if name not in repeating]
        due = self._due("stream_s")
        for position, stream in enumerate(due):
            by = self._even(STREAMS, len(due) - position)
            patience = self.arguments.patience
            self._part(stream.name, "stream_s", self.measured.stream, fresh, stream, patience, by)
        for stream in self._due("steady_s"):
            seconds, by = self.arguments.steady, self._by(STEADY)
            self._part(stream.name, "steady_s", self.measured.steady, ready, stream, seconds, by)
        if ("-", "checks_s") in self.left:
            self._part("-", "checks_s", self._checks, ready, exact)

    def _chosen(self, folder: Path) -> list[Contender]:
        """Contenders that are to run; those of steady states alone only where these are due."""
        found = model_contenders.contenders(
            self.model, self.dtype, folder, self.provider, eager=not self.arguments.no_torch
        )
        wanted = self.arguments.contenders
        steady = bool(self._due("steady_s"))
        return [
            one for one in found
            if (steady or not one.repeats)
            and (one.name in wanted if wanted else self.arguments.all or not one.on_request)
        ]  # fmt: skip

    def _load(self, chosen: list[Contender], folder: Path) -> dict[Size, Path]:
        """Starts a process for each contender, and one for exact results. The weights are drawn
        and the exact results computed while the others load. Returns these by size.
        """
        exact: dict[Size, Path] = {}
        workers = {one.name: self._process(self.dtype, one) for one in chosen}
        reference = None
        if ("-", "checks_s") in self.left:
            start = partial(model_contenders.reference, folder / "f32", self.provider)
            reference = self._process("f32", Contender("reference", start))

        def meanwhile() -> None:
            self.arguments.places.put_weights(self.model, self.dtype, folder / self.dtype)
            if reference is not None:
                if self.dtype != "f32":
                    self.arguments.places.put_graphs(self.model, "f32", folder / "f32")
                    self.arguments.places.put_weights(self.model, "f32", folder / "f32")
                self._compute(reference, folder, exact)

        try:
            self.measured.load(workers, meanwhile)
        finally:
            if reference is not None:
                reference.stop()
        say(f"{self.model.id} {self.dtype}: {len(chosen)} processes, "
            f"{time.monotonic() - self.started:.1f} s")  # fmt: skip
        return exact

    def _process(self, dtype: str, contender: Contender) -> OwnProcess:
        make = partial(ContenderRuns, self.model, dtype, self.provider, contender)
        return OwnProcess(contender.name, make)

    def _compute(self, reference: OwnProcess, folder: Path, exact: dict[Size, Path]) -> None:
        try:
            for size in dict.fromkeys(stream.steady[0] for stream in self.streams):
                path = folder / f"exact-{len(exact)}.npz"
                reference.call("save", size, path, seconds=self.arguments.limit)
                exact[size] = path
        except CallFailed as error:
            say(f"{self.model.id} {self.dtype}: no exact results: {error}")

    def _due(self, part: str) -> list[Stream]:
        return [stream for stream in self.streams if (stream.name, part) in self.left]

    def _part(
        self, stream: str, part: str, work: Callable[..., bool | None], *arguments: Any
    ) -> None:
        """Does a part; its row says that it is done, unless time was too short for any of it."""
        started = time.monotonic()
        complete = work(*arguments) is not False and self.measured.all_started
        seconds = time.monotonic() - started
        said = "" if complete else ", cut short"
        say(f"{self.model.id} {self.dtype} {stream} {part}: {seconds:.1f}{said}")
        if complete:
            self.measured.row(stream, "-", part, seconds)

    def _checks(self, names: list[str], exact: dict[Size, Path]) -> bool:
        if self.provider.is_cuda:
            self.measured.launches(names, self.streams[0].steady[1])
        self.measured.errors(names, exact, "ort")
        return bool(exact)

    def _compiled(self, stream: Stream) -> None:
        """torch.compile in a process that begins with this stream."""
        contender = model_contenders.compiled(self.model, self.dtype, self.provider)
        alone = Measured(self.model, self.dtype, self.rows.write, COMPILING)
        try:
            alone.load({contender.name: self._process(self.dtype, contender)}, lambda: None)
            names, patience = [contender.name], PATIENT * self.arguments.compile
            alone.stream(names, stream, patience, math.inf, sweeps=["new_ms"])
            alone.steady(names, stream, 1.0, math.inf)
        finally:
            alone.stop()

    def _by(self, share: float) -> float:
        return float(self.started + share * self.seconds)

    def _even(self, share: float, parts: int) -> float:
        """When the first of so many parts is to be done, all of them by `share`."""
        now = time.monotonic()
        return now + (self._by(share) - now) / parts


def parts_left(
    rows: CsvRows, model: Model, dtype: str, streams: list[Stream], arguments: argparse.Namespace
) -> list[tuple[str, str]]:
    """Of each stream `stream_s`, `steady_s` and perhaps `compile_s`, and the `checks_s` of all."""
    parts = [(stream.name, part) for stream in streams for part in ("stream_s", "steady_s")]
    if streams:
        parts.append(("-", "checks_s"))
    if arguments.compile and model.family != "published":
        parts += [(stream.name, "compile_s") for stream in streams]
    return [
        (name, part) for name, part in parts if not rows.has(model.id, dtype, name, "-", part, "")
    ]  # fmt: skip


def streams_of(model: Model, sizes: int = 0, names: Collection[str] = ()) -> list[Stream]:
    """The streams of a model, or those of some names, of which `sizes` are kept (0: all); no size
    is a steady one.
    """
    found = model.streams(np.random.default_rng(SEED))
    return [
        Stream(
            stream.name,
            tuple(s for s in stream.sizes if s not in stream.steady)[: sizes or None],
            stream.steady,
        )
        for stream in found
        if not names or stream.name in names
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what `benchmarks.exported_models` wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--models", default="", help="which, separated by commas; default: all")
    parser.add_argument("--dtypes", default="f16,f32", help="of those that a model has")
    parser.add_argument("--published", type=Path, help="folder of published models, for PP-OCRv4")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all")
    parser.add_argument("--each", type=float, default=120, help="seconds for a model, at most")
    parser.add_argument(
        "--patience", type=float, default=2.0,
        help="seconds of a contender's runs after which it leaves a stream",
    )  # fmt: skip
    parser.add_argument(
        "--streams", default="", metavar="NAMES",
        help="which of a model's streams, separated by commas; default: all",
    )  # fmt: skip
    parser.add_argument("--sizes", type=int, default=0, help="of each stream; default: all")
    parser.add_argument("--steady", type=float, default=2.0, help="seconds for its steady sizes")
    parser.add_argument("--contenders", help="which, separated by commas; default: the likely ones")
    parser.add_argument("--all", action="store_true", help="contenders on request, too")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch eager")
    parser.add_argument(
        "--limit", type=float, default=60,
        help="seconds in which a contender must start, or run a few sizes; else it is out",
    )  # fmt: skip
    parser.add_argument(
        "--compile", type=float, default=0, metavar="SECONDS",
        help="torch.compile(dynamic=True) for so long in each stream; default: not at all",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, help="folder for the weights; default: the system's")
    parser.add_argument("--provider", default=CUDA, help="ONNX Runtime's execution provider")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--pack", type=Path, help="a kernel pack, perhaps .xz; default: found")
    parser.add_argument("--no-pictures", action="store_true", help="needs no matplotlib")
    arguments = parser.parse_args()
    arguments.places = Places(arguments.folder, arguments.published)
    arguments.contenders = arguments.contenders and arguments.contenders.split(",")
    arguments.streams = [name for name in arguments.streams.split(",") if name]
    try:
        arguments.chosen = exported_models.named(arguments.models, arguments.places.known())
    except ValueError as error:
        parser.error(str(error))
    known = {stream.name for model in arguments.chosen for stream in streams_of(model)}
    for name in arguments.streams:
        if name not in known:
            parser.error(f"--streams: no {name!r} in the models chosen, but {sorted(known)}")
    found = {model: arguments.places.find(model) for model in arguments.chosen}
    missing = [model.id for model, there in found.items() if there is None]
    if missing and arguments.models:
        parser.error(f"{missing[0]} is not in {arguments.folder}: run benchmarks.exported_models")
    arguments.chosen = [there for there in found.values() if there is not None]
    if arguments.provider == CUDA:
        arguments.pack = pack_of(arguments, parser)
    return arguments


def main() -> None:
    arguments = parsed()
    deadline = time.monotonic() + arguments.budget
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.pack is not None:
        arguments.pack = unpacked(arguments.pack, arguments.output)
    path = arguments.output / "models.csv"
    done = CsvRows(path, HEAD, KEY)
    done.close()
    pairs = [
        (model, dtype) for model in arguments.chosen for dtype in model.dtypes
        if dtype in arguments.dtypes.split(",")
        and parts_left(done, model, dtype, streams_of(model, names=arguments.streams), arguments)
    ]  # fmt: skip
    for model in dict.fromkeys(model for model, _ in pairs):
        exported_models.import_for(model)  # here, and not in each of the processes to come
    for position, (model, dtype) in enumerate(pairs):
        remaining = deadline - time.monotonic()
        if remaining < 1:
            say(f"{model.id} {dtype}: no time left")
            continue
        seconds = min(arguments.each, remaining / (len(pairs) - position))
        try:
            with tempfile.TemporaryDirectory(dir=arguments.work) as name:
                Run(arguments, model, dtype, seconds).all(Path(name))
        except Exception:  # the next model may fare better
            say(f"{model.id} {dtype} failed:\n{traceback.format_exc()}")
        model_summaries.write(path, arguments.output / "summary.json")
        if not arguments.no_pictures:
            from benchmarks import model_plots

            model_plots.draw(path, model.id, dtype, arguments.output)
    print(model_summaries.shown(model_summaries.of_file(path)), flush=True)


if __name__ == "__main__":
    main()
