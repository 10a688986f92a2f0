"""Sessions of ONNX Runtime on the CPU whose ops run in the interpreter that a test has set."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort

from moonpoly_ort import native


def options(pack: Path, **config: str) -> ort.SessionOptions:
    """Options on which the library is not registered yet; `config`: entries of ours."""
    so = ort.SessionOptions()
    so.log_severity_level = 4
    entries = {"moonpoly.backend": "interpreter", "moonpoly.pack": str(pack)}
    for key, value in (entries | {f"moonpoly.{k}": v for k, v in config.items()}).items():
        so.add_session_config_entry(key, value)
    return so


def session(model: onnx.ModelProto, so: ort.SessionOptions | None) -> ort.InferenceSession:
    """With the library, or of ONNX Runtime alone."""
    if so is not None:
        so.register_custom_ops_library(str(native.library_path()))
    return ort.InferenceSession(model.SerializeToString(), so, providers=["CPUExecutionProvider"])
