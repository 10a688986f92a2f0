"""Where the time of one run of a model goes: every kernel on the GPU, every operator on the host.

    python -m benchmarks.profile_model FOLDER --model bert_base --size 8x384,1x16 --output RESULTS
        [--form onnxscript] [--contenders "ours+onnxscript,ort+onnxscript sdpa"]

FOLDER is what `benchmarks.exported_models` wrote; the contenders are those of `bench_models`, by
default ours and ONNX Runtime on one form, both without the attention that plans every length.
Writes RESULTS/profile-MODEL-DTYPE.csv and prints the longest rows. Each row is of one contender
and size, `count` and `us` are per run, `share` is of its `side`:

    run       wall: the median of runs that nothing watches; kernels: the sum of their times; span:
              from the start of a run's first kernel to the end of its last, of which `idle` is
              without any; executor and nodes: ONNX Runtime's own account of the host, with
              profiling on, which is slower
    kernel    a kernel or copy on the GPU, of the whole process, as CUPTI saw it
    api       a call of the CUDA runtime or driver on the host
    operator  nodes of one operator: the time on the host (on CUDA: to launch, not to compute)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import exported_models, model_contenders
from benchmarks.csv_rows import CsvRows
from benchmarks.exported_models import PLAIN, Model, Size
from benchmarks.machine import pack_of, unpacked
from benchmarks.model_rows import shown
from benchmarks.placed_models import Places
from benchmarks.recording import say
from benchmarks.running import CUDA, Provider, session_options

HEAD = ("model", "dtype", "contender", "size", "side", "name", "count", "us", "share")
KEY = HEAD[:6]
WARM_UP = 5
WATCHED = 3  # seconds of runs at most, of each way to look at them


@dataclass(frozen=True)
class Span:
    """Something that took place, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """`count` times and `us` microseconds a run."""

    side: str
    name: str
    count: float
    us: float


def table(side: str, spans: Iterable[Span], runs: int) -> list[Row]:
    """Spans of several runs summed by name, the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[span.name].append(span.end - span.start)
    rows = [Row(side, name, len(times) / runs, sum(times) / runs) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row.us)


def of_gpu(spans: Sequence[Span], runs: int) -> list[Row]:
    """What the kernels of several runs took: their sum, and where all runs have the same number of
    them, the medians of a run's span and of the time in it without any kernel.
    """
    rows = [Row("run", "kernels", len(spans) / runs, sum(s.end - s.start for s in spans) / runs)]
    each = len(spans) // runs
    if each * runs != len(spans) or not each:
        return rows
    ordered = sorted(spans, key=lambda span: span.start)
    length, idle = [], []
    for first in range(0, len(ordered), each):
        mine = ordered[first : first + each]
        busy, reached = 0.0, mine[0].start
        for span in mine:
            busy += max(span.end - max(span.start, reached), 0.0)
            reached = max(reached, span.end)
        length.append(reached - mine[0].start)
        idle.append(length[-1] - busy)
    return [
        *rows,
        Row("run", "span", 1, statistics.median(length)),
        Row("run", "idle", 1, statistics.median(idle)),
    ]


def of_host(events: Sequence[Mapping[str, Any]], first: int, runs: int) -> list[Row]:
    """ONNX Runtime's profile of the runs first ... first + runs - 1, by operator and provider.

    Raises:
        ValueError: The profile has fewer runs: it is cut off after a million events.
    """
    sessions = [event for event in events if event.get("cat") == "Session"]
    whole = [event for event in sessions if event["name"] == "model_run"][first : first + runs]
    if len(whole) < runs:
        raise ValueError(f"ONNX Runtime's profile has no {first + runs} runs; ask for fewer")
    start, end = whole[0]["ts"], whole[-1]["ts"] + whole[-1]["dur"]
    inside = [event for event in events if start <= event["ts"] < end]
    executor = sum(e["dur"] for e in inside if e["name"] == "SequentialExecutor::Execute") / runs
    nodes = []
    for event in inside:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            operator, provider = event["args"]["op_name"], event["args"].get("provider", "")
            name = f"{operator} ({provider.removesuffix('ExecutionProvider')})"
            nodes.append(Span(name, event["ts"], event["ts"] + event["dur"]))
    rows = table("operator", nodes, runs)
    total = Row("run", "nodes", len(nodes) / runs, sum(row.us for row in rows))
    return [Row("run", "executor", 1, executor), total, *rows]


def watched(run: Callable[[], None], runs: int) -> tuple[list[Span], list[Span]]:
    """Kernels and calls of the CUDA API in so many runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
    kernels, calls = [], []
    for event in profiler.events():
        span = Span(event.name, event.time_range.start, event.time_range.end)
        if event.device_type.name == "CUDA":
            kernels.append(span)
        elif event.name.startswith("cu"):
            calls.append(span)
    return kernels, calls


def wall(run: Callable[[], None], runs: int) -> list[float]:
    """Microseconds of each of up to `runs` runs behind a warm-up, of which `WATCHED` s at most."""
    for _ in range(WARM_UP):
        run()
    times: list[float] = []
    stop = time.perf_counter() + WATCHED
    while len(times) < runs and (not times or time.perf_counter() < stop):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return times


