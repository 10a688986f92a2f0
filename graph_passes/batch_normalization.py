"""BatchNormalization(Conv(X, W, B?)) -> Conv(X, W', B'), for convolutions that a rule has taken

The normalization of a channel is a factor and an offset, which W and B absorb. ONNX Runtime does
that behind its own Conv, but it does not know ours. The new constants are computed in float64 and
rounded once. They come last among the initializers, or into Constant nodes where the old W was in
one. Constants that nothing reads any more go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx

from .domain import DOMAIN, is_standard
from .operators import OPERATORS
from .report import Entry, Reason, Refusal
from .tree import Array, Constant, Initializers, Place, Tree, forest

NAME = "batch_normalization"
OP_TYPE = "BatchNormalization"
TRANSFORMATION = "BatchNormalization(Conv(X, W, B?)) -> ai.moonpoly.Conv(X, W', B')"

_EPSILON = 1e-5
_SPATIAL_UNTIL = 8

_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.DOUBLE,
)


def fold(
    model: onnx.ModelProto, initializers: Initializers, overridden: Collection[str]
) -> list[Entry]:
    """Folds what can be folded, in place.

    Args:
        model: A model in which convolutions have been taken.
        initializers: Of its main graph.
        overridden: Standard operators for which the model has functions of its own.

    Returns:
        An entry for each BatchNormalization behind a taken convolution.
    """
    if OP_TYPE in overridden or model.training_info:  # which names initializers
        return []
    return [entry for tree in forest(model, initializers) for entry in _Folding(tree).fold()]


class _Folding:
    """Folds the nodes of one tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def fold(self) -> Iterator[Entry]:
        released: list[str] = []
        for place in self._tree.places:
            producers = {name: n for n in place.body.node for name in n.output if name}
            for node in list(place.body.node):
                if node.op_type != OP_TYPE or not is_standard(node.domain) or not node.input:
                    continue
                conv = producers.get(node.input[0])
                if conv is None or conv.domain != DOMAIN or not _is_convolution(conv):
                    continue
                entry = {
                    "name": node.name,
                    "op_type": OP_TYPE,
                    "where": place.where,
                    "output": next(iter(node.output), ""),
                    "rule": NAME,
                }
                refusal = self._refuse(place, conv, node) or self._fold(place, conv, node, released)
                if refusal is None:
                    producers[node.output[0]] = conv  # another normalization may follow
                yield Entry(**entry, refusal=refusal)
        self._tree.remove_unread(released)

    def _refuse(self, place: Place, conv: onnx.NodeProto, node: onnx.NodeProto) -> Refusal | None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if any(attribute.ref_attr_name for attribute in attributes.values()):
            return Refusal(Reason.UNBOUND_ATTRIBUTE, "an attribute differs from call to call")
        if len(node.input) != 5 or not all(node.input):
            return Refusal(Reason.INVALID, f"{len(node.input)} inputs; 5 are legal")
        spatial = attributes.get("spatial")
        if self._tree.opset <= _SPATIAL_UNTIL and spatial is not None and not spatial.i:
            return Refusal(Reason.INVALID, "spatial is 0: a value for each element")
        training = attributes.get("training_mode")
        if (training is not None and training.i) or any(node.output[1:]):
            return Refusal(Reason.TRAINING, "it computes the statistics of this batch")
        if self._tree.readers[conv.output[0]] != 1:
            return Refusal(
                Reason.OTHER_READERS, f"{conv.output[0]!r} is an output or has other readers"
            )
        for name in (*conv.input[1:], *node.input[1:]):
            if name and name not in place.constants:
                return Refusal(Reason.NOT_CONSTANT, f"{name!r} is not a constant")
        grouped = any(a.name == "group" and a.ref_attr_name for a in conv.attribute)
        if grouped and _is_transposed(conv):
            return Refusal(Reason.UNBOUND_ATTRIBUTE, "group differs from call to call")
        return None

    def _fold(
        self, place: Place, conv: onnx.NodeProto, node: onnx.NodeProto, released: list[str]
    ) -> Refusal | None:
        names = [name for name in (*conv.input[1:], *node.input[1:]) if name]
        arrays = {}
        for name in names:
            try:
                array = self._array(place.constants[name])
            except ValueError as error:
                return Refusal(Reason.INVALID, f"{name!r} cannot be read: {error}")
            if array is None:
                return Refusal(Reason.NOT_CONSTANT, f"{name!r} has its data in another file")
            arrays[name] = array
        weight = arrays[conv.input[1]]
        groups = next((a.i for a in conv.attribute if a.name == "group"), 1)
        transposed = _is_transposed(conv)
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        # scale, B, mean, variance and, if there is one, the bias of the convolution
        vectors = [arrays[name] for name in (*node.input[1:], *conv.input[2:]) if name]
        if any(vector.shape != (channels,) for vector in vectors):
            return Refusal(Reason.INVALID, f"constants of other than {channels} channels")
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), _EPSILON)
        factor, shift = _affine(vectors, epsilon)
        with np.errstate(all="ignore"):
            exact = weight.astype(np.float64)
            exact *= _per_channel(factor, weight.shape, transposed, groups)
            new = exact.astype(weight.dtype), shift.astype(weight.dtype)
        finite = all(np.isfinite(array.astype(np.float64)).all() for array in new)
        if not finite or not _is_close(new[0], exact, transposed):
            return Refusal(
                Reason.INEXACT, f"in {weight.dtype.name}, the product would not be accurate"
            )
        self._replace(place, conv, node, new)
        released += names
        return None

    def _array(self, constant: Constant) -> Array | None:
        array = self._tree.array(constant)
        if array is not None and constant.tensor.data_type not in _FLOATS:
            raise ValueError(f"it is of type {constant.tensor.data_type}")
        return array

    def _replace(
        self,
        place: Place,
        conv: onnx.NodeProto,
        node: onnx.NodeProto,
        new: tuple[Array, Array],
    ) -> None:
        """The convolution gets the new constants and the output of the node, which goes."""
        body = place.body
        output = node.output[0]
        in_nodes = place.constants[conv.input[1]].is_node
        added = [
            self._tree.add_constant(place, f"{output}/{what}", array, conv, as_node=in_nodes)
            for what, array in zip(("weight", "bias"), new, strict=True)
        ]
        for name in (*conv.input[1:], *node.input):
            self._tree.readers[name] -= 1
        for info in [info for info in body.value_info if info.name == conv.output[0]]:
            body.value_info.remove(info)
        body.node.remove(node)
        conv.input[1:] = added
        conv.output[0] = output
        conv.op_type = OPERATORS[conv.op_type].standard


