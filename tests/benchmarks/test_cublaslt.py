"""The binding of cuBLASLt, against one that computes on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import cublaslt
from moonpoly_ort.errors import DeviceError


@pytest.fixture
def library(fake_cublaslt: str) -> Iterator[cublaslt.CublasLt]:
    opened = cublaslt.CublasLt([fake_cublaslt])
    yield opened
    opened.close()


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 7, 3), (4, 1, 9), (1, 6, 2)])
def test_products_of_row_major_matrices(
    library: cublaslt.CublasLt, fake_cublaslt: str, sizes: tuple[int, int, int], batch: int,
    trans_b: bool,
) -> None:  # fmt: skip
    m, n, k = sizes
    a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
    stored = b.mT.contiguous() if trans_b else b
    y, workspace = torch.full((batch, m, n), torch.nan), torch.empty(1)
    product = library.product(cublaslt.Sizes.dense(m, n, k, batch), "f32ieee", trans_b)
    for algorithm in product.algorithms(2):
        product.run(
            algorithm, a.data_ptr(), stored.data_ptr(), y.data_ptr(), workspace.data_ptr(), 0
        )
        torch.testing.assert_close(y, a @ b)
        y.fill_(torch.nan)
    assert ctypes.CDLL(fake_cublaslt).fake_open_descriptors() > 0
    product.close()
    assert ctypes.CDLL(fake_cublaslt).fake_open_descriptors() == 0


@pytest.mark.parametrize("dtype", sorted(cublaslt.DATA_TYPES))
def test_the_list_is_no_longer_than_asked(library: cublaslt.CublasLt, dtype: str) -> None:
    product = library.product(cublaslt.Sizes.dense(2, 3, 4), dtype)
    assert [len(product.algorithms(most)) for most in (1, 2, 10)] == [1, 2, 3]
    product.close()


def test_an_algorithm_tells_its_settings(library: cublaslt.CublasLt) -> None:
    product = library.product(cublaslt.Sizes.dense(2, 3, 4), "f16")
    first, second = product.algorithms(2, alignment=16)
    # The stand-in knows two of them, and tells the alignment that it was asked for as the split.
    assert library.settings(first) == {"tile": 20, "split": 16}
    assert library.settings(second) == {"tile": 21, "split": 16}
    assert library.settings(product.algorithms(1)[0])["split"] == 256
    product.close()


def test_what_it_cannot_do_is_said(library: cublaslt.CublasLt) -> None:
    refused = library.product(cublaslt.Sizes.dense(2, 3, 13), "f32")
    with pytest.raises(cublaslt.Refused, match="not supported"):
        refused.algorithms(4)
    refused.close()
    product = library.product(cublaslt.Sizes.dense(2, 3, 4), "f32")
    last = product.algorithms(3)[2]
    y = torch.empty(2, 3)
    with pytest.raises(cublaslt.Refused, match="cublasLtMatmul"):
        product.run(last, y.data_ptr(), y.data_ptr(), y.data_ptr(), y.data_ptr(), 0)
    with pytest.raises(DeviceError, match=r"invalid value \(7\)"):
        product.run(last, y.data_ptr(), y.data_ptr(), y.data_ptr(), 0, 0)
    product.close()


def test_an_absent_library_is_named() -> None:
    with pytest.raises(DeviceError, match=r"nvidia-cublas.*libnowhere\.so\.1"):
        cublaslt.CublasLt(["libnowhere.so.1"])


def test_torchs_version_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert cublaslt.find_library()[-2:] == ["libcublasLt.so.12", "libcublasLt.so.13"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cublaslt.find_library()[-2:] == ["libcublasLt.so.13", "libcublasLt.so.12"]


def test_the_struct_has_the_library_s_size() -> None:
    assert ctypes.sizeof(cublaslt.Algorithm) == 96
