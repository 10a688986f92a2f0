"""Polymerized Triton micro-kernels for ONNX Runtime.

    import moonpoly_ort
    moonpoly_ort.rewrite("model.onnx", "fast.onnx")
    session = moonpoly_ort.InferenceSession("model.onnx", providers=["CUDAExecutionProvider"])

Everything here is loaded at first use: importing the package needs no GPU, no Triton, no torch and
no onnxruntime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        ArgumentError,
        DeviceError,
        InputError,
        KernelMissingError,
        MissingDependencyError,
        ModelError,
        MoonPolyError,
        NativeLibraryError,
        OptimizerError,
        OutputError,
        PackError,
        ProblemError,
        RegistrationError,
        TableError,
    )
    from .explaining import NodePlan, explain
    from .graph_policy import GraphLimits
    from .native import library_path
    from .registering import register
    from .rewriting import RewriteResult, list_rules, rewrite
    from .session import InferenceSession

    __version__: str

__all__ = [  # noqa: RUF022 - grouped: what one does, what one gets, what can go wrong
    "rewrite",
    "list_rules",
    "InferenceSession",
    "register",
    "explain",
    "library_path",
    "GraphLimits",
    "NodePlan",
    "RewriteResult",
    "MoonPolyError",
    "ArgumentError",
    "DeviceError",
    "InputError",
    "KernelMissingError",
    "MissingDependencyError",
    "ModelError",
    "NativeLibraryError",
    "OptimizerError",
    "OutputError",
    "PackError",
    "ProblemError",
    "RegistrationError",
    "TableError",
    "__version__",
]

_HOME = {
    "rewrite": "rewriting",
    "list_rules": "rewriting",
    "RewriteResult": "rewriting",
    "InferenceSession": "session",
    "register": "registering",
    "explain": "explaining",
    "GraphLimits": "graph_policy",
    "NodePlan": "explaining",
    "library_path": "native",
}


def __getattr__(name: str) -> Any:  # PEP 562
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("moonpoly-ort")
    elif name in __all__:
        value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
