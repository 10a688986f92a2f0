"""A small model of the Gluon that `gemm_ws` uses, for which there is no interpreter: numpy arrays
for tensors and shared memory, a thread for each partition of each block.

What is asynchronous on the GPU happens here as late as the program's waits allow (products and TMA
stores read shared memory only when they are waited for) or as early (TMA loads write at once), so
that a buffer that is reused too soon gives wrong values. A wait that nobody answers fails the test.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SWIZZLES = 64, 128  # bytes of a row that lie side by side in shared memory
PATIENCE = 20.0  # seconds that a wait may take before the ring counts as dead
KERNELS = Path(__file__).parents[2] / "custom_ops" / "kernels"
_local = threading.local()


class Dtype:
    def __init__(self, numpy: type, bits: int) -> None:
        self.numpy, self.primitive_bitwidth = numpy, bits


float16, float32, int32, int64 = (
    Dtype(np.float16, 16), Dtype(np.float32, 32), Dtype(np.int32, 32), Dtype(np.int64, 64),
)  # fmt: skip


class Tensor(np.ndarray):
    """Values; layouts are without meaning here."""

    type = types.SimpleNamespace(
        layout=types.SimpleNamespace(instr_shape=(16, 0, 16), cga_layout=())
    )

    def to(self, dtype: Dtype, bitcast: bool = False) -> Tensor:
        if bitcast:
            return np.asarray(self).view(dtype.numpy).view(Tensor)
        return self.astype(dtype.numpy).view(Tensor)

    def permute(self, order: Sequence[int]) -> Tensor:
        return np.transpose(self, order).view(Tensor)

    def split(self) -> tuple[Tensor, Tensor]:
        return tensor(self[..., 0].copy()), tensor(self[..., 1].copy())


def tensor(values: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


class Pointer:
    def __init__(
        self, array: np.ndarray | None, offset: Any = 0, element_ty: Dtype = float32
    ) -> None:
        self.array, self.offset = array, offset
        self.dtype = types.SimpleNamespace(element_ty=element_ty)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset + offset, self.dtype.element_ty)

    def to(self, element_ty: Dtype, bitcast: bool) -> Pointer:
        """As to a pointer to wider elements, which the array has in truth."""
        assert bitcast
        assert self.array is not None
        assert self.array.dtype == element_ty.numpy
        scale, odd = divmod(element_ty.primitive_bitwidth, self.dtype.element_ty.primitive_bitwidth)
        assert odd == 0
        assert np.all(self.offset % scale == 0)
        return Pointer(self.array, self.offset // scale, element_ty)


class Shared:
    """A view of shared memory."""

    def __init__(self, array: np.ndarray, dtype: Dtype) -> None:
        self.array, self.dtype = array, dtype

    shape = property(lambda self: self.array.shape)

    def index(self, at: int) -> Shared:
        return Shared(self.array[at], self.dtype)

    def reshape(self, shape: Sequence[int]) -> Shared:
        view = self.array.view()
        view.shape = tuple(shape)  # raises where a copy would be needed
        return Shared(view, self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order), self.dtype)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.array[start : start + length], self.dtype)

    def reinterpret(self, shape: Sequence[int], layout: Any) -> Shared:
        """A tile (1, rows, columns) as tiles one behind the other in memory, of as many columns as
        fill the swizzle, or of fewer rows."""
        count, _, rows, columns = shape
        _, tall, wide = self.array.shape
        assert (rows, columns) in ((tall, wide // count), (tall // count, wide))
        assert rows < tall or columns * self.array.itemsize in SWIZZLES
        split = self.array.reshape(tall // rows, rows, wide // columns, columns)
        return Shared(split.transpose(0, 2, 1, 3).reshape(shape, copy=False), self.dtype)

    def store(self, values: Tensor) -> None:
        self.array[...] = values

    def load(self, layout: Any) -> Tensor:
        return tensor(self.array.copy())


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all expected bytes are in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def update(self, arrivals: int, transfer: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += transfer
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.pending = self.count
                self.phase += 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            alive = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE)
            assert alive, "a wait on a barrier that is never answered"


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.all[at]


class Descriptor:
    """A tensor map of rank 3 over an array; `block_shape` is its box."""

    layout = None

    def __init__(self, array: np.ndarray, block_shape: Sequence[int], dtype: Dtype) -> None:
        self.array, self.block_shape, self.dtype = array, list(block_shape), dtype

    def box(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the array inside the box at some coordinates, and its place in the box."""
        inside = [
            min(max(size - start, 0), box)
            for start, size, box in zip(at, self.array.shape, self.block_shape, strict=True)
        ]
        assert all(start >= 0 for start in at)
        return (
            tuple(slice(start, start + size) for start, size in zip(at, inside, strict=True)),
            tuple(slice(0, size) for size in inside),
        )


