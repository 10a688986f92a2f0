"""Costs that made timings are found again, and the planner then makes the best choices."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
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
    kernels = [k for k in compiling.catalog_kernels(90) if k.spec.dtype == "f16"]
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
        spec, blocks = kernel.spec, planner.occupancy(index)
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
    with planner.with_costs(None, 4300.0) as analytic:
        before = fit_costs.quality(planner, analytic, rows)
    assert found.error < 0.01
    assert found.mean < 1.01
    assert found.mean < before.mean


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
