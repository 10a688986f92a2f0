"""The CUDA ops from registration to launch: streams, scratch memory, counters, tensor maps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tiny_pack as tp
from fake_gpu import (
    Aligned,
    argument_sizes,
    driver,
    execute,
    launches,
    memsets,
    write_fake_pack,
    write_pack_that_cuts,
)
from fake_ort import Context, FakeOrt

from moonpoly_ort import native
from tests.epilogues import PRODUCTS, TO_FLOAT

STREAM = 0x5EED


@pytest.fixture(scope="module")
def pack_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_pack(tmp_path_factory.mktemp("pack") / "sm_90.mpk")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    driver.fake_set_context(0)
    driver.fake_set_capturing(0)
    driver.fake_reset()
    yield
    while Node.living:
        Node.living.pop().destroy()


class Node:
    """A created kernel and what runs through it."""

    living: ClassVar[list[Node]] = []

    def __init__(self, pack_path: Path, name: str = "MatMul", *, device: int = 0,
                 dtype: native.Dtype = native.Dtype.F16, vendor: str = "",
                 version: bytes = b"1.23.2", **attributes: float) -> None:  # fmt: skip
        config = {"moonpoly.pack": str(pack_path), "moonpoly.vendor": vendor}
        self.ort = FakeOrt(config, device=device, version=version, attributes=attributes)
        self.ort.register()
        self.op = self.ort.op(name, dtype)
        self.kernel = self.ort.create(self.op)
        self.pack = native.Pack(pack_path)
        Node.living.append(self)

    def destroy(self) -> None:
        self.ort.destroy(self.op, self.kernel)
        assert self.ort.live == {"info": 0, "allocator": 0, "status": 0}

    def launch(self, inputs: Sequence[Aligned | None], stream: int = STREAM) -> Context:
        context = Context(inputs, inputs[0].array.dtype, stream)  # type: ignore[union-attr]
        self.ort.compute(self.op, self.kernel, context)
        return context

    def run(self, inputs: Sequence[Aligned | None], stream: int = STREAM) -> Context:
        """Computes, then does on host memory what was launched."""
        driver.fake_reset()
        context = self.launch(inputs, stream)
        for launch, record in zip(launches(), self._records(inputs), strict=True):
            assert launch.stream == stream
            execute(launch, record)
        assert self.ort.live == {"info": 0, "allocator": 1, "status": 0}
        assert sorted(self.ort.freed) == sorted(self.ort.scratch_memory)
        return context

    def counters(self, inputs: Sequence[Aligned | None]) -> object:
        """Where the only launch has its counters."""
        ((launch,), (record,)) = launches(), self._records(inputs)
        (address,) = launch.decode(record)[tp.PTR_COUNTERS]
        return address

    def _records(self, inputs: Sequence[Aligned | None]) -> list[native.KernelRecord]:
        shared = [launch.shared for launch in launches()]
        sizes = [[len(value) for value in launch.raw] for launch in launches()]
        out = []
        for launch, want_shared, arguments in zip(launches(), shared, sizes, strict=True):
            for record in self.pack.kernels:
                if record.shared_bytes != want_shared or launch.block != 32 * record.warps:
                    continue
                if arguments != argument_sizes(record) or record.dtype != 0:
                    continue
                values = launch.decode(record)
                if record.persistent:  # the grid does not tell whether K is cut
                    fits = bool(record.split_k) == bool(values[8][0])
                else:
                    tiles = -(-values[10][0] // record.bm) * -(-values[11][0] // record.bn)  # type: ignore[operator]
                    split = values[13][0]
                    fits = bool(record.split_k) == (split > 1)  # type: ignore[operator]
                    fits = fits and launch.grid % (tiles * split) == 0  # type: ignore[operator]
                if fits and self._layout_fits(record, values):
                    out.append(record)
                    break
            else:
                raise AssertionError("no kernel of the pack matches the launch")
        return out

    def _layout_fits(self, record: native.KernelRecord, values: dict[int, list[object]]) -> bool:
        m, n, k = (values[code][0] for code in (10, 11, 12))
        if record.family != native.Family.GEMM_POINTER:
            a, b = values[1][0], values[2][0]
            return (
                a.dims[1:] == ((k, m) if record.trans_a else (m, k))  # type: ignore[attr-defined]
                and b.dims[1:] == ((n, k) if record.trans_b else (k, n))
            )  # type: ignore[attr-defined]
        return True


def array(*shape: int, seed: int = 0) -> Aligned:
    rng = np.random.default_rng(seed + sum(shape))
    return Aligned(rng.standard_normal(shape).astype(np.float16))


def check(context: Context, expected: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
    assert context.output is not None
    assert context.output.array.shape == expected.shape
    np.testing.assert_allclose(
        context.output.array.astype(np.float64), expected, rtol=1e-2, atol=5e-2
    )


def exact(x: Aligned) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return x.array.astype(np.float64)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((40, 72), (72, 136)),
        ((3, 40, 72), (72, 136)),
        ((3, 40, 72), (3, 72, 136)),
        ((2, 1, 8, 24), (1, 3, 24, 16)),
        ((2, 1, 2, 8, 24), (1, 3, 1, 24, 16)),
        ((1, 4096), (4096, 256)),
    ],
)
def test_matmul(pack_path: Path, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    node = Node(pack_path)
    x, y = array(*a), array(*b, seed=9)
    check(node.run([x, y]), np.matmul(exact(x), exact(y)))


def test_gemm_with_bias(pack_path: Path) -> None:
    node = Node(pack_path, "Gemm", alpha=0.5, beta=2.0, transA=0, transB=0)
    x, y, c = array(40, 72), array(72, 136), array(136)
    check(node.run([x, y, c]), 0.5 * exact(x) @ exact(y) + 2.0 * exact(c))
    check(node.run([x, y, None]), 0.5 * exact(x) @ exact(y))
    check(node.run([x, y]), 0.5 * exact(x) @ exact(y))


def test_a_residual_moves_with_the_launches(pack_path: Path) -> None:
    node = Node(pack_path, "MatMulMul")
    x, y, r = array(2, 1, 2, 8, 24), array(1, 3, 1, 24, 16), array(2, 3, 2, 8, 16)
    check(node.run([x, y, r]), exact(x) @ exact(y) * exact(r))
    assert len(launches()) == 2


def test_empty_output_launches_nothing(pack_path: Path) -> None:
    node = Node(pack_path)
    context = node.run([array(0, 72), array(72, 136)])
    assert launches() == []
    assert context.output is not None
    assert context.output.array.shape == (0, 136)


def test_split_k_takes_stream_counters_and_scratch(pack_path: Path) -> None:
    node = Node(pack_path)
    x, y = array(1, 8192), array(8192, 64)
    first = node.run([x, y])
    check(first, exact(x) @ exact(y))
    counters = node.counters([x, y])
    assert counters
    assert len(first.scratch) == 1
    assert memsets() == []
    # the same stream takes the same counters; another stream others
    node.run([x, y])
    assert node.counters([x, y]) == counters
    node.run([x, y], stream=0xABC)
    assert node.counters([x, y]) != counters


def test_capture_clears_counters_in_scratch(pack_path: Path) -> None:
    node = Node(pack_path)
    x, y = array(1, 8192), array(8192, 64)
    driver.fake_set_capturing(1)
    context = node.run([x, y])
    check(context, exact(x) @ exact(y))
    ((pointer, count, stream),) = memsets()
    assert stream == STREAM
    (base,) = node.ort.scratch_memory
    assert base < pointer
    assert pointer + 4 * count == base + context.scratch[0]


def test_a_captured_run_asks_for_no_more_memory_than_those_before_it(pack_path: Path) -> None:
    """The arena cannot grow under capture: cudaMalloc is refused there."""
    node = Node(pack_path)
    x, y = array(1, 8192), array(8192, 64)
    before = node.run([x, y]).scratch
    driver.fake_set_capturing(1)
    assert node.run([x, y]).scratch == before


def test_streams_beyond_the_slots_use_scratch(pack_path: Path) -> None:
    node = Node(pack_path, device=1)
    driver.fake_set_context(1)
    x, y = array(1, 8192), array(8192, 64)
    seen = set()
    for number in range(1, 70):
        driver.fake_reset()
        node.launch([x, y], 0x100 * number)
        seen.add(node.counters([x, y]))
        assert len(memsets()) == (number > 64)
    assert len(seen) >= 64


def test_the_stream_of_each_thread_has_no_slot(pack_path: Path) -> None:
    """cudaStreamPerThread, handle 2, is another stream in every thread."""
    node = Node(pack_path)
    x, y = array(1, 8192), array(8192, 64)
    check(node.run([x, y], stream=2), exact(x) @ exact(y))
    ((pointer, _, stream),) = memsets()
    (base,) = node.ort.scratch_memory
    assert stream == 2
    assert base < pointer


def test_without_a_stream_nothing_is_split(pack_path: Path) -> None:
    node = Node(pack_path)
    x, y = array(1, 8192), array(8192, 64)
    context = node.run([x, y], stream=0)
    check(context, exact(x) @ exact(y))
    assert context.scratch == []


def test_the_device_of_the_provider_is_used(pack_path: Path) -> None:
    node = Node(pack_path, device=1)
    x, y = array(40, 72), array(72, 136)
    for current in (-1, 0, 1):
        driver.fake_set_context(current)
        check(node.run([x, y]), exact(x) @ exact(y))
        assert driver.fake_context_depth() == (current >= 0)


@pytest.mark.parametrize("version", [b"1.23.2", b"1.24.0", b"1.31.1"])
def test_shapes_are_borrowed_where_the_runtime_lends_them(pack_path: Path, version: bytes) -> None:
    node = Node(pack_path, version=version)
    x, y = array(3, 40, 72), array(72, 136)
    check(node.run([x, y]), exact(x) @ exact(y))
    lends = version != b"1.23.2"
    assert (node.ort.shapes_lent, node.ort.shapes_copied) == ((2, 0) if lends else (0, 2))
    with pytest.raises(RuntimeError, match="input 1 has rank 33; at most 32 is possible"):
        node.run([x, Aligned(np.zeros([1] * 33, np.float16))])


def test_moved_operands_are_encoded_afresh(pack_path: Path) -> None:
    node = Node(pack_path)
    weight = array(72, 136)
    for seed in range(4):
        x = array(40, 72, seed=seed)
        check(node.run([x, weight]), exact(x) @ exact(weight))
        check(node.run([x, weight]), exact(x) @ exact(weight))


def test_nodes_share_tensor_maps(tmp_path: Path) -> None:
    """Of a node that multiplies what another one has, only B and Y are encoded; of other rows at
    the same address all.
    """
    path = write_pack_that_cuts(tmp_path / "sm_90.mpk")
    first, second = Node(path), Node(path)
    x = array(256, 512)
    for node, encoded in ((first, 3), (second, 2)):
        weight, before = array(512, 128), driver.fake_encoded()
        context = node.run([x, weight])
        check(context, exact(x) @ exact(weight))
        assert driver.fake_encoded() == before + encoded
    fewer, before = x.first_rows(128), driver.fake_encoded()
    assert fewer.address == x.address
    check(first.run([fewer, weight]), exact(fewer) @ exact(weight))
    assert driver.fake_encoded() >= before + 2


def test_two_regions_each_remember_their_tensor_maps(tmp_path: Path) -> None:
    """Of a second run on the same operands, only those of Y, which ONNX Runtime has moved."""
    node = Node(write_pack_that_cuts(tmp_path / "sm_90.mpk"))
    x, weight = array(133 * 128, 512), array(512, 128)
    before = driver.fake_encoded()
    check(node.run([x, weight]), exact(x) @ exact(weight))
    assert len(launches()) == 2
    assert driver.fake_encoded() == before + 6
    context = node.run([x, weight])
    check(context, exact(x) @ exact(weight))
    assert driver.fake_encoded() <= before + 8
    # Each region has scratch of its own within what was asked for; counters come from the stream.
    assert len(context.scratch) == 1
    assert memsets() == []


def test_kernels_share_modules_and_release_them(pack_path: Path) -> None:
    before = driver.fake_modules()
    first = Node(pack_path)
    loaded = driver.fake_modules()
    assert loaded > before
    second = Node(pack_path, "Gemm")
    assert driver.fake_modules() == loaded
    for node in (first, second):
        node.destroy()
    Node.living.clear()
    assert driver.fake_modules() == before


def test_other_dtypes_load_other_kernels(pack_path: Path) -> None:
    Node(pack_path)
    loaded = driver.fake_modules()
    Node(pack_path, dtype=native.Dtype.F32)
    assert driver.fake_modules() > loaded


def test_ops_are_registered_for_cuda_in_every_dtype(pack_path: Path) -> None:
    ort = FakeOrt({"moonpoly.pack": str(pack_path), "moonpoly.backend": "cuda"})
    ort.register()
    for name in PRODUCTS:
        for dtype in list(native.Dtype)[: 2 if name in TO_FLOAT else 3]:
            assert ort.provider(ort.op(name, dtype)) == b"CUDAExecutionProvider"
    del ort.config["moonpoly.registered"]  # as in new session options
    ort.register()
    # Sessions with equal settings share the domain. The pack has no kernels of convolutions.
    assert len(ort.ops) == 3 * len(PRODUCTS) - len(TO_FLOAT)


def test_registering_twice_on_the_same_options_is_refused(pack_path: Path) -> None:
    ort = FakeOrt({"moonpoly.pack": str(pack_path)})
    ort.register()
    with pytest.raises(RuntimeError, match="on these session options already"):
        ort.register()
    assert ort.live["status"] == 0


def test_warns_once_of_a_gpu_without_a_table(pack_path: Path) -> None:
    for _ in range(3):
        Node(pack_path)
    every = [text for ort in FakeOrt.everyone for text in ort.warnings]
    assert len(every) == 1
    assert "GPU" in every[0]
    assert "analytic model" in every[0]


def test_old_onnx_runtime_is_refused_naming_both(pack_path: Path) -> None:
    ort = FakeOrt({}, version=b"1.17.0")
    with pytest.raises(RuntimeError, match=r"API 22 .*this runtime is 1.17.0"):
        ort.register()


def test_wrong_architecture_names_node_and_both(tmp_path: Path) -> None:
    path = write_fake_pack(tmp_path / "sm_100.mpk", sm=100)
    ort = FakeOrt({"moonpoly.pack": str(path)})
    ort.register()
    with pytest.raises(RuntimeError, match=r"node 'node'.*sm_100, but NVIDIA H200 is sm_90"):
        ort.create(ort.op("MatMul", native.Dtype.F16))
    assert ort.live["allocator"] == 0


def test_threads_with_streams_of_their_own(pack_path: Path) -> None:
    node = Node(pack_path)
    weight = array(256, 64)
    failures: list[BaseException] = []

    def work(stream: int) -> None:
        try:
            driver.fake_set_context(0)
            for i in range(40):
                node.launch([array(1 + i % 7, 256), weight], stream)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(0x100 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(launches()) == 160


def test_threads_that_share_a_stream_do_not_part_regions(tmp_path: Path) -> None:
    """Between two regions side by side, a kernel of another thread would run beside the second one
    and count in the same counters."""
    node = Node(write_pack_that_cuts(tmp_path / "sm_90.mpk"))
    inputs = [array(133 * 128, 512), array(512, 128)]
    node.launch(inputs)
    first, second = (launch.grid for launch in launches())
    driver.fake_reset()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            driver.fake_set_context(0)
            for _ in range(300):
                node.launch(inputs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [launch.grid for launch in launches()] == [first, second] * 1200
