"""A small model, and folders that keep the tests away from the user's cache and settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import mlp


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and packs of the machine must not change a test's outcome."""
    monkeypatch.setenv("MOONPOLY_TABLES", str(tmp_path_factory.mktemp("tables")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("MOONPOLY_PACK", raising=False)


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    """The once-per-process log messages start anew in every test."""
    from moonpoly_ort import registering

    registering._said.clear()
    yield
    registering._said.clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(), path)
    return path


@pytest.fixture
def external_model(tmp_path: Path) -> Path:
    """The same model with its weights in a file beside it."""
    folder = tmp_path / "external"
    folder.mkdir()
    path = folder / "mlp.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="mlp.data", size_threshold=0)
    return path


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
