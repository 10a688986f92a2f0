"""BatchNormalization(Conv(X, W, B?)) -> ai.moonpoly.Conv(X, W', B')

The normalization of a channel is a factor and an offset, which W and B absorb. ONNX Runtime does
that behind its own Conv, but it does not know ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from .convolution_weights import FLOATS, scaled
from .fusion import Fused, Fusion, NearMiss, Product
from .report import Reason, Refusal
from .tree import Array

_EPSILON = 1e-5
_SPATIAL_UNTIL = 8


class BatchNormalizationFusion(Fusion):
    name = "batch_normalization"
    op_type = "BatchNormalization"
    transformation = "BatchNormalization(Conv(X, W, B?)) -> ai.moonpoly.Conv(X, W', B')"
    changes_weights = True

    def match(self, product: Product) -> Fused | NearMiss | None:
        node = product.reader(self.op_type)
        if node is None or not product.is_standard(node) or node.input[0] != product.output:
            return None
        if not product.is_convolution:
            what = f"{product.operator.name} is no convolution with nothing but a bias behind it"
            return NearMiss(node, Refusal(Reason.NO_SUCH_OPERATOR, what))
        refusal = _refuse(product, node)
        if refusal is None:
            affine = _affine(product, node)
            found = affine if isinstance(affine, Refusal) else scaled(product, node, *affine)
            if isinstance(found, Fused):
                return found
            refusal = found
        return NearMiss(node, refusal)


def _refuse(product: Product, node: onnx.NodeProto) -> Refusal | None:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if any(attribute.ref_attr_name for attribute in attributes.values()):
        return Refusal(Reason.UNBOUND_ATTRIBUTE, "an attribute differs from call to call")
    if len(node.input) != 5 or not all(node.input):
        return Refusal(Reason.INVALID, f"{len(node.input)} inputs; 5 are legal")
    spatial = attributes.get("spatial")
    if product.opset <= _SPATIAL_UNTIL and spatial is not None and not spatial.i:
        return Refusal(Reason.INVALID, "spatial is 0: a value for each element")
    training = attributes.get("training_mode")
    if (training is not None and training.i) or any(node.output[1:]):
        return Refusal(Reason.TRAINING, "it computes the statistics of this batch")
    refusal = product.refuse_readers(product.output, by=[node])
    if refusal is None:
        for name in node.input[1:]:
            if not product.is_constant(name):
                return Refusal(Reason.NOT_CONSTANT, f"{name!r} is not a constant")
    return refusal


def _affine(product: Product, node: onnx.NodeProto) -> tuple[Array, Array] | Refusal:
    """Factor and offset of each channel, in float64."""
    vectors: list[Array] = []
    for name in node.input[1:]:
        try:
            vector = product.weight(name)
        except ValueError as error:
            return Refusal(Reason.INVALID, f"{name!r} cannot be read: {error}")
        if vector.dtype not in FLOATS or vector.ndim != 1:
            return Refusal(
                Reason.INVALID, f"{name!r} is {vector.dtype.name}{list(vector.shape)}, no vector"
            )
        vectors.append(vector.astype(np.float64))
    if len({vector.shape for vector in vectors}) != 1:
        return Refusal(Reason.INVALID, f"constants of {_sizes(vectors)} channels")
    scale, offset, mean, variance = vectors
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), _EPSILON)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + epsilon)
        return factor, offset - mean * factor


def _sizes(vectors: Sequence[Array]) -> str:
    return ", ".join(str(vector.size) for vector in vectors)
