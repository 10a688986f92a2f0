"""Add(MatMul(A, B), bias[N]) -> ai.moonpoly.MatMulBias(A, B, bias)

The same behind a Gemm without C, whose C the addend becomes, and behind a convolution without B. A
constant of shape [1, .., N], or [1, C, 1, ..] behind a convolution, is stored anew as a vector.
ONNX Runtime's BiasGelu, and FastGelu with a bias, keep what they do behind the bias.
"""

from __future__ import annotations

import onnx

from .fusion import Fused, Fusion, NearMiss, NewConstant, Product, same_size
from .operators import Operator
from .report import Reason, Refusal
from .tree import Array

_WITH_BIAS = {
    "MatMul": "MatMulBias",
    "ScaledMatMul": "ScaledMatMulBias",
    "Gemm": "Gemm",
    "ConvNoBias": "Conv",
    "ConvTransposeNoBias": "ConvTranspose",
}
_WITH_BETA = ("Gemm", "ScaledMatMul")
_BIASED_GELUS = {"BiasGelu": "Gelu", "FastGelu": "FastGelu"}


class BiasFusion(Fusion):
    name = "bias"
    op_type = "Add"
    transformation = "Add(MatMul(A, B), bias) -> ai.moonpoly.MatMulBias(A, B, bias)"

    def match(self, product: Product) -> Fused | NearMiss | None:
        operator = product.operator
        node = product.reader("Add", *_BIASED_GELUS)
        if node is None or len(node.input) != 2:
            return None
        is_gelu = product.is_contrib(node) and node.op_type in _BIASED_GELUS
        if not is_gelu and not (node.op_type == "Add" and product.is_standard(node)):
            return None
        if is_gelu and node.input[0] != product.output:
            return None
        addend = product.beside(node)
        if not addend or addend == product.output:  # a product added to itself
            return None
        if refusal := _refuse_place(product):
            if product.is_convolution and product.scalar(addend) is not None:
                return None  # an offset
            # Of a larger rank, it may be a residual.
            return NearMiss(node, refusal) if is_gelu or product.rank(addend) in (0, 1) else None
        found = self._addend(product, addend)
        if found is None:
            return None
        if isinstance(found, Refusal):
            return NearMiss(node, found)
        refusal = product.refuse_readers(product.output, by=[node])
        if refusal is None and is_gelu:
            readable = _in_front(product, addend, found)
            if isinstance(readable, Refusal):
                refusal = readable
            else:
                found = readable
        if refusal is not None:
            return NearMiss(node, refusal)
        index = 2 if operator.base == "Gemm" else len(operator.inputs)
        return Fused(
            operator=Operator(_WITH_BIAS[operator.base]),
            inputs=[*product.inputs[:index], addend],
            constants=(
                {} if isinstance(found, bool) else {index: NewConstant(f"{addend}/vector", found)}
            ),
            attributes={"beta": 1.0} if operator.base in _WITH_BETA else {},
            # A node that does more than to add stays behind the product, without its bias.
            absorbed=[] if is_gelu else [node],
            changes=[(node, _without_bias(node))] if is_gelu else [],
            concerns=node,
        )

    def _addend(self, product: Product, addend: str) -> bool | Array | Refusal | None:
        """True if it is a bias as it is; its values if it becomes one in another shape."""
        shapes = product.shapes(addend)
        if shapes is None:
            return None
        if product.operator.standard == "MatMul":
            return _behind_matmul(product, addend)
        if product.operator.standard == "Gemm":
            return _behind_gemm(product, addend)
        return per_channel(product, addend)


def _refuse_place(product: Product) -> Refusal | None:
    """A bias comes before all else, and once."""
    operator = product.operator
    if operator.base == "Gemm" and operator.is_base and product.operand(2):
        return Refusal(Reason.NO_SUCH_OPERATOR, "the Gemm has a C already")
    if operator.is_base and operator.base in _WITH_BIAS:
        return None
    return Refusal(Reason.NO_SUCH_OPERATOR, f"{operator.name} adds no vector behind what it does")


