"""Regions that run side by side: what their kernels are told of each other, and that no order of
events that programmatic dependent launch allows breaks a dependence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tiny_pack as tp
from cases_launch import Case
from fake_gpu import Aligned, driver, execute, launches, write_fake_pack

from moonpoly_ort import errors, native

IN_TURN, LETS_NEXT_JOIN, JOINS_PREVIOUS = 0, 1, 2


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[native.Pack]:
    with native.Pack(write_fake_pack(tmp_path_factory.mktemp("pack") / "sm_90.mpk")) as opened:
        yield opened


@pytest.fixture(scope="module")
def launcher(pack: native.Pack) -> Iterator[native.Launcher]:
    with native.Launcher(pack, 1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def clean() -> None:
    driver.fake_set_context(-1)
    driver.fake_reset()


def kernel_of(pack: native.Pack, family: native.Family, split: bool) -> int:
    return next(
        i for i, k in enumerate(pack.kernels)
        if (k.family, k.dtype, k.trans_a, k.trans_b, k.bm, k.bias_matrix) == (family, 0, 0, 0, 64,
            family == native.Family.GEMM_TMA) and bool(k.split_k) == split
    )  # fmt: skip


def cut(pack: native.Pack, case: Case, parts: list[tuple[int, int, int, bool]]) -> native.Plan:
    """A plan of (rows, kernel, split, joins the one before)."""
    device = native.device_query(1)
    plan = native.Plan()
    m0 = workspace = counters = 0
    for i, (m, kernel, split, joins) in enumerate(parts):
        part = native.Problem.from_buffer_copy(case.problem)
        part.m = m
        (region,) = pack.plan(device, part, kernel=kernel, split=split).regions
        if not joins:
            workspace = counters = 0
        region.m0, region.joins_previous = m0, joins
        region.workspace_offset, region.counters_offset = workspace, counters
        m0 += m
        workspace += -(-region.workspace_bytes // 256) * 256
        counters += region.counters
        plan.workspace_bytes = max(plan.workspace_bytes, workspace)
        plan.counters = max(plan.counters, counters)
        plan._regions[i] = region
    plan.region_count = len(parts)
    return plan


def orders(pack: native.Pack, plan: native.Plan) -> list[int | None]:
    """The order that each launch was given; None for a kernel that takes none."""
    values = [
        launch.decode(pack.kernels[region.kernel])
        for launch, region in zip(launches(), plan.regions, strict=True)
    ]
    return [v[tp.ORDER][0] if tp.ORDER in v else None for v in values]  # type: ignore[misc]


TMA, POINTER, WS = native.Family.GEMM_TMA, native.Family.GEMM_POINTER, native.Family.GEMM_WS


@pytest.mark.parametrize(
    ("families", "joins", "expected"),
    [
        ((TMA, TMA), (False, True), [LETS_NEXT_JOIN, JOINS_PREVIOUS]),
        ((TMA, TMA), (False, False), [IN_TURN, IN_TURN]),
        ((TMA, TMA, TMA), (False, True, True), [LETS_NEXT_JOIN, JOINS_PREVIOUS, JOINS_PREVIOUS]),
        ((TMA, TMA, TMA), (False, True, False), [LETS_NEXT_JOIN, JOINS_PREVIOUS, IN_TURN]),
        # A kernel that is not launched early cannot join, nor can one behind it.
        ((POINTER, TMA), (False, True), [None, IN_TURN]),
        ((TMA, POINTER), (False, True), [IN_TURN, None]),
        ((WS, TMA, TMA), (False, True, True), [None, LETS_NEXT_JOIN, JOINS_PREVIOUS]),
    ],
)
def test_orders(
    pack: native.Pack, launcher: native.Launcher, families: tuple[native.Family, ...],
    joins: tuple[bool, ...], expected: list[int | None],
) -> None:  # fmt: skip
    case = Case(64 * len(families), 128, 256)
    parts = [
        (64, kernel_of(pack, family, False), 1, join)
        for family, join in zip(families, joins, strict=True)
    ]
    plan = cut(pack, case, parts)
    case.run(launcher, pack, plan)
    assert orders(pack, plan) == expected


def test_regions_side_by_side_have_scratch_of_their_own(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    case = Case(192, 128, 512)
    split = kernel_of(pack, TMA, True)
    plan = cut(pack, case, [(128, split, 2, False), (64, split, 4, True)])
    counters = Aligned(np.zeros(plan.counters, np.int32))
    workspace = Aligned(np.zeros(plan.workspace_bytes, np.uint8))
    launcher.launch(
        case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address,
        workspace=workspace.address, counters=counters.address,
    )  # fmt: skip
    spans = []
    for launch, region in zip(launches(), plan.regions, strict=True):
        v = execute(launch, pack.kernels[region.kernel])
        (start,), (flags,) = v[tp.PTR_WORKSPACE], v[tp.PTR_COUNTERS]
        spans.append((start, start + region.workspace_bytes, flags, flags + 4 * region.counters))
    assert spans[0][:1] + spans[0][2:3] == (workspace.address, counters.address)
    assert spans[1][0] >= spans[0][1]
    assert spans[1][2] >= spans[0][3]
    assert spans[1][1] <= workspace.address + plan.workspace_bytes
    assert spans[1][3] <= counters.address + 4 * plan.counters


def test_plans_that_would_race_are_refused(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(192, 128, 512)
    split = kernel_of(pack, TMA, True)
    parts = [(128, split, 2, False), (64, split, 4, True)]
    at = {"a": case.a.address, "b": case.b.address, "y": case.y.address,
          "workspace": 0x10000, "counters": 0x10000}  # fmt: skip

    def refused(message: str, **changes: int) -> None:
        plan = cut(pack, case, parts)
        for field, value in changes.items():
            setattr(plan._regions[1], field, value)
        with pytest.raises(errors.ProblemError, match=message):
            launcher.launch(case.problem, plan, **at)
        assert not launches()

    refused("regions 0 and 1 run side by side, yet write the same part", m0=64)
    refused("yet share workspace or counters", workspace_offset=0)
    refused("yet share workspace or counters", counters_offset=0)
    refused("do not lie within the plan's", workspace_offset=1 << 40)
    refused("do not lie within the plan's", workspace_offset=-256)
    refused("do not lie within the plan's", counters_offset=1 << 20)
    plan = cut(pack, case, parts)
    plan._regions[0].joins_previous = 1
    with pytest.raises(errors.ProblemError, match="region 0 has none before it"):
        launcher.launch(case.problem, plan, **at)
    # One after another they may share.
    plan = cut(pack, case, parts)
    plan._regions[1].joins_previous = plan._regions[1].workspace_offset = 0
    launcher.launch(case.problem, plan, **at)
    assert len(launches()) == 2


@pytest.mark.parametrize(
    ("family", "split", "changes", "message"),
    [
        (TMA, 2, {"grid": 13}, "13 blocks do not fit"),
        (TMA, 2, {"grid": 5}, "5 blocks do not fit"),
        (TMA, 2, {"split": 3}, "in 3 slices, which 12 blocks do not fit"),
        (TMA, 2, {"split": 1}, "cannot cut 8 K steps into 1 slices"),
        (TMA, 2, {"split": 9, "grid": 54}, "cannot cut 8 K steps into 9 slices"),
        (TMA, 2, {"split": -2}, "into -2 slices"),
        (TMA, 2, {"workspace_bytes": 64}, "needs 12 x 16384 bytes of workspace and 6 counters"),
        (TMA, 2, {"workspace_bytes": 0}, "not 0 and 6"),
        (TMA, 2, {"counters": 5}, "not 196608 and 5"),
        (TMA, 1, {"grid": 1}, "1 blocks do not fit"),
        (TMA, 1, {"split": 2, "grid": 12}, "into 2 slices"),
        (POINTER, 1, {"grid": 2**31 - 1}, "blocks do not fit"),
        (TMA, 1, {"n": 124}, "which this part of them is not"),
        (WS, 1, {"n0": 4, "n": 124}, "which this part of them is not"),
        (WS, 1, {"grid": 7}, "7 blocks do not fit"),
        (WS, 2, {"grid": 13}, "13 blocks do not fit"),
        (WS, 2, {"counters": 1}, "counters, not"),
    ],
)
def test_regions_that_their_kernel_would_overrun_are_refused(
    pack: native.Pack, launcher: native.Launcher, family: native.Family, split: int,
    changes: dict[str, int], message: str,
) -> None:  # fmt: skip
    case = Case(192, 128, 512)
    plan = cut(pack, case, [(192, kernel_of(pack, family, split > 1), split, False)])
    for field, value in changes.items():
        setattr(plan._regions[0], field, value)
    with pytest.raises(errors.ProblemError, match=message):
        launcher.launch(
            case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address,
            workspace=0x10000, counters=0x10000,
        )  # fmt: skip
    assert not launches()


def test_slices_that_leave_blocks_over_are_refused(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    """Blocks beyond tiles * split would take tiles that are not there."""
    index = next(i for i, k in enumerate(pack.kernels) if k.sliced and not k.trans_b)
    case = Case(256, 128, 512, dtype=native.Dtype(pack.kernels[index].dtype))
    plan = pack.plan(native.device_query(1), case.problem, kernel=index, split=2)
    assert plan._regions[0].grid == 8
    for grid in (7, 9):
        plan._regions[0].grid = grid
        with pytest.raises(errors.ProblemError, match=f"{grid} blocks do not fit"):
            launcher.launch(
                case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address,
                workspace=0x10000, counters=0x10000,
            )  # fmt: skip


# ---- the order of events ----


@dataclass
class Running:
    """A kernel on the GPU, by the rules of programmatic dependent launch, at its worst: it starts
    as early as it may, and the time it takes is arbitrary."""

    touches: float  # from here on it reads and writes memory
    triggered: float  # all of its blocks have let the next kernel start
    ended: float


def simulate(given: list[tuple[int | None, bool, float]]) -> list[Running]:
    """(order, launched early, time it takes) of the kernels of a stream."""
    before = Running(0, 0, 0)
    done: list[Running] = []
    for order, early, duration in given:
        start = before.triggered if early else before.ended
        waited = max(start, before.ended)
        touches = start if order == JOINS_PREVIOUS else waited
        ended = touches + duration
        triggered = waited if order == LETS_NEXT_JOIN else start
        if order is None:  # it has no trigger: it lets the next one start when it ends
            triggered = ended
        if order == JOINS_PREVIOUS:
            ended = max(ended, before.ended)
        before = Running(touches, triggered, ended)
        done.append(before)
    return done


def test_no_plan_starts_before_the_one_in_front_has_ended(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    """Plans on one stream, each of which reads what the one before wrote."""
    generator = random.Random(7)
    kernels = [kernel_of(pack, family, False) for family in (TMA, TMA, TMA, POINTER, WS)]
    side_by_side = 0
    for _ in range(60):
        given: list[tuple[int | None, bool, float]] = []
        owner: list[int] = []
        for number in range(5):
            count = generator.choice([1, 2, 2, 3])
            case = Case(64 * count, 128, 64)
            plan = cut(
                pack, case,
                [(64, generator.choice(kernels), 1, i > 0 and generator.random() < 0.8)
                 for i in range(count)],
            )  # fmt: skip
            driver.fake_reset()
            case.run(launcher, pack, plan)
            for i, order in enumerate(orders(pack, plan)):
                early = bool(driver.fake_launched_early(i))
                given.append((order, early, generator.choice([0.1, 1, 10])))
                owner.append(number)
        ran = simulate(given)
        for i, one in enumerate(ran):
            for j in range(i):
                if owner[j] != owner[i]:
                    assert one.touches >= ran[j].ended
                elif one.touches < ran[j].ended:
                    side_by_side += 1
    assert side_by_side > 20  # it does overlap


def test_the_model_tells_a_race() -> None:
    """Were the first region to let the second one start before its own wait, as single kernels do,
    the second one would read what is not yet written."""
    ran = simulate([(IN_TURN, True, 10), (IN_TURN, True, 1), (JOINS_PREVIOUS, True, 1)])
    assert ran[2].touches < ran[0].ended
    ran = simulate([(IN_TURN, True, 10), (LETS_NEXT_JOIN, True, 1), (JOINS_PREVIOUS, True, 1)])
    assert ran[2].touches >= ran[0].ended