def profile_contender(
    contender: model_contenders.Contender,
    inputs: Mapping[Size, dict[str, Any]],
    runs: int,
    *,
    on_gpu: bool,
) -> dict[Size, list[Row]]:
    """The rows of one contender for every size."""
    found: dict[Size, list[Row]] = {}
    ready = contender.start()
    counts = {}
    for size, tensors in inputs.items():
        prepared = ready.prepare(tensors)
        times = wall(prepared.run, runs)
        counts[size] = len(times)
        found[size] = [Row("run", "wall", 1, statistics.median(times))]
        if on_gpu:
            kernels, calls = watched(prepared.run, len(times))
            found[size] += of_gpu(kernels, len(times))
            found[size] += table("kernel", kernels, len(times))
            found[size] += table("api", calls, len(times))
    del ready
    if contender.name.startswith("torch"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        options = session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        profiled = contender.start(options)
        for size, tensors in inputs.items():
            prepared = profiled.prepare(tensors)
            for _ in range(WARM_UP + counts[size]):
                prepared.run()
        events = json.loads(Path(profiled.session.end_profiling()).read_text())
    done = sum(1 for event in events if event["name"] == "model_run")
    preparing = (done - sum(WARM_UP + count for count in counts.values())) // len(counts)
    at = 0
    for size, count in counts.items():
        found[size] += of_host(events, at + preparing + WARM_UP, count)
        at += preparing + WARM_UP + count
    return found


def shares(rows: Sequence[Row]) -> list[float]:
    """Of each row in the time of its side; of the side `run`, in the first one, the wall time."""
    whole: dict[str, float] = defaultdict(float)
    for row in rows:
        whole[row.side] += row.us
    whole["run"] = rows[0].us
    return [row.us / whole[row.side] if whole[row.side] else 0.0 for row in rows]


def shown_table(rows: Sequence[Row], longest: int = 12) -> str:
    """Lines for a terminal: all of the side `run` and the `longest` of the others."""
    lines, seen = [], dict.fromkeys((row.side for row in rows), 0)
    for row, share in zip(rows, shares(rows), strict=True):
        seen[row.side] += 1
        if row.side == "run" or seen[row.side] <= longest:
            figures = f"{row.count:7.1f} x {row.us:10.1f} us {share:6.1%}"
            lines.append(f"  {row.side:8} {figures}  {row.name[:100]}")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what `benchmarks.exported_models` wrote")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--form", default=PLAIN, help="as exported, or an optimizer's: onnxscript")
    parser.add_argument("--size", required=True, help="sizes such as 8x384, separated by commas")
    parser.add_argument("--contenders", help="names of bench_models, separated by commas")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True, help="folder of the CSV")
    parser.add_argument("--published", type=Path, help="folder of published models, for PP-OCRv4")
    parser.add_argument("--work", type=Path, help="folder for the weights; default: the system's")
    parser.add_argument("--provider", default=CUDA, help="ONNX Runtime's execution provider")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--pack", type=Path, help="a kernel pack, perhaps .xz; default: found")
    arguments = parser.parse_args()
    arguments.places = Places(arguments.folder, arguments.published)
    try:
        (model,) = exported_models.named(arguments.model, arguments.places.known())
        arguments.sizes = [tuple(map(int, size.split("x"))) for size in arguments.size.split(",")]
    except ValueError as error:
        parser.error(str(error))
    arguments.chosen = arguments.places.find(model)
    if arguments.chosen is None:
        parser.error(f"{model.id} is not in {arguments.folder}: run benchmarks.exported_models")
    if arguments.provider == CUDA:
        arguments.pack = pack_of(arguments, parser)
    return arguments


def named_contenders(
    candidates: Iterable[model_contenders.Contender], names: str | None, form: str
) -> list[model_contenders.Contender]:
    """Those of a comma-separated list; without one, ONNX Runtime and ours on `form`.

    Raises:
        ValueError: There is no such contender.
    """
    known = {candidate.name: candidate for candidate in candidates}
    suffix = "" if form == PLAIN else f"+{form}"
    theirs = f"ort{suffix} sdpa" if f"ort{suffix} sdpa" in known else f"ort{suffix}"
    wanted = names.split(",") if names else [theirs, f"ours{suffix}"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no contender {name!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def main() -> None:
    arguments = parsed()
    model: Model = arguments.chosen
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.pack is not None:
        arguments.pack = unpacked(arguments.pack, arguments.output)
    provider = Provider(arguments.provider, arguments.device, arguments.pack)
    path = arguments.output / f"profile-{model.id}-{arguments.dtype}.csv"
    rows = CsvRows(path, HEAD, KEY)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        folder = arguments.places.put(model, arguments.dtype, Path(work))
        say(f"{model.id} {arguments.dtype}: weights drawn")
        candidates = [
            *model_contenders.contenders(model, arguments.dtype, folder, provider, eager=True),
            model_contenders.compiled(model, arguments.dtype, provider),
        ]  # fmt: skip
        inputs = {
            size: model.feed(size, arguments.dtype, provider.torch_device)
            for size in arguments.sizes
        }  # fmt: skip
        for contender in named_contenders(candidates, arguments.contenders, arguments.form):
            profiled = profile_contender(
                contender, inputs, arguments.runs, on_gpu=provider.is_cuda
            )  # fmt: skip
            for size, found in profiled.items():
                say(f"{contender.name} {shown(size)}\n{shown_table(found)}")
                for row, share in zip(found, shares(found), strict=True):
                    rows.write(
                        {
                            "model": model.id, "dtype": arguments.dtype,
                            "contender": contender.name, "size": shown(size), "side": row.side,
                            "name": row.name, "count": row.count, "us": row.us, "share": share,
                        }
                    )  # fmt: skip
    rows.close()


if __name__ == "__main__":
    main()
