"""The analytic model on GPUs that are known by their attributes alone: its choices can be launched
there, and none is absurd.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import assert_covers_once, problem
from test_regions import products

from moonpoly_ort import devices, native, packs
from moonpoly_ort.errors import MoonPolyError
from moonpoly_ort.native import PlanFlag

GPUS = ("A100-80GB", "L4", "RTX 4090", "H100", "B200", "RTX 4060 Laptop")
# Dense fp16 multiply-adds per clock and SM, by the vendor's data sheets.
F16_RATE = {80: 1024, 86: 512, 89: 512, 90: 2048, 100: 4096, 120: 512}


@cache
def catalog(sm: int) -> native.Pack:
    return native.Pack(packs.catalog(sm))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def assert_launchable(device: native.Device, kernel: native.KernelRecord, r: native.Region) -> None:
    assert kernel.shared_bytes <= device.shared_per_block
    assert kernel.shared_bytes + 1024 <= device.shared_per_sm
    assert 32 * kernel.warps <= min(1024, device.threads_per_sm)
    assert kernel.registers * 32 * kernel.warps <= device.registers_per_sm
    assert kernel.registers <= 255
    assert native.blocks_per_sm(kernel, device) >= 1
    assert 1 <= r.grid < 2**31
    assert 0 <= r.workspace_bytes <= 256 << 20
    assert kernel.family != native.Family.GEMM_TMA or device.sm >= 90
    assert kernel.family != native.Family.GEMM_WS or device.sm == 90


def floor_us(device: native.Device, p: native.Problem) -> float:
    """No GPU of these attributes is faster: its multipliers or its memory set the limit."""
    size = 4 if p.dtype == native.Dtype.F32 else 2
    rate = F16_RATE[device.sm] / (2 if p.dtype == native.Dtype.F32 else 1)
    multiply = p.m * p.n * p.k * p.batch / (rate * device.sm_count * device.clock_mhz)
    moved = (p.m * p.k + p.k * p.n + p.batch * p.m * p.n) * size
    return max(multiply, moved / (device.bandwidth_gbps * 1e3))


@settings(max_examples=300, deadline=None)
@given(gpu=st.sampled_from(GPUS), p=products())
def test_choices_can_be_launched(gpu: str, p: native.Problem) -> None:
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    plan = pack.plan(device, p)
    assert not plan.measured
    assert_covers_once(p, plan)
    for region in plan.regions:
        assert_launchable(device, pack.kernels[region.kernel], region)
    assert math.isfinite(plan.predicted_us)
    assert plan.predicted_us >= floor_us(device, p)


@settings(max_examples=60, deadline=None)
@given(gpu=st.sampled_from(GPUS), p=products())
def test_no_forced_kernel_is_predicted_to_be_faster(gpu: str, p: native.Problem) -> None:
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    chosen = pack.plan(device, p, flags=PlanFlag.NO_REGIONS)
    tried = 0
    for index, kernel in enumerate(pack.kernels):
        if (kernel.dtype, kernel.trans_a, kernel.trans_b) != (p.dtype, p.trans_a, p.trans_b):
            continue
        if kernel.family == native.Family.COPY_PADDED:
            continue  # forced by copying what needs no copy
        try:
            forced = pack.plan(device, p, kernel=index)
        except MoonPolyError:
            continue
        tried += 1
        assert forced.predicted_us >= chosen.predicted_us * (1 - 1e-9)
    assert tried >= 2


@settings(max_examples=300, deadline=None)
@given(
    gpu=st.sampled_from(GPUS), dtype=st.sampled_from(list(native.Dtype)), m=st.integers(1, 4096),
    n=st.integers(1, 1024), k=st.integers(1, 1024), trans_b=st.integers(0, 1),
)  # fmt: skip
def test_no_choice_is_absurd(
    gpu: str, dtype: native.Dtype, m: int, n: int, k: int, trans_b: int
) -> None:
    n, k = 8 * n, 8 * k
    p = problem(m, n, k, dtype=dtype, trans_b=trans_b)
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    plan = pack.plan(device, p)
    # Within 8 times what no GPU can beat, plus what even an empty product takes.
    assert plan.predicted_us <= 8 * floor_us(device, p) + 12
    for r in plan.regions:
        kernel = pack.kernels[r.kernel]
        # Tiles are not mostly outside of the matrix, but for sides shorter than most tiles.
        rows, columns = ceil_div(r.m, kernel.bm) * kernel.bm, ceil_div(r.n, kernel.bn) * kernel.bn
        assert rows * columns <= 2.1 * max(r.m, 128) * max(r.n, 128)
        # K is cut only where the device is not full without.
        tiles = ceil_div(r.m, kernel.bm) * ceil_div(r.n, kernel.bn)
        slots = device.sm_count * native.blocks_per_sm(kernel, device)
        assert r.split == 1 or kernel.persistent or tiles <= slots


@pytest.mark.parametrize("gpu", GPUS)
def test_large_products_take_large_tiles(gpu: str) -> None:
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    plan = pack.plan(device, problem(8192, 8192, 8192))
    kernel = pack.kernels[plan.regions[0].kernel]
    assert kernel.bm * kernel.bn >= 128 * 128
    assert plan.regions[0].split == 1
    assert plan.predicted_us <= 2 * floor_us(device, problem(8192, 8192, 8192))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("m", [1, 8, 16])
def test_few_rows_stream_the_weight(gpu: str, m: int) -> None:
    """A product that only reads a large weight: thin tiles, all SMs at it, near the bandwidth."""
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    p = problem(m, 8192, 8192)
    plan = pack.plan(device, p)
    (region,) = plan.regions
    assert pack.kernels[region.kernel].bm <= 32
    assert region.grid >= 0.8 * device.sm_count
    assert plan.predicted_us <= 1.6 * floor_us(device, p) + 5