def _is_convolution(node: onnx.NodeProto) -> bool:
    """Whether a node of ours is a convolution that nothing has been fused into."""
    operator = OPERATORS[node.op_type]
    return operator.is_base and operator.standard in ("Conv", "ConvTranspose")


def _is_transposed(conv: onnx.NodeProto) -> bool:
    return OPERATORS[conv.op_type].standard == "ConvTranspose"


def _affine(vectors: Sequence[Array], epsilon: float) -> tuple[Array, Array]:
    """Factor and offset of each channel in float64, from scale, B, mean, variance, bias or none."""
    scale, offset, mean, variance, *bias = (vector.astype(np.float64) for vector in vectors)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + epsilon)
        return factor, offset + (sum(bias) - mean) * factor


def _per_channel(factor: Array, shape: tuple[int, ...], transposed: bool, groups: int) -> Array:
    """The factors of the output channels, for each element of W."""
    ones = (1,) * (len(shape) - 2)
    if not transposed:
        return factor.reshape(-1, 1, *ones)
    # Rows of W are input channels, and each group of them has output channels of its own.
    rows = np.repeat(factor.reshape(groups, shape[1]), shape[0] // groups, axis=0)
    return rows.reshape(*rows.shape, *ones)


def _is_close(stored: Array, exact: Array, transposed: bool) -> bool:
    """Whether rounding lost no more than it does to normal numbers, in each output channel.

    It does where a factor is so small that W becomes subnormal.
    """
    axes = tuple(axis for axis in range(exact.ndim) if axis != int(transposed))
    error = np.sqrt(np.square(stored.astype(np.float64) - exact).sum(axis=axes))
    size = np.sqrt(np.square(exact).sum(axis=axes))
    epsilon = float(ml_dtypes.finfo(stored.dtype).eps)  # type: ignore[no-untyped-call]
    return bool((error <= size * epsilon).all())
