"""ONNX's node tests of the candidates, every input dimension dynamic."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.corpus import node_tests
from tests.corpus.comparing import Precision, bound, require_close, require_same_form
from tests.corpus.references import Float64Reference

from . import battery

_ALL = node_tests.collect()
_INTERPRETED = [test for test in _ALL if next(iter(test.feed.values())).dtype.kind == "f"]


def _save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("test", _ALL, ids=lambda test: test.id)
def test_dynamic_ones_are_taken(test: node_tests.NodeTest, tmp_path: Path) -> None:
    rewritten = battery.rewrite_file(_save(test.dynamic(), tmp_path), tmp_path)
    assert rewritten.taken_types == {test.operator: 1}
    battery.check_valid(rewritten)
    battery.check_idempotent(rewritten, tmp_path)
    battery.check_fixed_point(rewritten.before)
    battery.check_without_library(rewritten, [test.feed])
    battery.check_session(rewritten, [test.feed])


@pytest.mark.parametrize("test", _ALL, ids=lambda test: test.id)
def test_static_ones_are_left_unless_asked_for(test: node_tests.NodeTest, tmp_path: Path) -> None:
    path = _save(test.model, tmp_path)
    left = battery.rewrite_file(path, tmp_path)
    assert left.refused == {(test.operator, "static"): 1}
    assert left.after.read_bytes() == left.before.read_bytes()
    taken = battery.rewrite_file(path, tmp_path, static=True)
    assert taken.taken_types == {test.operator: 1}
    battery.check_without_library(taken, [test.feed])


@pytest.mark.parametrize("test", _INTERPRETED, ids=lambda test: test.id)
def test_kernels_give_the_expected_values(test: node_tests.NodeTest, tmp_path: Path) -> None:
    path = _save(test.dynamic(), tmp_path)
    precisions: tuple[Precision, ...] = ("ieee", "tf32")
    for precision in precisions:
        (got,) = battery.interpreted(path, [test.feed], precision)
        require_same_form(got, test.expected)
        first = next(iter(test.feed.values()))
        limit = bound(first.dtype, precision, max(first.shape))
        require_close(got, Float64Reference(path)(test.feed), limit)
