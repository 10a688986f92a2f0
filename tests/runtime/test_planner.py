from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pack import TinyKernel, h200, pack_bytes, standard_kernels, unaligned_kernels

from moonpoly_ort import devices, errors, native, packs, tables

SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(1, 70000),
    st.sampled_from([0, 2**31 - 1025, 2**31 - 1024, 2**31, 3 * 2**31, 2**33]),
)


def problem(m: int, n: int, k: int, **changes: float) -> native.Problem:
    trans_a, trans_b = changes.get("trans_a", 0), changes.get("trans_b", 0)
    fields = {
        "m": m, "n": n, "k": k, "batch": 1,
        "lda": m if trans_a else k, "ldb": k if trans_b else n, "ldc": n,
        "a_batch_stride": m * k, "b_batch_stride": k * n, "c_batch_stride": m * n,
        "a_div": 1, "a_mod": 1, "b_div": 1, "b_mod": 1,
        "align_a": 16, "align_b": 16, "align_c": 16, "alpha": 1.0, "beta": 1.0,
    }  # fmt: skip
    return native.Problem(**(fields | changes))


TENSOR_MAPS = (native.Family.GEMM_TMA, native.Family.GEMM_WS, native.Family.GEMM_TMA_MASKED)
"""The families whose operands cannot be empty."""


@st.composite
def problems(draw: st.DrawFn) -> native.Problem:
    dtype = draw(st.sampled_from(list(native.Dtype)))
    element = 4 if dtype == native.Dtype.F32 else 2
    aligns = st.sampled_from([a for a in (2, 4, 8, 16) if a >= element])
    m, n = draw(SIZES), draw(SIZES)
    batch = draw(st.sampled_from([1, 1, 2, 17, 4096, 2**31 - 513])) if m * n < 2**32 else 1
    bias = draw(st.sampled_from(list(native.Bias)))
    vector = draw(st.sampled_from([(0, 0), (0, 1), (1, 0)]))
    return problem(
        m, n, draw(st.one_of(st.integers(0, 200), st.integers(0, 2**31 - 513))),
        dtype=dtype,
        precision=draw(st.integers(0, 1)) if dtype == native.Dtype.F32 else 0,
        trans_a=draw(st.integers(0, 1)), trans_b=draw(st.integers(0, 1)),
        batch=batch, a_mod=batch, b_mod=draw(st.sampled_from([1, batch])),
        align_a=draw(aligns), align_b=draw(aligns), align_c=draw(aligns),
        bias=bias, bias_stride_m=n if bias == native.Bias.MATRIX else vector[0],
        bias_stride_n=1 if bias == native.Bias.MATRIX else vector[1],
    )  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def assert_covers_once(p: native.Problem, plan: native.Plan) -> None:
    """Boxes inside the output, pairwise apart, with the output's volume in sum."""
    spans = [((r.m0, r.m0 + r.m), (r.n0, r.n0 + r.n), (r.z0, r.z0 + r.z)) for r in plan.regions]
    for span in spans:
        for (low, high), size in zip(span, (p.m, p.n, p.batch), strict=True):
            assert 0 <= low < high <= size
    for i, one in enumerate(spans):
        for other in spans[:i]:
            assert any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))
    assert sum(r.m * r.n * r.z for r in plan.regions) == p.m * p.n * p.batch


