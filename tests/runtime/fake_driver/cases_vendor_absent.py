"""Where there is no cuBLASLt: plans of a session never name it, and who insists is told."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cases_cuda_op import Node, array, check, exact
from fake_gpu import Aligned, driver, launches, write_fake_pack

from moonpoly_ort import errors, native


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_pack(tmp_path_factory.mktemp("fast") / "sm_90.mpk", vendor_us=1e-3)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    driver.fake_set_context(0)
    driver.fake_reset()
    yield
    while Node.living:
        Node.living.pop().destroy()


def test_a_session_runs_on_our_kernels(fast: Path) -> None:
    x, y = array(40, 72), array(72, 136)
    check(Node(fast, vendor="auto").run([x, y]), exact(x) @ exact(y))
    assert launches()


def test_a_session_that_insists_is_refused(fast: Path) -> None:
    with pytest.raises(RuntimeError, match=r"node 'node'.*libcublasLt was not found .*so\.13"):
        Node(fast, vendor="1")


def test_the_library_is_looked_for_again(fast: Path) -> None:
    """A forced plan cannot be launched until someone, such as torch, has loaded the library."""
    x, w = array(40, 72), array(72, 136)
    y: Aligned = array(40, 136)
    workspace = Aligned(np.zeros((32 << 20) + 256, np.uint8))
    problem, _ = native.matmul_problem((40, 72), (72, 136), native.Dtype.F16)
    at = {"a": x.address, "b": w.address, "y": y.address, "workspace": workspace.address}
    with native.Pack(fast) as pack, native.Launcher(pack, 0) as launcher:
        plan = pack.plan(native.device_query(0), problem)
        assert plan.regions[0].kernel == native.VENDOR  # plans do not look for the library
        with pytest.raises(errors.DeviceError, match="libcublasLt was not found"):
            launcher.launch(problem, plan, **at)
        ctypes.CDLL(os.environ["FAKE_CUBLASLT"])
        launcher.launch(problem, plan, **at)
    np.testing.assert_allclose(y.array, exact(x) @ exact(w), rtol=1e-2, atol=5e-2)