def _in_front(product: Product, addend: str, found: bool | Array) -> bool | Array | Refusal:
    """What a product that stays where it is can read of the addend of the node behind it."""
    if product.is_constant(addend):
        if product.producer(addend) is None or not isinstance(found, bool):
            return found
        # A Constant node may stand behind the product, which gets one of its own.
        values = product.constant(addend)
        if values is not None:
            return values
    return Refusal(Reason.NOT_CONSTANT, f"{addend!r} is not a constant")


def _without_bias(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node that is left when the bias has gone into the product."""
    rest = onnx.NodeProto()
    rest.CopyFrom(node)
    rest.op_type = _BIASED_GELUS[node.op_type]
    del rest.input[1:]
    return rest


def _behind_matmul(product: Product, addend: str) -> bool | Array | Refusal | None:
    columns = [
        shape[-1] if len(shape) >= 2 else None for shape in product.shapes(product.operand(1)) or ()
    ]
    rank = product.rank(addend)
    if rank is None or rank == 0:
        return _refusal("the addend is a number, not a vector")
    sizes = [shape[-1] for shape in product.shapes(addend) or ()]
    fits = len(columns) == len(sizes) and all(map(same_size, sizes, columns))
    if rank == 1:
        if fits:
            return True
        if not columns or None in columns:
            return _refusal("B is not known to be a matrix, whose columns a vector could be for")
        return _refusal(f"the addend is [{sizes[0]}] and the product has {columns[0]} columns")
    array = product.constant(addend)
    if array is None or not fits or array.size != array.shape[-1]:
        return None  # of no interest as a bias; it may be a residual
    if rank > product.least_rank():
        return _refusal(f"the addend is {list(array.shape)}, which may add dimensions")
    return array.reshape(-1)


def _behind_gemm(product: Product, addend: str) -> bool | Refusal | None:
    """C may broadcast to the product, which must not grow."""
    rank = product.rank(addend)
    output = product.shapes(product.output)
    if rank is None or rank > 2 or output is None:
        return None
    grown = False
    vector = True
    for shape, full in zip(product.shapes(addend) or (), output, strict=False):
        pairs = list(zip(reversed(list(shape)), reversed(list(full)), strict=False))
        grown |= not all(size == 1 or same_size(size, whole) for size, whole in pairs)
        vector &= len(shape) < 2 or 1 in list(shape)
    if not vector:
        return None  # a full matrix: the rule for residuals takes it
    return _refusal("the addend may broadcast the product to a larger shape") if grown else True


def per_channel(product: Product, addend: str) -> Array | Refusal | None:
    """The values of a constant behind a convolution that has one for each output channel, behind
    which only axes of 1 follow; None for numbers, too.
    """
    array = product.constant(addend)
    rank = product.rank(product.output) or product.rank(product.operand(1))
    weight = product.shapes(product.operand(1))
    if product.scalar(addend) is not None:
        return None  # an offset
    if product.rank(addend) in (0, 1):
        return _refusal("the addend is a number or a vector, not one value for each channel")
    if rank is None or weight is None or product.rank(addend) not in (rank - 1, rank):
        return None
    if array is None:
        return None
    channels = _channels(product)
    if channels is None or array.shape[-(rank - 1) :] != (channels, *[1] * (rank - 2)):
        return None
    if array.size != channels:
        return _refusal(f"the addend is {list(array.shape)}: not one value for each channel")
    return array.reshape(-1)


def _channels(product: Product) -> int | None:
    """The number of output channels, where it is a number."""
    sizes = {shape[1] for shape in product.shapes(product.output) or ()}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    return size if isinstance(size, int) else None


def _refusal(detail: str) -> Refusal:
    return Refusal(Reason.BROADCASTS, detail)
