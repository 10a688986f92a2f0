"""Builds libmoonpoly_ort.so with the C++ compiler that is there, and maps the top-level folders into
the one import name `moonpoly_ort`. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

RUNTIME = Path("custom_ops/runtime")
SOURCES = sorted(str(p) for p in RUNTIME.glob("*.cc"))


class BuildRuntime(build_ext):
    """Compiles the native runtime into one shared library beside the Python package."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise SystemExit(
                "moonpoly-ort needs a C++17 compiler to build its runtime library and found none "
                "(looked at $CXX, g++, clang++). Install one, e.g. `apt-get install g++`."
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        version_script = RUNTIME / "exports.map"
        command = [
            *compiler.split(),
            "-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden",
            "-Wall", "-Wextra", "-static-libstdc++", "-static-libgcc",
            f"-I{RUNTIME}", f"-Wl,--version-script={version_script}", "-Wl,--no-undefined",
            *ext.sources, "-o", str(target), "-ldl", "-lpthread",
        ]  # fmt: skip
        subprocess.run(command, check=True)


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    ext_modules=[Extension("moonpoly_ort.libmoonpoly_ort", SOURCES)],
    cmdclass={"build_ext": BuildRuntime},
)