def assert_kernels_accept(pack: native.Pack, p: native.Problem, plan: native.Plan) -> None:
    for r in plan.regions:
        k = pack.kernels[r.kernel]
        assert (k.dtype, k.trans_a, k.trans_b) == (p.dtype, p.trans_a, p.trans_b)
        assert k.precision == p.precision
        assert k.align_a <= p.align_a
        assert k.align_b <= p.align_b
        assert k.align_c <= p.align_c
        assert p.bias != native.Bias.MATRIX or k.bias_matrix
        assert p.k > 0 or k.family not in TENSOR_MAPS
        assert max(r.m, r.n, r.z) < 2**31
        tiles = ceil_div(r.m, k.bm) * ceil_div(r.n, k.bn) * r.z
        steps = ceil_div(p.k, k.bk)
        if k.persistent:
            slots = 132 * min(
                233472 // (k.shared_bytes + 1024), 65536 // (k.registers * 32 * k.warps)
            )
            assert r.grid == min(tiles * r.split, slots)
            assert not k.sliced or tiles * r.split <= slots
            assert (r.split > 1) == bool(k.split_k)
            assert r.split <= steps
            # A partial tile for each block and a flag for each of its consumers.
            assert r.workspace_bytes == (r.grid * k.bm * k.bn * 4 if k.split_k else 0)
            assert r.counters == (r.grid * (k.warps // 4 - 1) if k.split_k else 0)
            assert not k.split_k or steps * min(tiles, 2 * slots) < 2**31
            assert r.predicted_us > 0
            continue
        assert r.grid == tiles * r.split < 2**31
        if k.split_k:
            assert r.split >= 2
            assert (r.split - 1) * ceil_div(steps, r.split) < steps  # the last slice has work
            assert r.workspace_bytes == r.grid * k.bm * k.bn * 4
            assert r.counters == tiles
        else:
            assert (r.split, r.workspace_bytes, r.counters) == (1, 0, 0)
        assert r.predicted_us > 0


@settings(max_examples=400, deadline=None)
@given(p=problems())
def test_plan_covers_the_output_once(catalog: native.Pack, p: native.Problem) -> None:
    try:
        plan = catalog.plan(h200(), p)
    except errors.MoonPolyError:
        # only outputs beyond every memory: over 16 launches, or more tiles than a grid has blocks
        assert p.m * p.n * p.batch > 2**34
        return
    if 0 in (p.m, p.n, p.batch):
        assert plan.region_count == 0
        return
    assert_covers_once(p, plan)
    assert_kernels_accept(catalog, p, plan)
    assert plan.workspace_bytes >= max(r.workspace_bytes for r in plan.regions)
    assert plan.counters >= max(r.counters for r in plan.regions)
    assert bytes(plan) == bytes(catalog.plan(h200(), p))


def test_rows_beyond_i32_become_regions(catalog: native.Pack) -> None:
    plan = catalog.plan(h200(), problem(2**33 + 5, 64, 64))
    assert [r.m0 for r in plan.regions] == [i * (2**31 - 1024) for i in range(5)]
    assert sum(r.m for r in plan.regions) == 2**33 + 5


def test_batch_is_cut_where_a_grid_would_overflow(catalog: native.Pack) -> None:
    batch = 2**31 - 1000
    plan = catalog.plan(h200(), problem(1024, 16, 8, batch=batch, a_mod=batch, b_mod=batch))
    assert plan.region_count > 1
    assert_covers_once(problem(1024, 16, 8, batch=batch), plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 2**31 - 512}, "K = 2147483136 is too large"),
        ({"m": -1}, "m = -1"),
        ({"dtype": 9}, "dtype code 9"),
        ({"lda": 3}, "lda = 3"),
        ({"a_mod": 0}, r"a = \(1, 0\)"),
        ({"align_a": 6}, "alignment of 6 bytes"),
        ({"bias": 5}, "bias code 5"),
        ({"bias": 1, "bias_stride_n": 4}, "1 and 0, got 0 and 4"),
        ({"batch": 2**31}, "batch of 2147483648"),
        ({"trans_a": 2}, "trans_a = 2"),
    ],
)
def test_illegal_problems(catalog: native.Pack, changes: dict[str, int], message: str) -> None:
    p = problem(64, 64, 64)
    for field, value in changes.items():
        setattr(p, field, value)
    with pytest.raises(errors.ProblemError, match=message):
        catalog.plan(h200(), p)


def test_skinny_products_split_k(catalog: native.Pack) -> None:
    region = catalog.plan(h200(), problem(1, 4096, 11008)).regions[0]
    kernel = catalog.kernels[region.kernel]
    assert kernel.bm == 16
    assert 2 <= region.split <= 8


