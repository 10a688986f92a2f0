"""Models on images whose size changes from run to run: PP-OCRv4 text detection and recognition.

Every run of a stream has a random size, mostly one never seen before; device buffers, the host's
part included. Ours runs all of it, and so does ONNX Runtime with HEURISTIC search where the time
allows it; with its default search it takes a second an image, so that it runs the first few. Totals
of fewer runs are scaled to all by what ours takes for the same part, and the share is noted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch

import moonpoly_ort
from benchmarks.conv_in_session import ORT_MODES
from benchmarks.machine import Setting
from benchmarks.measuring import Timing
from benchmarks.operands import relative_error
from benchmarks.recording import NotApplicable, Recorder
from benchmarks.running import Bound, Provider, every_rule, our_session, plain_session
from tests.corpus import wheels

ERROR_LIMIT = 1e-2  # of a model's outputs, TF32 on both sides
OWN_ERRORS = 1.5  # or so many times ONNX Runtime's own, where that is more
CHECKED = 3  # images whose outputs are compared
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Stream:
    """A model and the shapes of its runs. `faster`: what must be reached, by mode of ONNX Runtime;
    `largest`: the size whose memory is measured."""

    name: str
    model: wheels.WheelModel
    shapes: tuple[Shape, ...]
    faster: dict[str, float]
    largest: Shape


def detection(seed: int, images: int = 100, sides: tuple[int, int] = (320, 1280)) -> Stream:
    """Single images; sides are multiples of 32, as the model needs them."""
    draw = random.Random(f"detection-{seed}")
    low, high = (side // 32 for side in sides)
    shapes = tuple(
        (1, 3, 32 * draw.randint(low, high), 32 * draw.randint(low, high)) for _ in range(images)
    )
    return Stream(
        "detection", wheels.PP_OCR_DETECTION, shapes, {"default": 20.0, "heuristic": 4.0},
        (1, 3, sides[1], sides[1]),
    )  # fmt: skip


def recognition(seed: int, runs: int = 200, widths: tuple[int, int] = (48, 960)) -> Stream:
    """Batches of 1 to 8 lines of text of one width."""
    draw = random.Random(f"recognition-{seed}")
    shapes = tuple((draw.randint(1, 8), 3, 48, draw.randint(*widths)) for _ in range(runs))
    return Stream(
        "recognition", wheels.PP_OCR_RECOGNITION, shapes, {"default": 10.0, "heuristic": 2.0},
        (8, 3, 48, widths[1]),
    )  # fmt: skip


def model_path(model: wheels.WheelModel, folder: Path | None) -> Path:
    """The model's file in a folder of unpacked wheels, as the tests make it.

    Raises:
        NotApplicable: it is not there.
    """
    path = folder / model.wheel.folder.name / model.member if folder else None
    if path is None or not path.is_file():
        raise NotApplicable(f"{model.id} is not in the folder of models ({folder})")
    return path


def _image(shape: Shape, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(shape[2] * 10_007 + shape[3])
    return torch.rand(shape, generator=generator, device=device) * 2 - 1


def _run(session: ort.InferenceSession, provider: Provider, shape: Shape) -> tuple[float, Bound]:
    """Seconds of one run, its end awaited."""
    (name,) = (meta.name for meta in session.get_inputs())
    bound = Bound(session, provider, {name: _image(shape, provider.torch_device)})
    start = time.perf_counter()
    bound.run()
    provider.synchronize()
    return time.perf_counter() - start, bound


def run(make: Callable[[int], Stream], setting: Setting, record: Recorder) -> None:
    """Times the stream; checks values, and how many times faster ours is."""
    stream, provider = make(setting.seed), setting.provider
    path = model_path(stream.model, setting.models)
    shapes = stream.shapes if not setting.quick else stream.shapes[:2]
    sessions = {"ours": our_session(path, provider, rules=every_rule())}
    for name, asked in (ORT_MODES if provider.is_cuda else {"default": {}}).items():
        sessions[name] = plain_session(path, provider, **asked)
    for session in sessions.values():  # kernels are loaded, libraries found
        _run(session, provider, (1, *stream.largest[1:3], 64))

    ours = [_run(sessions["ours"], provider, shape)[0] for shape in shapes]
    _note_times(record, "ours", ours)
    others = [name for name in ("heuristic", "default") if name in sessions]
    for left, name in zip(range(len(others), 0, -1), others, strict=True):
        stop = time.monotonic() + record.time_left() / left
        taken: list[float] = []
        for shape in shapes:
            taken.append(_run(sessions[name], provider, shape)[0])
            if time.monotonic() > stop:
                break
        _note_times(record, name, taken)
        record.note(f"{name}: runs done, of", [len(taken), len(shapes)])
        faster = sum(taken) / sum(ours[: len(taken)])
        record.note(f"{name}: ms for all, scaled", faster * sum(ours) * 1e3)
        if provider.is_cuda:
            wanted = stream.faster[name]
            record.check(
                f"{stream.name}: times faster than {name}", faster >= wanted, wanted / faster, 1.0,
                faster=faster,
            )  # fmt: skip
    sessions["exact"] = plain_session(
        path, provider, **ORT_MODES["heuristic"], **({"use_tf32": "0"} if provider.is_cuda else {})
    )
    _compare(sessions, provider, shapes[:CHECKED], record)


def _note_times(record: Recorder, name: str, seconds: Sequence[float]) -> None:
    one = Timing.of([1e3 * taken for taken in seconds])
    record.note(
        f"{name}, ms",
        {"total": 1e3 * sum(seconds), "runs": one.rounds, "median": one.median, "low": one.low,
         "high": one.high, "longest": 1e3 * max(seconds)},
    )  # fmt: skip


def _compare(
    sessions: dict[str, ort.InferenceSession], provider: Provider, shapes: Sequence[Shape],
    record: Recorder,
) -> None:  # fmt: skip
    """Errors against ONNX Runtime without TF32: a detector amplifies noise, ONNX Runtime's own by
    TF32, too (0.016 seen)."""
    other = "heuristic" if "heuristic" in sessions else "default"
    errors = {"ours": 0.0, other: 0.0}
    for shape in shapes:
        outputs = {
            name: [torch.from_numpy(y) for y in bound.binding.copy_outputs_to_cpu()]
            for name in ("exact", *errors)
            for _, bound in [_run(sessions[name], provider, shape)]
        }
        for name, error in errors.items():
            pairs = zip(outputs[name], outputs["exact"], strict=True)
            errors[name] = max(error, *(relative_error(y, z.double()) for y, z in pairs))
    limit = max(ERROR_LIMIT, OWN_ERRORS * errors[other])
    record.note("errors against fp32", errors)
    record.check("error against fp32, worst", errors["ours"] <= limit, errors["ours"], limit)


def memory(make: Callable[[int], Stream], session: str, setting: Setting, record: Recorder) -> None:
    """Bytes of the GPU that a session takes at the stream's largest size: `session` is ours,
    default or heuristic. In a process of its own, where nothing else is allocated.
    """
    stream, provider = make(setting.seed), setting.provider
    if not provider.is_cuda:
        raise NotApplicable("needs a GPU")
    path = model_path(stream.model, setting.models)
    image = _image(stream.largest, provider.torch_device)  # makes the context
    provider.synchronize()
    before, _ = torch.cuda.mem_get_info(provider.ordinal)
    arena = {"arena_extend_strategy": "kSameAsRequested"}
    if session == "ours":
        made = our_session(path, provider, rules=every_rule(), **arena)
    else:
        made = plain_session(path, provider, **arena, **ORT_MODES[session])
    (name,) = (meta.name for meta in made.get_inputs())
    bound = Bound(made, provider, {name: image})
    for _ in range(2):
        bound.run()
    provider.synchronize()
    after, _ = torch.cuda.mem_get_info(provider.ordinal)
    record.note("MiB", (before - after) / 2**20)


def nodes_left(setting: Setting, record: Recorder) -> None:
    """Conv and ConvTranspose nodes that stay ONNX Runtime's in the published models; no GPU."""
    found = 0
    for model in wheels.ALL:
        try:
            path = model_path(model, setting.models)
        except NotApplicable as reason:
            record.note(f"{model.id} not looked at", str(reason))
            continue
        report = moonpoly_ort.rewrite(path, rules=every_rule()).report
        nodes = [entry for entry in report if "Conv" in entry.op_type]
        if not nodes:
            continue
        found += 1
        left = [entry for entry in nodes if not entry.taken]
        record.check(
            f"{model.id}: Conv nodes left of {len(nodes)}", not left, len(left), 0,
            reasons=sorted({str(entry.detail) for entry in left}),
        )  # fmt: skip
    if not found:
        raise NotApplicable("there is no model with convolutions in the folder of models")


def sections(setting: Setting) -> dict[str, Callable[[Recorder], Any]]:
    """What this module measures, by name, each for a process of its own."""
    found: dict[str, Callable[[Recorder], Any]] = {
        "nodes_left": partial(nodes_left, setting),
        "detection": partial(run, detection, setting),
        "recognition": partial(run, recognition, setting),
    }
    for session in ("ours", *ORT_MODES):
        found[f"memory_{session}"] = partial(memory, detection, session, setting)
    return found
