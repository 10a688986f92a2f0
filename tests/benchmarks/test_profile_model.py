"""Where the time of a run goes: sums over spans, and a rehearsal of the command on the CPU."""

from __future__ import annotations

import csv
import dataclasses
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.profile_model import Row, Span, of_gpu, of_host, shares, table


def test_spans_are_summed_by_name_and_per_run() -> None:
    spans = [Span("a", 0, 2), Span("b", 2, 12), Span("a", 20, 24), Span("b", 24, 34)]
    assert table("kernel", spans, 2) == [Row("kernel", "b", 1, 10), Row("kernel", "a", 1, 3)]
    assert shares(table("kernel", spans, 2)) == [10 / 13, 3 / 13]


runs_of_kernels = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=3, max_size=3),
    min_size=1, max_size=5,
)  # fmt: skip


@given(runs_of_kernels)
def test_idle_is_what_no_kernel_covers(runs: list[list[tuple[int, int]]]) -> None:
    spans = [
        Span("k", 1000 * i + start, 1000 * i + start + length)
        for i, run in enumerate(runs) for start, length in run
    ]  # fmt: skip
    found = {row.name: row for row in of_gpu(spans, len(runs))}
    lengths, idles = [], []
    for run in runs:
        covered = {at for start, length in run for at in range(start, start + length)}
        lengths.append(max(covered) - min(covered) + 1)
        idles.append(lengths[-1] - len(covered))
    assert found["span"].us == statistics.median(lengths)
    assert found["idle"].us == statistics.median(idles)
    assert found["kernels"].count == 3


def test_runs_of_different_kernels_have_no_span() -> None:
    (only,) = of_gpu([Span("k", 0, 1), Span("k", 2, 3), Span("k", 4, 5)], 2)
    assert only == Row("run", "kernels", 1.5, 1.5)


def event(category: str, name: str, start: int, length: int, **arguments: str) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def test_the_host_counts_the_runs_that_are_asked_for() -> None:
    events = []
    for run in range(3):
        at = 100 * run
        gelu = {"op_name": "Gelu", "provider": "CUDAExecutionProvider"}
        events += [
            event("Node", "g_kernel_time", at + 10, 5 * (run + 1), **gelu),
            event("Session", "SequentialExecutor::Execute", at + 5, 50),
            event("Session", "model_run", at, 60),
        ]
    rows = of_host(events, 1, 2)
    assert rows == [
        Row("run", "executor", 1, 50), Row("run", "nodes", 1, 12.5),
        Row("operator", "Gelu (CUDA)", 1, 12.5),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has no 4 runs"):
        of_host(events, 1, 3)


def test_the_command_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    from benchmarks import exported_models, profile_model

    (bert,) = exported_models.named("bert_base")
    bert = dataclasses.replace(bert, dtypes=("f32",), optimizers=("onnxscript",))
    exported_models.prepare(bert, tmp_path, reduced=True)

    def command(*words: str) -> None:
        always = [
            str(tmp_path),
            "--model",
            "bert_base",
            "--dtype",
            "f32",
            "--size",
            "1x7,2x5",
            "--output",
            str(tmp_path),
            "--provider",
            "CPUExecutionProvider",
            "--runs",
            "3",
        ]
        monkeypatch.setattr(sys, "argv", ["profile_model", *always, *words])  # fmt: skip
        profile_model.main()

    command("--form", "onnxscript")
    with (tmp_path / "profile-bert_base-f32.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["contender"] for row in rows} == {"ort+onnxscript", "ours+onnxscript"}
    assert {row["size"] for row in rows} == {"1x7", "2x5"}
    attention = [row for row in rows if row["name"] == "Attention (CPU)"]
    assert [float(row["count"]) for row in attention] == [2] * 4  # a layer, contenders and sizes
    with pytest.raises(ValueError, match="no contender 'theirs'; there are ort, "):
        command("--contenders", "theirs")
