"""The diagnosis of a machine."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from moonpoly_ort import doctor, native, packs, tables
from moonpoly_ort.cli import app


def test_finds_versions_library_and_providers() -> None:
    found = doctor.examine()
    assert found.onnxruntime["version"] == ort.__version__
    assert found.onnxruntime["providers"] == ort.get_available_providers()
    assert found.packages["onnx"]
    assert Path(found.library["path"]).is_file()
    assert found.library["api_version"] == native.API_VERSION


def test_json_is_complete_and_plain() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data) == {
        "python", "platform", "packages", "onnxruntime", "library", "gpus", "pack_folders", "packs",
        "table_folders", "tables", "problems",
    }  # fmt: skip


def test_a_broken_pack_and_table_become_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "sm_90.mpk"
    broken.write_bytes(packs.catalog(90).read_bytes()[:-100])
    monkeypatch.setenv("MOONPOLY_PACK", str(broken))
    tables.user_folder().mkdir(exist_ok=True)
    (tables.user_folder() / "gemm__gpu.json").write_text("{}")
    found = doctor.examine()
    assert any(str(broken) in problem for problem in found.problems)
    assert any("gemm__gpu.json" in problem for problem in found.problems)


def test_packs_are_fresh_or_stale() -> None:
    folder = packs.cache_dir()
    catalog = packs.catalog(90).read_bytes()
    (folder / "sm_90.mpk").write_bytes(catalog)
    (state,) = doctor.examine().packs
    assert (state["sm"], state["fresh"], state["bytes"]) == (90, True, len(catalog))


def test_the_table_for_people_names_everything() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("Python", "onnxruntime", "library", "GPU", "packs", "table"):
        assert word in result.stdout
