"""Whole models over sizes that never repeat: ONNX Runtime, its optimizers, ours, torch.

    python -m benchmarks.exported_models FOLDER                      # once, anywhere
    python -m benchmarks.bench_models FOLDER --output RESULTS [--models bert_base,llama_1b]

The first command needs no GPU; what it writes is small, and the weights are drawn anew where the
second one runs. That one needs a GPU (`--provider CPUExecutionProvider` rehearses without), and
writes RESULTS/models.csv, a row as it is found, then summary.json, what it amounts to, printed too
(`model_summaries`), and a picture per model and type. `--published FOLDER` adds PP-OCRv4 from a
folder of models as tests/ unpack them.

Each model in each type has a process of its own, and an even share of the time that is left, in
which it does its streams, then steady states, then the checks. Started again, it goes on with the
parts that are not done; of rows that are there twice, the last holds.

Rows: `create_s`, `first_run_ms`, `memory_mib`, `kernels` and `error` of each contender
(`model_contenders` tells their names), and for each stream `new_ms` of every size, their sum
`stream_ms`, that of a second pass `again_stream_ms`, medians of both, and `steady_ms` of three
sizes. Times include the host; inputs and outputs stay on the GPU. All contenders run each size in
turn on one host, so that each finds its caches as the others left them, in streams, and in steady
states but for the first run of three. A contender that is slow leaves a stream early, and its note
tells from how many sizes its sum is estimated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import exported_models, model_contenders, model_summaries
from benchmarks.csv_rows import CsvRows
from benchmarks.exported_models import Model, Size, Stream
from benchmarks.machine import pack_of, unpacked
from benchmarks.model_contenders import Contender, Running
from benchmarks.model_rows import HEAD, KEY, Measured
from benchmarks.placed_models import Places
from benchmarks.recording import say
from benchmarks.running import CUDA, Provider

_FORK = multiprocessing.get_context("fork")
SEED = 2026
START, STREAMS, STEADY = 0.4, 0.65, 0.9  # when, in a model's share of the time, these must end
GRACE = 30  # seconds behind its share after which a model is ended


class Run:
    """One model in one type, in this process: the parts of it that have no row yet."""

    def __init__(self, arguments: argparse.Namespace, model: Model, dtype: str, seconds: float):
        self.arguments, self.model, self.dtype = arguments, model, dtype
        self.provider = Provider(arguments.provider, arguments.device, arguments.pack)
        self.rows = CsvRows(arguments.output / "models.csv", HEAD, KEY)
        self.measured = Measured(model, dtype, self.provider, self.rows.write)
        self.streams = streams_of(model, arguments.sizes)
        self.left = parts_left(self.rows, model, dtype, self.streams, arguments)
        self.started = time.monotonic()
        compiling = sum(part == "compile_s" for _, part in self.left) * 1.5 * arguments.compile
        self.seconds = max(seconds - compiling, 0.4 * seconds)

    def all(self, folder: Path) -> None:
        """Everything, in the order of its weight."""
        own = self.arguments.places.put(self.model, self.dtype, folder / self.dtype)
        warm_up(self.provider)
        candidates = self._candidates(own)
        steady = [size for stream in self.streams for size in stream.steady]
        largest = max(steady, key=lambda size: np.prod(np.maximum(size, 1)))
        lasting: dict[str, Running] = {}
        if any(part != "compile_s" for _, part in self.left):
            fresh = [contender for contender in candidates if not contender.repeats]
            lasting = self.measured.start(fresh, largest, self._by(START))
        due = self._due("stream_s")
        for position, stream in enumerate(due):
            by = self._even(STREAMS, len(due) - position)
            patience = self.arguments.patience
            self._part(stream.name, "stream_s", self.measured.stream, lasting, stream, patience, by)
        running = lasting
        if due := self._due("steady_s"):
            repeating = [contender for contender in candidates if contender.repeats]
            running = lasting | self.measured.start(repeating, largest, self._by(STEADY))
        for stream in due:
            seconds, by = self.arguments.steady, self._by(STEADY)
            self._part(stream.name, "steady_s", self.measured.steady, running, stream, seconds, by)
        if ("-", "checks_s") in self.left:
            self._part("-", "checks_s", self._checks, running, folder)
        contender = model_contenders.compiled(self.model, self.dtype, self.provider)
        for stream in self._due("compile_s"):
            seconds = self.arguments.compile
            self._part(
                stream.name, "compile_s", self.measured.compiled, contender, stream, seconds
            )  # fmt: skip
        self.rows.close()

    def _candidates(self, folder: Path) -> list[Contender]:
        found = model_contenders.contenders(
            self.model, self.dtype, folder, self.provider,
            eager=not self.arguments.no_torch, nopattern=self.arguments.nopattern,
        )  # fmt: skip
        wanted = self.arguments.contenders
        return [one for one in found if wanted is None or one.name in wanted]

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

    def _checks(self, running: dict[str, Running], folder: Path) -> None:
        if self.provider.is_cuda:
            self.measured.launches(running, self.streams[0].steady[1])
        exact = self.arguments.places.put(self.model, "f32", folder / "f32")
        ready = model_contenders.reference(exact, self.provider)
        wanted: dict[Size, model_contenders.Arrays] = {}
        for size in dict.fromkeys(stream.steady[0] for stream in self.streams):
            wanted[size] = ready.prepare(self.measured.tensors(size, "f32")).fetch()
        del ready
        self.measured.errors(running, wanted, "ort")

    def _by(self, share: float) -> float:
        return self.started + share * self.seconds

    def _even(self, share: float, parts: int) -> float:
        """When the first of so many parts is to be done, all of them by `share`."""
        now = time.monotonic()
        return now + (self._by(share) - now) / parts


def parts_left(
    rows: CsvRows, model: Model, dtype: str, streams: list[Stream], arguments: argparse.Namespace
) -> list[tuple[str, str]]:
    """Of each stream `stream_s`, `steady_s` and perhaps `compile_s`, and the `checks_s` of all."""
    parts = [(stream.name, part) for stream in streams for part in ("stream_s", "steady_s")]
    parts.append(("-", "checks_s"))
    if arguments.compile and model.family != "published":
        parts += [(stream.name, "compile_s") for stream in streams]
    return [
        (name, part) for name, part in parts if not rows.has(model.id, dtype, name, "-", part, "")
    ]  # fmt: skip


def streams_of(model: Model, sizes: int = 0) -> list[Stream]:
    """The streams of a model, of which `sizes` are kept (0: all); no size is a steady one."""
    found = model.streams(np.random.default_rng(SEED))
    return [
        Stream(
            stream.name,
            tuple(s for s in stream.sizes if s not in stream.steady)[: sizes or None],
            stream.steady,
        )
        for stream in found
    ]


def warm_up(provider: Provider) -> None:
    """A product and a convolution in ONNX Runtime: loading CUDA's libraries is no contender's."""
    import onnx.parser
    import torch

    from benchmarks.running import Bound, plain_session

    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[1,4,8,8] x, float[8,8] w, float[4,4,1,1] k) => (float[1,4,8,8] y)
        { p = MatMul(x, w)  y = Conv(p, k) }"""
    )
    shapes = {"x": (1, 4, 8, 8), "w": (8, 8), "k": (4, 4, 1, 1)}
    inputs = {
        name: torch.ones(shape, device=provider.torch_device) for name, shape in shapes.items()
    }
    Bound(plain_session(model.SerializeToString(), provider), provider, inputs).run()


