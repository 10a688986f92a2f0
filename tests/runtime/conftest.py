from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_pack import standard_kernels, write_pack

from moonpoly_ort import native


@pytest.fixture(scope="session")
def catalog_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("packs") / "sm_90.mpk", standard_kernels())


@pytest.fixture(scope="session")
def catalog(catalog_path: Path) -> Iterator[native.Pack]:
    with native.Pack(catalog_path) as pack:
        yield pack