def test_large_products_take_large_tiles_without_split(catalog: native.Pack) -> None:
    region = catalog.plan(h200(), problem(64 * 132, 8192, 8192)).regions[0]
    kernel = catalog.kernels[region.kernel]
    assert (kernel.bm, kernel.bn, region.split) == (128, 128, 1)


def test_persistent_blocks_stream_what_does_not_fill_the_device(catalog: native.Pack) -> None:
    index, kernel = next(
        (i, k) for i, k in enumerate(catalog.kernels) if k.persistent and k.split_k and k.bm == 128
    )
    for m, grid in ((128 * 10, 10 * 7), (128 * 40, 132), (128 * 132, 132)):
        p = problem(m, 128, 4096)
        plan = catalog.plan(h200(), p, kernel=index, split=7)
        assert plan.regions[0].grid == grid
        assert_kernels_accept(catalog, p, plan)
    # Whole rounds leave nothing to stream: left to itself the planner takes the kernel without.
    with pytest.raises(errors.ProblemError):
        catalog.plan(h200(), problem(128 * 132, 128, 4096), kernel=index)
    assert kernel.warps == 12


def test_slices_are_no_more_than_the_device_holds(catalog: native.Pack) -> None:
    for index, kernel in enumerate(catalog.kernels):
        if not kernel.sliced:
            continue
        most = 132 * native.blocks_per_sm(kernel, h200())
        p = problem(kernel.bm * 10, kernel.bn, 1 << 20, trans_b=kernel.trans_b, dtype=kernel.dtype)
        for split in (0, 2, most // 10):
            plan = catalog.plan(h200(), p, kernel=index, split=split)
            assert plan.regions[0].split == split or split == 0
            assert_kernels_accept(catalog, p, plan)
        with pytest.raises(errors.ProblemError, match="cannot cut K"):
            catalog.plan(h200(), p, kernel=index, split=most // 10 + 1)
        wide = problem(
            kernel.bm * most, kernel.bn, 4096, trans_b=kernel.trans_b, dtype=kernel.dtype
        )
        with pytest.raises(errors.ProblemError):
            catalog.plan(h200(), wide, kernel=index)


def test_slices_of_a_very_long_k_are_counted_in_32_bits(catalog: native.Pack) -> None:
    k = 2**30 + 2**29
    for index, kernel in enumerate(catalog.kernels):
        if not kernel.sliced:
            continue
        p = problem(8, 8, k, trans_b=kernel.trans_b, dtype=kernel.dtype)
        for split in (0, 100):
            try:
                plan = catalog.plan(h200(), p, kernel=index, split=split)
            except errors.ProblemError:
                assert ceil_div(k, kernel.bk) * split >= 2**31 - 1024
                continue
            assert ceil_div(k, kernel.bk) * plan.regions[0].split < 2**31


def test_tiles_of_a_group_are_counted_in_32_bits(catalog: native.Pack) -> None:
    """One column a block: eight rows of 2^29 tiles would be none in 32 bits."""
    index, kernel = next(
        (i, k) for i, k in enumerate(catalog.kernels)
        if k.family == native.Family.GEMM_DOT
    )  # fmt: skip
    most = (2**31 - 1) // kernel.group_m * kernel.bn
    shape = {"trans_b": 1, "dtype": kernel.dtype, "align_a": 16, "align_b": 16, "align_c": 16}
    plan = catalog.plan(h200(), problem(1, most // 8 * 8, 16, **shape), kernel=index)
    assert plan.regions[0].grid <= most
    with pytest.raises(errors.ProblemError):
        catalog.plan(h200(), problem(1, most // 8 * 8 + 8, 16, **shape), kernel=index)
    assert catalog.plan(h200(), problem(1, 2**29, 16, **shape)).region_count >= 1


def test_forced_choices(catalog: native.Pack) -> None:
    p = problem(64, 64, 4096)
    usable = [
        i for i, k in enumerate(catalog.kernels)
        if (k.dtype, k.trans_a, k.trans_b) == (0, 0, 0)
    ]  # fmt: skip
    for index in usable:
        kernel = catalog.kernels[index]
        split = 5 if kernel.split_k else 1
        plan = catalog.plan(h200(), p, kernel=index, split=split)
        assert (plan.regions[0].kernel, plan.regions[0].split) == (index, split)
        assert catalog.plan(h200(), p, kernel=index).regions[0].kernel == index
        with pytest.raises(errors.ProblemError, match="cannot cut K = 4096"):
            catalog.plan(h200(), p, kernel=index, split=1 if kernel.split_k else 2)
    assert catalog.plan(h200(), p, split=3).regions[0].split == 3
    assert catalog.plan(h200(), p, split=1).regions[0].split == 1
    with pytest.raises(errors.ProblemError, match="does not exist"):
        catalog.plan(h200(), p, kernel=10**6)
    other = next(i for i, k in enumerate(catalog.kernels) if k.dtype == 1)
    with pytest.raises(errors.KernelMissingError, match="another dtype"):
        catalog.plan(h200(), p, kernel=other)


def test_no_kernel_names_the_problem(tmp_path: Path) -> None:
    path = tmp_path / "one.mpk"
    path.write_bytes(pack_bytes([TinyKernel(family=0, dtype=0, bm=64, bn=64, bk=64)]))
    with native.Pack(path) as pack:
        pack.plan(h200(), problem(64, 64, 64))
        with pytest.raises(errors.KernelMissingError, match=r"fp16 m = 64.*alignment 16/2/16"):
            pack.plan(h200(), problem(64, 64, 64, align_b=2))
        with pytest.raises(errors.KernelMissingError):
            pack.plan(h200(), problem(64, 64, 0))  # a tensor map cannot be empty


def test_kernels_too_large_for_the_device_are_left_out(catalog: native.Pack) -> None:
    small = h200(shared_per_block=60000, shared_per_sm=65536)
    for m in (16, 300, 5000):
        kernel = catalog.kernels[catalog.plan(small, problem(m, m, m)).regions[0].kernel]
        assert kernel.shared_bytes <= 60000
    big = next(i for i, k in enumerate(catalog.kernels) if k.shared_bytes > 60000)
    k = catalog.kernels[big]
    with pytest.raises(errors.KernelMissingError, match="shared memory"):
        catalog.plan(
            small,
            problem(64, 64, 64, dtype=k.dtype, trans_a=k.trans_a, trans_b=k.trans_b),
            kernel=big,
        )


def measured_pack(path: Path, gpu: bytes, sm_count: int) -> native.Pack:
    """Two kernels; the table says that the small one takes 1 us a wave and the large one 100."""
    kernels = [
        TinyKernel(family=0, dtype=0, bm=128, bn=128, bk=64),
        TinyKernel(family=0, dtype=0, bm=64, bn=64, bk=64),
    ]
    table = native.Table(gpu=gpu, sm_count=sm_count, bandwidth_gbps=4e6, launch_us=1.5)
    costs = [
        native.Cost(fixed_us=100, step_us=1, single_step_us=1, blocks_per_sm=1),
        native.Cost(fixed_us=1, step_us=0.01, single_step_us=0.01, blocks_per_sm=2),
    ]
    path.write_bytes(pack_bytes(kernels, tables=[(table, costs)]))
    return native.Pack(path)


def test_measured_costs_are_used_for_the_exact_device(tmp_path: Path) -> None:
    p = problem(64, 64, 640)
    with measured_pack(tmp_path / "a.mpk", b"NVIDIA H200", 132) as pack:
        plan = pack.plan(h200(), p)
        assert plan.measured
        assert plan.regions[0].kernel == 1
        # launch + fixed + 10 steps; the bandwidth is so high that traffic is nothing. 0.4 us of the
        # launch are hidden, since the kernel is launched early.
        assert plan.predicted_us == pytest.approx(1.5 - 0.4 + 1 + 10 * 0.01, abs=0.01)
    with measured_pack(tmp_path / "b.mpk", b"NVIDIA H200", 114) as pack:
        assert not pack.plan(h200(), p).measured
    with measured_pack(tmp_path / "c.mpk", b"NVIDIA H100", 132) as pack:
        assert not pack.plan(h200(), p).measured


def test_a_kernel_without_timings_is_on_the_scale_of_those_with_them(tmp_path: Path) -> None:
    """Otherwise a table of slow timings, however partial, would send all work to what it lacks."""
    kernels = [
        TinyKernel(family=0, dtype=0, bm=128, bn=128, bk=64),
        TinyKernel(family=0, dtype=0, bm=128, bn=128, bk=64, trans_b=1),
        TinyKernel(family=1, dtype=0, bm=128, bn=128, bk=64),
        TinyKernel(family=1, dtype=0, bm=64, bn=64, bk=64),
    ]
    none = native.Cost(fixed_us=0, step_us=0, single_step_us=0, blocks_per_sm=0)
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4e6, launch_us=1.5)

    def us(pack: native.Pack, kernel: int, trans_b: int = 0) -> float:
        return pack.plan(
            h200(), problem(128, 128, 6400, trans_b=trans_b), kernel=kernel
        ).predicted_us

    def costs(times: float) -> native.Cost:
        return native.Cost(fixed_us=times, step_us=times, single_step_us=times, blocks_per_sm=1)

    def packed(name: str, rows: list[native.Cost]) -> native.Pack:
        (tmp_path / name).write_bytes(pack_bytes(kernels, tables=[(table, rows)]))
        return native.Pack(tmp_path / name)

    with packed("zeros", [none] * 4) as derived, packed("one", [costs(50), *[none] * 3]) as one:
        scale = (us(one, 0) - 1.5) / (us(derived, 0) - 1.5)
        # Its twin in another layout takes as long, and 10% of caution; so does another family.
        assert us(one, 1, trans_b=1) - 1.5 == pytest.approx(1.1 * (us(one, 0) - 1.5), rel=1e-3)
        assert us(one, 2) > 0.5 * scale * us(derived, 2)
        assert us(one, 3) > 0.5 * scale * us(derived, 3)
    with packed("two", [costs(50), none, costs(1), none]) as two:
        # The nearest relatives count, not the average of all that was timed.
        assert us(two, 3) < us(two, 0) / 10


def test_waves_of_a_measured_kernel(tmp_path: Path) -> None:
    with measured_pack(tmp_path / "a.mpk", b"NVIDIA H200", 132) as pack:

        def predicted(tiles: int) -> float:
            return pack.plan(h200(), problem(64 * tiles, 64, 64), kernel=1).predicted_us

        one_wave = predicted(264)
        assert predicted(200) == pytest.approx(one_wave, abs=0.01)
        # The second block of an SM starts later, by 175 clocks for each of its 4 warps; that of a
        # further wave starts while others still run.
        later = 4 * 175 / h200().clock_mhz
        assert predicted(132) == pytest.approx(one_wave - later, abs=0.01)
        assert predicted(265) == pytest.approx(2 * (one_wave - later) - 1.5 + 0.4, abs=0.01)


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "blocks"),
    [
        (4, 128, 0, 4),  # 65536 registers, 128 threads of 128 each
        (4, 129, 0, 3),  # a warp's registers come 256 at a time
        (8, 16, 0, 8),  # 2048 threads
        (1, 16, 0, 32),  # no more blocks
        (4, 32, 100_000, 2),  # 228 KB, 1 KB of each block is the system's
        (4, 32, 232_448, 1),
        (4, 32, 232_449, 0),  # over a block's limit
        (0, 32, 0, 0),
    ],
)
def test_blocks_per_sm(warps: int, registers: int, shared: int, blocks: int) -> None:
    kernel = native.KernelRecord(warps=warps, registers=registers, shared_bytes=shared)
    assert native.blocks_per_sm(kernel, h200()) == blocks


def test_splits_of_a_problem_forbid_nothing(catalog: native.Pack) -> None:
    """Every split up to the K steps can be forced on a split kernel, and none beyond."""
    index = next(i for i, k in enumerate(catalog.kernels) if k.split_k and k.dtype == 0)
    p = problem(64, 64, 64 * 7)
    for split in range(2, 8):
        assert catalog.plan(h200(), p, kernel=index, split=split).regions[0].split == split
    with pytest.raises(errors.ProblemError, match="cannot cut K"):
        catalog.plan(h200(), p, kernel=index, split=8)


def test_standard_pack_serves_every_class(catalog: native.Pack) -> None:
    assert len(catalog.kernels) == len(standard_kernels())


def test_a_copy_that_the_table_excludes_is_in_no_plan(tmp_path: Path) -> None:
    kernels = [*standard_kernels(), *unaligned_kernels()]
    p = problem(4096, 1000, 2047, trans_b=1, align_a=2, align_b=2, align_c=16)
    costs = [native.Cost() for _ in kernels]
    table = native.Table(gpu=b"NVIDIA H200", sm_count=132, bandwidth_gbps=4000, launch_us=1.0)
    (tmp_path / "all.mpk").write_bytes(pack_bytes(kernels, tables=[(table, costs)]))
    for kernel, cost in zip(kernels, costs, strict=True):
        if kernel.family == native.Family.COPY_PADDED:
            cost.blocks_per_sm = -1
    (tmp_path / "none.mpk").write_bytes(pack_bytes(kernels, tables=[(table, costs)]))
    with native.Pack(tmp_path / "all.mpk") as pack:
        plan = pack.plan(h200(), p)
        assert [operand for operand, _ in plan.copies] == ["a", "b"]
        copying = plan.copies[0][1].kernel
    with native.Pack(tmp_path / "none.mpk") as pack:
        plan = pack.plan(h200(), p)
        assert not plan.copies
        assert kernels[plan.regions[0].kernel].family == native.Family.GEMM_POINTER
        with pytest.raises(errors.KernelMissingError, match=r"copy_padded.* is excluded"):
            pack.plan(h200(), p, kernel=copying)


def test_copies_are_not_weighed_where_no_kernel_behind_them_cuts_k_so(tmp_path: Path) -> None:
    common = {"dtype": 0, "bm": 64, "bn": 64, "trans_b": 1, "split_k": 1}
    kernels = [
        TinyKernel(family=1, bk=16, align=2, **common),
        TinyKernel(family=8, bk=64, align_c=2, **common),
        *(k for k in unaligned_kernels() if k.family == native.Family.COPY_PADDED),
    ]
    (tmp_path / "sm_90.mpk").write_bytes(pack_bytes(kernels))
    p = problem(4096, 4096, 513, trans_b=1, align_a=2, align_b=2, align_c=2)
    with native.Pack(tmp_path / "sm_90.mpk") as pack:
        assert pack.plan(h200(), p, split=9).copies
        plan = pack.plan(h200(), p, split=20)  # 9 steps of 64, 33 of 16
        assert not plan.copies
        assert (plan.regions[0].kernel, plan.regions[0].split) == (0, 20)


@pytest.mark.parametrize(
    ("layout", "align_b", "refused"),
    [((0, 0), 16, True), ((0, 1), 16, False)],
)
def test_kernels_that_believe_in_longer_rows_take_no_padded_operand_alone(
    layout: tuple[int, int], align_b: int, refused: bool
) -> None:
    """A copy of A ends at K = 100 in rows of 104: masks compiled for multiples of 8 would let rows
    of B beyond K, which are no zeros, meet the padding.
    """
    device, pack = devices.lookup("H100"), native.Pack(packs.catalog(90))
    p = problem(
        64, 64, 100, lda=104, ldb=104 if layout[1] else 64, trans_b=layout[1],
        align_a=16, align_b=align_b, align_c=16,
    )  # fmt: skip
    believing = [
        i for i, k in enumerate(pack.kernels)
        if k.family in (native.Family.GEMM_POINTER, native.Family.GEMM_DOT)
        and (k.dtype, k.trans_a, k.trans_b) == (0, *layout) and not k.split_k
        and k.align_a == 16 and k.align_b <= align_b
    ]  # fmt: skip
    assert believing
    for i in believing:
        if refused:
            with pytest.raises(errors.KernelMissingError, match="K is shorter"):
                pack.plan(device, p, kernel=i)
        else:
            pack.plan(device, p, kernel=i)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> native.Pack:
    """The kernels of sm_90 with the costs that were measured on an H200."""
    path = tmp_path_factory.mktemp("tuned") / "sm_90.mpk"
    table = tables.load(Path(__file__).parents[2] / "tuned" / "gemm__nvidia-h200.json")
    packs.write_with_tables(packs.catalog(90), path, [table])
    return native.Pack(path)


@given(
    p=st.builds(
        problem,
        *[st.one_of(st.integers(1, 64), st.integers(1, 8000)).map(lambda i: 8 * i)] * 3,
        dtype=st.sampled_from(native.Dtype), trans_b=st.integers(0, 1),
        batch=st.sampled_from([1, 1, 7, 200]), a_mod=st.just(2**20), b_mod=st.just(2**20),
        align_a=st.sampled_from([4, 16, 16]), bias=st.sampled_from([0, 1]),
    ),
    measured=st.booleans(),
    flags=st.sampled_from([0, native.PlanFlag.NO_SPLIT, native.PlanFlag.NO_STREAM]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_no_kernel_that_is_left_out_of_the_search_is_better(
    tuned: native.Pack, p: native.Problem, measured: bool, flags: int
) -> None:
    """The first of the kernels whose prediction is least, with its best split, is what is found."""
    flags |= native.PlanFlag.NO_REGIONS | native.PlanFlag.NO_VENDOR
    device = h200() if measured else devices.lookup("H100")
    plan = tuned.plan(device, p, flags=flags)
    assert bool(plan.measured) == measured
    forced = {}
    for i, k in enumerate(tuned.kernels):
        tiles = ceil_div(p.m, k.bm) * ceil_div(p.n, k.bn)
        lean = k.family in TENSOR_MAPS and k.warps <= 2 and p.batch == 1
        if lean and tiles > 3 * device.sm_count:
            continue  # of those only few tiles are taken, unless they are forced
        if (k.dtype, k.trans_a, k.trans_b) == (p.dtype, p.trans_a, p.trans_b):
            with contextlib.suppress(errors.MoonPolyError):
                forced[i] = tuned.plan(device, p, kernel=i, flags=flags).predicted_us
    least = min(forced.values())
    if plan.copies:
        assert plan.predicted_us < least
        return
    assert plan.predicted_us == least
    assert plan.regions[0].kernel == min(i for i, us in forced.items() if us == least)


@pytest.mark.parametrize("kernel", standard_kernels()[:6], ids=lambda kernel: str(kernel))
def test_what_follows_a_product_costs_time_with_every_kernel(
    tmp_path: Path, kernel: TinyKernel
) -> None:
    path = tmp_path / "sm_90.mpk"
    path.write_bytes(pack_bytes([kernel]))
    pack = native.Pack(path)
    field = {
        "dtype": kernel.dtype, "precision": kernel.precision, "trans_a": kernel.trans_a,
        "trans_b": kernel.trans_b,
    }  # fmt: skip

    def us(activation: native.Activation, residual: native.Residual) -> float:
        p = problem(100, 300, 4096, **field, activation=activation, residual=residual)
        return pack.plan(h200(), p, kernel=0).predicted_us

    plain = us(native.Activation.NONE, native.Residual.NONE)
    relu = us(native.Activation.RELU, native.Residual.NONE)
    gelu = us(native.Activation.GELU, native.Residual.NONE)
    both = us(native.Activation.GELU, native.Residual.BEFORE)
    assert plain < relu < gelu < both
