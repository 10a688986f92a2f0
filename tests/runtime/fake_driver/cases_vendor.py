"""cuBLASLt as a candidate: what reaches the library, and that its column-major view of a problem is
the right one (the stand-in multiplies what it is given).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases_cuda_op import STREAM, array, check, exact
from cases_cuda_op import Node as ProductNode
from fake_gpu import Aligned, driver, launches, write_fake_pack
from reference import DTYPES, interpret

from moonpoly_ort import errors, native

library = ctypes.CDLL("libcublasLt.so.13")
library.fakelt_heuristics()  # AttributeError: the real library was found
LIMIT = 32 << 20
Bias = native.Bias


class Asked(ctypes.Structure):
    _fields_ = [
        ("compute", ctypes.c_int64), ("workspace", ctypes.c_int64), ("reduction", ctypes.c_int64),
        ("align", ctypes.c_int64 * 4), ("bias_align", ctypes.c_int64), ("epilogue", ctypes.c_int64),
    ]  # fmt: skip


class Launched(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("algorithm", "workspace", "workspace_bytes", "stream")
    ]


def asked() -> Asked:
    out = Asked()
    library.fakelt_asked(ctypes.byref(out))
    return out


def launched() -> Launched:
    out = Launched()
    library.fakelt_launched(ctypes.byref(out))
    return out


def answer(workspace: int = 0, *, refuse: bool = False, fail: bool = False) -> None:
    """What the library's heuristic says from now on, and whether a handle can be had."""
    library.fakelt_set(ctypes.c_uint64(workspace), refuse, fail)


