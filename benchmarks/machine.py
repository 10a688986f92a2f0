"""The machine under test: its pack, its GPU, and how a plan is run on torch tensors there."""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch

from benchmarks.operands import Operands
from benchmarks.running import Provider
from moonpoly_ort import devices, native, packs

PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "triton",
    "onnx",
    "onnx-ir",
    "numpy",
    "transformers",
)


@dataclass
class Setting:
    """What every section is given. Nothing here touches the GPU before it is used in a section."""

    provider: Provider
    pack_path: Path
    models: Path | None = None
    bert: Path | None = None
    work: Path = Path("/tmp")
    seed: int = 2026
    quick: bool = False
    only: str = ""  # kernels whose names contain it
    patience: float = 30.0  # seconds that one kernel may be silent

    @cached_property
    def pack(self) -> native.Pack:
        return native.Pack(self.pack_path)

    def without_tables(self) -> Setting:
        """The same with the kernels alone: those that a table excludes cannot be forced."""
        alone = packs.write_with_tables(self.pack_path, self.work / "kernels_alone.mpk", [])
        return replace(self, pack_path=alone)

    @cached_property
    def device(self) -> native.Device:
        """The GPU of the provider; without one, an H200 as the planner knows it."""
        if self.provider.is_cuda:
            return native.device_query(self.provider.ordinal)
        return devices.lookup("H200")

    def plan(
        self, problem: native.Problem, kernel: int = -1, split: int = 0, flags: int = 0
    ) -> native.Plan:
        if not self.provider.is_cuda:
            flags |= native.PlanFlag.NO_VENDOR  # the interpreter has our kernels alone
        return self.pack.plan(self.device, problem, kernel=kernel, split=split, flags=flags)

    def kernel_name(self, region: native.Region) -> str:
        if region.kernel == native.VENDOR:
            return "cublaslt"
        return self.pack.kernels[region.kernel].name

    @cached_property
    def runner(self) -> Runner:
        return Runner(self)


class Runner:
    """Runs plans on torch's current stream; the workspace starts as NaN, counters must end at 0."""

    def __init__(self, setting: Setting) -> None:
        self.device = setting.provider.torch_device
        self.launcher: Any = None
        self._pack = setting.pack
        if setting.provider.is_cuda:
            torch.cuda.set_device(setting.provider.ordinal)
            torch.zeros(1, device=self.device)  # makes the context that the launcher then shares
            self.launcher = native.Launcher(setting.pack, setting.provider.ordinal)
        else:
            from moonpoly_ort import interpreter

            self._interpret = partial(interpreter.run, setting.pack)
        self._workspace = torch.empty(0, dtype=torch.float32, device=self.device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.device)

    def reserve(self, plan: native.Plan) -> None:
        """Makes the scratch buffers large enough; do it before a capture."""
        if self._workspace.numel() * 4 < plan.workspace_bytes:
            size = (-(-plan.workspace_bytes // 4),)
            self._workspace = torch.full(size, float("nan"), device=self.device)
        if self._counters.numel() < plan.counters:
            self._counters = torch.zeros(int(plan.counters), dtype=torch.int32, device=self.device)

    def launch(
        self, problem: native.Problem, plan: native.Plan, pointers: tuple[int, int, int, int],
        residual: int = 0,
    ) -> None:  # fmt: skip
        """Launches a plan; `pointers`: those of A, B, bias (0: none) and Y; `residual`: of R."""
        a, b, bias, y = pointers
        if self.launcher is None:
            self._interpret(problem, plan, a, b, bias or None, y, residual or None)
            return
        self.launcher.launch(
            problem, plan, a=a, b=b, bias=bias or None, y=y, residual=residual or None,
            workspace=self._workspace.data_ptr(), counters=self._counters.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def launch_conv(
        self, conv: native.Conv, plan: native.Plan, pointers: tuple[int, int, int, int]
    ) -> None:
        """Launches a plan; `pointers` are those of X, W, bias (0: none) and Y."""
        x, w, bias, y = pointers
        if self.launcher is None:
            from moonpoly_ort import interpreter

            interpreter.run_conv(self._pack, conv, plan, x, w, bias or None, y)
            return
        self.launcher.launch_conv(
            conv, plan, x=x, w=w, bias=bias or None, y=y,
            workspace=self._workspace.data_ptr(), counters=self._counters.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def run(self, operands: Operands, plan: native.Plan) -> None:
        """Launches and waits."""
        self.reserve(plan)
        self.launch(operands.problem, plan, operands.pointers, operands.residual)
        if self.launcher is not None:
            torch.cuda.synchronize()

    def counters_left(self) -> int:
        """Counters that are not back at 0."""
        return int(torch.count_nonzero(self._counters))

    def clear_counters(self) -> None:
        self._counters.zero_()


def unpacked(pack: Path, folder: Path) -> Path:
    """A pack that may have travelled as `NAME.mpk.xz` (a tenth of the size), as a plain file."""
    if pack.suffix != ".xz":
        return pack
    target = folder / pack.stem
    target.write_bytes(lzma.decompress(pack.read_bytes()))
    return target


def pack_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Path:
    """The pack that `--pack` names, else the one that is found for the GPU `--device`; without
    either the parser's error.
    """
    if arguments.pack is not None:
        return Path(arguments.pack)
    sm = architecture(arguments.device) or 90
    found = packs.find_pack(sm)
    if found is None:
        parser.error(f"there is no pack for sm_{sm}: build one with `moonpoly pack`, or name one "
                     "with --pack")  # fmt: skip
    return found


def architecture(ordinal: int) -> int | None:
    """90 for a GPU of compute capability 9.0, asked of nvidia-smi: this process must not touch CUDA
    before it has forked. None where there is no such GPU.
    """
    found = _nvidia_smi("compute_cap")
    if ordinal >= len(found) or not found[ordinal].replace(".", "").isdigit():
        return None
    return int(found[ordinal].replace(".", ""))


def environment(setting: Setting, commit: str) -> dict[str, Any]:
    """Versions and hardware, for the head of a results file."""
    header: dict[str, Any] = {"commit": commit, "python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            header[name] = version(name)
        except PackageNotFoundError:
            header[name] = None
    header["onnxruntime in use"] = ort.__version__  # two may be installed
    header["torch cuda"] = torch.version.cuda
    header["gpu"] = _nvidia_smi("name")
    header["driver"] = _nvidia_smi("driver_version")
    header["clocks, MHz"] = _nvidia_smi("clocks.sm,clocks.max.sm,clocks.mem")
    if setting.pack_path.exists():
        info = setting.pack.header
        header["pack"] = {
            "file": setting.pack_path.name, "sm": info.sm, "key": info.key.decode(),
            "triton": info.triton.decode(), "kernels": info.kernel_count,
            "tables": info.table_count, "bytes": setting.pack_path.stat().st_size,
        }  # fmt: skip
    return header


def commit() -> str:
    """The commit that is measured: MOONPOLY_COMMIT, else git's HEAD, else `unknown`."""
    if "MOONPOLY_COMMIT" in os.environ:
        return os.environ["MOONPOLY_COMMIT"]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _nvidia_smi(field: str) -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"no nvidia-smi: {error}"]
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
