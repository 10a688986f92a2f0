"""Plans of two regions, by the kernels of the real packs."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import assert_covers_once, problem

from moonpoly_ort import devices, native, packs
from moonpoly_ort.native import PlanFlag
from tests.catalogs import one_tile_a_block


@cache
def catalog(sm: int) -> native.Pack:
    return native.Pack(packs.catalog(sm))


def small_h200(sm_count: int = 6) -> native.Device:
    """An H200 with few SMs: small products then take several waves."""
    device = devices.lookup("H200")
    device.sm_count = sm_count
    return device


SIZE = st.one_of(st.integers(1, 700), st.integers(1, 12000))


@st.composite
def products(draw: st.DrawFn) -> native.Problem:
    dtype = draw(st.sampled_from(list(native.Dtype)))
    batch = draw(st.sampled_from([1, 1, 1, 12, 97]))
    multiple = draw(st.sampled_from([8, 8, 8, 1]))
    m, n, k = (draw(SIZE) * multiple for _ in range(3))
    align = 16 if multiple == 8 else dtype_bytes(dtype)
    return problem(
        m, n, k, dtype=dtype, batch=batch, a_mod=batch, b_mod=draw(st.sampled_from([1, batch])),
        trans_a=draw(st.integers(0, 1)), trans_b=draw(st.integers(0, 1)),
        align_a=align, align_b=align, align_c=align,
    )  # fmt: skip


def dtype_bytes(dtype: native.Dtype) -> int:
    return 4 if dtype == native.Dtype.F32 else 2


def apart(a: int, a_size: int, b: int, b_size: int) -> bool:
    return a + a_size <= b or b + b_size <= a


def assert_scratch_is_apart(plan: native.Plan) -> None:
    for before, region in zip([None, *plan.regions], plan.regions, strict=False):
        assert region.workspace_offset % 256 == 0
        assert region.workspace_offset + region.workspace_bytes <= max(
            plan.workspace_bytes, region.workspace_offset
        )
        if not region.joins_previous:
            assert (region.workspace_offset, region.counters_offset) == (0, 0)
            continue
        assert before is not None
        assert apart(region.workspace_offset, region.workspace_bytes,
                     before.workspace_offset, before.workspace_bytes)  # fmt: skip
        assert apart(region.counters_offset, region.counters,
                     before.counters_offset, before.counters)  # fmt: skip
    assert plan.workspace_bytes == max(
        [
            *(r.workspace_offset + r.workspace_bytes for r in plan.regions if r.workspace_bytes),
            *(copy.offset + copy.bytes for _, copy in plan.copies),
        ],
        default=0,
    )
    assert plan.counters == max(
        (r.counters_offset + r.counters for r in plan.regions if r.counters), default=0
    )


def can_join(kernel: native.KernelRecord) -> bool:
    joining = (native.Family.GEMM_TMA, native.Family.GEMM_TMA_MASKED)
    return bool(kernel.dependent_launch) and kernel.family in joining


def regions_us(plan: native.Plan) -> float:
    return sum(region.predicted_us for region in plan.regions)


@settings(max_examples=300, deadline=None)
@given(
    p=products(),
    gpu=st.sampled_from(["H200", "few SMs", "A100-80GB", "RTX 4090", "B200"]),
    persistent=st.booleans(),
)
def test_two_regions_cover_the_output_once(p: native.Problem, gpu: str, persistent: bool) -> None:
    device = small_h200() if gpu == "few SMs" else devices.lookup(gpu)
    pack = catalog(device.sm) if persistent or device.sm != 90 else one_tile_a_block(90)
    plan = pack.plan(device, p)
    one = pack.plan(device, p, flags=PlanFlag.NO_REGIONS)
    assert plan.region_count <= 2
    assert one.region_count == 1
    assert_covers_once(p, plan)
    assert_scratch_is_apart(plan)
    if plan.region_count == 1:
        assert bytes(plan) == bytes(one)
        return
    first, second = plan.regions
    # A copy in front costs as much with one region behind it as with two.
    assert plan.predicted_us <= one.predicted_us
    if [operand for operand, _ in plan.copies] == [operand for operand, _ in one.copies]:
        assert regions_us(plan) <= 0.95 * regions_us(one)
    if not plan.copies:
        assert plan.predicted_us == pytest.approx(regions_us(plan))
    last = pack.kernels[second.kernel]
    tiles = -(-second.m // last.bm) * -(-second.n // last.bn) * second.z
    assert not last.sliced or second.grid == tiles * second.split
    assert min(first.predicted_us, second.predicted_us) > 0
    assert first.split == 1
    assert not first.joins_previous
    # They run side by side where both are launched early, which is on sm_90 alone.
    both = all(can_join(pack.kernels[r.kernel]) for r in plan.regions)
    assert bool(second.joins_previous) == both
    assert not both or device.sm == 90
    # The cut is where the first kernel's tiles end, so that operands stay aligned.
    kernel = pack.kernels[first.kernel]
    assert (second.m0, second.n0, second.z0).count(0) == 2
    assert second.m0 % kernel.bm == 0
    assert second.n0 % kernel.bn == 0


@settings(max_examples=200, deadline=None)
@given(p=products(), flags=st.integers(0, 15))
def test_flags_rule_out_what_they_say(p: native.Problem, flags: int) -> None:
    device, pack = devices.lookup("H200"), catalog(90)
    plan = pack.plan(device, p, flags=flags)
    assert not flags & PlanFlag.NO_REGIONS or plan.region_count == 1
    for region in plan.regions:
        if region.split > 1:
            stream = pack.kernels[region.kernel].persistent
            assert not flags & (PlanFlag.NO_STREAM if stream else PlanFlag.NO_SPLIT)
    # Means given up never make a plan better.
    assert plan.predicted_us >= pack.plan(device, p).predicted_us * (1 if flags & 2 else 0.95)


@pytest.mark.parametrize(
    ("m", "n", "k", "batch", "dtype", "sm_count"),
    [
        (864, 2912, 6560, 2, native.Dtype.F16, 132),
        (2128, 2096, 2976, 1, native.Dtype.F32, 132),
        (496, 10512, 9504, 1, native.Dtype.F32, 132),
        (96, 2336, 10112, 2, native.Dtype.BF16, 6),
    ],
)
def test_slices_of_a_second_region_are_all_resident(
    m: int, n: int, k: int, batch: int, dtype: native.Dtype, sm_count: int
) -> None:
    """A sliced kernel divides its grid by its tiles: blocks left over would take tiles that are not
    there, and write them behind Y.
    """
    pack = catalog(90)
    p = problem(m, n, k, dtype=dtype, batch=batch, a_mod=batch, b_mod=batch, trans_b=1)
    plan = pack.plan(small_h200(sm_count), p)
    assert_covers_once(p, plan)
    for r in plan.regions:
        kernel = pack.kernels[r.kernel]
        tiles = -(-r.m // kernel.bm) * -(-r.n // kernel.bn) * r.z
        assert not kernel.sliced or r.grid == tiles * r.split


def test_a_last_wave_is_filled_by_a_second_kernel() -> None:
    """384 tiles of 128x128 are 2.9 waves; 132 of 128x256 and 120 of 128x128 fill two."""
    device, pack = devices.lookup("H200"), one_tile_a_block(90)
    p = problem(1500, 4096, 4096)
    plan = pack.plan(device, p)
    first, second = plan.regions
    assert first.grid == 132
    assert second.joins_previous
    assert second.n0 == first.n
    assert pack.plan(device, p, split=1).region_count == 1
    assert pack.plan(device, p, kernel=first.kernel).region_count == 1


def test_without_early_launch_regions_run_one_after_another() -> None:
    device, pack = devices.lookup("A100-80GB"), catalog(80)
    plan = pack.plan(device, problem(1000, 4096, 11008))
    first, second = plan.regions
    assert not second.joins_previous
    assert second.workspace_offset == 0
    # Nothing hides the second launch.
    assert second.predicted_us > 1
    assert first.grid % 108 == 0


def test_batch_entries_are_cut_at_whole_waves() -> None:
    """150 products of one 128x128 tile: a wave of 132, and 18 by smaller tiles."""
    device, pack = devices.lookup("H200"), one_tile_a_block(90)
    p = problem(256, 128, 8192, batch=70, a_mod=70, b_mod=70)
    plan = pack.plan(device, p)
    assert plan.region_count == 2
    assert plan.regions[1].z0 == plan.regions[0].z
    assert_covers_once(p, plan)


def test_no_workspace_for_split_regions_is_shared() -> None:
    """Some two-region plan splits K in its second region, and its memory is its own."""
    device, pack = devices.lookup("H200"), one_tile_a_block(90)
    split = [
        plan.regions[1]
        for m in range(1000, 5000, 104)
        if (plan := pack.plan(device, problem(m, 768, 3072))).region_count == 2
        and plan.regions[1].split > 1
    ]
    assert split
    assert all(r.workspace_bytes > 0 and r.counters > 0 and r.joins_previous for r in split)
