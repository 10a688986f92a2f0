"""Models of nodes side by side, their sessions on the CPU, and taking up where a run stopped."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch

from benchmarks import in_session, kernel_only
from benchmarks.csv_rows import CsvRows, read
from benchmarks.in_session import PAGE, WEIGHTS, Group, InSession, Limits
from benchmarks.running import CPU, Provider
from benchmarks.suites import Row
from tests.corpus.interface import operators


def _row(number: int, m: int, n: int, k: int) -> Row:
    return Row("gemm", str(number), "small", 1, m, n, k, True)


ROWS = [_row(0, 3, 8, 16), _row(1, 5, 4, 2), _row(2, 7, 8, 16)]


def test_groups_share_weights_and_keep_the_limits() -> None:
    limits = Limits(nodes=4, weight_bytes=3 * 8 * 16 * 2, output_bytes=1 << 20)
    found = in_session.groups(ROWS, 2, limits)
    assert found == [Group(4, 2, (ROWS[1],), 4), Group(8, 16, (ROWS[0], ROWS[2]), 3)]
    assert in_session.weights_bytes(found, 2) == 4 * 2 * 2 + 3 * PAGE
    assert in_session.weights_bytes([], 2) == 0
    # The row with most outputs decides; one node is always possible below 2 GB.
    assert in_session.groups(ROWS, 2, Limits(output_bytes=2 * 7 * 8 * 2))[1].nodes == 2
    assert in_session.groups(ROWS, 2, Limits(weight_bytes=1))[1].nodes == 1
    assert in_session.groups([_row(0, 1, 40_000, 30_000)], 2, Limits()) == []


def test_the_model_reads_weights_a_page_apart(tmp_path: Path) -> None:
    group = Group(8, 16, (ROWS[0],), 3)
    in_session.write_weights(
        tmp_path, in_session.weights_bytes([group], 4), torch.float32, "cpu"
    )  # fmt: skip
    path = in_session.write_model(tmp_path, group, torch.float32)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path))
    assert list(operators(model)) == [("", "MatMul")] * 3
    data = np.fromfile(tmp_path / WEIGHTS, np.float32)
    for i, weight in enumerate(model.graph.initializer):
        start = i * PAGE // 4
        expected = data[start : start + 8 * 16].reshape(16, 8)
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight), expected)
    assert len({w.raw_data for w in model.graph.initializer}) == 3


@pytest.mark.parametrize("dtype", ["f16", "f32", "f32ieee"])
def test_rows_are_measured_and_not_twice(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rows: list[Row], seconds: float = 60) -> list[dict[str, str]]:
        out = CsvRows(tmp_path / "sessions.csv", in_session.HEAD, kernel_only.KEY)
        stop = time.monotonic() + seconds
        in_session.run(
            rows, dtype, Provider(CPU), out, tmp_path, Limits(nodes=2), stop, lambda _: None
        )
        out.close()
        return read([tmp_path / "sessions.csv"])

    real = in_session.compare_calls
    monkeypatch.setattr(
        in_session, "compare_calls", lambda calls, seconds: real(calls, rounds=3, seconds=seconds)
    )
    assert run(ROWS, seconds=-1) == []  # no time, no row
    first = run(ROWS[:1])
    assert [row["id"] for row in first] == ["0"]
    rows = run(ROWS)
    assert rows[:1] == first
    assert sorted(row["id"] for row in rows) == ["0", "1", "2"]
    for row in rows:
        assert (row["status"], row["note"], row["nodes"]) == ("ok", "", "2")
        assert float(row["ours_us"]) > 0
        assert float(row["ort_low_us"]) <= float(row["ort_us"]) <= float(row["ort_high_us"])
    assert not list(tmp_path.glob("8x16*"))
    monkeypatch.setattr(in_session, "InSession", None)  # all done: nothing may be started
    with pytest.raises(TypeError):
        run([_row(9, 1, 1, 1)])


def test_other_results_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = InSession(Provider(CPU), "f16", tmp_path, seconds_per_row=0.01)
    group = Group(8, 16, (ROWS[0],), 2)
    bench.start(in_session.weights_bytes([group], 2))
    plain = in_session.plain_session

    def other(path: Path, *arguments: object, **named: str) -> object:
        model = onnx.load(str(path))
        model.graph.initializer[1].raw_data = bytes(8 * 16 * 2)
        return plain(model.SerializeToString(), *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(in_session, "plain_session", other)
    (found,) = bench.measure(group)
    assert found["status"] == "wrong"
    assert "results differ by " in found["note"]


def test_a_session_that_fails_is_recorded(tmp_path: Path) -> None:
    bench = InSession(Provider(CPU), "bf16", tmp_path)  # the CPU provider has no bf16 MatMul
    group = Group(8, 16, (ROWS[0], ROWS[2]), 1)
    in_session.write_weights(tmp_path, 8 * 16 * 2, torch.bfloat16, "cpu")
    found = list(bench.measure(group))
    assert [(row["id"], row["status"]) for row in found] == [("0", "failed"), ("2", "failed")]
    assert "NotImplemented" in found[0]["note"]


def test_the_difference_has_a_fixed_scale() -> None:
    y = torch.randn(50, 40)
    assert in_session.difference(y, y, 4) == 0
    assert in_session.difference(y + 2, y, 4) == pytest.approx(1)
    assert in_session.difference(y / 0, y, 4) == math.inf
    assert in_session.difference(y * math.nan, y, 4) == math.inf
