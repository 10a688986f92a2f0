from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pack import h200

from moonpoly_ort import errors, native


def test_struct_sizes_match_the_library() -> None:
    library = native._library()
    assert library.mp_struct_size(b"no_such_struct") == -1
    for name, struct in native.STRUCTS.items():
        assert library.mp_struct_size(name.encode()) == ctypes.sizeof(struct), name


def test_structs_have_no_implicit_padding() -> None:
    for struct in native.STRUCTS.values():
        sizes = sum(ctypes.sizeof(kind) for _, kind in struct._fields_)
        assert sizes == ctypes.sizeof(struct), struct.__name__


def test_library_exports_only_its_surface() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", native.library_path()],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    names = [line.split()[-1] for line in listing.splitlines()]
    assert "RegisterCustomOps" in names
    assert [n for n in names if n != "RegisterCustomOps" and not n.startswith("mp_")] == []


def test_missing_library_names_the_build_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.raises(errors.NativeLibraryError, match="pip install"):
        native.library_path()


def test_import_loads_no_library() -> None:
    code = "import moonpoly_ort.native as n; assert n._library.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_device_errors_are_typed() -> None:
    count = native.device_count()
    with pytest.raises(errors.DeviceError, match=str(count) if count else "CUDA driver"):
        native.device_query(count)


def test_closed_pack_is_refused(catalog_path: Path) -> None:
    pack = native.Pack(catalog_path)
    pack.close()
    pack.close()
    with pytest.raises(errors.PackError, match="closed"):
        pack.plan(h200(), native.Problem())
