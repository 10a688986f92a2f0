"""What is installed and found on this machine, and what is wrong with it: `moonpoly doctor`.

Nothing here raises: what cannot be found out becomes a problem, with what to do about it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from .errors import MoonPolyError

PACKAGES = ("moonpoly-ort", "onnx", "onnx-ir", "numpy", "triton", "torch", "onnxscript")
RUNTIMES = "onnxruntime"  # onnxruntime, onnxruntime-gpu, ...: all install the one import name


@dataclass
class Diagnosis:
    """What was found. `problems` is empty on a machine where all is well."""

    python: str = ""
    platform: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    onnxruntime: dict[str, Any] = field(default_factory=dict)
    library: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    pack_folders: list[str] = field(default_factory=list)
    packs: list[dict[str, Any]] = field(default_factory=list)
    table_folders: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """What goes wrong inside is noted as a problem."""
        try:
            yield
        except MoonPolyError as error:
            self.problems.append(f"{what}: {error}")


def examine() -> Diagnosis:
    """Looks at this machine. Loads the library and onnxruntime, builds nothing, writes nothing."""
    found = Diagnosis(python=sys.version.split()[0], platform=platform.platform())
    found.packages = {name: _version(name) for name in PACKAGES}
    _onnxruntime(found)
    _library(found)
    _packs(found)
    _tables(found)
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _onnxruntime(found: Diagnosis) -> None:
    names = (str(dist.metadata["Name"]) for dist in distributions())
    flavours = sorted(
        {n.lower() for n in names if n and n.lower().startswith(RUNTIMES)}
        - {"onnxruntime-extensions"}
    )
    found.onnxruntime = {"flavours": flavours, "version": None, "providers": []}
    if len(flavours) > 1:
        found.problems.append(
            f"{' and '.join(flavours)} are installed over each other: uninstall all of them, then "
            "install one."
        )
    from .dependencies import load

    with found.checking("onnxruntime"):
        ort = load("onnxruntime", "running models")
        found.onnxruntime |= {
            "version": ort.__version__,
            "providers": ort.get_available_providers(),
        }


def _library(found: Diagnosis) -> None:
    from . import native, packs

    with found.checking("runtime library"):
        path = native.library_path()
        found.library = {"path": str(path), "api_version": native.API_VERSION}
        for ordinal in range(native.device_count()):
            device = native.device_query(ordinal)
            found.gpus.append(
                {
                    "ordinal": ordinal,
                    "name": device.name,
                    "sm": device.sm,
                    "sm_count": device.sm_count,
                    "clock_mhz": device.clock_mhz,
                    "l2_bytes": device.l2_bytes,
                    "memory_bytes": device.memory_bytes,
                }
            )
            with found.checking(f"GPU {ordinal}"):
                packs.pack_name(device.sm)
    if found.gpus and "CUDAExecutionProvider" not in found.onnxruntime["providers"]:
        found.problems.append(
            "there is a GPU, but this onnxruntime has no CUDAExecutionProvider: install "
            '"moonpoly-ort[gpu]" in its place.'
        )


def _packs(found: Diagnosis) -> None:
    from . import packs
    from .custom_ops.kernels import compiling, pack_format

    folders = [Path(__file__).parent / "packs", packs.cache_dir()]
    found.pack_folders = [str(folder) for folder in folders]
    names = [packs.pack_name(sm) for sm in packs.supported_architectures()]
    paths = [path for folder in folders for name in names if (path := folder / name).exists()]
    if named := os.environ.get("MOONPOLY_PACK"):
        paths.insert(0, Path(named))
    for path in paths:
        with found.checking("pack"):
            info = pack_format.read_info(path)
            keys = [compiling.content_key(info.sm, info.triton, trial=t) for t in (False, True)]
            found.packs.append(
                {
                    "path": str(path),
                    "sm": info.sm,
                    "kernels": info.kernel_count,
                    "bytes": info.file_bytes,
                    "triton": info.triton,
                    "key": info.key,
                    "fresh": info.key in keys,
                }
            )


def _tables(found: Diagnosis) -> None:
    from . import tables

    found.table_folders = [str(folder) for folder in tables.folders()]
    for folder in tables.folders():
        for path in sorted(folder.glob("*.json")):
            with found.checking("table"):
                table = tables.load(path)
                found.tables.append(
                    {
                        "path": str(path),
                        "gpu": table.gpu,
                        "kernels": len(table.costs),
                        "date": table.date,
                    }
                )
    measured = {table["gpu"] for table in found.tables}
    for gpu in found.gpus:
        if gpu["name"] not in measured:
            found.problems.append(
                f"no performance table for {gpu['name']}: plans use the analytic model, which is "
                "less exact. `moonpoly tune` measures one."
            )
