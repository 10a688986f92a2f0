from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels import pack_format
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.pack_format import (
    COST,
    HEADER,
    CostTable,
    Descriptor,
    PackedKernel,
    checksum,
    encode,
    read_info,
    read_pack,
    write_pack,
)
from moonpoly_ort.custom_ops.kernels.signature import launch_params

from moonpoly_ort.errors import PackError

RUNTIME = Path(pack_format.__file__).parents[1] / "runtime"
KEY = "0123456789abcdef" * 4


def kernels() -> list[PackedKernel]:
    boxes = tuple(Descriptor((1, 64, 64 + i), i) for i in (1, 2, 3))
    return [
        PackedKernel(
            s, f"entry_{i}", bytes([i]) * (100 + 7 * i), 1000 + i, 32 + i, launch_params(s),
            boxes[: len(s.family.maps)],
        )
        for i, s in enumerate(specs(90, trial=True)[::40])
    ]  # fmt: skip


def tables() -> list[CostTable]:
    costs = np.zeros(len(kernels()), COST)
    costs["step_us"] = np.arange(len(costs))
    return [CostTable("NVIDIA H200", 132, 4300.0, 1.5, costs)]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "sm_90.mpk"
    write_pack(path, 90, kernels(), tables(), key=KEY, triton="3.9.0")
    return path


def test_what_is_written_is_read(pack: Path) -> None:
    got = read_pack(pack)
    assert got.kernels == kernels()
    assert got.tables == tables()
    assert np.array_equal(got.tables[0].costs, tables()[0].costs)
    assert got.info == read_info(pack)
    assert (got.info.sm, got.info.key, got.info.triton) == (90, KEY, "3.9.0")
    assert got.info.file_bytes == pack.stat().st_size


def test_cubins_are_aligned(pack: Path) -> None:
    data = pack.read_bytes()
    header = np.frombuffer(data, HEADER, 1)[0]
    rows = np.frombuffer(data, pack_format.KERNEL, len(kernels()), header["kernels_offset"])
    assert (rows["cubin_offset"] % 64 == 0).all()
    assert rows["cubin_offset"][0] >= header["cubins_offset"]


def test_a_catalog_has_no_code(tmp_path: Path) -> None:
    path = tmp_path / "catalog.mpk"
    bare = [PackedKernel(k.spec, k.entry, b"", 1, 1, k.params) for k in kernels()]
    write_pack(path, 90, bare, key=KEY, triton="none")
    rows = np.frombuffer(path.read_bytes(), pack_format.KERNEL, len(bare), HEADER.itemsize)
    assert not rows["cubin_bytes"].any()
    assert [k.spec for k in read_pack(path).kernels] == [k.spec for k in bare]


def _patch(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is not a kernel pack"),
        (lambda data: data[:100], "is not a kernel pack"),
        (lambda data: b"ELF" + data[3:], "is not a kernel pack"),
        (_patch(8, b"\x01"), "pack version 1, while this release reads 6"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"\0", "truncated"),
        (_patch(HEADER.itemsize + 5, b"\xff"), "corrupt"),
        (_patch(-1000, b"\xff"), "corrupt"),
        (_patch(24, b"\xff"), "corrupt"),
        (_patch(HEADER.fields["key"][1], b"\xff"), "corrupt"),
    ],
)
def test_a_damaged_pack_is_refused(
    pack: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    pack.write_bytes(damage(pack.read_bytes()))
    for read in (read_info, read_pack):
        with pytest.raises(PackError, match=message) as caught:
            read(pack)
        assert str(pack) in str(caught.value)
        assert "moonpoly pack" in str(caught.value)


@pytest.mark.parametrize("field", ["kernel_count", "kernels_offset", "params_offset"])
def test_a_header_that_says_the_impossible_is_refused(pack: Path, field: str) -> None:
    pack.write_bytes(_patch(HEADER.fields[field][1], b"\xff\xff\xff\x7f")(pack.read_bytes()))
    with pytest.raises(PackError, match="impossible values"):
        read_pack(pack)


def test_a_missing_pack_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"nowhere\.mpk: No such file"):
        read_info(tmp_path / "nowhere.mpk")


def test_a_failed_write_leaves_the_old_pack(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pack.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_pack(pack, 90, kernels()[:1], key=KEY, triton="3.9.0")
    assert pack.read_bytes() == before
    assert os.listdir(pack.parent) == [pack.name]


def test_others_may_read_a_pack(pack: Path) -> None:
    assert stat.S_IMODE(pack.stat().st_mode) == 0o644


def test_what_does_not_fit_is_refused() -> None:
    long = PackedKernel(kernels()[0].spec, "e" * 64, b"", 0, 0, ())
    with pytest.raises(ValueError, match="at most 63 fit"):
        encode(90, [long], key=KEY, triton="3.9.0")
    with pytest.raises(ValueError, match=r"NVIDIA H200 has \d+ costs for 1 kernels"):
        encode(90, kernels()[:1], tables(), key=KEY, triton="3.9.0")


@given(st.binary(max_size=100))
def test_checksum_is_the_documented_sum(data: bytes) -> None:
    padded = data + b"\0" * (-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum((w ^ (w >> 32)) * (2 * i + 0x9E3779B97F4A7C15) for i, w in enumerate(words))
    assert checksum(data) == total % 2**64


@given(st.binary(min_size=1, max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_checksum_sees_every_changed_byte(data: bytes, at: int, flip: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= flip
    assert checksum(bytes(changed)) != checksum(data)


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "building the package needs a C++ compiler"
    structs = {
        "mp_pack_header": pack_format.HEADER, "mp_kernel": pack_format.KERNEL,
        "mp_desc_shape": pack_format.DESC_SHAPE, "mp_cost": COST, "mp_table": pack_format.TABLE,
    }  # fmt: skip
    want, prints = [], []
    for struct, dtype in structs.items():
        want.append(dtype.itemsize)
        prints.append(f"sizeof({struct})")
        for member in dtype.names or ():
            want.append(dtype.fields[member][1])  # type: ignore[index]
            prints.append(f"offsetof({struct}, {member})")
    source = tmp_path / "offsets.cc"
    body = "".join(f'printf("%zu\\n", {p});' for p in prints)
    source.write_text(
        f'#include "moonpoly.h"\n#include <cstddef>\n#include <cstdio>\nint main() {{ {body} }}\n'
    )
    program = tmp_path / "offsets"
    subprocess.run([compiler, f"-I{RUNTIME}", source, "-o", program], check=True)
    listing = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in listing.split()] == want
