"""What the ablation makes of plans and timings; it measures on a GPU only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import ablate_plans as ablation
from benchmarks.machine import Setting
from benchmarks.operands import dense_problem
from moonpoly_ort import devices, native, packs


@pytest.fixture(scope="module")
def setting() -> Setting:
    device, pack = devices.lookup("H200"), native.Pack(packs.catalog(90))

    def plan(p: native.Problem, kernel: int = -1, split: int = 0, flags: int = 0) -> native.Plan:
        return pack.plan(device, p, kernel=kernel, split=split, flags=flags)

    return cast(Setting, SimpleNamespace(pack=pack, device=device, plan=plan))


def test_means_only_ever_help(setting: Setting) -> None:
    for shape in ablation.shapes(1, 20):
        found = ablation.plans(setting, shape.problem())
        predicted = [found[name].predicted_us for name in ablation.MEANS if name in found]
        assert predicted == sorted(predicted, reverse=True)
        assert found["one kernel"].region_count == 1
        assert found["one kernel"].regions[0].split == 1


def test_in_turn_is_the_same_plan_without_overlap(setting: Setting) -> None:
    # No persistent kernel takes a transposed A.
    plan = setting.plan(dense_problem(1464, 4096, 4096, "f16", "tn"))
    assert [r.joins_previous for r in plan.regions] == [0, 1]
    copy = ablation.in_turn(plan)
    assert [r.joins_previous for r in copy.regions] == [0, 0]
    assert [r.kernel for r in copy.regions] == [r.kernel for r in plan.regions]
    assert "&" in ablation.described(setting, plan)
    assert " + " in ablation.described(setting, copy)


def test_the_chains_regions_are_apart(setting: Setting) -> None:
    for m, rows, width in ablation.CHAINS:
        plan = ablation.side_by_side(setting, dense_problem(m, width, width, "f16"), rows)
        first, second = plan.regions
        assert (first.m0, first.m, second.m0, second.m) == (0, rows, rows, m - rows)
        assert second.split == 3
        assert second.joins_previous
        assert plan.workspace_bytes >= second.workspace_offset + second.workspace_bytes


def row(shape: int, means: str, plan: str, us: float, predicted: float = 1.0) -> dict[str, str]:
    head = dict.fromkeys(ablation.HEAD, "") | {"id": str(shape), "means": means, "plan": plan}
    return head | {"us": str(us), "predicted_us": str(predicted)}


def test_summary_counts_what_each_means_adds() -> None:
    rows = [
        row(1, "one kernel", "a", 8, 8), row(1, "split-K", "b", 4, 2), row(1, "cublas", "", 6),
        row(1, "two regions", "b", 4, 2),
        row(2, "one kernel", "a", 5, 5), row(2, "split-K", "a", 5, 5), row(2, "cublas", "", 5),
        row(2, "two regions", "c", 2.5, 4), row(2, "regions in turn", "d", 5, 4),
    ]  # fmt: skip
    one, split, two, turn = ablation.summary(rows)
    assert (one.shapes, one.chosen) == (2, 0)
    assert (split.shapes, split.chosen) == (2, 1)
    assert split.gain == pytest.approx(2**0.5)
    assert split.gain_chosen == pytest.approx(2)
    assert split.predicted_chosen == pytest.approx(4)
    assert (two.chosen, two.gain_chosen) == (1, pytest.approx(2))
    assert (turn.shapes, turn.gain_chosen) == (1, pytest.approx(0.5))
    assert two.over_cublas == pytest.approx((6 / 4 * 5 / 2.5) ** 0.5)
    assert "two regions" in ablation.table([one, split, two, turn])
