"""Runs `fake_driver/cases_*.py` in a process of their own whose libcuda.so.1 is `fake_cuda.cc`: the
CUDA path down to the driver calls, on a machine without a GPU. Only those of cuBLASLt find a
cuBLASLt there, `fake_cublaslt.cc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fake_driver"


VENDOR = "libcublasLt.so.13"
WITH_VENDOR = ("cases_vendor.py", "cases_vendor_tune.py")
STAND_INS = {"libcuda.so.1": "fake_cuda.cc", VENDOR: "fake_cublaslt.cc"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each stand-in, the folder that holds it alone."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build the stand-ins for CUDA's libraries")
    made = {}
    for name, source in STAND_INS.items():
        folder = tmp_path_factory.mktemp("library")
        subprocess.run(
            [
                compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}",
                str(HERE / source), "-o", str(folder / name),
            ],
            check=True,
        )  # fmt: skip
        made[name] = str(folder)
    return made


@pytest.mark.parametrize("cases", sorted(p.name for p in HERE.glob("cases_*.py")))
def test_with_the_fake_driver(folders: dict[str, str], cases: str) -> None:
    names = list(STAND_INS) if cases in WITH_VENDOR else ["libcuda.so.1"]
    path = os.pathsep.join(
        [*(folders[name] for name in names), os.environ.get("LD_LIBRARY_PATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env=os.environ | {"LD_LIBRARY_PATH": path, "FAKE_CUBLASLT": f"{folders[VENDOR]}/{VENDOR}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
