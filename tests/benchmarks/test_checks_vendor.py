"""The GPU section about cuBLASLt, as far as it goes without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from benchmarks import checks_vendor, operands
from benchmarks.machine import Setting
from benchmarks.operands import Operands
from benchmarks.running import CUDA, Provider
from moonpoly_ort import devices, native


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    kernels = [
        replace(kernel, cubin=b"code")
        for kernel in compiling.catalog_kernels(90)
        if not kernel.spec.family.tensor_maps
    ]
    path = tmp_path / "sm_90.mpk"
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    made = Setting(Provider(CUDA, pack=path), path, work=tmp_path)
    made.device = devices.lookup("H200")
    return made


def test_every_case_is_one_that_it_takes(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    # As small as the alignments allow: the plan does not depend on sizes.
    monkeypatch.setattr(checks_vendor, "SIZES", tuple(
        (min(m, 9), min(n, 10), min(k, 11)) for m, n, k in checks_vendor.SIZES
    ))  # fmt: skip
    cases = list(checks_vendor.cases())
    seen = {(p.dtype, p.precision, p.trans_a, p.trans_b) for p in cases}
    assert len(seen) == 16
    assert {p.bias for p in cases} == {"none", "row", "matrix"}
    assert any(p.special for p in cases)
    for product in cases:
        problem = Operands.allocate(product, "cpu").problem
        plan = setting.plan(problem, native.VENDOR)
        assert [r.kernel for r in plan.regions] == [native.VENDOR]


def test_the_made_table_lets_it_win_everything(setting: Setting) -> None:
    assert setting.plan(operands.dense_problem(64, 64, 64, "f16")).regions[0].kernel >= 0
    with native.Pack(checks_vendor.vendor_pack(setting)) as pack:
        for number, (dtype, precision) in operands.NUMBERS.items():
            for layout in ("nn", "nt", "tn", "tt"):
                for m, n, k in ((64, 64, 64), (1, 8, 100000), (3, 5, 7), (5000, 8000, 8000)):
                    problem = operands.dense_problem(m, n, k, dtype, layout, precision)
                    plan = pack.plan(setting.device, problem)
                    assert plan.regions[0].kernel == native.VENDOR, (number, layout, m)
