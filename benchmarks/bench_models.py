"""Whole models over sizes that never repeat: ONNX Runtime, its optimizers, ours, torch.

    python -m benchmarks.exported_models FOLDER                      # once, anywhere
    python -m benchmarks.bench_models FOLDER --output RESULTS [--models bert_base,llama_1b]

The first command needs no GPU; what it writes is small, and the weights are drawn anew where the
second one runs. That one needs a GPU (`--provider CPUExecutionProvider` rehearses without), and
writes RESULTS/models.csv, a row as it is found, and a picture per model and type. Started again, it
goes on with the streams that are not done; of rows that are there twice, the last holds.
`--published FOLDER` adds PP-OCRv4 from a folder of models as tests/ unpack them. Each model in each
type has a process of its own.

Rows: `create_s`, `first_run_ms`, `memory_mib`, `kernels` and `error` of each contender, and for
each stream `new_ms` of every size, `stream_ms` (their sum), `again_stream_ms` (all sizes once
more) and `steady_ms` of three sizes. Times include the host; inputs and outputs stay on the GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import exported_models, model_contenders
from benchmarks.csv_rows import CsvRows
from benchmarks.exported_models import Model, Stream
from benchmarks.machine import pack_of, unpacked
from benchmarks.model_rows import DONE, HEAD, KEY, Measured, outputs
from benchmarks.placed_models import Places
from benchmarks.recording import say
from benchmarks.running import CUDA, Provider

_FORK = multiprocessing.get_context("fork")
SEED = 2026


def measure(arguments: argparse.Namespace, model: Model, dtype: str, deadline: float) -> None:
    """One model in one type, in this process: all its streams that have no row `seconds` yet."""
    provider = Provider(arguments.provider, arguments.device, arguments.pack)
    rows = CsvRows(arguments.output / "models.csv", HEAD, KEY)
    streams = [
        stream for stream in streams_of(model, arguments.sizes)
        if not rows.has(model.id, dtype, stream.name, "-", DONE, "")
    ]  # fmt: skip
    measured = Measured(model, dtype, provider, rows.write)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        wanted = {}
        checked = dict.fromkeys(stream.steady[0] for stream in streams)
        exact = arguments.places.put(model, "f32", folder / "f32")
        ready = model_contenders.reference(exact, provider)
        for size in checked:
            wanted[size] = outputs(ready, model.feed(size, "f32"), provider)
        del ready
        own = exact
        if dtype != "f32":
            own = arguments.places.put(model, dtype, folder / dtype)
        candidates = list(
            model_contenders.contenders(
                model, dtype, own, provider,
                eager=not arguments.no_torch, compiled=arguments.compile > 0,
            )
        )  # fmt: skip
        steady = [size for stream in streams for size in stream.steady]
        largest = max(steady, key=lambda size: np.prod(np.maximum(size, 1)))
        repeats = {contender.name for contender in candidates if contender.repeats}
        running = measured.start(candidates, largest)
        measured.errors(running, wanted, "ort")
        if provider.is_cuda:
            measured.launches(running, streams[0].steady[1])
        for stream in streams:
            if time.monotonic() > deadline:
                say(f"{model.id} {dtype} {stream.name}: no time left")
                break
            started = time.monotonic()
            lasting = {name: one for name, one in running.items() if name not in repeats}
            measured.stream(lasting, stream, {"torch.compile": arguments.compile})
            measured.steady(running, stream, arguments.steady)
            seconds = time.monotonic() - started
            measured.row(stream.name, "-", DONE, seconds)
            say(f"{model.id} {dtype} {stream.name}: {seconds:.1f} s")
    rows.close()


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
    parser.add_argument("--sizes", type=int, default=0, help="of each stream; default: all")
    parser.add_argument("--steady", type=float, default=1.5, help="seconds for its steady sizes")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch eager")
    parser.add_argument(
        "--compile", type=int, default=0, metavar="SIZES",
        help="torch.compile(dynamic=True) for so many sizes of each stream; default: not at all",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, help="folder for the weights; default: the system's")
    parser.add_argument("--provider", default=CUDA, help="ONNX Runtime's execution provider")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--pack", type=Path, help="a kernel pack, perhaps .xz; default: found")
    parser.add_argument("--no-pictures", action="store_true", help="needs no matplotlib")
    arguments = parser.parse_args()
    arguments.places = Places(arguments.folder, arguments.published)
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
    done = CsvRows(arguments.output / "models.csv", HEAD, KEY)
    done.close()
    for model in arguments.chosen:
        for dtype in model.dtypes:
            left = [
                stream.name for stream in streams_of(model)
                if not done.has(model.id, dtype, stream.name, "-", DONE, "")
            ]  # fmt: skip
            if dtype not in arguments.dtypes.split(",") or not left:
                continue
            if time.monotonic() > deadline:
                say(f"{model.id} {dtype}: no time left")
                continue
            work = _FORK.Process(target=measure, args=(arguments, model, dtype, deadline))
            work.start()
            work.join(max(1.0, deadline + 60 - time.monotonic()))
            if work.is_alive():
                work.kill()
                work.join()
            if work.exitcode:
                say(f"{model.id} {dtype}: ended with exit code {work.exitcode}")
            if not arguments.no_pictures:
                from benchmarks import model_plots

                model_plots.draw(arguments.output / "models.csv", model.id, dtype, arguments.output)


if __name__ == "__main__":
    main()
