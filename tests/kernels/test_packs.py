from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from moonpoly_ort.custom_ops.kernels import compiling, pack_format
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import KernelSpec, name

from moonpoly_ort import packs
from moonpoly_ort.errors import (
    DeviceError,
    MissingDependencyError,
    OutputError,
    PackError,
    TableError,
)

FEW = 3  # kernels of the shortened list


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, nothing beside the library, no settings, a list that builds in a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("MOONPOLY_PACK", "MOONPOLY_NO_BUILD"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(packs, "__file__", str(tmp_path / "library" / "packs.py"))
    monkeypatch.setattr(packs, "_measured", lambda sm: [])
    for module in (packs, compiling):
        monkeypatch.setattr(module, "specs", lambda sm, **_: specs(sm)[-FEW:])


def _key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(
        compiling, "content_key", lambda sm, triton, **_: (key + triton).ljust(64, ".")
    )


def test_a_pack_is_built_once_into_the_cache() -> None:
    assert packs.find_pack(80) is None
    steps: list[tuple[int, int, str]] = []
    path = packs.ensure_pack(80, progress=lambda *step: steps.append(step))
    assert path == packs.cache_dir() / "sm_80.mpk"
    assert [step[:2] for step in steps] == [(i, FEW) for i in range(1, FEW + 1)]
    pack = pack_format.read_pack(path)
    assert [name(k.spec) for k in pack.kernels] == [name(s) for s in specs(80)[-FEW:]]
    assert pack.info.key == compiling.content_key(80, compiling.triton_version())

    before = path.stat().st_mtime_ns
    assert packs.ensure_pack(80, progress=lambda *_: pytest.fail("built again")) == path
    assert packs.find_pack(80) == path
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-5],
        lambda data: data[:-1] + b"!",
        lambda data: data[:12] + b"Z" + data[13:],  # another architecture
        lambda data: b"",
    ],
)
def test_a_spoilt_pack_is_rebuilt(spoil: Callable[[bytes], bytes]) -> None:
    path = packs.ensure_pack(80)
    good = path.read_bytes()
    path.write_bytes(spoil(good))
    assert packs.find_pack(80) is None
    assert packs.ensure_pack(80) == path
    assert path.read_bytes() == good


def test_a_pack_of_other_sources_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    path = packs.ensure_pack(80)
    _key(monkeypatch, "new sources ")
    assert packs.find_pack(80) is None
    assert packs.ensure_pack(80) == path
    assert pack_format.read_info(path).key.startswith("new sources 3.9")


def test_a_pack_of_another_triton_serves_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = packs.ensure_pack(80)

    def other() -> str:
        return "3.9.99"

    def missing() -> str:
        raise MissingDependencyError("no Triton")

    monkeypatch.setattr(compiling, "triton_version", other)
    assert packs.find_pack(80) is None
    monkeypatch.setattr(compiling, "triton_version", missing)
    assert packs.find_pack(80) == path
    path.unlink()
    with pytest.raises(MissingDependencyError):
        packs.ensure_pack(80)


def test_new_cost_tables_reach_a_built_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    path = packs.ensure_pack(80)
    built = pack_format.read_pack(path)
    assert built.tables == []
    costs = np.zeros(FEW, pack_format.COST)
    table = pack_format.CostTable("NVIDIA A100", 108, 1900.0, 2.0, costs)
    monkeypatch.setattr(packs, "_measured", lambda sm: [table])
    monkeypatch.setattr(compiling, "compile_specs", lambda *_, **__: pytest.fail("built again"))
    for step_us in (1.5, 2.5):  # a first table, and a new measurement of the same GPU
        costs["step_us"] = step_us
        packs.ensure_pack(80)
        renewed = pack_format.read_pack(path)
        assert renewed.tables[0].costs["step_us"].tolist() == [step_us] * FEW
        assert (renewed.kernels, renewed.info.key) == (built.kernels, built.info.key)
    before = path.stat().st_mtime_ns
    packs.ensure_pack(80)
    assert path.stat().st_mtime_ns == before


