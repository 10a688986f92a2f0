"""Sizes behind strided convolutions and poolings as expressions of the sizes in front of them.

Shape inference gives the output of a convolution over a symbolic size a name of its own. Two of one
input that stride alike then seem to differ: the branches of a residual block. Their sizes are

    floor((h + pads - kernel) / stride) + 1 = floor((h + c) / d)

and a chain of them is again of that form, since floor((floor((h + c) / d) + e) / f) is
floor((h + c + d e) / (d f)) for whole numbers. So a symbol, c and d say all, and sizes are equal
for every h if these three are. What shape inference named is renamed to the expression:
`floor((h + 1)/2)`, or `h` where a convolution keeps the size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from .domain import DOMAIN
from .operators import OPERATORS

_WINDOWED = frozenset({"Conv", "MaxPool", "AveragePool", "LpPool"})
_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where"})
_FIRST_AXIS = 2
"""The dimensions in front of it are those of images and channels."""


@dataclasses.dataclass(frozen=True)
class Size:
    """floor((symbol + offset) / divisor), with a divisor of 1 or more."""

    symbol: str
    offset: int = 0
    divisor: int = 1

    def windows(self, window: int, stride: int) -> Size:
        """How many positions a window has along it: floor((self - window) / stride) + 1."""
        added = self.offset + self.divisor * (stride - window)
        return Size(self.symbol, added, self.divisor * stride)

    def times(self, factor: int, offset: int) -> Size:
        """factor * self + offset, as a symbol of its own where factor is not 1."""
        if factor == 1:
            return Size(self.symbol, self.offset + self.divisor * offset, self.divisor)
        return Size(f"{factor}*{self}", offset)

    def __str__(self) -> str:
        sign = "+" if self.offset > 0 else "-"
        text = self.symbol if self.symbol.isidentifier() else f"({self.symbol})"
        if self.offset:
            text = f"{text} {sign} {abs(self.offset)}"
        if self.divisor > 1:
            return f"floor(({text})/{self.divisor})"
        return f"({text})" if self.offset else self.symbol


Extent = int | Size | None
"""A dimension: a number, an expression, or not known."""


def rename_sizes(nodes: Sequence[ir.Node], overridden: Collection[str] = ()) -> None:
    """Gives dimensions that follow from others their expressions as names, in place.

    Args:
        nodes: The typed nodes of a graph and its subgraphs, producers first.
        overridden: Standard operators for which the model has functions of its own.
    """
    names = _Names()
    for node in nodes:
        names.enter(node, _standard(node, overridden))
    for node in nodes:
        for value in (*node.inputs, *node.outputs):
            names.rename(value)


def _standard(node: ir.Node, overridden: Collection[str]) -> str:
    """The ai.onnx operator that gives a node's output its shape; empty for others."""
    if node.domain == DOMAIN and node.op_type in OPERATORS:
        return OPERATORS[node.op_type].standard
    return "" if node.domain or node.op_type in overridden else node.op_type


class _Names:
    """What the names of dimensions in a graph stand for."""

    def __init__(self) -> None:
        self._sizes: dict[str, Size] = {}
        self._seen: set[str] = set()

    def enter(self, node: ir.Node, op_type: str) -> None:
        """Notes what the new names among the outputs of a node stand for."""
        for value in node.inputs:
            self._seen.update(_symbols(value))
        output = node.outputs[0] if node.outputs else None
        shape = None if output is None else output.shape
        if shape is not None:
            found = self._found(node, op_type, len(shape))
            for dimension, extent in zip(shape, found, strict=False):
                name = dimension.value if isinstance(dimension, ir.SymbolicDim) else None
                if name and name not in self._seen and isinstance(extent, Size):
                    self._sizes[name] = extent
        for value in node.outputs:
            self._seen.update(_symbols(value))

    def rename(self, value: ir.Value | None) -> None:
        if value is not None and value.shape is not None and self._sizes.keys() & _symbols(value):
            value.shape = ir.Shape(map(self._renamed, value.shape))

    def _renamed(self, dimension: int | ir.SymbolicDim) -> int | ir.SymbolicDim | str:
        size = None if isinstance(dimension, int) else self._sizes.get(dimension.value or "")
        return dimension if size is None else str(size)

    def _found(self, node: ir.Node, op_type: str, rank: int) -> Sequence[Extent]:
        if op_type in _WINDOWED:
            return _of_windows(node, self._extents(node.inputs[0], rank))
        if op_type == "ConvTranspose":
            return _of_transposed(node, self._extents(node.inputs[0], rank))
        if op_type in _BROADCASTING:
            return [_broadcast(axis) for axis in zip(*self._aligned(node, rank), strict=True)]
        return ()

    def _extents(self, value: ir.Value | None, rank: int) -> list[Extent]:
        """The dimensions of a value, unknown ones where its rank is another."""
        if value is None or value.shape is None or len(value.shape) != rank:
            return [None] * rank
        return [self._extent(dimension) for dimension in value.shape]

    def _aligned(self, node: ir.Node, rank: int) -> list[list[Extent]]:
        """The dimensions of all operands, with ones in front of the shorter."""
        result: list[list[Extent]] = []
        for value in node.inputs:
            own = -1 if value is None or value.shape is None else len(value.shape)
            known = self._extents(value, own) if 0 <= own <= rank else [None] * rank
            result.append([*[1] * (rank - len(known)), *known])
        return result

    def _extent(self, dimension: int | ir.SymbolicDim) -> Extent:
        if isinstance(dimension, int):
            return dimension
        name = dimension.value
        return None if name is None else self._sizes.get(name, Size(name))


