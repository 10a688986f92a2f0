"""Optional packages: imported when something needs them, with what to install where they are
missing.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .errors import MissingDependencyError

_INSTALL = {
    "onnxruntime": '`pip install "moonpoly-ort[cpu]"`, or "moonpoly-ort[gpu]" for an NVIDIA GPU',
    "triton": '`pip install "moonpoly-ort[tune]"`',
    "onnxscript.rewriter.ort_fusions": "`pip install onnxscript`",
    "torch": "`pip install torch` (a CPU build is enough)",
}


def load(package: str, purpose: str) -> ModuleType:
    """The imported package. Raises `MissingDependencyError` that says what needs it and how to get
    it.

    `purpose` completes the sentence "... needs onnxruntime", e.g. "running a model".
    """
    try:
        return import_module(package)
    except ImportError as error:
        how = _INSTALL.get(package, f"`pip install {package}`")
        broken = "" if error.name == package else f" (it is there but fails to import: {error})"
        raise MissingDependencyError(
            f"{purpose} needs {package}, which is not installed{broken}. Install it with {how}."
        ) from error
