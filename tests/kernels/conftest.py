from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpoly_ort import interpreter


class Guarded:
    """Triton's memory access, refusing addresses outside of the buffers of the region at hand."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.ranges: list[tuple[int, int]] = []
        self.shrink = 0

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.real, attribute)

    def recorded(self, allocate: Any) -> Any:
        def call(*arguments: Any) -> Any:
            tensor = allocate(*arguments)
            self.ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
            return tensor

        return call

    def check(self, pointers: Any, mask: Any, size: int) -> None:
        inside = np.zeros(np.shape(pointers), bool)
        for low, high in self.ranges:
            inside |= (pointers >= low) & (pointers + size <= high - self.shrink)
        assert (inside | ~np.broadcast_to(mask, inside.shape)).all(), "access out of bounds"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self.check(pointers, mask, values.dtype.itemsize)
        return self.real.store(pointers, values, mask)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    """Bounds checks for all tests of a module: a buffer is exactly what its strides reach."""
    import triton.runtime.interpreter as triton_interpreter

    guard = Guarded(triton_interpreter._interpreter)
    run_region = interpreter._run_region

    def run(*arguments: Any) -> None:
        guard.ranges.clear()
        run_region(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_interpreter, "_interpreter", guard)
        patch.setattr(interpreter, "_elements", guard.recorded(interpreter._elements))
        patch.setattr(interpreter, "_scratch", guard.recorded(interpreter._scratch))
        patch.setattr(interpreter, "_run_region", run)
        yield guard
