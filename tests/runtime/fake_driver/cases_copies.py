"""Copies with padded rows: in front of a plan's regions, and of constant weights at creation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases_launch import Case
from fake_gpu import Aligned, argument_sizes, driver, execute, launches, write_fake_pack
from fake_ort import Context, FakeOrt

from moonpoly_ort import errors, native

NT, TN = (0, 1), (1, 0)
COPIES = {NT: 1, TN: 0}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[native.Pack]:
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    with native.Pack(write_fake_pack(path, unaligned=True)) as opened:
        yield opened


@pytest.fixture(scope="module")
def launcher(pack: native.Pack) -> Iterator[native.Launcher]:
    with native.Launcher(pack, 1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    driver.fake_set_context(-1)
    driver.fake_reset()
    yield
    driver.fake_pointers_on_host(0)
    driver.fake_fail_alloc(0)


def copier(pack: native.Pack, problem: native.Problem) -> int:
    layout = (problem.trans_a, problem.trans_b)
    return next(
        i for i, k in enumerate(pack.kernels)
        if k.family == native.Family.COPY_PADDED and (k.trans_a, k.trans_b) == layout
        and (k.dtype, k.precision) == (problem.dtype, problem.precision)
    )  # fmt: skip


def run(launcher: native.Launcher, pack: native.Pack, case: Case, plan: native.Plan) -> None:
    counters = Aligned(np.zeros(max(plan.counters, 1), np.int32))
    workspace = Aligned(np.full(plan.workspace_bytes, 0xFF, np.uint8))  # NaN
    launcher.launch(
        case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address,
        bias=case.c.address if case.problem.bias else None, workspace=workspace.address,
        counters=counters.address, stream=0x77,
    )  # fmt: skip
    wanted = [copy.kernel for _, copy in plan.copies] + [r.kernel for r in plan.regions]
    for launch, kernel in zip(launches(), wanted, strict=True):
        assert launch.stream == 0x77
        execute(launch, pack.kernels[kernel])
    got = case.y.array.astype(np.float64)
    np.testing.assert_allclose(got, case.expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", list(native.Dtype))
@pytest.mark.parametrize("layout", [NT, TN])
@pytest.mark.parametrize("batch", [1, 3])
def test_copies_are_launched_in_front_of_the_product(
    pack: native.Pack, launcher: native.Launcher, dtype: native.Dtype, layout: tuple[int, int],
    batch: int,
) -> None:  # fmt: skip
    case = Case(37, 45, 301, dtype=dtype, batch=batch, trans_a=layout[0], trans_b=layout[1],
                align=4 if dtype == native.Dtype.F32 else 2)  # fmt: skip
    plan = pack.plan(native.device_query(1), case.problem, kernel=copier(pack, case.problem))
    assert pack.kernels[plan.regions[0].kernel].family == native.Family.GEMM_TMA_MASKED
    run(launcher, pack, case, plan)
    assert all(driver.fake_launched_early(i) for i in range(3))


def test_only_what_is_unaligned_is_copied(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(1024, 1024, 2047)
    case.problem.align_a = 2
    plan = pack.plan(native.device_query(1), case.problem)
    assert [operand for operand, _ in plan.copies] == ["a"]
    run(launcher, pack, case, plan)


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes", 64), ("pitch", 301), ("offset", 8), ("offset", 1 << 40), ("kernel", 0), ("grid", 9)],
)
def test_a_copy_that_does_not_fit_is_refused(
    pack: native.Pack, launcher: native.Launcher, field: str, value: int
) -> None:
    case = Case(37, 45, 301, trans_b=1, align=2)
    plan = pack.plan(native.device_query(1), case.problem, kernel=copier(pack, case.problem))
    setattr(plan._copies[1], field, value)
    with pytest.raises(errors.ProblemError, match="copy of B does not fit"):
        run(launcher, pack, case, plan)
    assert launches() == []


def test_copies_that_share_workspace_are_refused(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    case = Case(37, 45, 301, trans_b=1, align=2)
    plan = pack.plan(native.device_query(1), case.problem, kernel=copier(pack, case.problem))
    plan._copies[1].offset = plan._copies[0].offset
    with pytest.raises(errors.ProblemError, match="copy of B shares its workspace"):
        run(launcher, pack, case, plan)
    case = Case(64, 64, 4095, trans_b=1, align=2)
    plan = pack.plan(
        native.device_query(1), case.problem, kernel=copier(pack, case.problem), split=2
    )
    assert 0 < plan.regions[0].workspace_bytes <= plan._copies[0].offset
    plan._copies[0].offset = 0
    with pytest.raises(errors.ProblemError, match="copy of A shares its workspace"):
        run(launcher, pack, case, plan)
    assert launches() == []


def test_repack(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(64, 45, 304, align=2)
    case.problem.align_a = 16
    problem, size = pack.repacked(case.problem)
    packed = Aligned(np.full(size, 0xFF, np.uint8))
    launcher.repack(case.problem, b=case.b.address, packed=packed.address, stream=5)
    (launch,) = launches()
    assert launch.stream == 5
    execute(launch, pack.kernels[copier(pack, native.Problem(trans_a=1))])
    copied = packed.array.view(np.float16).reshape(45, 304)
    np.testing.assert_array_equal(copied, case.b.array[0].T)
    with pytest.raises(errors.ProblemError, match="as it is stored"):
        launcher.repack(problem, b=packed.address, packed=packed.address)
    with pytest.raises(errors.ProblemError, match="not 16-byte aligned"):
        launcher.repack(case.problem, b=case.b.address, packed=packed.address + 8)


class Node:
    """A node with a constant weight, from its creation to its end."""

    def __init__(
        self, pack: native.Pack, weight: np.ndarray[Any, Any], op: str = "MatMul",
        config: dict[str, str] | None = None, **attributes: float,
    ) -> None:  # fmt: skip
        self.pack, self.weight = pack, Aligned(weight)
        self.ort = FakeOrt(
            {"moonpoly.pack": str(pack.path), **(config or {})}, attributes=attributes,
            constants={1: self.weight},
        )  # fmt: skip
        self.ort.register()
        dtype = native.Dtype.F32 if weight.dtype == np.float32 else native.Dtype.F16
        self.op = self.ort.op(op, dtype)
        driver.fake_set_context(0)
        self.before = driver.fake_allocations()
        driver.fake_reset()
        self.kernel = self.ort.create(self.op)
        self.at_creation = launches()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.ort.destroy(self.op, self.kernel)
        assert self.ort.live == {"info": 0, "allocator": 0, "status": 0}

    def compute(self, a: np.ndarray[Any, Any]) -> tuple[Context, list[Any]]:
        driver.fake_reset()
        context = Context([Aligned(a), self.weight], a.dtype)
        self.ort.compute(self.op, self.kernel, context)
        return context, launches()


def random(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def masked(pack: native.Pack, launch: Any) -> native.KernelRecord:
    """The kernel of a launch that reads a repacked weight and has rows of Y of any alignment."""
    return next(
        k for k in pack.kernels
        if k.family == native.Family.GEMM_TMA_MASKED and k.dtype == 0
        and [len(value) for value in launch.raw] == argument_sizes(k)
    )  # fmt: skip


@pytest.mark.parametrize("trans_b", [0, 1])
def test_a_constant_weight_is_repacked_once(pack: native.Pack, trans_b: int) -> None:
    k = 304 if not trans_b else 301
    weight = random(45, k) if trans_b else random(k, 45)
    with Node(pack, weight, "Gemm", transB=trans_b) as node:
        (copying,) = node.at_creation
        execute(copying, pack.kernels[copier(pack, native.Problem(
            trans_a=1 - trans_b, trans_b=trans_b))])  # fmt: skip
        assert driver.fake_allocations() > node.before
        a = random(64, k)
        context, launched = node.compute(a)
        if trans_b:  # A has rows of an odd length: whatever is planned, no weight is copied again
            assert len(launched) <= 2
            return
        (launch,) = launched
        assert launch.stream == context.stream
        execute(launch, masked(pack, launch))
        assert context.output is not None
        np.testing.assert_allclose(
            context.output.array.astype(np.float64),
            a.astype(np.float64) @ weight.astype(np.float64), rtol=1e-2, atol=5e-2,
        )  # fmt: skip
    assert driver.fake_allocations() <= node.before + 1  # the launcher's counters may stay


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((304, 48), {}),  # aligned
        ((3, 304, 45), {}),  # a stack
        ((304, 1), {}),  # a vector: the product is turned round
        ((304, 45), {"moonpoly.repack": "0"}),
    ],
)
def test_what_is_not_repacked(
    pack: native.Pack, shape: tuple[int, ...], config: dict[str, str]
) -> None:
    with Node(pack, random(*shape), config=config) as node:
        assert node.at_creation == []
        _, launched = node.compute(random(64, 304))
        assert launched


def test_a_weight_on_the_host_is_left_alone(pack: native.Pack) -> None:
    driver.fake_pointers_on_host(1)
    with Node(pack, random(304, 45)) as node:
        assert node.at_creation == []


def test_without_memory_the_stored_weight_is_used_and_said(pack: native.Pack) -> None:
    with Node(pack, random(304, 45)):
        driver.fake_fail_alloc(1)
        with Node(pack, random(304, 45)) as node:
            assert node.at_creation == []
            assert any("copy of the weight of node 'node'" in text for text in node.ort.warnings)
            assert node.compute(random(64, 304))[1]


def test_other_settings_are_refused(pack: native.Pack) -> None:
    with pytest.raises(RuntimeError, match=r"moonpoly.repack is 'yes'; accepted: 0, 1"):
        Node(pack, random(304, 45), config={"moonpoly.repack": "yes"})
