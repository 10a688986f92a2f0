"""The correctness gate: what a kernel must pass before it is measured, and the memory of it."""

from __future__ import annotations

from collections.abc import Callable

from .. import native
from .conv_gate import check_conv
from .cuda import Gpu, KernelFault
from .journal import ATTEMPTS, Journal
from .product_gate import check


def gate(
    gpu: Gpu, launcher: native.Launcher, pack: native.Pack, device: native.Device,
    journal: Journal, wanted: list[int], report: Callable[[int, int, str], None],
) -> None:  # fmt: skip
    """Checks the kernels that the journal does not know yet, and notes the outcomes there.

    A kernel that faults or hangs ends the run with a KernelFault; the journal remembers that its
    check began, and after its second attempt the kernel counts as wrong.
    """
    record = journal.record
    for done, index in enumerate(wanted):
        name = pack.kernels[index].name
        report(done, len(wanted), name)
        if name in record.checked or record.begun.get(name, 0) >= ATTEMPTS:
            continue
        journal.begin_check(name)
        convolves = native.Family(pack.kernels[index].family).convolves
        try:
            fault = (check_conv if convolves else check)(gpu, launcher, pack, device, index)
        except KernelFault as error:
            raise KernelFault(f"kernel {name}: {error}") from error
        except BaseException:
            journal.interrupted(name)  # by the user, or for a reason that is not the kernel's
            raise
        journal.end_check(name, fault)
    report(len(wanted), len(wanted), "")
