"""What may compute a shape: every legal (kernel, K split) of a pack, as the planner itself says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .. import native
from ..errors import MoonPolyError
from .work import Work, plan

SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
VENDOR_NAME = "cublaslt"  # what the vendor's product goes by in journals


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem. `kernel` is an index in the pack, or the vendor's code."""

    name: str
    kernel: int
    split: int
    plan: native.Plan


class Kernels:
    """The kernels of a pack by class, without those to be left alone."""

    def __init__(
        self, pack: native.Pack, device: native.Device, avoid: Collection[str] = (),
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:  # fmt: skip
        self.pack, self.device = pack, device
        self._classes: dict[tuple[int, ...], list[tuple[int, str, bool, bool]]] = {}
        for index, kernel in enumerate(pack.kernels):
            if kernel.name in avoid or not only(kernel.name):
                continue
            key: tuple[int, ...]
            key = (kernel.dtype, kernel.precision, kernel.trans_a, kernel.trans_b)
            if native.Family(kernel.family).convolves:
                key = (kernel.dtype,)
            entry = (index, kernel.name, bool(kernel.split_k), bool(kernel.persistent))
            self._classes.setdefault(key, []).append(entry)

    def legal(self, problem: Work) -> list[Candidate]:
        """Every (kernel, split) that the planner accepts."""
        if isinstance(problem, native.Conv):
            key: tuple[int, ...] = (problem.dtype,)
        else:
            key = (problem.dtype, problem.precision, problem.trans_a, problem.trans_b)
        found = []
        for index, name, splits, persistent in self._classes.get(key, ()):
            grids = set()  # splits beyond what the device holds make the same persistent launch
            seen = set()
            # 0: as many slices as the planner likes best, which may be none of the fixed numbers.
            for split in (0, *SPLITS) if splits else (1,):
                try:
                    made = plan(self.pack, self.device, problem, kernel=index, split=split)
                except MoonPolyError:
                    continue  # not legal for this problem
                if any(region.kernel != index for region in made.regions):
                    break  # it only helps another kernel
                split = made.regions[0].split
                if split in seen:
                    continue
                seen.add(split)
                if persistent and made.regions[0].grid in grids:
                    continue
                grids.add(made.regions[0].grid)
                found.append(Candidate(name, index, split, made))
        return found


def promising(candidates: list[Candidate], slowest: float, splits: int = 3) -> list[Candidate]:
    """Those predicted to take at most `slowest` times as long as the best, and of each kernel no
    more than its best few splits; the likeliest first."""
    if not candidates:
        return []
    ordered = sorted(candidates, key=lambda candidate: candidate.plan.predicted_us)
    limit = slowest * ordered[0].plan.predicted_us
    taken: Counter[int] = Counter()
    found = []
    for candidate in ordered:
        if candidate.plan.predicted_us <= limit and taken[candidate.kernel] < splits:
            taken[candidate.kernel] += 1
            found.append(candidate)
    return found


def vendor(pack: native.Pack, device: native.Device, problem: Work) -> Candidate | None:
    """The vendor library's product as one more candidate, where the runtime offers it: it then
    names the code that forces it, `native.VENDOR`. Whether the library is here shows at launch.
    """
    code: int | None = getattr(native, "VENDOR", None)
    if code is None or isinstance(problem, native.Conv):
        return None
    try:
        made = pack.plan(device, problem, kernel=code)
    except MoonPolyError:
        return None  # the library is absent, or does not take this problem
    return Candidate(VENDOR_NAME, code, 1, made)