def _symbols(value: ir.Value | None) -> set[str]:
    shape = () if value is None or value.shape is None else value.shape
    return {d.value for d in shape if isinstance(d, ir.SymbolicDim) and d.value}


def _broadcast(extents: Sequence[Extent]) -> Extent:
    others = {extent for extent in extents if extent != 1}
    return others.pop() if len(others) == 1 else None


def _of_windows(node: ir.Node, extents: list[Extent]) -> list[Extent]:
    """The output of a convolution or a pooling: the spatial dimensions, nothing of the first two.

    A pooling that rounds up drops a last window that begins in the padding, so that its size is
    none of these expressions.
    """
    window = _Window.of(node, len(extents) - _FIRST_AXIS)
    if window is None or node.attributes.get_string("auto_pad", "NOTSET") not in _AUTO_PADS:
        return []
    result: list[Extent] = [None] * _FIRST_AXIS
    rounds_up = bool(node.attributes.get_int("ceil_mode", 0))
    for axis, extent in enumerate(extents[_FIRST_AXIS:]):
        if isinstance(extent, Size) and not (rounds_up and window.strides[axis] > 1):
            result.append(window.count(axis, extent))
        else:
            result.append(None)
    return result


def _of_transposed(node: ir.Node, extents: list[Extent]) -> list[Extent]:
    """The same of a ConvTranspose, whose pads are numbers and give the size."""
    rank = len(extents) - _FIRST_AXIS
    window = _Window.of(node, rank)
    automatic = node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    if window is None or automatic or "output_shape" in node.attributes:
        return []
    added = node.attributes.get_ints("output_padding", [0] * rank)
    if len(added) != rank:
        return []
    result: list[Extent] = [None] * _FIRST_AXIS
    for axis, extent in enumerate(extents[_FIRST_AXIS:]):
        stride = window.strides[axis]
        rest = added[axis] + window.extents[axis] - window.pads[axis] - stride
        result.append(extent.times(stride, rest) if isinstance(extent, Size) else None)
    return result


_AUTO_PADS: Mapping[str, bool] = {
    "NOTSET": False, "VALID": False, "SAME_UPPER": True, "SAME_LOWER": True
}  # fmt: skip
"""Whether they pad so that only the stride counts."""


@dataclasses.dataclass(frozen=True)
class _Window:
    """Along each axis: how far the kernel reaches, the stride, and the pads of both sides."""

    extents: Sequence[int]
    strides: Sequence[int]
    pads: Sequence[int]
    same: bool

    @classmethod
    def of(cls, node: ir.Node, rank: int) -> _Window | None:
        """None where an attribute has another length, or the kernel is not known."""
        attributes = node.attributes
        if any(attribute.is_ref() for attribute in attributes.values()):
            return None
        kernel = list(attributes.get_ints("kernel_shape", ()))
        if not kernel and len(node.inputs) > 1 and node.inputs[1] is not None:
            kernel = [size for size in (node.inputs[1].shape or ())[2:] if isinstance(size, int)]
        strides = attributes.get_ints("strides", [1] * rank)
        dilations = attributes.get_ints("dilations", [1] * rank)
        pads = attributes.get_ints("pads", [0] * 2 * rank)
        lengths = [len(kernel), len(strides), len(dilations)]
        if rank < 1 or lengths != [rank] * 3 or len(pads) != 2 * rank or min(strides) < 1:
            return None
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        both = [pads[axis] + pads[axis + rank] for axis in range(rank)]
        same = _AUTO_PADS.get(attributes.get_string("auto_pad", "NOTSET"), False)
        return cls(extents, strides, both, same)

    def count(self, axis: int, size: Size) -> Size:
        stride = self.strides[axis]
        # Padded so that every stride begins a window: ceil(size / stride).
        window = 1 if self.same else self.extents[axis] - self.pads[axis]
        return size.windows(window, stride)
