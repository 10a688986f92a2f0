"""Timings become models in a table, through the command line."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from benchmarks import bench_kernels, fit_vendor
from moonpoly_ort import native, tables
from moonpoly_ort.tuning import vendor_model
from moonpoly_ort.tuning.candidates import SPLITS

SHAPES = [(m, n * 8, k * 8) for m in (1, 37, 300, 2000) for n in (1, 40, 500) for k in (2, 60, 700)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels = [
        kernel for kernel in compiling.catalog_kernels(90)
        if kernel.spec.dtype == "f16" and not kernel.spec.family.convolves
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return path


def table(pack: Path) -> tables.Table:
    names = [pack_format.name(k.spec) for k in pack_format.read_pack(pack).kernels]
    costs = tuple(tables.Cost(name, 2.0, 0.3, 0.2, 1.0) for name in names)
    return tables.Table(
        "NVIDIA H200", 90, 132, 232448, 4300.0, 1.5, "3.9.0", "13.0", "580", "ab" * 32,
        "2026-11-30", "free", costs,
    )  # fmt: skip


def write(path: Path, pack: Path) -> None:
    """cuBLASLt's times, cuBLAS's that must not count, and every kernel's of ours: 30 us each, which
    is not what they promise."""
    rng = np.random.default_rng(0)
    names = [pack_format.name(k.spec) for k in pack_format.read_pack(pack).kernels]
    with path.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(bench_kernels.ORACLE_HEAD)
        for number, (m, n, k) in enumerate(SHAPES):
            head = (number, "made", "f16", "nn", m, n, k)
            us = (3 + m * n * k / 4e8) * rng.uniform(0.98, 1.02)
            rows.writerow((*head, "cublaslt", 1, 0, us))
            rows.writerow((*head, "cublas", 1, "", 1e6))
            for name in names:
                for split in (1, *SPLITS):
                    rows.writerow((*head, name, split, 20, 30))


@pytest.mark.parametrize("with_pack", [False, True])
def test_models_are_fitted_and_written(
    tmp_path: Path, pack: Path, with_pack: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    timings, target = tmp_path / "vendor.csv", tmp_path / "t.json"
    write(timings, pack)
    tables.dump(table(pack), target)
    command = ["fit_vendor", str(timings), "--table", str(target)]
    monkeypatch.setattr(sys, "argv", command + ["--pack", str(pack)] * with_pack)
    assert fit_vendor.main() == 0
    assert "f16 tf32 nn aligned" in capsys.readouterr().out
    found = tables.load(target)
    assert set(found.costs) == set(table(pack).costs)
    assert {(c.dtype, c.aligned) for c in found.vendor} == {("f16", 1), ("bf16", 1)}
    read, ours = fit_vendor.read([timings])
    assert max(t.us for t in read) < 1e5  # cuBLAS's own rows are not those
    assert len(ours) == len(SHAPES)
    if not with_pack:  # 20 us promised, 30 taken
        (cost,) = (c for c in found.vendor if c.dtype == "f16")
        told = fit_vendor.promised(read, ours, None)
        assert np.median(vendor_model.expected(cost, told)) == pytest.approx(30, rel=0.05)


def test_a_planner_of_a_table_goes_by_it(tmp_path: Path, pack: Path) -> None:
    planner = fit_vendor.Planner(pack, table(pack), tmp_path)
    timing = fit_vendor.Timing("f16", "tf32", "nn", 64, 64, 64, 1.0)
    kernel, split, us = planner.plan(timing)
    assert kernel in planner.names
    assert us == pytest.approx(1.5 + 2 + 0.2, rel=0.3)
    assert split == 1
    assert native.PlanFlag.NO_VENDOR == 4


def test_wrong_usage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = tmp_path / "few.csv"
    few.write_text(",".join(bench_kernels.ORACLE_HEAD) + "\n1,x,f16,nn,8,8,8,cublas,1,,2.5\n")
    for arguments in (["missing.csv"], [str(few)], [str(few), "--pack", str(few)]):
        monkeypatch.setattr(sys, "argv", ["fit_vendor", *arguments])
        with pytest.raises(SystemExit):
            fit_vendor.main()
