"""The whole-model benchmark, rehearsed on the CPU with a BERT of two narrow layers."""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

from benchmarks import bench_models, exported_models, model_plots
from benchmarks.exported_models import ALL

FORMS = ("onnxscript", "onnxscript-lean", "onnxscript-mha", "ort:bert")
"""Those that run on the CPU."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    (bert,) = exported_models.named("bert_base")
    exported_models.prepare(dataclasses.replace(bert, dtypes=("f32",)), folder, reduced=True)
    return folder


def bench(exported: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    words = [exported, "--output", output, "--dtypes", "f32", "--sizes", "3", "--steady", "0",
             "--provider", "CPUExecutionProvider", "--no-torch", "--no-pictures"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench_models", *map(str, words)])
    bench_models.main()
    with (output / "models.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_contender_is_right_and_timed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bench(exported, tmp_path, monkeypatch)
    assert not [row for row in rows if row["measure"] == "failed"]
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[row["measure"]][row["contender"]].append(float(row["value"]))
    names = {"ort", "ours", *(f"{who}+{form}" for who in ("ort", "ours") for form in FORMS)}
    for measure in ("create_s", "error", "new_ms", "stream_ms", "again_stream_ms", "steady_ms"):
        assert set(values[measure]) == names, measure
    assert max(error for errors in values["error"].values() for error in errors) < 1e-5
    assert {len(times) for times in values["new_ms"].values()} == {6}  # 3 sizes, 2 streams
    for name, totals in values["stream_ms"].items():  # of its sizes
        assert sum(totals) == pytest.approx(sum(values["new_ms"][name]), rel=0.01)
    assert model_plots.totals(rows).keys() == {"batch 1", "batch 8"}

    assert bench(exported, tmp_path, monkeypatch) == rows  # nothing is done twice


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.id)
def test_streams_hold_what_is_promised(model: exported_models.Model) -> None:
    for stream in bench_models.streams_of(model):
        assert len(set(stream.sizes)) == len(stream.sizes) >= 60
        assert not set(stream.sizes) & set(stream.steady)
    assert bench_models.streams_of(model) == bench_models.streams_of(model)
    assert all(len(stream.sizes) == 4 for stream in bench_models.streams_of(model, 4))


def test_unknown_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("t5", "no model 't5'"), ("gpt2", "run benchmarks.exported_models")):
        words = ["bench_models", str(tmp_path), "--output", str(tmp_path), "--models", name]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            bench_models.main()
        assert said in capsys.readouterr().err
