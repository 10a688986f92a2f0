"""A numpy array with its copy on the device, as the gates give operands to kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cuda import Gpu

Array = NDArray[Any]


class DeviceArray:
    """`contents`, and as many bytes on the device, uploaded.

    `lead`: bytes that the allocation has in front, so that they start aligned to no more than that.
    """

    def __init__(self, gpu: Gpu, contents: Array, lead: int = 0) -> None:
        self.contents = contents
        self._gpu, self._allocation = gpu, gpu.allocate(lead + contents.nbytes)
        self._start = self._allocation + lead
        self.upload()

    @property
    def pointer(self) -> int:
        return self._start

    def upload(self) -> None:
        self._gpu.upload(self._start, self.contents)

    def download(self) -> Array:
        """What the device holds of it now, gaps and guards included."""
        found = np.empty_like(self.contents)
        self._gpu.download(self._start, found)
        return found

    def free(self) -> None:
        self._gpu.free(self._allocation)
