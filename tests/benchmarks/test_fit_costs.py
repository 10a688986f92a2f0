"""Costs that made timings are found again, and the planner then makes the best choices."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from benchmarks import bench_kernels, fit_costs
from moonpoly_ort import devices, tables
from moonpoly_ort.errors import MoonPolyError

SHAPES = [(m, n, k) for m in (1, 37, 300, 2000) for n, k in ((768, 768), (4096, 1024), (256, 8192))]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = [
        k for k in compiling.catalog_kernels(90)
        if k.spec.dtype == "f16" and not k.spec.family.convolves
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return path


def _facts(pack: Path) -> dict[str, Any]:
    device = devices.lookup("H200")
    names = [name for name, *_ in device._fields_ if name != "_name"]
    return {
        "gpu": device.name, "device": {name: getattr(device, name) for name in names},
        "bandwidth_gbps": 4300.0, "launch_us": 1.5, "cuda": "13.0", "driver": "580",
        "clocks": "free", "date": "2026-11-30", "pack_key": pack_format.read_info(pack).key,
    }  # fmt: skip


def _timings(path: Path, planner: fit_costs.Planner) -> None:
    """Writes what an oracle run would if the model were true for costs drawn at random."""
    rng = np.random.default_rng(0)
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    for index, kernel in enumerate(planner.kernels):
        spec, blocks = kernel.spec, planner.occupancy[index]
        step = spec.bm * spec.bn * spec.bk * rng.uniform(0.7, 1.8) / 1.7e6
        costs[index] = (rng.uniform(0.8, 3), 0.05 + step * blocks, 0.08 + step, blocks)
    with planner.with_costs(costs, 4300.0) as true, path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(bench_kernels.ORACLE_HEAD)
        for number, (m, n, k) in enumerate(SHAPES):
            for index, kernel in enumerate(planner.kernels):
                for split in bench_kernels.SPLITS if kernel.spec.split_k else (1,):
                    row = fit_costs.Row(("f16", "nn", m, n, k), index, split, 0.0)
                    try:
                        us = planner.predict(true, [row])[0]
                    except MoonPolyError:
                        continue
                    name = pack_format.name(kernel.spec)
                    writer.writerow([number, "test", "f16", "nn", m, n, k, name, split, 0, us])


def test_the_costs_behind_timings_are_found(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, timings, output = (
        _facts(pack),
        tmp_path / "oracle.csv",
        tmp_path / "gemm__nvidia-h200.json",
    )
    timings.with_suffix(".json").write_text(json.dumps(facts))
    planner = fit_costs.Planner(pack, facts, tmp_path)
    _timings(timings, planner)
    monkeypatch.setattr(
        sys, "argv", ["fit_costs", str(timings), "--pack", str(pack), "--output", str(output)]
    )
    assert fit_costs.main() == 0
    assert "fitted, on shapes held out" in capsys.readouterr().out
    table = tables.load(output, gpu="NVIDIA H200")
    index = {pack_format.name(k.spec): i for i, k in enumerate(planner.kernels)}
    costs = np.zeros(len(index), pack_format.COST)
    for cost in table.costs:
        costs[index[cost.kernel]] = (
            cost.fixed_us, cost.step_us, cost.single_step_us, cost.blocks_per_sm
        )  # fmt: skip
    rows = fit_costs.read_rows([timings], planner)
    with planner.with_costs(costs, 4300.0) as fitted:
        found = fit_costs.quality(planner, fitted, rows)
    with planner.without_table() as analytic:
        before = fit_costs.quality(planner, analytic, rows)
    assert found.error < 0.03
    assert found.mean > 0.99
    assert found.mean > before.mean


def test_analytic_costs_are_those_behind_the_predictions(pack: Path, tmp_path: Path) -> None:
    facts = _facts(pack)
    planner = fit_costs.Planner(pack, facts, tmp_path)
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    for name, values in zip(fit_costs.COSTS, fit_costs.analytic_costs(planner).T, strict=True):
        costs[name] = values
    costs["blocks_per_sm"] = planner.occupancy
    zeros = np.zeros(len(planner.kernels), pack_format.COST)
    rows = [
        fit_costs.Row(("f16", "nn", m, n, k), index, 2 if kernel.spec.split_k else 1, 0.0)
        for m, n, k in SHAPES
        for index, kernel in enumerate(planner.kernels)
        if (kernel.spec.trans_a, kernel.spec.trans_b) == (False, False)
    ]
    with planner.with_costs(costs, 4300.0) as given, planner.with_costs(zeros, 4300.0) as derived:
        np.testing.assert_allclose(
            planner.predict(given, rows), planner.predict(derived, rows), rtol=1e-4
        )


def test_few_timings_leave_the_rest_to_the_analytic_model(pack: Path, tmp_path: Path) -> None:
    """One timing, twice as long as predicted: the costs move, and none by more than that."""
    planner = fit_costs.Planner(pack, _facts(pack), tmp_path)
    prior = fit_costs.analytic_costs(planner)
    row = fit_costs.Row(("f16", "nn", 300, 768, 768), 0, 1, 0.0)
    with planner.without_table() as analytic:
        row = dataclasses.replace(row, us=2 * planner.predict(analytic, [row])[0])
    rows = [row]
    fitted = fit_costs.Fit(planner, rows, fit_costs.Coefficients.probe(planner, rows), prior)
    costs, _ = fitted.at(4300.0)
    ratios = np.array([costs[name][0] for name in fit_costs.COSTS]) / prior[0]
    assert ratios.max() > 1.1
    assert ratios.min() > 0.9
    assert ratios.max() < 2.2
    assert not costs["step_us"][1:].any()


def test_every_kernel_can_be_timed_on_the_shapes_of_the_oracle(pack: Path, tmp_path: Path) -> None:
    planner = fit_costs.Planner(pack, _facts(pack), tmp_path)
    for layout in ("nn", "nt"):
        wanted = {
            i for i, k in enumerate(planner.kernels)
            if "nt"[k.spec.trans_a] + "nt"[k.spec.trans_b] == layout
        }  # fmt: skip
        with planner.without_table() as catalog:
            for shape in bench_kernels.informative():
                m, n, k = shape.m, shape.n, shape.k
                for index in sorted(wanted):
                    split = 2 if planner.kernels[index].spec.split_k else 1
                    row = fit_costs.Row(("f16", layout, m, n, k), index, split, 0.0)
                    try:
                        planner.predict(catalog, [row])
                    except MoonPolyError:
                        continue
                    wanted.discard(index)
        assert not wanted


def test_only_promising_candidates_are_timed() -> None:
    plan = SimpleNamespace
    choices: list[Any] = [
        (0, 1, plan(predicted_us=9.0)), (1, 2, plan(predicted_us=4.0)),
        (1, 3, plan(predicted_us=3.0)), (1, 4, plan(predicted_us=5.0)),
        (2, 1, plan(predicted_us=6.0)),
    ]  # fmt: skip
    found = bench_kernels.promising(choices, 6.0, splits=2)
    assert [choice[:2] for choice in found] == [(1, 3), (1, 2), (2, 1)]


def test_timings_of_another_pack_are_refused(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = tmp_path / "oracle.csv"
    timings.write_text(",".join(bench_kernels.ORACLE_HEAD) + "\n")
    timings.with_suffix(".json").write_text(json.dumps(_facts(pack) | {"pack_key": "f" * 64}))
    monkeypatch.setattr(
        sys,
        "argv",
        ["fit_costs", str(timings), "--pack", str(pack), "--output", str(tmp_path / "t")],
    )
    with pytest.raises(SystemExit, match="taken with pack ffffffffffff"):
        fit_costs.main()
