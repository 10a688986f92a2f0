"""Results are taken up again where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.csv_rows import CsvRows, read

HEAD, KEY = ["op", "id", "us", "note"], ["op", "id"]


def test_done_rows_are_known_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.csv"
    rows = CsvRows(path, HEAD, KEY)
    rows.write({"op": "gemm", "id": 1, "us": 1 / 3})
    rows.write({"op": "gemm", "id": "2", "us": True, "note": "a, b"})
    assert rows.has("gemm", "1")
    rows.close()
    again = CsvRows(path, HEAD, KEY)
    assert again.done == {("gemm", "1"), ("gemm", "2")}
    again.write({"op": "bmm", "id": "1"})
    again.close()
    assert read([path]) == [
        {"op": "gemm", "id": "1", "us": "0.33333", "note": ""},
        {"op": "gemm", "id": "2", "us": "1", "note": "a, b"},
        {"op": "bmm", "id": "1", "us": "", "note": ""},
    ]


def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,id,us,note\ngemm,1,2.5,\ngemm,2,3")
    rows = CsvRows(path, HEAD, KEY)
    assert rows.done == {("gemm", "1")}
    rows.write({"op": "gemm", "id": "2", "us": 3.5})
    rows.close()
    assert path.read_text() == "op,id,us,note\ngemm,1,2.5,\ngemm,2,3.5,\n"


def test_a_head_cut_short_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,i")
    CsvRows(path, HEAD, KEY).close()
    assert path.read_text() == "op,id,us,note\n"


def test_other_columns_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,id\ngemm,1\n")
    with pytest.raises(ValueError, match="has other columns"):
        CsvRows(path, HEAD, KEY)
    rows = CsvRows(tmp_path / "more.csv", HEAD, KEY)
    with pytest.raises(ValueError, match="nonsense"):
        rows.write({"op": "gemm", "id": "1", "nonsense": 1})
    rows.close()
