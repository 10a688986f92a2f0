"""`moonpoly tune` where cuBLASLt is: timed beside the kernels, its models reach the table."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from cases_tune import options, surroundings, wanted  # noqa: F401
from tune_gpu import Bench, write_pack

from moonpoly_ort import native, tables, tuning
from moonpoly_ort.tuning import journal, shapes, vendor_model

library = ctypes.CDLL("libcublasLt.so.13")
library.fakelt_heuristics()  # AttributeError: the real library was found
COUNT = vendor_model.LEAST_TIMINGS + 6


def test_its_models_are_fitted_and_its_plans_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(number: str, layout: str, seed: int = 0) -> dict[Any, list[shapes.Shape]]:
        sizes = [(1 + seed + i, 8 + 8 * (i % 4), 8 + 8 * (i % 3)) for i in range(COUNT)]
        return {(number, layout, False): [shapes.Shape(number, layout, *size) for size in sizes]}

    monkeypatch.setattr(shapes, "synthetic", few)
    pack = write_pack(tmp_path / "sm_90.mpk", wanted)
    tuned = tmp_path / "tuned.mpk"
    bench = Bench(pack, tmp_path)
    with bench.installed():
        outcome = tuning.tune(options(pack, tuned_pack=tuned))
    assert library.fakelt_products() > 0
    for shape, times in journal.read(outcome.journal).timings.items():
        (us,) = (timed.us for timed in times if timed.name == "cublaslt")
        assert us == pytest.approx(4 + 2e-6 * shape.m * shape.n * shape.k, rel=0.01)
    table = tables.load(outcome.table)
    assert {(cost.dtype, cost.aligned) for cost in table.vendor} >= {("f16", 1)}
    assert outcome.vendor_wins is not None
    checked = outcome.verified
    assert checked is not None
    assert all(check.vendor_us is not None for check in checked.checks)
    # Where the plan goes to the library, that is what it then costs.
    for check in checked.checks:
        if check.allowed_us is not None:
            assert check.allowed_us == pytest.approx(check.vendor_us, rel=0.01)
    with native.Pack(tuned) as opened:
        device = native.device_query(0)
        forced = opened.plan(device, shapes.Shape("f16", "nn", 20, 16, 16).problem(),
                             kernel=native.VENDOR)  # fmt: skip
        assert forced.predicted_us == pytest.approx(4, rel=0.15)
