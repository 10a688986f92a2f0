"""A GPU that is host memory and Triton's interpreter: what the correctness gate asks of one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpoly_ort import interpreter, native


class _Stream:
    value = None


class HostGpu:
    """`cuda.Gpu`, as far as the gate uses it; memory is 256-byte aligned, as a driver's."""

    stream = _Stream()

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        block = np.zeros(max(size, 1) + 256, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 256
        self.memory[address] = block
        return address

    def free(self, pointer: int) -> None:
        del self.memory[pointer]

    def upload(self, pointer: int, data: NDArray[Any]) -> None:
        ctypes.memmove(pointer, np.ascontiguousarray(data).ctypes.data, data.nbytes)

    def download(self, pointer: int, data: NDArray[Any]) -> None:
        ctypes.memmove(data.ctypes.data, pointer, data.nbytes)

    def fill(self, pointer: int, size: int, word: int = 0) -> None:
        self.upload(pointer, np.full(size // 4, word, np.uint32))

    def wait(self) -> None:
        return None


class HostLauncher:
    """`native.Launcher` for convolutions, by the real kernels in the interpreter."""

    def __init__(self, pack: native.Pack) -> None:
        self.pack = pack

    def launch_conv(
        self, conv: native.Conv, plan: native.Plan, *, x: int, w: int, y: int,
        bias: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        interpreter.run_conv(self.pack, conv, plan, x, w, bias, y)
