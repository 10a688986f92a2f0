from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_cublaslt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a cuBLASLt that computes on the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    target = tmp_path_factory.mktemp("fake") / "libcublasLt.so.13"
    source = Path(__file__).with_name("fake_cublaslt.cc")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(source), "-o",
         str(target)],
        check=True,
    )  # fmt: skip
    return str(target)