def measure(arguments: argparse.Namespace, model: Model, dtype: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        Run(arguments, model, dtype, seconds).all(Path(name))


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
    parser.add_argument("--sizes", type=int, default=0, help="of each stream; default: all")
    parser.add_argument("--steady", type=float, default=2.0, help="seconds for its steady sizes")
    parser.add_argument("--contenders", help="which, separated by commas; default: all")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch eager")
    parser.add_argument(
        "--nopattern", action="store_true",
        help="try every form without ONNX Runtime's memory patterns, too",
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
    try:
        arguments.chosen = exported_models.named(arguments.models, arguments.places.known())
    except ValueError as error:
        parser.error(str(error))
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
        and parts_left(done, model, dtype, streams_of(model), arguments)
    ]  # fmt: skip
    for model in dict.fromkeys(model for model, _ in pairs):
        exported_models.import_for(model)  # here, and not in each of the processes to come
    for position, (model, dtype) in enumerate(pairs):
        remaining = deadline - time.monotonic()
        if remaining < 1:
            say(f"{model.id} {dtype}: no time left")
            continue
        seconds = min(arguments.each, remaining / (len(pairs) - position))
        work = _FORK.Process(target=measure, args=(arguments, model, dtype, seconds))
        work.start()
        work.join(seconds + GRACE)
        if work.is_alive():
            work.kill()
            work.join()
        if work.exitcode:
            say(f"{model.id} {dtype}: ended with exit code {work.exitcode}")
        model_summaries.write(path, arguments.output / "summary.json")
        if not arguments.no_pictures:
            from benchmarks import model_plots

            model_plots.draw(path, model.id, dtype, arguments.output)
    print(model_summaries.shown(model_summaries.of_file(path)), flush=True)


if __name__ == "__main__":
    main()
