"""The offline stage: kernels are checked, measured and modelled on one GPU, and a table is written.

    from moonpoly_ort import tuning
    outcome = tuning.tune(tuning.Options(minutes=10))
    print(outcome.table, outcome.fitted.held_out)

Needs a GPU and its driver, and a kernel pack or Triton to build one. See docs/tuning.md.
"""

from __future__ import annotations

from .running import Options, Outcome, refit, tune
from .shapes import Shape

__all__ = ["Options", "Outcome", "Shape", "refit", "tune"]
