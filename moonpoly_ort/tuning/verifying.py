"""How good the planner's choices are on shapes that no cost was fitted to, measured afterwards.

For each shape the plan under the new table and the analytic model's plan take turns with the
fastest of all candidates: what is reported involves no prediction.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from .. import native
from .candidates import VENDOR_NAME, Candidate, Kernels, promising
from .measuring import Measurer
from .work import AnyShape, plan

PLAIN, BATCHED = 20, 8  # shapes of a group
TUNED, UNTUNED = "plan", "plan without a table"
ALLOWED = "plan with cuBLASLt"  # only where it goes there
NOT_OURS = (ALLOWED, VENDOR_NAME)
ALWAYS = (TUNED, UNTUNED, *NOT_OURS)


@dataclass(frozen=True)
class Check:
    """One shape: microseconds of both plans and of the best candidate, and what those are."""

    shape: str
    tuned_us: float
    untuned_us: float
    best_us: float
    tuned: str
    best: str
    vendor_us: float | None = None  # of the vendor's library, where it was timed
    allowed_us: float | None = None  # of the plan with it as a candidate, where it goes there

    @property
    def share(self) -> float:
        return self.best_us / self.tuned_us


@dataclass(frozen=True)
class Verified:
    """The checks, the worst first."""

    checks: tuple[Check, ...]

    @property
    def mean(self) -> float:
        """Of best time / time of the plan."""
        return statistics.fmean(check.share for check in self.checks)

    @property
    def worst(self) -> float:
        return self.checks[0].share

    @property
    def untuned(self) -> float:
        """Speed without a table against that with it: the geometric mean."""
        return _geometric([check.tuned_us / check.untuned_us for check in self.checks])

    @property
    def against_vendor(self) -> float | None:
        """Speed of the plans against the vendor's library: the geometric mean, where timed."""
        both = [(c.vendor_us, c.tuned_us) for c in self.checks if c.vendor_us is not None]
        return _geometric([other / ours for other, ours in both]) if both else None

    @property
    def allowed_share(self) -> float:
        """Of best time / time of the plan, the vendor's library among both."""
        return statistics.fmean(
            min(c.best_us, c.vendor_us or math.inf, c.allowed_us or math.inf)
            / (c.allowed_us or c.tuned_us)
            for c in self.checks
        )

    @property
    def untuned_share(self) -> float:
        """As `mean`, for the plans without a table."""
        return statistics.fmean(
            min(check.best_us, check.untuned_us) / check.untuned_us for check in self.checks
        )


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def fresh(
    groups: Mapping[tuple[str, str, bool], list[AnyShape]], known: Collection[AnyShape]
) -> list[AnyShape]:
    """Shapes that were not measured, some of each group, the groups in turn."""
    lists = []
    for (_, _, batched), offered in groups.items():
        new = [shape for shape in offered if shape not in known]
        lists.append(new[: BATCHED if batched else PLAIN])
    longest = max(map(len, lists), default=0)
    return [one[i] for i in range(longest) for one in lists if i < len(one)]


def verify(
    wanted: Sequence[AnyShape], measurer: Measurer, kernels: Kernels, tuned: native.Pack,
    device: native.Device, deadline: float, fits: Callable[[AnyShape, list[Candidate]], bool],
    others: Callable[[AnyShape], list[Candidate]], report: Callable[[int, int, str], None],
) -> Verified | None:  # fmt: skip
    """Checks shapes until the deadline (of `time.monotonic`); None where there was none.

    `kernels` plan without a table, `tuned` with the new one; both are of the measurer's pack.
    `fits` says whether a shape can be timed; `others` are timed beside, and count as no plan.
    """
    checks = []
    for done, shape in enumerate(wanted):
        if time.monotonic() > deadline:
            break
        report(done, len(wanted), f"checking {shape}")
        problem = shape.problem()
        candidates = promising(kernels.legal(problem), slowest=1.6)
        if not candidates or not fits(shape, candidates):
            continue
        own_plan = plan(tuned, device, problem, flags=native.PlanFlag.NO_VENDOR)
        plain, allowed = plan(kernels.pack, device, problem), plan(tuned, device, problem)
        candidates += [Candidate(TUNED, -1, 0, own_plan), Candidate(UNTUNED, -1, 0, plain)]
        if any(region.kernel == native.VENDOR for region in allowed.regions):
            candidates.append(Candidate(ALLOWED, -1, 0, allowed))
        times = measurer.time(shape, candidates + others(shape), always=ALWAYS)
        us = {timed.name: timed.us for timed in times if timed.name in ALWAYS}
        own = [timed for timed in times if timed.careful and timed.name not in NOT_OURS]
        best = min(own, key=lambda timed: timed.us)
        checks.append(
            Check(str(shape), us[TUNED], us[UNTUNED], best.us, describe(tuned, own_plan),
                  best.name if best.split < 2 else f"{best.name}/{best.split}",
                  us.get(VENDOR_NAME), us.get(ALLOWED))
        )  # fmt: skip
    report(len(wanted), len(wanted), "")
    return Verified(tuple(sorted(checks, key=lambda check: check.share))) if checks else None


def describe(pack: native.Pack, made: native.Plan) -> str:
    """The kernels of a plan, with their K splits."""
    names = []
    for region in made.regions:
        known = 0 <= region.kernel < len(pack.kernels)
        name = pack.kernels[region.kernel].name if known else f"kernel {region.kernel}"
        names.append(name if region.split < 2 else f"{name}/{region.split}")
    return " + ".join(names)
