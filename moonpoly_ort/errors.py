"""The errors that this package raises. Each message says what was wrong, with the value, what is
accepted, and what to do next. `exit_code` is what the command `moonpoly` exits with.
"""

from __future__ import annotations

from typing import ClassVar


class MoonPolyError(Exception):
    """Base of every error raised by moonpoly_ort."""

    exit_code: ClassVar[int] = 1


class ArgumentError(MoonPolyError, ValueError):
    """An argument is not one of the accepted values."""

    exit_code = 2


class ModelError(MoonPolyError):
    """The model cannot be read: not ONNX, corrupt, or its external data is missing."""

    exit_code = 3


class OptimizerError(MoonPolyError):
    """Another project's graph optimizer failed, or made another model or an invalid one of it."""

    exit_code = 3


class InputError(MoonPolyError, ValueError):
    """The inputs or sizes given for a model do not fit it."""

    exit_code = 3


class ProblemError(MoonPolyError, ValueError):
    """A shape or an argument is not legal for the operation."""

    exit_code = 3


class OutputError(MoonPolyError):
    """The output cannot be written: same as the input, or not writable."""

    exit_code = 4


class MissingDependencyError(MoonPolyError):
    """An optional dependency (onnxruntime, Triton, torch, a compiler) is not installed."""

    exit_code = 5


class NativeLibraryError(MoonPolyError):
    """libmoonpoly_ort.so is missing, of another version, or a call into it failed."""

    exit_code = 5


class DeviceError(MoonPolyError):
    """No usable GPU or driver, or an unsupported architecture or unknown GPU name."""

    exit_code = 5


class RegistrationError(MoonPolyError):
    """The library cannot be registered on session options, or already is, with other settings."""

    exit_code = 5


class PackError(MoonPolyError):
    """A kernel pack is missing, truncated, corrupt, or of another version or architecture."""

    exit_code = 6


class KernelMissingError(PackError):
    """The pack holds no kernel for a problem."""


class TableError(MoonPolyError):
    """A performance table is malformed or was measured on another GPU."""

    exit_code = 6
