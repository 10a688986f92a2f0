"""What is built and installed: the wheel's contents and tag, and the errors of a build."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("setuptools", minversion="77", reason="the build is not isolated")


def build(target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A wheel of a copy of the sources, so that no build output lands in the checkout."""
    source = target / "source"
    parts = ["moonpoly_ort", "custom_ops", "graph_passes", "tuned"]
    files = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"]
    source.mkdir()
    subprocess.run(["cp", "-r", *(ROOT / name for name in parts + files), source], check=True)
    for built in source.glob("moonpoly_ort/*.so"):
        built.unlink()
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    return subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=source,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_everything_under_one_name(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"moonpoly_ort"}
    for name in (
        "libmoonpoly_ort.so",
        "py.typed",
        "cli/__main__.py",
        "graph_passes/matmul.py",
        "custom_ops/kernels/gemm_tma.py",
        "custom_ops/kernels/gemm_ws.py",
        "custom_ops/runtime/moonpoly.h",
        "tuned/__init__.py",
    ):
        assert f"moonpoly_ort/{name}" in names, name
    assert not [name for name in names if name.endswith((".cc", ".mpk")) or "tests" in name]


@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, variable: str) -> None:
    done = build(tmp_path, **{"CXX": "", variable: str(tmp_path / "nowhere")})
    assert done.returncode != 0
    assert "needs a C++17 compiler" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_a_pack_that_cannot_be_baked_in_fails_the_build(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"  # the library plays no part here: an empty one is quick
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    done = build(tmp_path, CXX=str(compiler), MOONPOLY_WHEEL_PACKS="sm_75")
    assert done.returncode != 0
    assert "sm_75" in done.stderr
    assert "MOONPOLY_WHEEL_PACKS" in done.stderr


def test_the_batch_example_runs(model: Path, x: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rows in (1, 5):
        np.savez(tmp_path / "in" / f"{rows}.npz", x=x[:rows])
    script = ROOT / "examples" / "batch_inference.py"
    command = [sys.executable, script, model, tmp_path / "in", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1.npz: x [1, 64]\n5.npz: x [5, 64]\n"
    with np.load(tmp_path / "out" / "5.npz") as results:
        assert results["y"].shape == (5, 16)
