"""The errors that this package raises. Each message says what was wrong, with the value, what is
accepted, and what to do next.
"""


class MoonPolyError(Exception):
    """Base of every error raised by moonpoly_ort."""


class ModelError(MoonPolyError):
    """The model cannot be read: not ONNX, corrupt, or its external data is missing."""


class OutputError(MoonPolyError):
    """The output cannot be written: same as the input, or not writable."""


class MissingDependencyError(MoonPolyError):
    """An optional dependency (onnxruntime, Triton, torch, a compiler) is not installed."""


class NativeLibraryError(MoonPolyError):
    """libmoonpoly_ort.so is missing, of another version, or a call into it failed."""


class PackError(MoonPolyError):
    """A kernel pack is missing, truncated, corrupt, or of another version or architecture."""


class KernelMissingError(PackError):
    """The pack holds no kernel for a problem."""


class TableError(MoonPolyError):
    """A performance table is malformed or was measured on another GPU."""


class DeviceError(MoonPolyError):
    """No usable GPU or driver, or an unsupported architecture or unknown GPU name."""


class ProblemError(MoonPolyError, ValueError):
    """A shape or an argument is not legal for the operation."""
