"""mp_launch: what reaches cuLaunchKernel and cuTensorMapEncodeTiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_pack as tp
from fake_gpu import Aligned, driver, execute, fake_cubin, launches, write_fake_pack
from reference import DTYPES

from moonpoly_ort import errors, native
from tests.epilogues import finished


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[native.Pack]:
    path = write_fake_pack(tmp_path_factory.mktemp("pack") / "sm_90.mpk")
    with native.Pack(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def launcher(pack: native.Pack) -> Iterator[native.Launcher]:
    with native.Launcher(pack, 1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def clean() -> None:
    driver.fake_set_context(-1)
    driver.fake_reset()


def test_device_query() -> None:
    assert native.device_count() == 2
    device = native.device_query(0)
    assert (device.name, device.sm, device.sm_count) == ("NVIDIA H200", 90, 132)
    assert (device.l2_bytes, device.memory_bytes) == (60 << 20, 141 << 30)
    with pytest.raises(errors.DeviceError, match="GPU 2 does not exist; the driver offers 2"):
        native.device_query(2)


TMA, POINTER = native.Family.GEMM_TMA, native.Family.GEMM_POINTER


def launches_early(kernel: native.KernelRecord, blocks: int, steps: int) -> bool:
    """Pointer kernels and dot products where there is room, others always; the GPU has 132 SMs."""
    room = blocks <= 66 or (blocks <= 132 and steps <= 2)
    small = kernel.family in (POINTER, native.Family.GEMM_DOT)
    return bool(kernel.dependent_launch) and (room or not small)


class Case:
    """A random product of full batches, its operands on the "GPU"."""

    def __init__(
        self, m: int, n: int, k: int, *, dtype: native.Dtype = native.Dtype.F16, batch: int = 1,
        trans_a: int = 0, trans_b: int = 0, bias: native.Bias = native.Bias.NONE,
        bias_shape: tuple[int, int] = (1, 1), align: int = 16, precision: int = 0,
        activation: native.Activation = native.Activation.NONE,
        residual: native.Residual = native.Residual.NONE,
    ) -> None:  # fmt: skip
        element = DTYPES[dtype]
        rng = np.random.default_rng(m * 7 + n * 5 + k)
        offset = align % 16  # an alignment below 16 comes from the address

        def operand(*shape: int) -> Aligned:
            return Aligned(rng.standard_normal(shape).astype(element), offset)

        self.a = operand(batch, *((k, m) if trans_a else (m, k)))
        self.b = operand(batch, *((n, k) if trans_b else (k, n)))
        self.c = operand(*bias_shape)
        self.r = operand(batch, m, n)
        self.y = Aligned(np.full((batch, m, n), 77, element), offset)
        self.problem = native.Problem(
            dtype=dtype, precision=precision, trans_a=trans_a, trans_b=trans_b, m=m, n=n, k=k,
            batch=batch, lda=m if trans_a else k, ldb=k if trans_b else n, ldc=n,
            a_batch_stride=m * k, b_batch_stride=k * n, c_batch_stride=m * n,
            a_div=1, a_mod=batch, b_div=1, b_mod=batch,
            align_a=align, align_b=align, align_c=align, bias=bias,
            bias_stride_m=bias_shape[1] if bias_shape[0] > 1 else 0,
            bias_stride_n=1 if bias_shape[1] > 1 else 0, alpha=0.5, beta=2.0 if bias else 0.0,
            activation=activation, residual=residual, act_alpha=0.25, act_beta=0.75,
        )  # fmt: skip
        a = self.a.array.astype(np.float64)
        b = self.b.array.astype(np.float64)
        product = (a.swapaxes(1, 2) if trans_a else a) @ (b.swapaxes(1, 2) if trans_b else b)
        self.expected = 0.5 * product
        if bias:
            self.expected = self.expected + 2.0 * self.c.array.astype(np.float64)
        other = self.r.array.astype(np.float64) if residual else None
        self.expected = finished(self.expected, activation, residual, 0.25, 0.75, other)

    def run(self, launcher: native.Launcher, pack: native.Pack, plan: native.Plan) -> None:
        counters = Aligned(np.zeros(max(plan.counters, 1), np.int32))
        workspace = Aligned(np.zeros(max(plan.workspace_bytes, 1), np.uint8))
        launcher.launch(
            self.problem, plan, a=self.a.address, b=self.b.address, y=self.y.address,
            bias=self.c.address if self.problem.bias else None,
            residual=self.r.address if self.problem.residual else None, workspace=workspace.address,
            counters=counters.address, stream=0x77,
        )  # fmt: skip
        done = launches()
        assert len(done) == plan.region_count
        for i, (launch, region) in enumerate(zip(done, plan.regions, strict=True)):
            kernel = pack.kernels[region.kernel]
            steps = -(-self.problem.k // (kernel.bk * region.split))
            assert driver.fake_launched_early(i) == launches_early(kernel, region.grid, steps)
            assert launch.grid == region.grid
            assert launch.stream == 0x77
            execute(launch, kernel)
        np.testing.assert_allclose(
            self.y.array.astype(np.float64), self.expected, rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    ("m", "k", "early"),
    [
        (64 * 66, 512, True),  # half as many blocks as SMs, 8 K steps each
        (64 * 67, 512, False),
        (64 * 132, 128, True),  # as many, two steps each
        (64 * 132, 192, False),
        (64 * 133, 64, False),
    ],
)
def test_kernels_without_tensor_maps_are_launched_early_where_there_is_room(
    pack: native.Pack, launcher: native.Launcher, m: int, k: int, early: bool
) -> None:
    case = Case(m, 64, k)
    for index, kernel in enumerate(pack.kernels):
        if kernel.split_k or (kernel.dtype, kernel.trans_a, kernel.trans_b) != (0, 0, 0):
            continue
        if kernel.family not in (TMA, POINTER) or (kernel.bm, kernel.bn) != (64, 64):
            continue
        driver.fake_reset()
        case.run(launcher, pack, pack.plan(native.device_query(1), case.problem, kernel=index))
        assert driver.fake_launched_early(0) == (early or kernel.family == TMA)


@pytest.mark.parametrize("dtype", list(native.Dtype))
@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 72, 24), (8, 200, 512), (136, 264, 8)])
def test_every_kernel_of_a_class(
    pack: native.Pack, launcher: native.Launcher, dtype: native.Dtype, trans: tuple[int, int],
    m: int, n: int, k: int,
) -> None:  # fmt: skip
    device = native.device_query(1)
    ran = 0
    for precision in (0, 1) if dtype == native.Dtype.F32 else (0,):
        for index, kernel in enumerate(pack.kernels):
            if (kernel.dtype, kernel.trans_a, kernel.trans_b) != (dtype, *trans):
                continue
            if kernel.precision != precision or (kernel.split_k and k <= kernel.bk):
                continue
            driver.fake_reset()
            case = Case(
                m, n, k, dtype=dtype, trans_a=trans[0], trans_b=trans[1], batch=2,
                precision=precision,
            )  # fmt: skip
            case.run(launcher, pack, pack.plan(device, case.problem, kernel=index))
            ran += 1
    assert ran >= 7


@pytest.mark.parametrize(
    ("bias", "shape"),
    [
        (native.Bias.VECTOR, (1, 1)),
        (native.Bias.VECTOR, (1, 72)),
        (native.Bias.VECTOR, (40, 1)),
        (native.Bias.MATRIX, (40, 72)),
    ],
)
def test_bias(
    pack: native.Pack, launcher: native.Launcher, bias: native.Bias, shape: tuple[int, int]
) -> None:
    case = Case(40, 72, 48, bias=bias, bias_shape=shape)
    case.run(launcher, pack, pack.plan(native.device_query(1), case.problem))


def test_unaligned_and_empty_k(pack: native.Pack, launcher: native.Launcher) -> None:
    device = native.device_query(1)
    for case in (Case(33, 65, 17, align=2), Case(5, 9, 0, align=2)):
        plan = pack.plan(device, case.problem)
        assert pack.kernels[plan.regions[0].kernel].family == native.Family.GEMM_POINTER
        driver.fake_reset()
        case.run(launcher, pack, plan)


@pytest.mark.parametrize("align", [16, 2])
@pytest.mark.parametrize("trans", [(0, 0), (1, 1)])
def test_regions_move_the_operands(
    pack: native.Pack, launcher: native.Launcher, align: int, trans: tuple[int, int]
) -> None:
    """Four regions in rows and columns and two in the batch, as a cut plan has them."""
    case = Case(
        96, 128, 32, batch=5, align=align, trans_a=trans[0], trans_b=trans[1],
        bias=native.Bias.MATRIX, bias_shape=(96, 128),
    )  # fmt: skip
    plan = pack.plan(native.device_query(1), case.problem)
    whole = plan.regions[0]
    kernel = pack.kernels[whole.kernel]
    count = 0
    for m0, m in ((0, 40), (40, 56)):
        for n0, n in ((0, 64), (64, 64)):
            for z0, z in ((0, 2), (2, 3)):
                tiles = -(-m // kernel.bm) * -(-n // kernel.bn)
                plan._regions[count] = native.Region(
                    kernel=whole.kernel, split=1, m0=m0, m=m, n0=n0, n=n, z0=z0, z=z,
                    grid=tiles * z, predicted_us=1,
                )  # fmt: skip
                count += 1
    plan.region_count = count
    case.run(launcher, pack, plan)


def test_modules_are_loaded_once_and_shared(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(40, 72, 24)
    plan = pack.plan(native.device_query(1), case.problem)
    case.run(launcher, pack, plan)
    modules, functions = driver.fake_modules(), driver.fake_functions_loaded()
    assert modules > 0
    with native.Launcher(pack, 1) as second:
        driver.fake_reset()
        case.run(second, pack, plan)
        assert (driver.fake_modules(), driver.fake_functions_loaded()) == (modules, functions)
    with native.Launcher(pack, 0) as other_device:
        driver.fake_reset()
        case.run(other_device, pack, plan)
        assert driver.fake_modules() > modules
    assert driver.fake_modules() == modules


def test_a_load_that_failed_can_be_repeated(pack: native.Pack) -> None:
    case = Case(40, 72, 24)
    plan = pack.plan(native.device_query(0), case.problem)
    before = driver.fake_modules()
    with native.Launcher(pack, 0) as launcher:
        driver.fake_fail_function(1)
        with pytest.raises(errors.DeviceError, match="cuFuncLoad of kernel"):
            case.run(launcher, pack, plan)
        driver.fake_fail_function(0)
        case.run(launcher, pack, plan)
    assert driver.fake_modules() == before


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Lets no thread start: its stack would take the whole address space."""
    libc = ctypes.CDLL(None)
    usual, huge = (ctypes.create_string_buffer(64) for _ in range(2))  # pthread_attr_t
    assert libc.pthread_getattr_default_np(usual) == libc.pthread_attr_init(huge) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 47)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        libc.pthread_setattr_default_np(usual)


