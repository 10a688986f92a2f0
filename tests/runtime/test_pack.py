from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tiny_pack import TinyKernel, checksum, h200, pack_bytes, standard_kernels

from moonpoly_ort import errors, native

KERNELS = [TinyKernel(family=0, dtype=0, bm=64, bn=64, bk=64, cubin=b"code" * 10)]
HEADER = ctypes.sizeof(native.PackHeader)


def opened(path: Path, data: bytes) -> native.Pack:
    path.write_bytes(data)
    return native.Pack(path)


def resealed(data: bytearray) -> bytes:
    header = native.PackHeader.from_buffer_copy(data)
    header.checksum = checksum(bytes(data[HEADER:]))
    return bytes(header) + bytes(data[HEADER:])


def test_reads_back_every_field(tmp_path: Path) -> None:
    kernels = standard_kernels(cubin=b"\x7fELF")
    with opened(tmp_path / "p.mpk", pack_bytes(kernels, sm=90)) as pack:
        assert pack.header.sm == 90
        assert len(pack.kernels) == len(kernels)
        for record, kernel in zip(pack, kernels, strict=True):
            for field in ("bm", "bn", "bk", "dtype", "precision", "split_k", "trans_a", "trans_b"):
                assert getattr(record, field) == getattr(kernel, field)
            assert record.cubin_bytes == 4


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(errors.PackError, match="cannot be opened"):
        native.Pack(tmp_path / "absent.mpk")
    with pytest.raises(errors.PackError, match="not a regular file"):
        native.Pack(tmp_path)


@pytest.mark.parametrize("length", [0, 10, HEADER - 1])
def test_truncated_in_the_header(tmp_path: Path, length: int) -> None:
    with pytest.raises(errors.PackError, match="truncated"):
        opened(tmp_path / "p.mpk", pack_bytes(KERNELS)[:length])


@pytest.mark.parametrize("cut", [1, 64, 400])
def test_truncated_behind_the_header(tmp_path: Path, cut: int) -> None:
    with pytest.raises(errors.PackError, match=r"truncated.*rebuild"):
        opened(tmp_path / "p.mpk", pack_bytes(KERNELS)[:-cut])


@pytest.mark.parametrize("offset", [0, 1, 200, 420])
def test_flipped_byte(tmp_path: Path, offset: int) -> None:
    data = bytearray(pack_bytes(KERNELS))
    data[HEADER + offset if offset else 0] ^= 0x40
    with pytest.raises(errors.PackError, match=r"not a MoonPoly pack|corrupt"):
        opened(tmp_path / "p.mpk", bytes(data))


def test_other_version_names_both(tmp_path: Path) -> None:
    data = bytearray(pack_bytes(KERNELS))
    data[8] = 7
    with pytest.raises(errors.PackError, match=r"version 7.*reads version 6"):
        opened(tmp_path / "p.mpk", bytes(data))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bm", 0, "tile 0x"),
        ("warps", 99, "99 warps"),
        ("align_b", 3, "alignments"),
        ("dtype", 3, "unknown family, dtype"),
        ("param_count", 10**6, "parameter list outside"),
        ("cubin_offset", 10**9, "cubin outside"),
        ("trans_a", 2, "layout"),
        ("persistent", 1, "persistent with 4 warps"),
        ("sliced", 1, "slices of K, but is not persistent"),
    ],
)
def test_faulty_writer(tmp_path: Path, field: str, value: int, message: str) -> None:
    data = bytearray(pack_bytes(KERNELS))
    record = native.KernelRecord.from_buffer(data, HEADER)
    setattr(record, field, value)
    del record
    with pytest.raises(errors.PackError, match=message):
        opened(tmp_path / "p.mpk", resealed(data))


def test_unknown_parameter_code(tmp_path: Path) -> None:
    data = bytearray(pack_bytes(KERNELS))
    at = native.PackHeader.from_buffer_copy(data).params_offset
    data[at : at + 4] = (77).to_bytes(4, "little")
    with pytest.raises(errors.PackError, match="parameter code 77"):
        opened(tmp_path / "p.mpk", resealed(data))


def test_other_architecture(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "p.mpk", pack_bytes(KERNELS, sm=100)) as pack,
        pytest.raises(errors.PackError, match=r"sm_100.*NVIDIA H200 is sm_90.*moonpoly pack"),
    ):
        pack.plan(h200(), native.Problem())


def test_replaced_file_is_a_new_pack(tmp_path: Path) -> None:
    path = tmp_path / "p.mpk"
    with opened(path, pack_bytes(KERNELS)) as old:
        aside = tmp_path / "aside"
        aside.write_bytes(pack_bytes(standard_kernels()))
        aside.replace(path)
        with native.Pack(path) as new:
            assert len(new.kernels) > len(old.kernels) == 1
            assert old.header.kernel_count == 1


def test_same_file_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "p.mpk"
    with opened(path, pack_bytes(KERNELS)) as first, native.Pack(path) as second:
        library = native._library()
        records = [
            ctypes.addressof(library.mp_pack_kernel(p.handle, 0).contents) for p in (first, second)
        ]
        assert records[0] == records[1]
