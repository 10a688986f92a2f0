"""Catalogs that tests make for themselves."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

from moonpoly_ort.custom_ops.kernels import compiling, kernel_list, pack_format

from moonpoly_ort import native


@cache
def one_tile_a_block(sm: int) -> native.Pack:
    """The kernels of which each block computes one tile, without a table. Persistent ones, which
    fill the last wave by themselves, leave two regions fewer products. Those that are left out for
    persistent ones are there.
    """
    with mock.patch.object(kernel_list, "LEFT_OUT", {}):
        kernels = [k for k in compiling.catalog_kernels(sm) if not k.spec.persistent]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"sm_{sm}.mpk"
        pack_format.write_pack(path, sm, kernels, key="0" * 64, triton="none")
        return native.Pack(path)
