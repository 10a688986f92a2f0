"""Builds libmoonpoly_ort.so with the C++ compiler that is there. Everything else is in
pyproject.toml.

    MOONPOLY_WHEEL_PACKS=sm_80,sm_90 pip wheel --no-build-isolation --no-deps .

bakes kernel packs of these architectures into the wheel (needs the `tune` extra in the
environment), so that no session on such a GPU ever compiles.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

RUNTIME = Path("custom_ops/runtime")
SOURCES = sorted(str(path) for path in RUNTIME.glob("*.cc"))
FLAGS = [
    "-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-static-libstdc++", "-static-libgcc", "-Wl,--no-undefined",
]  # fmt: skip
COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> list[str]:
    """The C++ compiler as a command. Leaves the build, with what to install, if there is none."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        sys.exit(
            f"error: moonpoly-ort runs on Linux x86-64; this is {platform.system()} "
            f"{platform.machine()}."
        )
    named = os.environ.get("CXX", "").split()
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_at = f"$CXX = {' '.join(named)}" if named else ", ".join(COMPILERS)
    sys.exit(
        "error: moonpoly-ort needs a C++17 compiler to build its runtime library and found none "
        f"(looked for {looked_at}). Install one, e.g. `apt-get install g++`, and try again."
    )


class BuildRuntime(build_ext):
    """Compiles the native runtime into one shared library beside the Python package."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # no Python ABI tag: it uses no Python

    def run(self) -> None:
        super().run()
        packs = os.environ.get("MOONPOLY_WHEEL_PACKS", "").replace(",", " ").split()
        if packs and not self.inplace and not self.editable_mode:
            self.build_packs(packs)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        exports = f"-Wl,--version-script={RUNTIME / 'exports.map'}"
        command = [*find_compiler(), *FLAGS, exports, f"-I{RUNTIME}", *ext.sources]
        command += ["-o", str(target), "-ldl", "-lpthread"]
        print(" ".join(command), flush=True)
        if status := subprocess.run(command).returncode:
            sys.exit(
                f"error: the C++ compiler failed (status {status}) on the runtime library, see "
                "above."
            )

    def build_packs(self, architectures: list[str]) -> None:
        """Runs `moonpoly pack` of the package that was just built."""
        root = Path(self.build_lib).resolve()
        command = [sys.executable, "-m", "moonpoly_ort.cli", "pack"]
        command += [word for arch in architectures for word in ("--arch", arch)]
        command += ["--output", str(root / "moonpoly_ort" / "packs")]
        env = os.environ | {"PYTHONPATH": str(root)}
        if status := subprocess.run(command, env=env, cwd=root).returncode:
            sys.exit(
                f"error: building the packs {' '.join(architectures)} of MOONPOLY_WHEEL_PACKS "
                "failed "
                f"(status {status}). It needs the packages of the `tune` extra: with pip, add "
                "--no-build-isolation in an environment that has them."
            )


class WheelForAnyPython(bdist_wheel):
    """The library is for a platform but for no Python version: `py3-none-linux_x86_64`."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    ext_modules=[Extension("moonpoly_ort.libmoonpoly_ort", SOURCES)],
    cmdclass={"build_ext": BuildRuntime, "bdist_wheel": WheelForAnyPython},
)
