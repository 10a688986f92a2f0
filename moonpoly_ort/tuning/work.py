"""Products and convolutions alike: what the steps of tuning ask of either."""

from __future__ import annotations

from .. import native
from .conv_shapes import ConvShape
from .shapes import Shape

AnyShape = Shape | ConvShape
Work = native.Problem | native.Conv


def plan(
    pack: native.Pack, device: native.Device, work: Work, *, kernel: int = -1, split: int = 0,
    flags: int = 0,
) -> native.Plan:  # fmt: skip
    """The plan for a product or a convolution; raises what `native.Pack.plan` raises."""
    if isinstance(work, native.Conv):
        return pack.plan_conv(device, work, kernel=kernel, split=split, flags=flags)
    return pack.plan(device, work, kernel=kernel, split=split, flags=flags)


def launch(
    launcher: native.Launcher, work: Work, planned: native.Plan, *, a: int, b: int, y: int,
    workspace: int, counters: int, stream: int | None,
) -> None:  # fmt: skip
    """Enqueues a plan without a bias; the A of a convolution is W, its B is X."""
    if isinstance(work, native.Conv):
        launcher.launch_conv(
            work, planned, x=b, w=a, y=y, workspace=workspace, counters=counters, stream=stream
        )
    else:
        launcher.launch(
            work, planned, a=a, b=b, y=y, workspace=workspace, counters=counters, stream=stream
        )
