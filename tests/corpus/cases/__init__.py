"""Small models, each written after a public report of a fault in some graph tool or runtime.

`ALL` holds every case in a fixed order, `get(id)` returns one. What a case is: see `case.py`.
"""

from __future__ import annotations

from . import convolution, gemm, graphs, matmul, types
from .case import Case, Random

ALL: tuple[Case, ...] = (
    *matmul.CASES,
    *gemm.CASES,
    *graphs.CASES,
    *convolution.CASES,
    *types.CASES,
)
_BY_ID = {case.id: case for case in ALL}


def get(case_id: str) -> Case:
    """The case of that id; KeyError names the id when there is none."""
    return _BY_ID[case_id]


__all__ = ["ALL", "Case", "Random", "get"]
