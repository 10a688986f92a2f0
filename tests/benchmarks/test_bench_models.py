"""The whole-model benchmark, rehearsed on the CPU with a BERT of two narrow layers."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

from benchmarks import bench_models, exported_models, model_contenders, model_plots
from benchmarks.exported_models import ALL, PUBLISHED
from benchmarks.model_contenders import Contender
from benchmarks.placed_models import Places
from benchmarks.running import Provider

FORMS = ("onnxscript", "onnxscript-lean", "onnxscript-mha", "ort:bert")
"""Those that run on the CPU."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    (bert,) = exported_models.named("bert_base")
    bert = dataclasses.replace(bert, dtypes=("f32",), optimizers=FORMS)
    exported_models.prepare(bert, folder, reduced=True)
    return folder


def bench(
    exported: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> list[dict[str, str]]:
    words = [exported, "--output", output, "--dtypes", "f32", "--sizes", "3", "--steady", "0",
             "--provider", "CPUExecutionProvider", "--no-torch", "--no-pictures"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench_models", *map(str, words), *more])
    bench_models.main()
    with (output / "models.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def by_contender(rows: list[dict[str, str]]) -> dict[str, dict[str, list[float]]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[row["measure"]][row["contender"]].append(float(row["value"]))
    return values


def test_every_contender_is_right_and_timed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bench(exported, tmp_path, monkeypatch)
    assert not [row for row in rows if row["measure"] == "failed"]
    values = by_contender(rows)
    forms = ("onnxscript", "ort:bert")
    names = {"ort", "ours+onnxscript-lean", "ours+onnxscript-mha", "ours+ort:bert",
             *(f"ort+{form}" for form in forms)}  # fmt: skip
    for measure in ("create_s", "error", "new_ms", "stream_ms", "again_stream_ms", "steady_ms"):
        assert set(values[measure]) == names, measure
    assert max(error for errors in values["error"].values() for error in errors) < 1e-5
    assert {len(times) for times in values["new_ms"].values()} == {6}  # 3 sizes, 2 streams
    for name, totals in values["stream_ms"].items():  # of its sizes
        assert sum(totals) == pytest.approx(sum(values["new_ms"][name]), rel=0.01)
    assert model_plots.totals(rows).keys() == {"batch 1", "batch 8"}
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert {name: stream["sizes"] for name, stream in summary["streams"].items()} == {
        "batch 1": 3, "batch 8": 3,
    }  # fmt: skip

    assert bench(exported, tmp_path, monkeypatch) == rows  # nothing is done twice


def test_chosen_contenders_alone(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--contenders", "ort+onnxscript-lean,ours")  # both on request alone
    rows = bench(exported, tmp_path, monkeypatch, *words)
    assert set(by_contender(rows)["steady_ms"]) == {"ort+onnxscript-lean", "ours"}
    assert {row["note"] for row in rows if row["measure"] == "error"} == {""}  # `ort` is not there


def test_names_that_a_model_does_not_have_count_as_nothing_done(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert bench(exported, tmp_path, monkeypatch, "--contenders", "theirs") == []
    assert "has none of the contenders" in capsys.readouterr().out


def test_one_that_dies_takes_no_other_along(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contenders(model: Any, *_: Any, **__: Any) -> Iterator[Contender]:
        start = partial(model_contenders.reference, _[1], _[2])
        yield Contender("ort", start)
        yield Contender("ort dead", lambda: os._exit(3))
        yield Contender("ours refused", lambda: 1 / 0)
        yield Contender("ours", start)

    monkeypatch.setattr(model_contenders, "contenders", contenders)
    rows = bench(exported, tmp_path, monkeypatch)
    assert {row["contender"]: row["note"] for row in rows if row["measure"] == "failed"} == {
        "ort dead": "start: ended with exit code 3",
        "ours refused": "start: ZeroDivisionError: division by zero",
    }
    values = by_contender(rows)
    for measure in ("stream_ms", "steady_ms", "error"):
        assert set(values[measure]) == {"ort", "ours"}
    assert set(values["checks_s"]) == {"-"}


def test_without_time_nothing_counts_as_done(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_models, "START", -1.0)
    rows = bench(exported, tmp_path, monkeypatch)
    assert {row["note"] for row in rows if row["measure"] == "failed"} == {"no time left"}
    assert not [row for row in rows if row["measure"] == "steady_s"]


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.id)
def test_streams_hold_what_is_promised(model: exported_models.Model) -> None:
    for stream in bench_models.streams_of(model):
        assert len(set(stream.sizes)) == len(stream.sizes) >= 60
        assert not set(stream.sizes) & set(stream.steady)
    assert bench_models.streams_of(model) == bench_models.streams_of(model)
    assert all(len(stream.sizes) == 4 for stream in bench_models.streams_of(model, 4))
    (last,) = bench_models.streams_of(model, names=[bench_models.streams_of(model)[-1].name])
    assert last == bench_models.streams_of(model)[-1]


def test_on_cuda_a_form_has_the_settings_that_suit_it(exported: Path) -> None:
    (bert,) = exported_models.named("bert_base")
    found = list(
        model_contenders.contenders(bert, "f32", exported / "bert_base/f32", Provider(), eager=True)
    )
    names = [contender.name for contender in found]
    assert len(set(names)) == len(names)
    assert {one.name for one in found if not one.on_request} == {
        "ort", "ort+onnxscript", "ort+onnxscript sdpa", "ort+onnxscript graphs", "ort+ort:bert",
        "ort+ort:bert graphs", "ours+onnxscript-lean", "ours+onnxscript-mha",
        "ours+onnxscript-mha cudnn graphs", "ours+ort:bert", "torch",
    }  # fmt: skip
    fused = {name.split(" ")[0] for name in names if name.endswith((" sdpa", " cudnn"))}
    passes = {f"{side}+onnxscript{end}" for side in ("ort", "ours") for end in ("-lean", "-mha")}
    assert fused == {"ort+onnxscript", "ours+onnxscript", *passes}
    for end in ("", " graphs", " cudnn", " cudnn graphs"):
        assert f"ours+onnxscript{end}" in names
    lasting = {contender.name for contender in found if not contender.repeats}
    assert not [name for name in lasting if "graphs" in name or "cudnn" in name]


def test_the_only_form_of_a_model_has_all_settings(exported: Path, tmp_path: Path) -> None:
    (bert,) = exported_models.named("bert_base")
    shutil.copy(exported / "bert_base/f32/plain.onnx", tmp_path)
    resnet = dataclasses.replace(bert, family="resnet")
    found = model_contenders.contenders(resnet, "f32", tmp_path, Provider(), eager=False)
    assert [one.name for one in found if not one.on_request] == [
        "ort", "ort graphs", "ort heuristic", "ort nhwc", "ours", "ours graphs"
    ]  # fmt: skip


def test_a_form_that_fuses_nothing_is_none(exported: Path, tmp_path: Path) -> None:
    plain = exported / "bert_base/f32/plain.onnx"
    assert model_contenders.Form.of("+ort:bert", plain) is None
    form = model_contenders.Form.of("", plain)
    assert form is not None
    assert not form.attention


def test_a_published_model_needs_a_folder_of_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the folder of these"):
        Places(tmp_path).put(next(iter(PUBLISHED)), "f32", tmp_path / "f32")


def test_inputs_of_another_type_are_the_same_rounded() -> None:
    (llama,) = exported_models.named("llama_1b")
    small = llama.shrunk()
    exact, half = small.feed((2, 3, 5), "f32"), small.feed((2, 3, 5), "f16")
    assert exact.keys() == half.keys()
    for name, value in exact.items():
        assert half[name].equal(value.half() if value.is_floating_point() else value)
    other = small.feed((2, 3, 6), "f32")
    assert other["past_0_key"].shape == (2, 2, 6, 16)
    assert not other["input_ids"].equal(exact["input_ids"])


def test_unknown_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("t5", "no model 't5'"), ("gpt2", "run benchmarks.exported_models")):
        words = ["bench_models", str(tmp_path), "--output", str(tmp_path), "--models", name]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            bench_models.main()
        assert said in capsys.readouterr().err


def test_a_model_that_fails_is_told_and_the_next_one_measured(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Places, "put_weights", fail)
    (tmp_path / "models.csv").write_text(",".join(bench_models.HEAD) + "\n")
    assert bench(exported, tmp_path, monkeypatch) == []
    assert "OSError: no space left" in capsys.readouterr().out
    assert not multiprocessing.active_children()
