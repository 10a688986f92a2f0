"""The best set of kernels: what the others gain is not worth planning with.

Backward elimination, class by class (dtype, precision, layout). The loss of a set is the mean over
the shapes of log(best time within the set / best time of all). Again and again the kernel whose
removal costs least goes, as long as the loss stays within `MEAN_LOSS` and no shape loses more than
`WORST_LOSS`. What no timing speaks of stays: kernels that were not timed, those with a matrix C,
those that multiply copies, those that hide an activation behind products (products alone are
timed), and those without which some problem would have no kernel at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from .. import native
from .candidates import VENDOR_NAME
from .measuring import Timed
from .shapes import NUMBERS, Shape
from .work import AnyShape

MEAN_LOSS = 0.002
WORST_LOSS = 0.03
LEAST_SHAPES = 20  # of a class; fewer do not speak for shapes that were not measured

Class = tuple[int, ...]


def class_of(kernel: native.KernelRecord) -> Class:
    """Dtype, precision and layout; of a convolution's kernel, which has no layout, the former."""
    if native.Family(kernel.family).convolves:
        return kernel.dtype, kernel.precision
    return kernel.dtype, kernel.precision, kernel.trans_a, kernel.trans_b


def superfluous(
    kernels: Sequence[native.KernelRecord],
    timings: Iterable[tuple[AnyShape, list[Timed]]],
    blocked: Iterable[str] = (),
) -> list[str]:
    """Names of kernels to leave out, sorted. `blocked` ones are neither kept nor named."""
    usable = [kernel for kernel in kernels if kernel.name not in set(blocked)]
    by_class: dict[Class, list[list[Timed]]] = defaultdict(list)
    for shape, times in timings:
        dtype, precision = NUMBERS[shape.number]
        key: Class = (int(dtype), int(precision))
        if isinstance(shape, Shape):
            key = (*key, int(shape.layout[0] == "t"), int(shape.layout[1] == "t"))
        by_class[key].append(times)
    dropped: list[str] = []
    for key, shapes in by_class.items():
        if len(shapes) >= LEAST_SHAPES:
            dropped += _eliminate([k for k in usable if class_of(k) == key], shapes)
    return sorted(dropped)


def _eliminate(kernels: list[native.KernelRecord], shapes: list[list[Timed]]) -> list[str]:
    place = {kernel.name: i for i, kernel in enumerate(kernels)}
    times = np.full((len(shapes), len(kernels)), np.inf)
    for row, timed in enumerate(shapes):
        for one in timed:
            if one.name != VENDOR_NAME and one.name in place:
                times[row, place[one.name]] = min(times[row, place[one.name]], one.us)
    times = times[np.isfinite(times).any(axis=1)]
    if not len(times):
        return []
    best = times.min(axis=1)
    kept = np.ones(len(kernels), bool)
    fixed = np.array([bool(kernel.bias_matrix) for kernel in kernels])
    # Those that multiply copies of operands are timed on operands as they are stored.
    fixed |= np.array([kernel.family == native.Family.GEMM_TMA_MASKED for kernel in kernels])
    fixed |= np.array([bool(kernel.pingpong) for kernel in kernels])
    fixed |= ~np.isfinite(times).any(axis=0)
    needs = _problems(kernels)
    while True:
        options = []
        for candidate in np.flatnonzero(kept & ~fixed).tolist():
            without = kept.copy()
            without[candidate] = False
            loss = np.log(times[:, without].min(axis=1, initial=np.inf) / best)
            options.append((float(loss.mean()), float(loss.max()), candidate))
        for mean, worst, index in sorted(options):
            if mean > MEAN_LOSS:
                return [kernel.name for kernel, keep in zip(kernels, kept, strict=True) if not keep]
            without = kept.copy()
            without[index] = False
            covered = all((need & without).any() for need in needs)
            if worst <= math.log1p(WORST_LOSS) and covered:
                kept[index] = False
                break
            fixed[index] = True
        else:
            return [kernel.name for kernel, keep in zip(kernels, kept, strict=True) if not keep]


def _problems(kernels: list[native.KernelRecord]) -> list[np.ndarray]:
    """Which kernels take each kind of problem, without scratch memory, where any does."""
    if kernels and native.Family(kernels[0].family).convolves:
        return _convolutions(kernels)
    least = 4 if kernels and kernels[0].dtype == native.Dtype.F32 else 2
    aligns = [align for align in (2, 4, 8, 16) if align >= least]
    found = []
    for a, b, c, matrix, empty in product(aligns, aligns, aligns, (False, True), (False, True)):
        takes = np.array([
            kernel.family != native.Family.COPY_PADDED
            and not kernel.split_k and kernel.align_a <= a and kernel.align_b <= b
            and kernel.align_c <= c and (not matrix or bool(kernel.bias_matrix))
            and (not empty or kernel.family == native.Family.GEMM_POINTER)
            for kernel in kernels
        ])  # fmt: skip
        if takes.any():
            found.append(takes)
    return found


def _convolutions(kernels: list[native.KernelRecord]) -> list[np.ndarray]:
    """The same of convolutions: each family, W packed or as it is stored, any width of a kernel."""
    found = []
    for family, packed in product(
        dict.fromkeys(kernel.family for kernel in kernels), (True, False)
    ):
        narrow = native.Family(family) >= native.Family.CONV_DEPTHWISE
        takes = np.array([
            kernel.family == family and not kernel.split_k and (packed or kernel.align_a < 16)
            and (not narrow or kernel.bk == 1)
            for kernel in kernels
        ])  # fmt: skip
        if takes.any():
            found.append(takes)
    return found