class Accumulator:
    """Products that are still in flight; shared memory is read when they are waited for."""

    def __init__(self, value: Tensor, pending: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.value, self.pending = value, pending

    def finished(self, outstanding: int) -> Accumulator | Tensor:
        while len(self.pending) > outstanding:
            a, b = self.pending.pop(0)
            product = truncated(a) @ truncated(b)
            self.value = tensor(self.value + product)
        return self if self.pending else self.value

    shape = property(lambda self: self.value.shape)


def truncated(values: np.ndarray) -> np.ndarray:
    """Factors as the tensor core sees them: of f32 with 10 bits of mantissa; f16 has no more."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    return (bits & -8192).view(np.float32)


def warpgroup_mma(
    a: Shared | Tensor, b: Shared, acc: Any, *, precision: str, is_async: bool, use_acc: bool = True
) -> Accumulator:
    assert is_async
    assert precision == "tf32"
    if not use_acc:
        acc = Accumulator(tensor(np.zeros_like(acc)), [])
    elif not isinstance(acc, Accumulator):
        acc = Accumulator(acc, [])
    left = a.array if isinstance(a, Shared) else np.array(a)
    return Accumulator(acc.value, [*acc.pending, (left, b.array)])


def warpgroup_mma_wait(outstanding: int, deps: tuple[Any]) -> Any:
    """Accumulators that are waited for together take turns, so each has an equal part of what may
    be in flight."""
    each, odd = divmod(outstanding, len(deps))
    assert odd == 0
    done = [acc.finished(each) if isinstance(acc, Accumulator) else acc for acc in deps]
    return done[0] if len(done) == 1 else tuple(done)


# ---- triton.experimental.gluon.language ----------------------------------------------------------
def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return tensor(np.arange(start, end))


def full(shape: Sequence[int], value: float, dtype: Dtype, layout: Any) -> Tensor:
    return tensor(np.full(shape, value, dtype.numpy))


def zeros(shape: Sequence[int], dtype: Dtype, layout: Any) -> Tensor:
    return full(shape, 0, dtype, layout)


_early = False  # the kernel is launched before the one in front of it has ended


def gdc_wait() -> None:
    _local.waited = True


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return tensor(np.where(condition, x, y))
    return x if condition else y


def load(pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Any:
    assert _early is False or _local.waited, "a load before the kernel in front has ended"
    offsets, mask = np.broadcast_arrays(pointer.offset, mask)
    if not mask.any():
        return tensor(np.full(offsets.shape, other, np.float32))
    assert pointer.array is not None, "a null pointer is read"
    safe = np.where(mask, offsets, 0)
    assert ((safe >= 0) & (safe < pointer.array.size)).all(), "a load outside its array"
    return tensor(np.where(mask, pointer.array[safe], other))


def store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    assert pointer.array is not None
    assert _early is False or _local.waited, "a store before the kernel in front has ended"
    offsets, values, mask = np.broadcast_arrays(pointer.offset, values, mask)
    offsets = offsets[mask]
    assert ((offsets >= 0) & (offsets < pointer.array.size)).all(), "a store outside its array"
    pointer.array[offsets] = values[mask]


_atomics = threading.Lock()


def atomic_add(pointer: Pointer, value: int, sem: str) -> int:
    assert pointer.array is not None
    assert _early is False or _local.waited, "an update before the kernel in front has ended"
    with _atomics:
        old = int(pointer.array[pointer.offset])
        pointer.array[pointer.offset] += value
    if value == 0:  # a poll
        assert time.monotonic() < _local.stop, "a flag that is never raised"
        time.sleep(0.0002 if old == 0 else 0)
    return old


def allocate_shared_memory(dtype: Dtype, shape: Sequence[int], layout: Any) -> Any:
    if dtype is int64:
        return Barriers(shape[0])
    return Shared(np.full(shape, np.nan, dtype.numpy), dtype)


def warp_specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
                    warps: Sequence[int], registers: Sequence[int]) -> None:  # fmt: skip
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    _together([_as_block(_local.block, _local.blocks, f, args) for f, args in partitions])


def _as_block(block: int, blocks: int, function: Callable[..., None], args: Sequence[Any]) -> Any:
    def work() -> None:
        _local.block, _local.blocks, _local.stores = block, blocks, []
        _local.waited = False
        _local.stop = time.monotonic() + PATIENCE
        function(*args)
        assert not _local.stores, "TMA stores that nobody waited for"

    return work


def _together(work: Sequence[Callable[[], None]]) -> None:
    faults: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


# ---- language.nvidia.hopper ----------------------------------------------------------------------
def async_load(desc: Descriptor, at: Sequence[int], barrier: Barrier, target: Shared) -> None:
    assert _early is False or _local.waited, "a load before the kernel in front has ended"
    source, inside = desc.box(at)
    target.array[...] = 0
    target.array[inside] = desc.array[source]
    barrier.update(0, -target.array.nbytes)


def async_store(desc: Descriptor, at: Sequence[int], source: Shared) -> None:
    assert _early is False or _local.waited, "a store before the kernel in front has ended"
    target, inside = desc.box(at)
    _local.stores.append((desc.array, target, source.array, inside))


def store_wait(pending: int) -> None:
    while len(_local.stores) > pending:
        array, target, source, inside = _local.stores.pop(0)
        array[target] = source[inside]


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _stand_ins() -> dict[str, types.ModuleType]:
    names = (
        "float16", "float32", "int32", "int64", "arange", "zeros", "load", "store", "atomic_add",
        "allocate_shared_memory", "warp_specialize", "full",
    )  # fmt: skip
    language = _module(
        "triton.experimental.gluon.language", **{name: globals()[name] for name in names},
        constexpr=lambda value: value, static_range=range, where=where,
        max=lambda x, axis: np.max(x, axis),
        static_assert=lambda condition: None,
        DotOperandLayout=lambda index, parent, width: None,
        minimum=min, maximum=max, program_id=lambda axis: _local.block, barrier=lambda: None,
        num_programs=lambda axis: _local.blocks,
        convert_layout=lambda x, layout, assert_trivial=False: x, range=range,
        NVMMADistributedLayout=lambda **shape: None, SliceLayout=lambda dim, parent: None,
        BlockedLayout=lambda *shape: None, DistributedLinearLayout=lambda *bases: None,
        pointer_type=lambda element_ty: element_ty,
    )  # fmt: skip
    hopper = _module(
        "triton.experimental.gluon.language.nvidia.hopper",
        fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
        tma=types.SimpleNamespace(
            async_load=async_load, async_store=async_store, store_wait=store_wait
        ),
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: barrier.wait(parity),
            expect=lambda barrier, size: barrier.update(1, size),
            arrive=lambda barrier, pred=True: barrier.update(1, 0) if pred else None,
        ),
    )  # fmt: skip
    gluon = _module(
        "triton.experimental.gluon", jit=lambda f: f, constexpr_function=lambda f: f,
        language=language,
    )  # fmt: skip
    dependent = _module(
        "triton.language.extra.cuda", gdc_wait=gdc_wait, gdc_launch_dependents=lambda: None
    )
    # What `activations` shares with kernels that are not Gluon.
    triton_language = _module(
        "triton.language",
        constexpr=lambda value: value, int64=int64, float32=float32, where=where, range=range,
        load=load, exp2=np.exp2, static_range=range, PropagateNan=types.SimpleNamespace(ALL=None),
        minimum=lambda x, y, **_: np.minimum(x, y), maximum=lambda x, y, **_: np.maximum(x, y),
    )  # fmt: skip
    triton = _module(
        "triton", jit=lambda f: f, language=triton_language,
        knobs=types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=True)),
    )  # fmt: skip
    # Its parent, too: `from ... import gluon` asks that for the real one, where it is loaded.
    parent = _module("triton.experimental", gluon=gluon)
    return {
        module.__name__: module
        for module in (triton, triton_language, parent, gluon, language, hopper, dependent)
    }


@contextlib.contextmanager
def _substituted(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


_copies = itertools.count()


def source(name: str) -> Any:
    """A kernel module of the project, its Gluon replaced by this model."""
    package = types.ModuleType(f"gluon_model_{next(_copies)}")
    package.__path__ = [str(KERNELS)]
    sys.modules[package.__name__] = package
    with _substituted(_stand_ins()):
        return importlib.import_module(f"{package.__name__}.{name}")


def in_block(block: int, blocks: int, function: Callable[..., Any], *args: Any) -> Any:
    """One call of a device function as a block sees it, on this thread."""
    _local.block, _local.blocks = block, blocks
    return function(*args)


def launch(function: Callable[..., None], blocks: int, *args: Any, early: bool = False) -> None:
    """Runs a kernel, all blocks at once."""
    global _early
    _early = early
    _together([_as_block(block, blocks, function, args) for block in range(blocks)])
