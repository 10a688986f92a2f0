"""The model of cuBLASLt: its numbers come back from timings that it made, and the native planner
computes what Python fits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from moonpoly_ort import devices, errors, native, tables
from moonpoly_ort.tables import LogFactors, VendorCost
from moonpoly_ort.tuning import vendor_model
from moonpoly_ort.tuning.vendor_model import Timing

SM_COUNT = 132


def cost(**changes: Any) -> VendorCost:
    rng = np.random.default_rng(3)
    fields: dict[str, Any] = {
        "dtype": "f16", "precision": "tf32", "layout": "nn", "aligned": 1, "batched": 0,
        "margin": 1.05, "fixed_us": 2.0, "epilogue_us": 0.1, "split_us": 1.0, "slice_us": 0.05,
        "lone_share": 0.6, "bandwidth_gbps": 4000.0,
        "tiles": ((64, 64, 0.12), (128, 128, 0.35), (128, 256, 0.6)),
        "correction": LogFactors(
            tuple(tuple(rng.uniform(0, 0.5, 3).tolist()) for _ in range(3)),
            tuple(rng.uniform(-0.2, 0.2, 125).tolist()),
        ),
        "promise": LogFactors(),
    }  # fmt: skip
    return VendorCost(**fields | changes)


def native_us(path: Path, costs: list[VendorCost], timings: list[Timing]) -> list[float]:
    """What the native planner predicts with a pack of these models."""
    kernels = [k for k in compiling.catalog_kernels(90) if k.spec.dtype == "f16"][:4]
    table = pack_format.CostTable(
        "NVIDIA H200", SM_COUNT, 4000.0, 1.0, np.zeros(len(kernels), pack_format.COST),
        tables.packed_vendor(costs),
    )  # fmt: skip
    pack_format.write_pack(path, 90, kernels, [table], key="0" * 64, triton="none")
    assert np.array_equal(pack_format.read_tables(path)[0].vendor, table.vendor)
    with native.Pack(path) as pack:
        return [
            pack.plan(devices.lookup("H200"), problem(t), kernel=native.VENDOR).predicted_us
            for t in timings
        ]


def problem(t: Timing) -> native.Problem:
    if t.batch > 1:
        return native.matmul_problem(
            (t.batch, t.m, t.k), (t.batch, t.k, t.n), native.Dtype[t.dtype.upper()]
        )[0]
    trans = {"trans_a": t.layout[0] == "t", "trans_b": t.layout[1] == "t"}
    a = (t.k, t.m) if trans["trans_a"] else (t.m, t.k)
    b = (t.n, t.k) if trans["trans_b"] else (t.k, t.n)
    return native.gemm_problem(
        a, b, None, native.Dtype[t.dtype.upper()], native.Precision[t.precision.upper()], **trans
    )


def shapes(count: int, aligned: bool, seed: int = 0) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    sizes = 2 ** rng.uniform([0, 3, 4], [13, 14, 14], (count, 3))
    m, n, k = np.maximum(sizes.astype(int), 1).T
    unit = 8 if aligned else 1
    return [(int(a), int(-(-b // unit)) * unit, int(-(-c // unit)) * unit)
            for a, b, c in zip(m, n, k, strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "layout"), [(1, "nn"), (1, "nt"), (1, "tn"), (3, "nn"), (40, "nn")]
)
def test_the_native_planner_predicts_the_same(tmp_path: Path, batch: int, layout: str) -> None:
    every = [
        Timing("f16", "tf32", layout, *shape, us=1.0, batch=batch)
        for shape in [*shapes(60, True), *shapes(60, False), (2, 8, 8), (1, 8, 8), (9000, 8, 99999)]
        if shape[1] > 1 and (shape[0] > 1 or layout != "tn")  # a single row has no layout
    ]
    classes = [
        cost(layout=layout, aligned=aligned, batched=int(batch > 1), fixed_us=2.0 + aligned)
        for aligned in (0, 1)
    ]
    found = native_us(tmp_path / "sm_90.mpk", classes, every)
    for one in classes:
        own = [i for i, t in enumerate(every) if t.key[3] == one.aligned]
        assert len(own) > 5
        mine = vendor_model.predict(one, [every[i] for i in own], SM_COUNT)
        np.testing.assert_allclose([found[i] for i in own], mine, rtol=1e-5)


def test_a_class_without_model_is_not_known(tmp_path: Path) -> None:
    odd, plain = (
        Timing("f16", "tf32", "nn", 5, 7, 9, 1.0),
        Timing("f16", "tf32", "nn", 8, 8, 8, 1.0),
    )
    found = native_us(tmp_path / "sm_90.mpk", [cost()], [odd, plain])
    assert found[0] == 0
    assert found[1] > 0


def timings_of(true: VendorCost, count: int, noise: float = 0.02, seed: int = 0) -> list[Timing]:
    asked = [
        Timing(true.dtype, true.precision, true.layout, *shape, us=1.0)
        for shape in shapes(count, bool(true.aligned), seed)
    ]
    asked = [t for t in asked if t.key[3] == true.aligned]
    factors = np.exp(np.random.default_rng(seed).normal(0, noise, len(asked)))
    us = vendor_model.predict(true, asked, SM_COUNT) * factors
    return [
        Timing(t.dtype, t.precision, t.layout, t.m, t.n, t.k, float(value))
        for t, value in zip(asked, us, strict=True)
    ]


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    true = cost()
    (fitted,) = [c for c in vendor_model.fit(timings_of(true, 150), SM_COUNT) if c.dtype == "f16"]
    fresh = timings_of(true, 100, noise=0, seed=9)
    us = np.array([t.us for t in fresh])
    error = np.abs(np.log(vendor_model.predict(fitted, fresh, SM_COUNT) / us))
    assert np.median(error) < 0.05
    assert fitted.margin == vendor_model.MARGIN


def test_classes_are_fitted_apart_and_bf16_takes_fp16s() -> None:
    slow = cost(aligned=0, fixed_us=9.0)
    timings = timings_of(cost(), 60) + timings_of(slow, 60)
    fitted = {(c.dtype, c.aligned): c for c in vendor_model.fit(timings, SM_COUNT)}
    assert set(fitted) == {("f16", 0), ("f16", 1), ("bf16", 0), ("bf16", 1)}
    assert fitted["f16", 0].fixed_us > 1.5 * fitted["f16", 1].fixed_us
    assert fitted["bf16", 1].tiles == fitted["f16", 1].tiles


def test_too_few_timings_make_no_model() -> None:
    few = timings_of(cost(), vendor_model.LEAST_TIMINGS - 1)
    assert vendor_model.fit(few, SM_COUNT) == ()
    assert vendor_model.fit([], SM_COUNT) == ()


@settings(max_examples=10)
@given(
    st.lists(st.tuples(*[st.integers(1, 50000)] * 3, st.floats(0.5, 1e5)), min_size=24, max_size=30)
)
def test_any_timings_give_a_model_that_a_pack_takes(
    rows: list[tuple[int, int, int, float]],
) -> None:
    timings = [Timing("f16", "tf32", "nn", m, n * 8, k * 8, us) for m, n, k, us in rows]
    fitted = vendor_model._fit_class(timings, SM_COUNT)
    assert np.isfinite(vendor_model.predict(fitted, timings, SM_COUNT)).all()
    assert min(step for _, _, step in fitted.tiles) > 0
    assert fitted.bandwidth_gbps > 0


def test_what_plans_promise_is_corrected() -> None:
    """Our plans take 1.5 times what they promise, and where M is large twice as much."""
    rng = np.random.default_rng(2)

    def told(timings: list[Timing]) -> list[Timing]:
        taken = [(15 if t.m < 64 else 20) * rng.uniform(0.98, 1.02) for t in timings]
        return [
            replace(t, promised_us=10.0, taken_us=us) for t, us in zip(timings, taken, strict=True)
        ]

    fitted = vendor_model._fit_class(told(timings_of(cost(), 200)), SM_COUNT)
    fresh = told(timings_of(cost(), 100, seed=9))
    found = vendor_model.expected(fitted, fresh)
    assert np.median(np.abs(np.log(found / [t.taken_us for t in fresh]))) < 0.08
    untold = vendor_model._fit_class(timings_of(cost(), 60), SM_COUNT)
    assert untold.promise == LogFactors()


def table(*vendor: VendorCost) -> tables.Table:
    return tables.Table(
        "NVIDIA H200", 90, SM_COUNT, 232448, 4300.0, 2.5, "3.9.0", "13.0", "580.1", "ab" * 32,
        "2026-11-30", "free", (tables.Cost("kernel", 3.0, 0.25, 0.2, 2.0),), vendor,
    )  # fmt: skip


def test_a_table_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    written = table(cost(), cost(dtype="bf16"))
    tables.dump(written, path)
    assert set(tables.load(path).vendor) == set(written.vendor)
    rows = [line for line in path.read_text().splitlines() if '"misaligned"' in line]
    assert len(rows) == 2  # one class a line
    tables.dump(table(), path)
    assert "vendor" not in path.read_text()
    assert tables.load(path) == table()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tiles", [], "tiles are 1 to 8"),
        ("tiles", [[64, 64]], "tiles are 1 to 8"),
        ("tiles", [[64, 64, 0]], "tiles are 1 to 8"),
        ("tiles", [[64, 64, 1]] * 9, "tiles are 1 to 8"),
        ("correction", {"misaligned": [[0, 0, 0]], "nodes": [0.0] * 125}, "misaligned is three"),
        ("correction", {"misaligned": [[0] * 3] * 3, "nodes": [0.0] * 124}, "nodes are 125"),
        ("promise", {"misaligned": [[0] * 3] * 3, "nodes": ["x"] * 125}, "promise: nodes are 125"),
        ("promise", 3, "promise: an object is expected"),
        ("layout", "xy", "layout = 'xy'; accepted: nn, nt, tn, tt"),
        ("aligned", 2, "aligned = 2; accepted: 0, 1"),
        ("margin", -1, "margin = -1"),
        ("tiles", "many", "tiles"),
    ],
)
def test_a_malformed_class_is_refused(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = tmp_path / "t.json"
    tables.dump(table(cost()), path)
    data = json.loads(path.read_text())
    data["vendor"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(errors.TableError, match=message):
        tables.load(path)
    data["vendor"] = "none"
    path.write_text(json.dumps(data))
    with pytest.raises(errors.TableError, match="`vendor` must be a list"):
        tables.load(path)