class Node(ProductNode):
    """With cuBLASLt wherever it can be had, which is not the default."""

    def __init__(self, *arguments: Any, vendor: str = "auto", **keywords: Any) -> None:
        super().__init__(*arguments, vendor=vendor, **keywords)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose table lets cuBLASLt win everything on GPU 0."""
    return write_fake_pack(tmp_path_factory.mktemp("fast") / "sm_90.mpk", vendor_us=1e-3)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_pack(tmp_path_factory.mktemp("slow") / "sm_90.mpk", vendor_us=1e9)


@pytest.fixture(scope="module")
def pack(fast: Path) -> Iterator[native.Pack]:
    with native.Pack(fast) as opened:
        yield opened


@pytest.fixture(scope="module")
def launcher(pack: native.Pack) -> Iterator[native.Launcher]:
    with native.Launcher(pack, 0) as opened:
        yield opened


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    driver.fake_set_context(0)
    driver.fake_set_capturing(0)
    driver.fake_reset()
    answer()
    yield
    while Node.living:
        Node.living.pop().destroy()


@dataclass(frozen=True)
class Case:
    """A product of random operands, with gaps behind rows and between batch entries."""

    m: int
    n: int
    k: int
    dtype: native.Dtype = native.Dtype.F16
    precision: int = 0
    trans_a: int = 0
    trans_b: int = 0
    batch: int = 1
    a_map: tuple[int, int] = (1, 1)
    b_map: tuple[int, int] = (1, 1)
    bias: native.Bias = Bias.NONE
    gap: int = 0
    offset: int = 0  # bytes off an alignment of 64
    alpha: float = 0.5
    beta: float = 1.0

    def problem(self) -> native.Problem:
        align = 16 if (self.gap, self.offset) == (0, 0) else DTYPES[self.dtype].itemsize
        lda = (self.m if self.trans_a else self.k) + self.gap
        ldb = (self.k if self.trans_b else self.n) + self.gap
        ldc = self.n + self.gap
        return native.Problem(
            dtype=self.dtype, precision=self.precision, trans_a=self.trans_a, trans_b=self.trans_b,
            m=self.m, n=self.n, k=self.k, batch=self.batch, lda=lda, ldb=ldb, ldc=ldc,
            a_batch_stride=lda * (self.k if self.trans_a else self.m) + self.gap,
            b_batch_stride=ldb * (self.n if self.trans_b else self.k) + self.gap,
            c_batch_stride=ldc * self.m + self.gap,
            a_div=self.a_map[0], a_mod=self.a_map[1], b_div=self.b_map[0], b_mod=self.b_map[1],
            align_a=align, align_b=align, align_c=align, bias=self.bias,
            bias_stride_m=self.n + self.gap if self.bias == Bias.MATRIX else 0,
            bias_stride_n=int(self.bias != Bias.NONE),
            alpha=self.alpha, beta=self.beta if self.bias else 0.0,
        )  # fmt: skip

    def run(
        self, launcher: native.Launcher, plan: native.Plan, *, workspace_offset: int = 0
    ) -> Aligned:
        """Launches the plan and compares with float64; returns the result, gaps included."""
        p = self.problem()
        rng = np.random.default_rng(self.m * 7 + self.n * 5 + self.k)

        def buffer(elements: int) -> Aligned:
            values = rng.standard_normal(elements).astype(DTYPES[self.dtype])
            return Aligned(values, self.offset)

        a = buffer(self.batch * p.a_batch_stride + self.gap)
        b = buffer(self.batch * p.b_batch_stride + self.gap)
        c = buffer(self.m * (self.n + self.gap))
        y = buffer(self.batch * p.c_batch_stride)
        expected = Aligned(y.array, self.offset)
        bias = c.address if self.bias else None
        interpret(p, plan, a.address, b.address, bias, None, expected.address)
        workspace = Aligned(np.zeros(plan.workspace_bytes + workspace_offset, np.uint8))
        launcher.launch(
            p, plan, a=a.address, b=b.address, y=y.address, bias=bias,
            workspace=workspace.address + workspace_offset if plan.workspace_bytes else None,
            stream=0x77,
        )  # fmt: skip
        np.testing.assert_allclose(
            y.array.astype(np.float64), expected.array.astype(np.float64), rtol=1e-2, atol=1e-2
        )
        return y


def forced(pack: native.Pack, problem: native.Problem) -> native.Plan:
    plan = pack.plan(native.device_query(0), problem, kernel=native.VENDOR)
    assert [r.kernel for r in plan.regions] == [native.VENDOR]
    return plan


PLAIN = Case(40, 72, 24)


@pytest.mark.parametrize("dtype", list(native.Dtype))
@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("bias", list(native.Bias))
@pytest.mark.parametrize("gap", [0, 3])
def test_layouts_and_bias(
    pack: native.Pack, launcher: native.Launcher, dtype: native.Dtype, trans: tuple[int, int],
    bias: native.Bias, gap: int,
) -> None:  # fmt: skip
    beta = 2.0 if bias == Bias.MATRIX else 1.0
    case = Case(
        13, 21, 17, dtype=dtype, trans_a=trans[0], trans_b=trans[1], bias=bias, gap=gap, beta=beta
    )
    before = library.fakelt_products()
    case.run(launcher, forced(pack, case.problem()))
    assert library.fakelt_products() == before + 1
    assert launches() == []  # none of the pack's kernels


@pytest.mark.parametrize(
    ("a_map", "b_map"),
    [((1, 3), (1, 3)), ((1, 1), (1, 3)), ((1, 3), (1, 1)), ((3, 1), (1, 3)), ((1, 1), (1, 1))],
)
@pytest.mark.parametrize("bias", [Bias.NONE, Bias.VECTOR, Bias.MATRIX])
@pytest.mark.parametrize("gap", [0, 5])
def test_batches(
    pack: native.Pack, launcher: native.Launcher, a_map: tuple[int, int], b_map: tuple[int, int],
    bias: native.Bias, gap: int,
) -> None:  # fmt: skip
    case = Case(5, 9, 7, batch=3, a_map=a_map, b_map=b_map, bias=bias, gap=gap, trans_b=1)
    case.run(launcher, forced(pack, case.problem()))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 9, 5), (9, 1, 5), (1, 1, 1), (1, 64, 300)])
@pytest.mark.parametrize("trans", [(0, 0), (1, 1)])
def test_single_rows_and_columns(
    pack: native.Pack, launcher: native.Launcher, m: int, n: int, k: int, trans: tuple[int, int]
) -> None:
    case = Case(m, n, k, trans_a=trans[0], trans_b=trans[1], bias=Bias.VECTOR)
    case.run(launcher, forced(pack, case.problem()))


def test_the_pitch_of_a_single_row_is_not_used(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    problem = replace(PLAIN, m=1).problem()
    problem.lda, problem.ldc = 0, 0
    one, weight, y = array(1, 24), array(24, 72), array(1, 72)
    workspace = Aligned(np.zeros(LIMIT + 256, np.uint8))
    launcher.launch(
        problem, forced(pack, problem), a=one.address, b=weight.address, y=y.address,
        workspace=workspace.address,
    )  # fmt: skip
    np.testing.assert_allclose(y.array, 0.5 * exact(one) @ exact(weight), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("trans", [(0, 0), (1, 1)])
@pytest.mark.parametrize("bias", [Bias.VECTOR, Bias.MATRIX])
def test_regions_move_the_operands(
    pack: native.Pack, launcher: native.Launcher, trans: tuple[int, int], bias: native.Bias
) -> None:
    case = Case(
        12, 20, 8, batch=5, a_map=(1, 5), b_map=(1, 5), trans_a=trans[0], trans_b=trans[1],
        bias=bias, gap=2,
    )  # fmt: skip
    plan = forced(pack, case.problem())
    count = 0
    for m0, m in ((0, 5), (5, 7)):
        for n0, n in ((0, 16), (16, 4)):
            for z0, z in ((0, 2), (2, 3)):
                plan._regions[count] = native.Region(
                    kernel=native.VENDOR, split=1, m0=m0, m=m, n0=n0, n=n, z0=z0, z=z, grid=1,
                    workspace_bytes=plan.workspace_bytes,
                )  # fmt: skip
                count += 1
    plan.region_count = count
    case.run(launcher, plan)


def test_what_the_heuristic_is_asked(pack: native.Pack, launcher: native.Launcher) -> None:
    computes = {
        (native.Dtype.F16, 0): 68, (native.Dtype.BF16, 0): 68,
        (native.Dtype.F32, 0): 77, (native.Dtype.F32, 1): 68,
    }  # fmt: skip
    for (dtype, precision), compute in computes.items():
        case = Case(11, 19, 23, dtype=dtype, precision=precision, bias=Bias.VECTOR)
        case.run(launcher, forced(pack, case.problem()))
        question = asked()
        assert question.compute == compute
        assert question.workspace == LIMIT
        assert question.reduction == 2  # slices of K in fp32, one after the other
        assert question.epilogue == 4
        assert (list(question.align), question.bias_align) == ([16] * 4, 16)
    replace(PLAIN, offset=4, bias=Bias.VECTOR).run(launcher, forced(pack, PLAIN.problem()))
    assert (list(asked().align), asked().bias_align) == ([4] * 4, 4)


def test_an_algorithm_is_asked_for_once(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(31, 33, 35)
    plan = forced(pack, case.problem())
    before = library.fakelt_heuristics()
    for _ in range(3):
        case.run(launcher, plan)
        assert launched().algorithm == before + 1
    assert library.fakelt_heuristics() == before + 1
    replace(case, alpha=3.0).run(launcher, plan)  # scales are not part of the question
    assert library.fakelt_heuristics() == before + 1
    replace(case, offset=2).run(launcher, plan)  # how addresses are aligned is
    assert library.fakelt_heuristics() == before + 2
    other = replace(case, k=36)
    other.run(launcher, forced(pack, other.problem()))
    assert launched().algorithm == library.fakelt_heuristics() == before + 3
    case.run(launcher, plan)
    assert launched().algorithm == before + 1


def test_many_shapes_stay_bounded(pack: native.Pack, launcher: native.Launcher) -> None:
    live = (ctypes.c_int * 4)()
    memory = Aligned(np.zeros(4200, np.float16))
    workspace = Aligned(np.zeros(LIMIT + 256, np.uint8))
    at = {"a": memory.address, "b": memory.address, "y": memory.address}
    for m in range(1, 4200):
        problem = Case(m, 1, 1).problem()
        launcher.launch(problem, forced(pack, problem), **at, workspace=workspace.address)
    library.fakelt_live(live)
    assert live[1] <= 4096
    assert live[2] == 4 * live[1]
    assert live[3] == 0


@pytest.mark.parametrize("offset", [0, 16, 240])
def test_workspace_is_aligned_and_within(
    pack: native.Pack, launcher: native.Launcher, offset: int
) -> None:
    answer(LIMIT)
    plan = forced(pack, PLAIN.problem())
    assert plan.workspace_bytes == plan.regions[0].workspace_bytes == LIMIT + 256
    PLAIN.run(launcher, plan, workspace_offset=offset)
    assert launched().workspace_bytes == LIMIT
    assert launched().stream == 0x77


def column(p: native.Problem) -> None:
    p.bias, p.bias_stride_m, p.bias_stride_n, p.beta = Bias.VECTOR, 1, 0, 1.0


def scaled(p: native.Problem) -> None:
    p.bias, p.bias_stride_m, p.bias_stride_n, p.beta = Bias.VECTOR, 0, 1, 0.5


def broadcast_matrix(p: native.Problem) -> None:
    p.bias, p.bias_stride_m, p.bias_stride_n, p.beta = Bias.MATRIX, 0, 1, 1.0


def inner(p: native.Problem) -> None:
    p.batch, p.a_div, p.a_mod, p.b_mod = 6, 2, 3, 6


def outer(p: native.Problem) -> None:
    p.batch, p.a_mod, p.b_div, p.b_mod = 6, 6, 1, 2


def empty(p: native.Problem) -> None:
    p.k = 0


def huge(p: native.Problem) -> None:
    p.m = 2**31


def zero_alpha(p: native.Problem) -> None:
    p.alpha = 0.0


REFUSED: list[tuple[Any, str]] = [
    (column, "its bias is no row"), (scaled, "beta is not 1"),
    (broadcast_matrix, "the rows of C are not contiguous"), (inner, "no common stride"),
    (outer, "no common stride"), (empty, "K is 0"), (zero_alpha, "alpha is 0"),
    (huge, "M or N is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "why"), REFUSED)
def test_what_it_cannot_express_is_no_candidate(
    pack: native.Pack, launcher: native.Launcher, change: Any, why: str
) -> None:
    device = native.device_query(0)
    problem = PLAIN.problem()
    assert pack.plan(device, problem).regions[0].kernel == native.VENDOR
    plan = forced(pack, problem)
    change(problem)
    assert all(r.kernel >= 0 for r in pack.plan(device, problem).regions)
    message = f"cuBLASLt cannot run this problem: .*{why}"
    with pytest.raises(errors.KernelMissingError, match=message):
        pack.plan(device, problem, kernel=native.VENDOR)
    with pytest.raises(errors.KernelMissingError, match=message):
        launcher.launch(problem, plan, a=16, b=16, y=16, bias=16, workspace=256)


def test_forced_splits_and_unknown_flags_are_refused(pack: native.Pack) -> None:
    device = native.device_query(0)
    with pytest.raises(errors.ProblemError, match="not into 3 slices"):
        pack.plan(device, PLAIN.problem(), kernel=native.VENDOR, split=3)
    with pytest.raises(errors.ProblemError, match="flags 1024 are unknown"):
        pack.plan(device, PLAIN.problem(), flags=1024)


def test_no_algorithm_is_an_error_of_a_forced_launch(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    answer(refuse=True)
    case = Case(3, 5, 77)
    with pytest.raises(errors.KernelMissingError, match=r"no algorithm for m = 3, .*status 15"):
        case.run(launcher, forced(pack, case.problem()))


def test_handles_and_descriptors_are_given_back(fast: Path, tmp_path: Path) -> None:
    live, before = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
    library.fakelt_live(before)
    copy = tmp_path / "copy.mpk"
    copy.write_bytes(fast.read_bytes())
    with native.Pack(copy) as pack, native.Launcher(pack, 0) as launcher:
        library.fakelt_live(live)
        assert list(live) == list(before)  # no handle before a plan needs one
        PLAIN.run(launcher, forced(pack, PLAIN.problem()))
        library.fakelt_live(live)
        assert [x - y for x, y in zip(live, before, strict=True)] == [1, 1, 4, 0]
    library.fakelt_live(live)
    assert list(live) == list(before)


def test_a_handle_that_failed_is_tried_again(fast: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mpk"
    copy.write_bytes(fast.read_bytes())
    with native.Pack(copy) as pack, native.Launcher(pack, 0) as launcher:
        answer(fail=True)
        with pytest.raises(errors.DeviceError, match=r"cublasLtCreate failed: CUBLAS_STATUS_FAKE"):
            PLAIN.run(launcher, forced(pack, PLAIN.problem()))
        answer()
        PLAIN.run(launcher, forced(pack, PLAIN.problem()))


# ---- inside a session ----


def test_a_session_uses_it_where_it_is_faster(fast: Path, slow: Path) -> None:
    x, y = array(40, 72), array(72, 136)
    answer(5000)
    node = Node(fast)
    context = node.launch([x, y])
    check(context, exact(x) @ exact(y))
    assert launches() == []
    assert launched().stream == STREAM
    assert launched().workspace_bytes == 5000
    assert context.scratch == [5000 + 256]  # what the algorithm needs, not the limit
    (base,) = node.ort.scratch_memory
    assert base <= launched().workspace
    assert launched().workspace + 5000 <= base + context.scratch[0]
    assert node.ort.freed == [base]
    before = library.fakelt_products()
    check(Node(slow).run([x, y]), exact(x) @ exact(y))
    assert library.fakelt_products() == before


def test_gemm_in_a_session(fast: Path) -> None:
    node = Node(fast, "Gemm", alpha=0.5, beta=1.0, transA=0, transB=0)
    x, y, row, matrix = array(40, 72), array(72, 136), array(136), array(40, 136)
    for c in (row, matrix):
        before = library.fakelt_products()
        check(node.launch([x, y, c]), 0.5 * exact(x) @ exact(y) + exact(c))
        assert library.fakelt_products() == before + 1
    node = Node(fast, "Gemm", alpha=0.5, beta=2.0, transA=0, transB=0)
    check(node.run([x, y, row]), 0.5 * exact(x) @ exact(y) + 2 * exact(row))  # ours: it scales
    assert launches()


def test_an_algorithm_without_workspace_takes_no_scratch(fast: Path) -> None:
    assert Node(fast).launch([array(47, 72), array(72, 136)]).scratch == []


def test_without_a_stream_it_gets_no_workspace(fast: Path) -> None:
    answer(5000)
    context = Node(fast).launch([array(44, 72), array(72, 136)], stream=0)
    assert context.scratch == []
    assert asked().workspace == 0


def test_a_captured_run_asks_for_what_those_before_it_did(fast: Path) -> None:
    answer(7000)
    node = Node(fast)
    inputs = [array(45, 72), array(72, 136)]
    before = node.launch(inputs).scratch
    heuristics = library.fakelt_heuristics()
    driver.fake_set_capturing(1)
    assert node.launch(inputs).scratch == before
    assert library.fakelt_heuristics() == heuristics


def test_where_it_has_no_algorithm_ours_run(fast: Path) -> None:
    answer(refuse=True)
    node = Node(fast)
    x, y = array(46, 72), array(72, 136)
    before = native.stats()
    for _ in range(2):
        heuristics = library.fakelt_heuristics()
        check(node.run([x, y]), exact(x) @ exact(y))
        assert launches()
    after = native.stats()  # the plan without cuBLASLt is for the same product
    counted = [getattr(after, of) - getattr(before, of) for of in ("plan_hits", "plan_misses")]
    assert sum(counted) == 2
    assert library.fakelt_heuristics() == heuristics  # the refusal is remembered


def test_outer_loops_are_ours(fast: Path) -> None:
    node = Node(fast)
    before = library.fakelt_products()
    x, y = array(2, 1, 2, 8, 24), array(1, 3, 1, 24, 16)
    check(node.run([x, y]), np.matmul(exact(x), exact(y)))
    assert library.fakelt_products() == before


@pytest.mark.parametrize("shape", [(3, 8, 24), (1, 8, 24)])
def test_batches_in_a_session(fast: Path, shape: tuple[int, ...]) -> None:
    node = Node(fast)
    x, y = array(*shape), array(3, 24, 16)
    check(node.launch([x, y]), np.matmul(exact(x), exact(y)))
    assert launches() == []


def test_the_switch(fast: Path) -> None:
    x, y = array(40, 72), array(72, 136)
    for value in ("auto", "1"):
        Node(fast, vendor=value).launch([x, y])
        assert launches() == []
    before = library.fakelt_products()
    for value in ("", "0"):  # it is not asked for by default
        check(ProductNode(fast, vendor=value).run([x, y]), exact(x) @ exact(y))
    assert library.fakelt_products() == before
    with pytest.raises(RuntimeError, match=r"moonpoly.vendor is 'yes'; accepted: auto, 0, 1"):
        Node(fast, vendor="yes")


def test_a_library_that_does_not_start_is_left_out(fast: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mpk"  # another launcher, without a handle yet
    copy.write_bytes(fast.read_bytes())
    answer(fail=True)
    with pytest.raises(RuntimeError, match=r"node 'node': cublasLtCreate failed"):
        Node(copy, vendor="1")
    node = Node(copy)
    (warning,) = node.ort.warnings
    assert "without cuBLASLt: cublasLtCreate failed" in warning
    x, y = array(40, 72), array(72, 136)
    check(node.run([x, y]), exact(x) @ exact(y))
    assert launches()


def test_insisting_needs_a_measured_model(fast: Path) -> None:
    """GPU 1 has no table."""
    with pytest.raises(RuntimeError, match=r"no timings of cuBLASLt on Fake GPU 1"):
        Node(fast, device=1, vendor="1")
    x, y = array(40, 72), array(72, 136)
    check(Node(fast, device=1).run([x, y]), exact(x) @ exact(y))
    assert launches()


def test_threads_share_descriptions(fast: Path) -> None:
    """A row bias is part of the description: two threads with biases of their own must not mix."""
    node = Node(fast, "Gemm", alpha=1.0, beta=1.0, transA=0, transB=0)
    x, weight = array(16, 32), array(32, 24)
    product = exact(x) @ exact(weight)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            driver.fake_set_context(0)
            row = Aligned(np.full(24, seed * 10, np.float16))
            for _ in range(50):
                check(node.launch([x, weight, row], 0x100 + seed), product + seed * 10)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