def test_new_cost_tables_of_a_shipped_pack_go_into_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "library" / "packs" / "sm_80.mpk"
    shipped.parent.mkdir(parents=True)
    packs.ensure_pack(80).rename(shipped)
    before = shipped.read_bytes()
    assert packs.ensure_pack(80) == packs.find_pack(80) == shipped
    costs = np.ones(FEW, pack_format.COST)
    table = pack_format.CostTable("NVIDIA A100", 108, 1900.0, 2.0, costs)
    monkeypatch.setattr(packs, "_measured", lambda sm: [table])
    monkeypatch.setenv("MOONPOLY_PACK", str(shipped))
    assert packs.ensure_pack(80) == shipped  # who names a pack gets it as it is
    monkeypatch.delenv("MOONPOLY_PACK")
    copy = packs.cache_dir() / "sm_80.mpk"
    assert packs.ensure_pack(80) == copy
    assert packs.find_pack(80) == copy  # explained plans are those of sessions
    assert pack_format.read_tables(copy) == [table]
    assert pack_format.read_pack(copy).kernels == pack_format.read_pack(shipped).kernels
    assert shipped.read_bytes() == before
    monkeypatch.setattr(packs, "_measured", lambda sm: [])  # the table was removed again
    assert packs.find_pack(80) == packs.ensure_pack(80) == shipped
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(packs, "_measured", lambda sm: [table])
    assert packs.ensure_pack(80) == shipped
    assert "with the tables that it was built with" in caplog.text


def test_a_table_that_cannot_be_used_keeps_no_built_pack_from_being_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = packs.ensure_pack(80)
    shipped = tmp_path / "library" / "packs" / "sm_80.mpk"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(cached.read_bytes())

    def refuse(sm: int) -> list[pack_format.CostTable]:
        raise TableError("the table t lists no kernel of this version")

    monkeypatch.setattr(packs, "_measured", refuse)
    assert packs.find_pack(80) == packs.ensure_pack(80) == shipped
    assert "left aside: the table t lists no kernel" in caplog.text


def test_places_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached = packs.ensure_pack(80)
    shipped = tmp_path / "library" / "packs" / "sm_80.mpk"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(cached.read_bytes())
    assert packs.find_pack(80) == shipped
    named = tmp_path / "named.mpk"
    named.write_bytes(cached.read_bytes())
    monkeypatch.setenv("MOONPOLY_PACK", str(named))
    assert packs.find_pack(80) == named
    assert packs.find_pack(80, cached) == cached
    shipped.write_bytes(b"stale")
    monkeypatch.delenv("MOONPOLY_PACK")
    assert packs.find_pack(80) == cached


def test_a_named_pack_must_be_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = packs.ensure_pack(80)
    with pytest.raises(PackError, match=r"holds kernels for sm_80, not for sm_90.*--arch sm_90"):
        packs.find_pack(90, good)
    assert packs.find_pack(86, good) == good  # code for sm_80 runs on later sm_8x
    _key(monkeypatch, "other sources")
    assert packs.find_pack(80, good) == good  # who names a pack gets it
    bad = tmp_path / "bad.mpk"
    bad.write_bytes(good.read_bytes()[:-1])
    monkeypatch.setenv("MOONPOLY_PACK", str(bad))
    for call in (packs.find_pack, packs.ensure_pack):
        with pytest.raises(PackError, match=r"bad\.mpk: .*truncated"):
            call(80)
    monkeypatch.setenv("MOONPOLY_PACK", str(tmp_path / "none.mpk"))
    with pytest.raises(PackError, match=r"none\.mpk: No such file"):
        packs.find_pack(80)


def test_building_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackError, match="the caller forbids building"):
        packs.ensure_pack(80, build=False)
    monkeypatch.setenv("MOONPOLY_NO_BUILD", "1")
    with pytest.raises(PackError, match=r"sm_80, and MOONPOLY_NO_BUILD is set.*cache.*sm_80\.mpk"):
        packs.ensure_pack(80)
    monkeypatch.setenv("MOONPOLY_NO_BUILD", "0")
    assert packs.ensure_pack(80).is_file()
    monkeypatch.setenv("MOONPOLY_NO_BUILD", "1")
    assert packs.ensure_pack(80).is_file()


