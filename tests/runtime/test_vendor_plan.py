"""When the planner takes cuBLASLt: by its model, by force, and when it must not."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tiny_pack import TinyKernel, checksum, h200, pack_bytes, vendor_costs

from moonpoly_ort import errors, native

VENDOR = native.VENDOR
KERNELS = [
    TinyKernel(family=1, dtype=dtype, precision=precision, bm=64, bn=64, bk=32, align=align,
               cubin=b"code")
    for dtype, precision, align in ((0, 0, 2), (1, 0, 2), (2, 0, 4), (2, 1, 4))
]  # fmt: skip


def pack(
    path: Path, us: float, *, cubins: bool = True, classes: slice = slice(None),
    promise: float = 0.0, margin: float = 1.0, ours: float = 50,
) -> native.Pack:  # fmt: skip
    """Our kernels take `ours` microseconds for everything small, cuBLASLt `us`."""
    costs = vendor_costs(us)[classes]
    for cost in costs:
        cost.margin = margin
        cost.promise.nodes[:] = [promise] * len(cost.promise.nodes)
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=1e9, launch_us=1e-6)
    own = [
        native.Cost(fixed_us=ours, step_us=1e-6, single_step_us=1e-6, blocks_per_sm=1)
        for _ in KERNELS
    ]
    kernels = KERNELS if cubins else [
        TinyKernel(family=1, dtype=k.dtype, precision=k.precision, bm=64, bn=64, bk=32,
                   align=k.align) for k in KERNELS
    ]  # fmt: skip
    path.write_bytes(pack_bytes(kernels, tables=[(table, own)], vendor=costs))
    return native.Pack(path)


def matmul(m: int = 64, n: int = 64, k: int = 64, dtype: int = 0) -> native.Problem:
    return native.matmul_problem((m, k), (k, n), native.Dtype(dtype))[0]


def chosen(opened: native.Pack, problem: native.Problem, **options: int) -> int:
    return int(opened.plan(h200(), problem, **options).regions[0].kernel)


def test_the_faster_prediction_wins(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 40) as fast, pack(tmp_path / "b.mpk", 60) as slow:
        for dtype in native.Dtype:
            assert chosen(fast, matmul(dtype=dtype)) == VENDOR
            assert chosen(slow, matmul(dtype=dtype)) >= 0
        plan = fast.plan(h200(), matmul(40, 72, 24))
        assert plan.measured
        assert plan.counters == 0
        assert plan.predicted_us == plan.regions[0].predicted_us == pytest.approx(40, rel=1e-3)
        (region,) = plan.regions
        assert (region.m0, region.m, region.n0, region.n, region.z0, region.z) == (
            0,
            40,
            0,
            72,
            0,
            1,
        )
        assert (region.split, region.grid, region.counters) == (1, 1, 0)
        assert plan.workspace_bytes == region.workspace_bytes == (32 << 20) + 256


def test_a_tie_and_less_than_the_margin_stay_ours(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 40, margin=1.2) as near:
        assert chosen(near, matmul()) == VENDOR
    with pack(tmp_path / "b.mpk", 40, margin=1.3) as nearer:
        assert chosen(nearer, matmul()) >= 0


def test_what_the_host_takes_counts(tmp_path: Path) -> None:
    """A call of the library keeps the host as busy as 7.5 us keep the GPU, however short it is."""
    with pack(tmp_path / "a.mpk", 1, ours=7) as short:
        assert chosen(short, matmul()) >= 0
    with pack(tmp_path / "b.mpk", 1, ours=8) as longer:
        assert chosen(longer, matmul()) == VENDOR
    with pack(tmp_path / "c.mpk", 8.5, ours=8) as slower:
        assert chosen(slower, matmul()) >= 0


def test_promises_are_corrected_before_they_are_compared(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 60, promise=0.3) as opened:  # ours take exp(0.3) times as long
        assert chosen(opened, matmul()) == VENDOR
    with pack(tmp_path / "b.mpk", 40, promise=-0.3) as opened:
        assert chosen(opened, matmul()) >= 0


def test_it_is_not_taken_where_it_was_not_measured(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 1) as opened:
        assert chosen(opened, matmul()) == VENDOR
        other = h200(sm_count=114)
        assert opened.plan(other, matmul()).regions[0].kernel >= 0
        other = h200()
        other._name = b"NVIDIA H100"
        assert opened.plan(other, matmul()).regions[0].kernel >= 0
    with pack(tmp_path / "b.mpk", 1, classes=slice(16, None)) as without_f16:
        assert chosen(without_f16, matmul(dtype=0)) >= 0
        assert chosen(without_f16, matmul(dtype=1)) == VENDOR


def test_the_flag_and_forced_choices_keep_it_out(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 1) as opened:
        assert chosen(opened, matmul(), flags=native.PlanFlag.NO_VENDOR) >= 0
        assert chosen(opened, matmul(), kernel=0) == 0
        assert chosen(opened, matmul(), split=1) >= 0
        forced = opened.plan(h200(), matmul(), kernel=VENDOR, flags=native.PlanFlag.NO_VENDOR)
        assert forced.regions[0].kernel == VENDOR


def test_catalogs_never_take_it_but_tell_its_time(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 1, cubins=False) as catalog:
        assert chosen(catalog, matmul()) >= 0
        forced = catalog.plan(h200(), matmul(), kernel=VENDOR)
        assert forced.predicted_us == pytest.approx(1, rel=1e-3)


def test_without_a_model_a_forced_plan_promises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.mpk"
    path.write_bytes(pack_bytes(KERNELS))
    with native.Pack(path) as opened:
        plan = opened.plan(h200(), matmul(), kernel=VENDOR)
        assert (plan.regions[0].kernel, plan.predicted_us, plan.measured) == (VENDOR, 0, False)


def test_empty_products_have_no_regions(tmp_path: Path) -> None:
    with pack(tmp_path / "a.mpk", 1) as opened:
        for shape in ((0, 4, 4), (4, 0, 4)):
            assert opened.plan(h200(), matmul(*shape)).region_count == 0
            assert opened.plan(h200(), matmul(*shape), kernel=VENDOR).region_count == 0
        assert chosen(opened, matmul(4, 4, 0)) >= 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", 7, "an unknown class"), ("aligned", 2, "an unknown class"),
        ("tile_count", 0, "too few or too many tiles"),
        ("tile_count", 9, "too few or too many tiles"),
        ("margin", float("nan"), "not finite or negative"),
        ("fixed_us", -1.0, "not finite or negative"),
        ("bandwidth_gbps", 0.0, "not finite or negative"),
    ],
)  # fmt: skip
def test_an_impossible_model_is_refused(
    tmp_path: Path, field: str, value: float, message: str
) -> None:
    costs = vendor_costs(1)
    setattr(costs[5], field, value)
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e3, launch_us=1)
    path = tmp_path / "a.mpk"
    zeros = [native.Cost() for _ in KERNELS]
    path.write_bytes(pack_bytes(KERNELS, tables=[(table, zeros)], vendor=costs))
    with pytest.raises(errors.PackError, match=rf"table 0 has a model of cuBLASLt .*{message}"):
        native.Pack(path)


def test_factors_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    costs = vendor_costs(1)
    costs[3].promise.nodes[7] = float("inf")
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e3, launch_us=1)
    path = tmp_path / "a.mpk"
    zeros = [native.Cost() for _ in KERNELS]
    path.write_bytes(pack_bytes(KERNELS, tables=[(table, zeros)], vendor=costs))
    with pytest.raises(errors.PackError, match="a factor that is not finite"):
        native.Pack(path)


def test_a_table_that_says_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e3, launch_us=1)
    zeros = [native.Cost() for _ in KERNELS]
    path = tmp_path / "a.mpk"
    data = bytearray(pack_bytes(KERNELS, tables=[(table, zeros)], vendor=[]))
    header = native.PackHeader.from_buffer(data)
    at = header.tables_offset + native.Table.vendor_count.offset
    for count in (-1, 90, 97, 2**31 - 1):
        ctypes.c_int32.from_buffer(data, at).value = count
        header.checksum = checksum(bytes(data[header.header_bytes :]))
        path.write_bytes(bytes(data))
        with pytest.raises(errors.PackError, match="table 0 lies outside the file"):
            native.Pack(path)


def test_several_tables_are_walked_by_their_own_lengths(tmp_path: Path) -> None:
    """Tables with and without a model in one pack: each GPU finds its own."""
    first = native.Table(gpu=b"GPU A", sm_count=10, bandwidth_gbps=4e3, launch_us=1)
    second = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e3, launch_us=1)
    zeros = [native.Cost() for _ in KERNELS]
    path = tmp_path / "a.mpk"
    path.write_bytes(
        pack_bytes(KERNELS, tables=[(first, zeros), (second, zeros)], vendor=vendor_costs(1e-3))
    )
    with native.Pack(path) as opened:
        assert chosen(opened, matmul(2048, 2048, 4096)) == VENDOR
