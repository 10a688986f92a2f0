"""Folders that keep the tests away from the user's cache and tables."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOLY_TABLES", str(tmp_path_factory.mktemp("tables")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("MOONPOLY_PACK", raising=False)
