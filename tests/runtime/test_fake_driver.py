"""Runs `fake_driver/cases_*.py` in a process of their own whose libcuda.so.1 is `fake_cuda.cc`: the
CUDA path down to the driver calls, on a machine without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fake_driver"


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build the stand-in for libcuda")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(
        [
            compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1",
            str(HERE / "fake_cuda.cc"), "-o", str(folder / "libcuda.so.1"),
        ],
        check=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("cases", sorted(p.name for p in HERE.glob("cases_*.py")))
def test_with_the_fake_driver(driver_folder: Path, cases: str) -> None:
    path = os.pathsep.join([str(driver_folder), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
