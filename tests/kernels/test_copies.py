"""Copies of operands with padded rows, in Triton's interpreter: in front of a plan's regions, and
alone. Sources lie inside NaN; copies start as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gemm_case import SENTINEL, TORCH, Buffer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels import pack_format
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import Dtype, Family

from moonpoly_ort import devices, interpreter, native, packs
from moonpoly_ort.errors import KernelMissingError, ProblemError

SPECS = specs(90)
DEVICE = devices.lookup("H200")


@pytest.fixture(scope="module")
def pack() -> Iterator[native.Pack]:
    with native.Pack(packs.catalog(90)) as opened:
        yield opened


def copy_kernel(dtype: Dtype, trans: bool) -> int:
    return next(
        i for i, s in enumerate(SPECS)
        if s.family is Family.COPY_PADDED and (s.dtype, s.trans_a) == (dtype, trans)
    )  # fmt: skip


def run(
    pack: native.Pack, dtype: Dtype, trans: bool, m: int, n: int, k: int, *,
    batch: int = 1, a_map: tuple[int, int] = (1, 1), b_map: tuple[int, int] = (1, 1),
    slack: int = 1, align: int = 0, bias: bool = False,
) -> native.Plan:  # fmt: skip
    """A product of operands inside NaN through a plan that must copy both; checks the result."""
    torch.manual_seed(m * 7 + n * 3 + k)
    nan, align = float("nan"), align or dtype.bytes
    a = torch.randn(a_map[1], m, k).to(TORCH[dtype])
    b = torch.randn(b_map[1], k, n).to(TORCH[dtype])
    c = torch.randn(1, 1, n).to(TORCH[dtype])
    a_in = Buffer(a.mT if trans else a, align, slack, nan)
    b_in = Buffer(b if trans else b.mT, align, slack, nan)
    y = Buffer(torch.full((batch, m, n), nan, dtype=TORCH[dtype]), align, slack, SENTINEL)
    c_in = Buffer(c, dtype.bytes, 0, nan)
    problem = native.Problem(
        dtype=pack_format.DTYPE_CODE[dtype],
        trans_a=trans, trans_b=not trans, m=m, n=n, k=k, batch=batch,
        lda=a_in.pitch, ldb=b_in.pitch, ldc=y.pitch, a_batch_stride=a_in.batch_stride,
        b_batch_stride=b_in.batch_stride, c_batch_stride=y.batch_stride,
        a_div=a_map[0], a_mod=a_map[1], b_div=b_map[0], b_mod=b_map[1],
        align_a=dtype.bytes, align_b=dtype.bytes, align_c=dtype.bytes,
        bias=int(bias), bias_stride_n=1, alpha=0.5, beta=2.0 * bias,
    )  # fmt: skip
    plan = pack.plan(DEVICE, problem, kernel=copy_kernel(dtype, trans))
    assert [operand for operand, _ in plan.copies] == ["a", "b"]
    interpreter.run(
        pack, problem, plan, a_in.address, b_in.address, c_in.address if bias else None, y.address
    )
    assert y.untouched(), "something wrote outside the result"
    want = torch.stack([
        0.5 * a[z // a_map[0] % a_map[1]].double() @ b[z // b_map[0] % b_map[1]].double()
        for z in range(batch)
    ])  # fmt: skip
    if bias:
        want += 2.0 * c.double()
    error = (y.view.double() - want).norm()
    limit = 1e-2 if dtype is Dtype.BF16 else 2e-3
    assert error <= limit * want.norm() + 1e-6
    return plan


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("dtype", Dtype)
def test_both_operands_are_copied(pack: native.Pack, dtype: Dtype, trans: bool) -> None:
    plan = run(pack, dtype, trans, 37, 45, 301, bias=True)
    assert SPECS[plan.regions[0].kernel].family in (Family.GEMM_TMA_MASKED, Family.GEMM_DOT)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_is_copied(pack: native.Pack, data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(Dtype))
    m, n, k = (draw(st.integers(1, high)) for high in (80, 140, 150))
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    maps = st.sampled_from([(1, 1), (1, inner * outer), (inner, outer), (1, inner)])
    plan = run(
        pack, dtype, draw(st.booleans()), m, n, k, batch=inner * outer,
        a_map=draw(maps), b_map=draw(maps), slack=draw(st.integers(0, 2)),
        align=draw(st.sampled_from([a for a in (2, 4, 8, 16) if a >= dtype.bytes])),
        bias=draw(st.booleans()),
    )  # fmt: skip
    starts = sorted((copy.offset, copy.offset + copy.bytes) for _, copy in plan.copies)
    assert plan.regions[0].workspace_bytes <= starts[0][0]
    assert starts[0][1] <= starts[1][0]
    assert starts[1][1] <= plan.workspace_bytes
    assert all(start % 16 == 0 for start, _ in starts)


def dense(dtype: native.Dtype, m: int, n: int, k: int, **changes: int) -> native.Problem:
    problem, _ = native.matmul_problem([m, k], [k, n], dtype)
    for field, value in changes.items():
        setattr(problem, field, value)
    return problem


def test_large_unaligned_products_are_planned_with_copies(pack: native.Pack) -> None:
    plan = pack.plan(DEVICE, dense(native.Dtype.F16, 4096, 1000, 2047))
    assert [operand for operand, _ in plan.copies] == ["a"]
    assert SPECS[plan.regions[0].kernel].family in (Family.GEMM_TMA, Family.GEMM_WS)
    plan = pack.plan(DEVICE, dense(native.Dtype.F16, 4096, 1001, 2048))
    assert [operand for operand, _ in plan.copies] == ["b"]
    assert SPECS[plan.regions[0].kernel].family in (Family.GEMM_TMA_MASKED, Family.GEMM_DOT)
    assert plan.predicted_us > plan.regions[0].predicted_us


def test_small_or_aligned_products_are_not(pack: native.Pack) -> None:
    assert not pack.plan(DEVICE, dense(native.Dtype.F16, 7, 9, 11)).copies
    assert not pack.plan(DEVICE, dense(native.Dtype.F16, 4096, 1000, 2048)).copies


def test_a_copy_of_no_columns_is_refused(pack: native.Pack) -> None:
    kernel = copy_kernel(Dtype.F16, False)
    problem = dense(native.Dtype.F16, 16, 16, 0, trans_b=1, ldb=8)
    with pytest.raises(KernelMissingError, match="K is 0"):
        pack.plan(DEVICE, problem, kernel=kernel)
    with pytest.raises(KernelMissingError, match="cannot copy the operands"):
        pack.plan(DEVICE, dense(native.Dtype.F16, 16, 16, 16), kernel=kernel)


def test_a_repacked_weight_is_a_problem_of_its_own(pack: native.Pack) -> None:
    problem = dense(native.Dtype.F16, 64, 1001, 520)
    packed, size = pack.repacked(problem)
    assert size == 1001 * 520 * 2
    assert (packed.trans_b, packed.ldb, packed.align_b, packed.align_a) == (1, 520, 16, 16)
    plan = pack.plan(DEVICE, packed)
    assert not plan.copies
    assert SPECS[plan.regions[0].kernel].family in (Family.GEMM_TMA_MASKED, Family.GEMM_DOT)
    assert plan.predicted_us < pack.plan(DEVICE, problem).predicted_us


@pytest.mark.parametrize(
    ("dtype", "n", "k", "changes", "expected"),
    [
        (native.Dtype.F16, 1000, 520, {}, 0),  # aligned
        (native.Dtype.F16, 1000, 521, {}, 0),  # rows of B are, whatever K
        (native.Dtype.F16, 1000, 521, {"trans_b": 1, "ldb": 521, "align_b": 2}, 1000 * 528 * 2),
        (native.Dtype.F32, 1000, 520, {}, 1000 * 520 * 4),  # not along K
        (native.Dtype.F32, 1001, 520, {"precision": 1}, 0),
        (native.Dtype.F32, 1000, 520, {"trans_b": 1, "ldb": 520}, 0),
        (native.Dtype.F16, 999, 520, {"batch": 3, "b_mod": 3}, 0),  # a stack of weights
    ],
)
def test_what_is_repacked(
    pack: native.Pack, dtype: native.Dtype, n: int, k: int, changes: dict[str, int], expected: int
) -> None:
    problem = dense(dtype, 64, n, k, **changes)
    packed, size = pack.repacked(problem)
    assert size == expected
    if size == 0:
        assert bytes(packed) == bytes(problem)


def test_repacking_an_illegal_problem_is_refused(pack: native.Pack) -> None:
    with pytest.raises(ProblemError, match="precision code 7"):
        pack.repacked(dense(native.Dtype.F16, 4, 5, 6, precision=7))
