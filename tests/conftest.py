"""What tests share: how hypothesis runs, one thread a worker, when GPU tests are skipped."""

from __future__ import annotations

import os

# Before torch is loaded: workers run side by side; each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a failure is one for everybody; no deadline, because the
# first launch of a kernel in the interpreter takes far longer than the next.
settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


def _why_no_gpu() -> str | None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"needs onnxruntime-gpu; onnxruntime {onnxruntime.__version__} has no CUDA provider"
    from moonpoly_ort import native

    return None if native.device_count() else "needs an NVIDIA GPU; the driver offers none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
