"""A GPU to tune on: a pack whose kernels the fake driver runs, in a time that hidden costs give."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import conv_launches
import numpy as np
import tiny_pack as tp
from fake_gpu import Launch, driver, execute, fake_cubin, launches
from moonpoly_ort.custom_ops.kernels import compiling, conv_spec, pack_format
from moonpoly_ort.custom_ops.kernels.pack_format import Param
from reference import DTYPES

from moonpoly_ort import native

Worker = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int, ctypes.c_int)
BANDWIDTH, LAUNCH_US = 4000.0, 1.25
MOST_PRODUCTS = 20_000  # of matrices, for a convolution to be computed: those of the gate
driver.fake_image.restype = ctypes.c_void_p
driver.fake_live_allocations.restype = ctypes.c_int64


def write_pack(path: Path, wanted: Callable[[pack_format.PackedKernel], bool]) -> Path:
    """Kernels of the real list, with "cubins" for the fake driver; each carries its number."""
    kernels = []
    for kernel in filter(wanted, compiling.catalog_kernels(90)):
        spec = kernel.spec
        if spec.family.convolves:
            image = conv_launches.fake_cubin(kernel) + struct.pack("<i", len(kernels))
            kernels.append(replace(kernel, cubin=image, entry="kernel"))
            continue
        tiny = tp.TinyKernel(pack_format.FAMILY_CODE[spec.family], 0, 16, 16, 16)
        image = fake_cubin(tiny) + struct.pack("<i", len(kernels))
        boxes = ((spec.bk, spec.bm) if spec.trans_a else (spec.bm, spec.bk),
                 (spec.bn, spec.bk) if spec.trans_b else (spec.bk, spec.bn),
                 (spec.bm, spec.bn))  # fmt: skip
        limit = 128 // spec.dtype.bytes
        descriptors = tuple(
            pack_format.Descriptor((1, rows, min(columns, limit)), 3) for rows, columns in boxes
        )
        kernels.append(
            replace(kernel, cubin=image, entry="kernel",
                    descriptors=descriptors if spec.family.tensor_maps else ())
        )  # fmt: skip
    pack_format.write_pack(path, 90, kernels, key="5" * 64, triton="3.9.0")
    return path


class Bench:
    """What launches of a pack's kernels do: the product, in the time that `costs` say."""

    def __init__(self, pack: Path, folder: Path, seed: int = 0) -> None:
        whole = pack_format.read_pack(pack)
        self.pack, self.stored = native.Pack(pack), whole.kernels
        self.device = native.device_query(0)
        rng = np.random.default_rng(seed)
        self.costs = np.zeros(len(whole.kernels), pack_format.COST)
        for index, (packed, kernel) in enumerate(
            zip(whole.kernels, self.pack.kernels, strict=True)
        ):
            blocks = native.blocks_per_sm(kernel, self.device)
            step = packed.spec.bm * packed.spec.bn * packed.spec.bk * rng.uniform(0.7, 1.8) / 1.7e6
            self.costs[index] = (rng.uniform(0.8, 3), 0.05 + step * blocks, 0.08 + step, blocks)
        table = pack_format.CostTable(
            self.device.name, self.device.sm_count, BANDWIDTH, LAUNCH_US, self.costs
        )
        hidden = folder / "hidden.mpk"
        pack_format.write_pack(hidden, 90, whole.kernels, [table], key="6" * 64, triton="hidden")
        self.hidden = native.Pack(hidden)
        self.names = [kernel.name for kernel in self.pack.kernels]
        self.launched: dict[str, int] = dict.fromkeys(self.names, 0)  # outside of graphs
        self.spoil: Callable[[str, dict[int, list[object]]], None] = lambda name, values: None
        self.failure: BaseException | None = None

    def work(self, number: int, run: int) -> float:
        try:
            return self._work(number, bool(run))
        except BaseException as error:  # ctypes would only print it
            self.failure = self.failure or error
            return 1.0

    def _work(self, number: int, run: bool) -> float:
        (launch,) = launches(number)
        image = driver.fake_image(number)
        if not launch.raw:
            return LAUNCH_US  # the empty kernel
        offset = 8 + 4 * len(launch.raw)
        index = struct.unpack("<i", ctypes.string_at(image + offset, 4))[0]
        kernel = self.pack.kernels[index]
        if run:
            self.launched[kernel.name] += 1
        if native.Family(kernel.family).convolves:
            return self._convolve(index, launch, run)
        # Work on the operands of a timing is left out: what counts there is how long it takes.
        small = launch.grid <= 64
        values = execute(launch, kernel) if run and small else launch.decode(kernel)
        if run and small:
            self.spoil(kernel.name, values)
        m, n, k = (values[code][0] for code in (tp.M, tp.N, tp.K))
        return self._us(index, kernel, launch.grid, m, n, k, values)  # type: ignore[arg-type]

    def _convolve(self, index: int, launch: Launch, run: bool) -> float:
        stored = self.stored[index]
        spec = stored.spec
        values = conv_launches.decode(launch.raw, stored.params)
        split = values.get(Param.SPLIT, 1)
        tiles = -(-values[Param.M] // spec.bm) * -(-values[Param.N] // spec.bn) * split
        entries = launch.grid // tiles
        transposed = conv_spec.is_transposed(spec.family)
        conv = conv_launches.problem(values, entries, spec)
        products = conv.n * conv.groups * math.prod(conv.out) * math.prod(conv.kernel)
        if run and products < MOST_PRODUCTS:
            dtype = DTYPES[native.Dtype(conv.dtype)]
            conv_launches.compute(values, dtype, entries, spec.family.depthwise, transposed)
        plan = self.hidden.plan_conv(self.device, conv, kernel=index, split=split)
        return plan.predicted_us

    def _us(
        self, index: int, kernel: native.KernelRecord, grid: int, m: int, n: int, k: int,
        values: dict[int, list[object]],
    ) -> float:  # fmt: skip
        tiles = -(-m // kernel.bm) * -(-n // kernel.bn)
        if kernel.persistent:  # its blocks work out by themselves what is theirs
            batch = int(values[tp.BATCH][0])  # type: ignore[call-overload]
            split = max(2, -(-grid // (tiles * batch))) if kernel.split_k else 1
        else:
            split = int(values[tp.SPLIT][0])  # type: ignore[call-overload]
            batch = grid // (tiles * split)
        problem = native.Problem(
            dtype=kernel.dtype, precision=kernel.precision, trans_a=kernel.trans_a,
            trans_b=kernel.trans_b, m=m, n=n, k=k, batch=batch, lda=m if kernel.trans_a else k,
            ldb=k if kernel.trans_b else n, ldc=n, a_batch_stride=m * k, b_batch_stride=k * n,
            c_batch_stride=m * n, a_div=1, a_mod=batch, b_div=1, b_mod=batch,
            align_a=kernel.align_a, align_b=kernel.align_b, align_c=kernel.align_c,
            alpha=1.0,
        )  # fmt: skip
        plan = self.hidden.plan(self.device, problem, kernel=index, split=split)
        return plan.predicted_us

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Launches do this work inside; what goes wrong in it is raised at the end."""
        worker = Worker(self.work)
        driver.fake_reset()
        driver.fake_set_l2_bytes(1 << 20)
        driver.fake_set_worker(worker)
        try:
            yield
        finally:
            driver.fake_set_worker(ctypes.cast(None, Worker))
            driver.fake_set_l2_bytes(60 << 20)
        if self.failure is not None:
            raise self.failure
