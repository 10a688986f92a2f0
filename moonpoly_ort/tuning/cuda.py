"""The CUDA driver through ctypes, as far as measuring needs it: memory, a stream, events, graphs.

The native runtime launches kernels and nothing else; this file is what surrounds them, so that
tuning needs no other GPU package. It works on the device's primary context, which the native
launcher uses too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import DeviceError

NOT_READY = 600
RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
PATIENCE = 30.0  # seconds that anything queued may take

REMEDIES = {
    2: "free memory on the GPU, or choose another one",
    3: "the driver is shutting down: start again",
    100: "install the NVIDIA driver, or choose a machine with a GPU",
    700: "a kernel read or wrote out of bounds; start again: its second attempt will be its last",
    719: "a kernel failed; start again: its second attempt will be its last",
    999: "see the kernel log (dmesg) for a fault of the GPU",
}

# Compiled by the driver; PTX of this version is read by every driver since CUDA 11.
EMPTY_KERNEL = (
    b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty()\n{\nret;\n}\n"
)


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"measuring needs an NVIDIA driver, and there is none ({error}); install it, or tune "
            "on a machine with a GPU"
        ) from error


class KernelFault(DeviceError):
    """A kernel that hangs, or that broke the context: this process can use the GPU no more."""


class Gpu:
    """A GPU with one stream of its own; a context manager that frees everything allocated.

    Raises:
        DeviceError: no driver, no such GPU, or a call that fails; names the call, the driver's own
            text and what to do.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._cuda = _driver()
        self._allocated: set[int] = set()
        self._events: list[c_void_p] = []
        self._device, context, self.stream = c_int(), c_void_p(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(self._device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            self.call("cuStreamCreate", byref(self.stream), 1)  # does not wait for the null stream
        except DeviceError:
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)
            raise
        self._open = True

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the driver; raises DeviceError unless it succeeds."""
        self.check(name, getattr(self._cuda, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        if status == 0:
            return
        code, text = c_char_p(), c_char_p()
        self._cuda.cuGetErrorName(status, byref(code))
        self._cuda.cuGetErrorString(status, byref(text))
        remedy = REMEDIES.get(status, "`moonpoly doctor` shows what is installed")
        raise (KernelFault if 700 <= status < 720 else DeviceError)(
            f"{name} failed on GPU {self.ordinal}: {(code.value or b'?').decode()} ({status}), "
            f"{(text.value or b'no description').decode()}; {remedy}"
        )

    def close(self) -> None:
        """Frees memory, events and the stream. What a broken context refuses no longer matters."""
        if not self._open:
            return
        self._open = False
        for pointer in self._allocated:
            self._cuda.cuMemFree_v2(c_uint64(pointer))
        for event in self._events:
            self._cuda.cuEventDestroy_v2(event)
        self._cuda.cuStreamDestroy_v2(self.stream)
        self._cuda.cuCtxPopCurrent_v2(byref(c_void_p()))
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- memory ----------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Memory that is free on the device now."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, at least one; their contents are arbitrary."""
        pointer = c_uint64()
        self.call("cuMemAlloc_v2", byref(pointer), c_size_t(max(size, 1)))
        self._allocated.add(pointer.value)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._allocated.discard(pointer)
        self.call("cuMemFree_v2", c_uint64(pointer))

    def upload(self, pointer: int, data: npt.NDArray[Any]) -> None:
        """Copies an array to the device, in its own memory order, and waits."""
        data = np.ascontiguousarray(data)
        # The plain copy may return before the data has arrived, and this stream would not wait.
        self.call("cuMemcpyHtoDAsync_v2", c_uint64(pointer), c_void_p(data.ctypes.data),
                  c_size_t(data.nbytes), self.stream)  # fmt: skip
        self.wait()

    def download(self, pointer: int, data: npt.NDArray[Any]) -> None:
        """Fills a contiguous array from the device, after all work that was queued."""
        self.wait()
        self.call("cuMemcpyDtoH_v2", c_void_p(data.ctypes.data), c_uint64(pointer),
                  c_size_t(data.nbytes))  # fmt: skip

    def copy(self, target: int, source: int, size: int) -> None:
        """Queues a copy within the device."""
        self.call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(size),
                  self.stream)  # fmt: skip

    def fill(self, pointer: int, size: int, word: int = 0) -> None:
        """Queues setting `size` bytes (a multiple of 4, or nothing) to a 32-bit pattern."""
        if size < 4:
            return
        self.call("cuMemsetD32Async", c_uint64(pointer), ctypes.c_uint32(word), c_size_t(size // 4),
                  self.stream)  # fmt: skip

    # ---- time ------------------------------------------------------------------------------------

    def wait(self, seconds: float = PATIENCE) -> None:
        """Waits for everything queued; a DeviceError says that it takes too long."""
        begun = time.monotonic()
        while (status := self._cuda.cuStreamQuery(self.stream)) == NOT_READY:
            passed = time.monotonic() - begun
            if passed > seconds:
                raise KernelFault(
                    f"work on GPU {self.ordinal} has not ended after {seconds:.0f} s: a kernel "
                    "hangs. Start again: what hung is left out after its second attempt"
                )
            if passed > 2e-3:  # before, sleeping would cost more than it saves
                time.sleep(2e-4)
        self.check("cuStreamQuery", status)

    def event(self) -> c_void_p:
        """A new event; it lives as long as this object."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0)
        self._events.append(event)
        return event

    def record(self, event: c_void_p) -> None:
        self.call("cuEventRecord", event, self.stream)

    def elapsed_us(self, start: c_void_p, end: c_void_p) -> float:
        """Microseconds between two recorded events that have passed."""
        milliseconds = c_float()
        self.call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value * 1e3

    # ---- graphs ----------------------------------------------------------------------------------

    def capture(self, work: Callable[[], None]) -> Graph:
        """The graph of what `work` queues on the stream; what it raises gets out."""
        graph, executable = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, RELAXED_CAPTURE)
        try:
            work()
        except BaseException:
            self._cuda.cuStreamEndCapture(self.stream, byref(graph))
            if graph:
                self._cuda.cuGraphDestroy(graph)
            raise
        self.call("cuStreamEndCapture", self.stream, byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        finally:
            self._cuda.cuGraphDestroy(graph)
        return Graph(self, executable)

    def empty_kernel(self) -> Callable[[], None]:
        """A function that queues an empty kernel."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), EMPTY_KERNEL)
        self.call("cuModuleGetFunction", byref(function), module, b"empty")

        def launch() -> None:
            self.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, self.stream, None, None)

        return launch


class Graph:
    """An executable graph; a context manager."""

    def __init__(self, gpu: Gpu, executable: c_void_p) -> None:
        self._gpu, self._executable = gpu, executable

    def replay(self) -> None:
        """Queues all of it."""
        self._gpu.call("cuGraphLaunch", self._executable, self._gpu.stream)

    def close(self) -> None:
        if self._executable:
            self._gpu._cuda.cuGraphExecDestroy(self._executable)
            self._executable = c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bus_id(ordinal: int) -> str:
    """The PCI address of a CUDA device, by which other tools know it. Raises DeviceError."""
    cuda, device, text = _driver(), c_int(), ctypes.create_string_buffer(32)
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(byref(device), ordinal),
        cuda.cuDeviceGetPCIBusId(text, len(text), device),
    ):
        if status:
            raise DeviceError(f"GPU {ordinal} cannot be asked for its PCI address (CUDA {status})")
    return text.value.decode()


def cuda_version() -> str:
    """The CUDA version that the driver supports, e.g. `13.0`. Raises DeviceError."""
    version = c_int()
    _driver().cuDriverGetVersion(byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
