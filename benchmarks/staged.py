"""Runs convolutions by staged images, kernels on trial (`conv_stage`, `conv_staged`), through
Triton itself: compiled on the GPU at hand, or interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from moonpoly_ort.custom_ops.kernels import loading

from benchmarks.convolutions import Convolution

UNIT_BYTES = 16  # what a tensor map's strides are multiples of
STAGE_TILE = {"BC": 64, "BP": 64}


@dataclass(frozen=True)
class Geometry:
    """Where pixels lie in the staged images of a 2-D Conv of one group. Positions are counted
    within an image: `phases` planes of `plane` of them, each of `width` columns."""

    out: tuple[int, int]
    phases: tuple[int, int]
    height: int
    width: int
    channels: int  # as stored, zeros at the end

    @staticmethod
    def of(case: Convolution) -> Geometry:
        """Raises ValueError where the case has groups, is transposed or not 2-D."""
        if case.groups != 1 or case.transposed or len(case.size) != 2:
            raise ValueError(f"staged images serve 2-D Conv of one group, not {case}")
        strides, dilations = case.strides or (1, 1), case.dilations or (1, 1)
        pads = case.pads or (0,) * 4
        taps = [[t * d for t in range(k)] for k, d in zip(case.kernel, dilations, strict=True)]
        height, width = (
            (size + pads[axis] + pads[axis + 2] - taps[axis][-1] - 1) // strides[axis] + 1
            for axis, size in enumerate(case.size)
        )
        phases = tuple(max(t % s for t in ts) + 1 for ts, s in zip(taps, strides, strict=True))
        reach = [ts[-1] // s for ts, s in zip(taps, strides, strict=True)]
        unit = UNIT_BYTES // (4 if case.dtype == "f32" else 2)
        return Geometry(
            (height, width), (phases[0], phases[1]), height + reach[0], width + reach[1],
            -(-case.c // unit) * unit,
        )  # fmt: skip

    @property
    def plane(self) -> int:
        return self.height * self.width

    @property
    def rows(self) -> int:
        """Positions of an image."""
        return self.phases[0] * self.phases[1] * self.plane

    @property
    def positions(self) -> int:
        """From the first output of an image to its last."""
        return (self.out[0] - 1) * self.width + self.out[1]


@dataclass(frozen=True)
class Tile:
    """A tile of `conv_staged`; `bk` in 2-byte elements, f32 takes half."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages}{' swap' * self.swap}"


class StagedConv:
    """One convolution on its tensors: X, W and Y as ONNX has them, W stored anew."""

    def __init__(
        self, case: Convolution, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor,
        bias: torch.Tensor | None = None, interpret: bool = False,
    ) -> None:  # fmt: skip
        self.case, self.x, self.y, self.bias = case, x, y, bias
        self.geometry = one = Geometry.of(case)
        self._stage = loading.kernel("conv_stage", interpret=interpret)
        self._multiply = loading.kernel("conv_staged", interpret=interpret)
        self.staged = torch.full(
            (case.n * one.rows, one.channels), torch.nan, dtype=x.dtype, device=x.device
        )
        taps = case.kernel[0] * case.kernel[1]
        self.w = torch.zeros(taps, case.k, one.channels, dtype=w.dtype, device=w.device)
        self.w[:, :, : case.c] = w.flatten(2).permute(2, 0, 1)

    def steps(self, tile: Tile) -> int:
        """K steps of a tile."""
        return (
            self.case.kernel[0] * self.case.kernel[1] * -(-self.geometry.channels // self._bk(tile))
        )

    def tiles(self, tile: Tile) -> int:
        rows, columns = -(-self.case.k // tile.bm), -(-self.geometry.positions // tile.bn)
        return self.case.n * rows * columns

    def _bk(self, tile: Tile) -> int:
        return tile.bk * 2 // self.x.element_size()

    def stage(self) -> None:
        """Enqueues the staging of X."""
        case, one = self.case, self.geometry
        unit = UNIT_BYTES // self.x.element_size()
        strides, pads = case.strides or (1, 1), case.pads or (0,) * 4
        tiles = -(-one.channels // STAGE_TILE["BC"]) * -(-one.rows // STAGE_TILE["BP"])
        self._stage[(case.n * tiles,)](
            self.x, self.staged, case.c, one.channels // unit, *case.size, one.rows, one.plane,
            one.width, one.phases[1], *strides, pads[0], pads[1], 0, UNIT=unit, num_warps=4,
            **STAGE_TILE,
        )  # fmt: skip

    def scratch(self, tile: Tile, split: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace and the zeroed counters that a launch needs."""
        count, device = self.tiles(tile), self.x.device
        partials = count * split * tile.bm * tile.bn if split > 1 else 4
        return (
            torch.full((partials,), torch.nan, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
        )

    def multiply(
        self, tile: Tile, split: int, workspace: torch.Tensor, counters: torch.Tensor
    ) -> None:
        """Enqueues the products of what is staged."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        case, one, bk = self.case, self.geometry, self._bk(tile)
        strides, dilations = case.strides or (1, 1), case.dilations or (1, 1)
        x, w = self.staged, self.w
        tf32 = self.x.dtype == torch.float32
        constants: dict[str, Any] = {
            "BM": tile.bm, "BN": tile.bn, "BK": bk, "GROUP_M": 8, "STRIDED": strides != (1, 1),
            "SPLIT_K": split > 1, "SWAP": tile.swap,
            "PRECISION": case.precision if tf32 else "tf32", "ROUND": "none",
        }  # fmt: skip
        self._multiply[(self.tiles(tile) * split,)](
            TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.bn, bk]),
            TensorDescriptor(w, list(w.shape), list(w.stride()), [1, tile.bm, bk]),
            self.y, self.y if self.bias is None else self.bias, workspace, counters,
            case.k, one.positions, one.channels, split, 0, int(self.bias is not None),
            one.rows, one.plane, one.width, one.phases[1], *one.out, *case.kernel, *strides,
            *dilations, num_warps=tile.warps, num_stages=tile.stages, **constants,
        )  # fmt: skip