def test_a_second_builder_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    started, real = threading.Event(), compiling.compile_specs

    def slowly(*arguments: object, **options: object) -> object:
        builds.append(1)
        started.set()
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compiling, "compile_specs", slowly)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(packs.ensure_pack(80)))]
    threads[0].start()
    assert started.wait(30)
    program = (
        "from moonpoly_ort import packs\n"
        "from moonpoly_ort.custom_ops.kernels import compiling, kernel_list\n"
        "packs.specs = compiling.specs = lambda sm, **_: kernel_list.specs(sm)[-3:]\n"
        "packs._measured = lambda sm: []\n"
        "def never(*_, **__): raise SystemExit('built twice')\n"
        "compiling.compile_specs = never\n"
        f"packs.__file__ = {packs.__file__!r}\n"
        "print(packs.ensure_pack(80))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    threads[0].join()
    assert (run.stdout.strip(), run.stderr) == (str(found[0]), "")
    assert len(builds) == 1


@pytest.mark.parametrize("call", [packs.find_pack, packs.ensure_pack, packs.catalog])
def test_an_unsupported_architecture_lists_the_supported(call: Callable[[int], Path]) -> None:
    with pytest.raises(DeviceError, match=r"sm_75; supported architectures: sm_80, .*sm_120"):
        call(75)


def test_a_pack_goes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "my.mpk"
    assert packs.build_pack(80, target) == target
    assert pack_format.read_info(target).kernel_count == FEW
    monkeypatch.delattr(compiling, "compile_specs")  # what cannot be written is not compiled
    with pytest.raises(OutputError, match=r"cannot write .*nowhere.my\.mpk: No such file"):
        packs.build_pack(80, tmp_path / "nowhere" / "my.mpk")
    folder = tmp_path / "folder.mpk"
    folder.mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*folder\.mpk: Is a directory"):
        packs.build_pack(80, folder)
    assert sorted(os.listdir(tmp_path)) == ["folder.mpk", "my.mpk"]


def test_a_pack_of_kernels_on_trial_is_used_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = specs(90)
    tried = next(spec for spec in specs(90, trial=True) if spec not in listed)

    def few(sm: int, *, trial: bool = False) -> list[KernelSpec]:
        return specs(sm)[-FEW:] + [tried] * trial

    for module in (packs, compiling):
        monkeypatch.setattr(module, "specs", few)
    target = packs.build_pack(90, tmp_path / packs.pack_name(90), trial=True)
    kernels = pack_format.read_pack(target).kernels
    assert [k.spec for k in kernels] == few(90, trial=True)
    assert len(kernels) == FEW + 1
    assert packs.find_pack(90, target) == target
    packs.cache_dir().mkdir(parents=True)
    target.rename(packs.cache_dir() / target.name)
    assert packs.find_pack(90) is None
    # Tuning keeps one of its own in the cache, which no session takes.
    kept = packs.ensure_pack(90, trial=True)
    assert kept == packs.cache_dir() / "sm_90.trial.mpk"
    assert [k.spec for k in pack_format.read_pack(kept).kernels] == few(90, trial=True)
    monkeypatch.setattr(compiling, "compile_specs", lambda *_, **__: pytest.fail("built again"))
    assert packs.ensure_pack(90, trial=True) == kept
    assert packs.find_pack(90) is None


def test_an_unwritable_cache_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PackError, match="Set XDG_CACHE_HOME"):
        packs.ensure_pack(80)
    assert packs.catalog(80).is_file()  # in the temporary folder


def test_a_catalog_is_the_list_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "specs", specs)
    path = packs.catalog(120)
    assert path.parent == packs.cache_dir()
    assert packs.find_pack(120) is None  # a catalog is not taken for a pack
    kernels = pack_format.read_pack(path).kernels
    assert [k.spec for k in kernels] == specs(120)
    assert all(k.shared_bytes >= 0 and k.registers > 0 and not k.cubin for k in kernels)