def test_kernels_load_where_no_thread_is_to_be_had(pack: native.Pack) -> None:
    case = Case(40, 72, 24)
    plan = pack.plan(native.device_query(0), case.problem)
    with native.Launcher(pack, 0) as launcher, no_new_threads():
        case.run(launcher, pack, plan)


def test_context_is_left_as_it_was(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(40, 72, 24)
    plan = pack.plan(native.device_query(1), case.problem)
    for current in (-1, 0, 1):
        driver.fake_set_context(current)
        driver.fake_reset()
        case.run(launcher, pack, plan)
        assert driver.fake_context_depth() == (current >= 0)


def test_driver_failures_name_the_call(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(40, 72, 24)
    maps = next(i for i, k in enumerate(pack.kernels) if k.family == 0 and k.dtype == 0)
    plan = pack.plan(native.device_query(1), case.problem, kernel=maps)
    driver.fake_fail_encode(1)
    with pytest.raises(errors.DeviceError, match=r"cuTensorMapEncodeTiled for operand A.*fake"):
        case.run(launcher, pack, plan)
    driver.fake_fail_encode(0)


def test_bad_plans_are_refused(pack: native.Pack, launcher: native.Launcher) -> None:
    case = Case(64, 64, 512)
    plan = pack.plan(native.device_query(1), case.problem, split=2)
    at = {"a": case.a.address, "b": case.b.address, "y": case.y.address}
    with pytest.raises(errors.ProblemError, match="bytes of workspace"):
        launcher.launch(case.problem, plan, **at)
    with pytest.raises(errors.ProblemError, match="0x1008 is not 16-byte aligned"):
        launcher.launch(case.problem, plan, **at, workspace=0x1008, counters=0x1000)
    plan = pack.plan(native.device_query(1), case.problem, split=1)
    plan._regions[0].m = 65
    with pytest.raises(errors.ProblemError, match="outside the problem"):
        launcher.launch(case.problem, plan, **at)
    plan._regions[0].m, plan._regions[0].m0 = 64, 2**63 - 1
    with pytest.raises(errors.ProblemError, match="outside the problem"):
        launcher.launch(case.problem, plan, **at)
    plan._regions[0].kernel = 10**6
    with pytest.raises(errors.ProblemError, match="names kernel 1000000"):
        launcher.launch(case.problem, plan, **at)


def test_catalog_and_broken_code_are_refused(tmp_path: Path) -> None:
    import tiny_pack as tp

    catalog = tp.write_pack(tmp_path / "catalog.mpk", tp.standard_kernels())
    with (
        native.Pack(catalog) as pack,
        pytest.raises(errors.PackError, match="is a catalog without code"),
    ):
        native.Launcher(pack)
    broken = tp.write_pack(tmp_path / "broken.mpk", tp.standard_kernels(cubin=b"NOPE"))
    case = Case(40, 72, 24)
    with native.Pack(broken) as pack, native.Launcher(pack) as launcher:
        plan = pack.plan(native.device_query(0), case.problem)
        with pytest.raises(errors.DeviceError, match=r"cuModuleLoadData of kernel .* on GPU 0"):
            case.run(launcher, pack, plan)


@pytest.mark.parametrize(("rows", "early"), [(132 * 64, True), (132 * 64 + 1, False)])
def test_short_pointer_kernels_are_launched_early_with_a_block_for_each_sm_at_most(
    tmp_path: Path, rows: int, early: bool
) -> None:
    kernel = tp.TinyKernel(family=1, dtype=0, bm=64, bn=64, bk=64, align=2)
    path = tp.write_pack(tmp_path / "sm_90.mpk", [replace(kernel, cubin=fake_cubin(kernel))])
    case = Case(rows, 8, 8)
    with native.Pack(path) as pack, native.Launcher(pack, 0) as launcher:
        plan = pack.plan(native.device_query(0), case.problem)
        launcher.launch(case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address)
        assert driver.fake_launched_early(0) == early


@pytest.mark.parametrize("residual", native.Residual)
@pytest.mark.parametrize("activation", [native.Activation.NONE, native.Activation.CLIP])
def test_what_follows_the_product(
    pack: native.Pack, launcher: native.Launcher, activation: native.Activation,
    residual: native.Residual,
) -> None:  # fmt: skip
    case = Case(40, 72, 136, batch=3, activation=activation, residual=residual)
    families = set()
    for index in range(len(pack.kernels)):
        try:
            plan = pack.plan(native.device_query(1), case.problem, kernel=index)
        except errors.KernelMissingError:
            continue
        families.add(pack.kernels[index].family)
        case.y.array[...] = 77
        driver.fake_reset()
        case.run(launcher, pack, plan)
    assert families == {native.Family.GEMM_TMA, native.Family.GEMM_POINTER, native.Family.GEMM_WS}


def test_a_missing_residual_and_unknown_codes_are_refused(
    pack: native.Pack, launcher: native.Launcher
) -> None:
    case = Case(40, 72, 48, residual=native.Residual.AFTER)
    plan = pack.plan(native.device_query(1), case.problem)
    with pytest.raises(errors.ProblemError, match="`residual` is null"):
        launcher.launch(
            case.problem, plan, a=case.a.address, b=case.b.address, y=case.y.address,
            workspace=0x1000, counters=0x1000,
        )  # fmt: skip
    case.problem.residual = 4
    with pytest.raises(errors.ProblemError, match="residual code 4"):
        pack.plan(native.device_query(1), case.problem)
    case.problem.residual, case.problem.activation = 0, 12
    with pytest.raises(errors.ProblemError, match="activation code 12"):
        pack.plan(native.device_query(1), case.problem)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 1000), (1, 1, 7), (40, 64, 512), (40, 64, 2048)])
@pytest.mark.parametrize("bias", [native.Bias.NONE, native.Bias.MATRIX])
def test_dot_products(tmp_path: Path, m: int, n: int, k: int, bias: native.Bias) -> None:
    kernel = tp.TinyKernel(
        family=6, dtype=0, bm=2, bn=4, bk=512, trans_b=1, align=2, bias_matrix=1
    )  # fmt: skip
    path = tp.write_pack(tmp_path / "sm_90.mpk", [replace(kernel, cubin=fake_cubin(kernel))])
    case = Case(m, n, k, trans_b=1, batch=2, bias=bias, bias_shape=(m, n) if bias else (1, 1))
    with native.Pack(path) as pack, native.Launcher(pack, 0) as launcher:
        case.run(launcher, pack, pack.plan(native.device_query(0), case.problem))
