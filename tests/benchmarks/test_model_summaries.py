"""What rows of `bench_models` amount to, and that README.md shows what the committed ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import model_summaries
from benchmarks.recording import plain

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks/results/h200/models/models.csv"


def row(contender: str, measure: str, value: float | str, **more: str) -> dict[str, str]:
    return {"model": "m", "dtype": "f16", "stream": "s", "contender": contender, "size": "",
            "measure": measure, "value": str(value), "note": ""} | more  # fmt: skip


def stream(**totals: float) -> list[dict[str, str]]:
    return [row(name.replace("_", " "), "stream_ms", value) for name, value in totals.items()]


def test_the_best_of_both_sides_are_compared() -> None:
    rows = [*stream(ort=30, ort_sdpa=20, ours=12, ours_cudnn=10, torch=50), *(
        row(name, "new_ms", value, size=str(size))
        for name in ("ort sdpa", "ours cudnn") for size, value in ((1, 3.0), (2, 5.0), (3, 9.0))
    )]  # fmt: skip
    (found,) = model_summaries.summarized(rows)
    one = found["streams"]["s"]
    assert (one["ort"]["name"], one["ours"]["name"]) == ("ort sdpa", "ours cudnn")
    assert one["speedup"] == 2
    assert one["ort_defaults"] == {"name": "ort", "ms": 30, "note": ""}
    assert one["torch"]["speedup"] == 5
    assert one["sizes"] == 3
    assert one["ours"]["new_ms"] == 5


def test_onnxruntime_on_a_form_with_our_passes_is_none_of_its_settings() -> None:
    rows = stream(ort=30, ours=12) + [
        row(f"ort+onnxscript{passes} sdpa", "stream_ms", value)
        for passes, value in (("", 20), ("-packed", 14), ("-lean", 15))
    ]
    rows += [
        row(name, "steady_ms", value, size="1x16")
        for name, value in (("ort", 4.0), ("ort+ort-mha:bert", 1.0), ("ours+ort-mha:bert", 2.0))
    ]
    (found,) = model_summaries.summarized(rows)
    one = found["streams"]["s"]
    assert one["ort"] == {"name": "ort+onnxscript sdpa", "ms": 20, "note": ""}
    assert one["ort_with_our_passes"] == {"name": "ort+onnxscript-packed sdpa", "ms": 14}
    assert one["steady"]["1x16"]["ort"] == {"name": "ort", "ms": 4}
    assert one["steady"]["1x16"]["ours"] == {"name": "ours+ort-mha:bert", "ms": 2}
    assert "for information: 14 ms (ort+onnxscript-packed sdpa)" in model_summaries.shown([found])


def test_steady_sizes_are_compared_with_graphs_and_without() -> None:
    times = {"ort": 4.0, "ort graphs": 3.0, "ours": 2.5, "ours graphs": 1.0, "torch": 0.5}
    rows = stream(ort=2, ours=1) + [
        row(name, "steady_ms", value, size="1x16") for name, value in times.items()
    ]
    (found,) = model_summaries.summarized(rows)
    pair = found["streams"]["s"]["steady"]["1x16"]
    assert (pair["ort"]["name"], pair["ours"]["name"]) == ("ort graphs", "ours graphs")
    assert pair["speedup"] == 3
    assert pair["without_graphs"]["speedup"] == 1.6


def test_later_rows_hold_and_estimates_say_so() -> None:
    rows = [*stream(ort=2, ours=1), row("ort", "stream_ms", 9, note="from 5 of 80 sizes")]
    (found,) = model_summaries.summarized(rows)
    assert found["streams"]["s"]["speedup"] == 9
    assert found["streams"]["s"]["ort"]["note"] == "from 5 of 80 sizes"
    assert model_summaries.markdown([found]).count("~9 ") == 2  # the defaults are the best here
    assert "from 5 of 80 sizes" in model_summaries.shown([found])


def test_one_that_failed_at_first_counts_when_it_ran() -> None:
    failed = row("ours", "failed", 1, note="no time left")
    (found,) = model_summaries.summarized([*stream(ort=2, ours=1), failed])
    assert found["contenders"]["ours"] == {"failed": "no time left"}
    beside = row("ours", "create_s", 0.5, note="made beside others")
    rows = [*stream(ort=2, ours=1), failed, beside]
    (found,) = model_summaries.summarized(rows)
    assert found["contenders"]["ours"] == {"create_s": 0.5}


def test_streams_of_one_side_are_left_out() -> None:
    assert model_summaries.summarized(stream(ort=2, torch=1)) == []
    assert model_summaries.summarized([]) == []


def test_a_table_replaces_the_one_between_the_comments() -> None:
    text = f"a\n{model_summaries.BEGIN}\nold\n{model_summaries.END}\nb\n"
    once = model_summaries.put("new", text)
    assert once == f"a\n{model_summaries.BEGIN}\nnew\n{model_summaries.END}\nb\n"
    assert model_summaries.put("new", once) == once
    with pytest.raises(ValueError, match="there is no"):
        model_summaries.put("new", "a\nb\n")


def test_the_readme_shows_what_was_measured() -> None:
    found = model_summaries.of_file(MEASURED)
    table = model_summaries.markdown(found)
    assert table.count("\n") > 2
    assert table in (ROOT / "README.md").read_text()
    assert json.loads((MEASURED.parent / "summary.json").read_text()) == plain(found)
