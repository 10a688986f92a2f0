"""Whether somebody else uses the GPU: timings beside other work would mislead the planner for good.

Asked of nvidia-smi, which comes with the driver, before this process touches the GPU itself: every
process that it then lists is another's.
"""

from __future__ import annotations

import subprocess
import time

from ..errors import DeviceError, MissingDependencyError

IDLE_PERCENT = 5  # utilisation up to which a GPU counts as idle
LOOKS = 3  # the figure is an average over up to a second: work that has just ended still shows
FIELDS = ("utilization.gpu", "driver_version", "clocks.sm", "clocks.max.sm")


def query(bus: str, fields: tuple[str, ...], kind: str = "gpu") -> list[list[str]]:
    """Rows of nvidia-smi's answer about the GPU at a PCI address.

    Raises MissingDependencyError where there is no nvidia-smi or it refuses.
    """
    command = ["nvidia-smi", f"--id={bus}", f"--query-{kind}={','.join(fields)}",
               "--format=csv,noheader,nounits"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(
            f"nvidia-smi cannot be asked about the GPU ({error}); it comes with the driver"
        ) from error
    if done.returncode != 0:
        what = (done.stdout + done.stderr).strip().splitlines()
        raise MissingDependencyError(
            f"nvidia-smi does not know the GPU {bus}: {what[0] if what else 'no reason given'}"
        )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def why_busy(bus: str, pause: float = 1.0) -> str | None:
    """What keeps the GPU busy, or None. Raises MissingDependencyError as `query`."""
    reason = None
    for look in range(LOOKS):
        if look:
            time.sleep(pause)
        others = [row[0] for row in query(bus, ("pid",), "compute-apps") if row[0].isdigit()]
        if others:
            reason = f"{len(others)} other process(es) compute on it: {', '.join(others[:5])}"
            continue
        used = query(bus, FIELDS)[0][0]
        if not used.isdigit() or int(used) <= IDLE_PERCENT:  # MIG slices say [N/A]
            return None
        reason = f"it is {used}% busy"
    return reason


def refuse_busy(bus: str, ordinal: int, *, force: bool, pause: float = 1.0) -> str:
    """A warning, empty if all is well. Raises DeviceError for a busy GPU, unless forced."""
    try:
        reason = why_busy(bus, pause)
    except MissingDependencyError as error:
        return f"whether others use the GPU is not known: {error}"
    if reason is None:
        return ""
    if force:
        return f"GPU {ordinal} is in use, and timings will be off: {reason}"
    raise DeviceError(
        f"GPU {ordinal} is in use, and timings would be off: {reason}. Wait until it is idle, "
        "choose another with --gpu, or tune all the same with --force"
    )


def state(bus: str) -> tuple[str, str]:
    """The driver's version, and the clock as measured against its limit; `unknown` if not known."""
    try:
        _, driver, clock, limit = query(bus, FIELDS)[0]
    except (MissingDependencyError, ValueError, IndexError):
        return "unknown", "unknown"
    return driver, f"{clock} of {limit} MHz"
