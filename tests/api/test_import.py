"""The public names: all there, none besides, and importable on a bare machine."""

from __future__ import annotations

import subprocess
import sys
import types

import moonpoly_ort
from moonpoly_ort import errors

BLOCKED = """
import sys
for name in ("onnxruntime", "triton", "torch"):
    sys.modules[name] = None  # makes `import name` an ImportError
"""


def bare(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process where neither onnxruntime nor Triton nor torch can be imported."""
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True)


def test_every_public_name_resolves() -> None:
    for name in moonpoly_ort.__all__:
        assert getattr(moonpoly_ort, name) is not None, name


def test_no_accidental_exports() -> None:
    for name in moonpoly_ort.__all__:
        getattr(moonpoly_ort, name)
    public = {name for name in vars(moonpoly_ort) if not name.startswith("_")}
    modules = {n for n in public if isinstance(getattr(moonpoly_ort, n), types.ModuleType)}
    accepted = set(moonpoly_ort.__all__) | modules | {"annotations", "import_module"}
    accepted |= {"TYPE_CHECKING", "Any"}
    assert public <= accepted, public - accepted
    assert dir(moonpoly_ort) == sorted(moonpoly_ort.__all__)


def test_every_error_is_exported_and_has_one_base() -> None:
    found = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(found) <= set(moonpoly_ort.__all__)
    for error in found.values():
        assert issubclass(error, moonpoly_ort.MoonPolyError)
        assert 1 <= error.exit_code <= 6


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(moonpoly_ort, "no_such_name")


def test_import_and_rewrite_need_no_runtime(model) -> None:
    code = f"""
import moonpoly_ort
result = moonpoly_ort.rewrite({str(model)!r})
assert [entry.op_type for entry in result.report if entry.taken] == ['MatMul', 'Gemm', 'Relu']
assert moonpoly_ort.explain({str(model)!r}, {{"batch": 3}}, gpu="H200")[0].regions
import moonpoly_ort.cli
print(moonpoly_ort.__version__)
"""
    done = bare(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == moonpoly_ort.__version__


def test_session_without_onnxruntime_says_what_to_install() -> None:
    done = bare("import moonpoly_ort\nmoonpoly_ort.InferenceSession")
    assert "MissingDependencyError" in done.stderr
    assert "moonpoly-ort[cpu]" in done.stderr
    assert "moonpoly-ort[gpu]" in done.stderr
