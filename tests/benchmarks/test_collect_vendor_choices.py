"""What is asked of cuBLASLt, in which order it is timed, and what the CSV holds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import collect_vendor_choices as collecting
from benchmarks import csv_rows, suites
from benchmarks.cublaslt import CublasLt
from benchmarks.suites import Row


def row(m: int, n: int, k: int, core: bool = False) -> Row:
    return Row("gemm", "", "drawn", 1, m, n, k, core)


def test_shapes_are_of_all_sources_and_the_same_each_time() -> None:
    found = list(collecting.shapes(40))
    assert found == list(collecting.shapes(40))
    assert {collecting.source(one) for one in found} == {"drawn", "weight", "batched", "suite"}
    core = sum(one.core for op in suites.OPS for one in suites.rows(op))
    assert sum(collecting.source(one) == "suite" for one in found) == core
    assert sum(collecting.source(one) == "drawn" for one in found) == 40


def test_an_answer_is_written_with_its_settings(fake_cublaslt: str, tmp_path: Path) -> None:
    lt = CublasLt([fake_cublaslt])
    choice = collecting.ask(lt, row(5, 7, 3), "f16", "nt")
    assert choice is not None
    assert collecting.ask(lt, row(5, 13, 3), "f16", "nn") is not None
    assert collecting.ask(lt, row(5, 3, 13), "f16", "nn") is None  # the stand-in refuses that
    collecting.write(tmp_path / "choices.csv", [choice])
    (read,) = csv_rows.read([tmp_path / "choices.csv"])
    assert (read["dtype"], read["layout"], read["m"], read["n"], read["k"]) == (
        "f16", "nt", "5", "7", "3",
    )  # fmt: skip
    assert (read["tile"], read["split"], read["stages"], read["us"]) == ("20", "16", "", "")
    lt.close()


def test_every_beginning_of_the_order_has_all_kinds(fake_cublaslt: str) -> None:
    lt = CublasLt([fake_cublaslt])
    choices = []
    for m in range(1, 30):
        choice = collecting.ask(lt, row(m, 4, 4), "f16", "nn")
        assert choice is not None
        choice.found["tile"] = 0 if m < 26 else m  # one kind of many products, four of one each
        choices.append(choice)
    ordered = collecting.in_turns(choices, seed=1)
    assert {choice.found["tile"] for choice in ordered[:5]} == {0, 26, 27, 28, 29}
    assert sorted(map(id, ordered)) == sorted(map(id, choices))
    assert len(collecting.one_of_each(ordered)) == 5
    lt.close()


def test_the_suites_rows_and_the_longest_are_not_timed(fake_cublaslt: str) -> None:
    lt = CublasLt([fake_cublaslt])
    answers = [
        collecting.ask(lt, one, "f32", "nn")
        for one in (row(64, 64, 64), row(64, 64, 64, core=True), row(1 << 14, 1 << 14, 1 << 14))
    ]
    assert [collecting.timeable(choice) for choice in answers if choice] == [True, False, False]
    lt.close()
