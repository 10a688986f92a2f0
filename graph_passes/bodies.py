"""The function body of each operator: standard operators, so that the model runs anywhere.

Bodies fit fp16, bf16 and fp32 alike: constants are fp32 and take the type of the product through
CastLike. Attribute references (`alpha=@alpha`) carry the attributes of each node into the body. A
reference to an attribute that the node lacks leaves it out of the body, in ONNX Runtime and by the
standard, so that the operator's own default holds: Conv needs that, whose defaults depend on the
rank.
"""

from __future__ import annotations

import math

import onnx

from .operators import ACTIVATIONS, ALPHA, BASES, BETA, Operator, Residual

_HAS_HARD_SWISH = 14
_HAS_GELU = 20
_BEHIND = 2**31 - 1  # every last column


def nodes(operator: Operator, opset: int) -> list[onnx.NodeProto]:
    """The nodes of the body over ai.onnx version `opset`; the output is called Y."""
    body = _Body(opset)
    base = BASES[operator.base]
    *operands, vector = base.inputs if base.has_vector else (*base.inputs, "")
    if base.turned:
        transpose = onnx.helper.make_node("Transpose", operands[1:], [])
        transpose.attribute.add(name="perm", ref_attr_name="perm", type=onnx.AttributeProto.INTS)
        operands[1] = body.append(transpose)
    product = onnx.helper.make_node(base.standard, operands, [])
    for name, kind in () if base.scaled else base.attributes.items():
        product.attribute.add(name=name, ref_attr_name=name, type=kind)
    value = body.append(product)
    if base.scaled:
        value = body.add("Mul", value, body.parameter(value, "alpha"))
        vector = vector and body.add("Mul", vector, body.parameter(vector, "beta"))
    if vector:
        value = body.add("Add", value, vector)
    if operator.residual is Residual.BEFORE:
        value = body.add("Add", value, "R")
    values = body.every_second_column(value, 1) if base.gated else ""
    if base.gated:
        value = body.every_second_column(value, 0)
    if operator.activation:
        value = body.activate(operator.activation, value)
    if operator.residual is Residual.AFTER:
        body.add("Add", value, "R")
    elif operator.residual is Residual.FACTOR:
        body.add("Mul", value, "R")
    elif base.gated:
        body.add("Mul", value, values)
    elif base.to_float:
        body.append(onnx.helper.make_node("Cast", [value], [], to=onnx.TensorProto.FLOAT))
    body.nodes[-1].output[0] = "Y"
    return body.nodes


class _Body:
    """A list of nodes that grows; each method returns the name of a value."""

    def __init__(self, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._opset = opset

    def append(self, node: onnx.NodeProto) -> str:
        name = f"v{len(self.nodes)}"
        node.output.append(name)
        self.nodes.append(node)
        return name

    def add(self, op_type: str, *inputs: str) -> str:
        return self.append(onnx.helper.make_node(op_type, inputs, []))

    def constant(self, like: str, value: float) -> str:
        tensor = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [], [value])
        constant = self.append(onnx.helper.make_node("Constant", [], [], value=tensor))
        return self.add("CastLike", constant, like)

    def every_second_column(self, x: str, first: int) -> str:
        numbers = []
        for number in (first, _BEHIND, -1, 2):  # starts, ends, axes, steps
            tensor = onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [number])
            numbers.append(self.append(onnx.helper.make_node("Constant", [], [], value=tensor)))
        return self.add("Slice", x, *numbers)

    def parameter(self, like: str, attribute: str) -> str:
        """The value of an attribute of the operator."""
        node = onnx.helper.make_node("Constant", [], [])
        node.attribute.add(
            name="value_float", ref_attr_name=attribute, type=onnx.AttributeProto.FLOAT
        )
        return self.add("CastLike", self.append(node), like)

    def activate(self, name: str, x: str) -> str:
        if name in ("Relu", "Sigmoid", "Tanh"):
            return self.add(name, x)
        if name in ("LeakyRelu", "HardSigmoid"):
            node = onnx.helper.make_node(name, [x], [])
            for own, attribute in zip(
                ("alpha", "beta"), ACTIVATIONS[name].parameters, strict=False
            ):
                node.attribute.add(
                    name=own, ref_attr_name=attribute, type=onnx.AttributeProto.FLOAT
                )
            return self.append(node)
        if name == "Clip":
            return self.add("Clip", x, self.parameter(x, ALPHA), self.parameter(x, BETA))
        if name == "HardSwish":
            return self._hard_swish(x)
        if name in ("Gelu", "GeluTanh"):
            return self._gelu(x, tanh=name == "GeluTanh")
        if name == "Silu":
            return self.add("Mul", x, self.add("Sigmoid", x))
        if name == "QuickGelu":
            scaled = self.add("Mul", self.parameter(x, ALPHA), x)
            return self.add("Mul", x, self.add("Sigmoid", scaled))
        raise ValueError(f"no activation {name!r}; there are {', '.join(ACTIVATIONS)}")

    def _hard_swish(self, x: str) -> str:
        if self._opset >= _HAS_HARD_SWISH:
            return self.add("HardSwish", x)
        gate = onnx.helper.make_node("HardSigmoid", [x], [], alpha=1 / 6, beta=0.5)
        return self.add("Mul", x, self.append(gate))

    def _gelu(self, x: str, *, tanh: bool) -> str:
        if self._opset >= _HAS_GELU:
            attributes = {"approximate": "tanh"} if tanh else {}
            return self.append(onnx.helper.make_node("Gelu", [x], [], **attributes))
        if tanh:
            cube = self.add("Mul", self.add("Mul", x, x), x)
            inner = self.add("Add", x, self.add("Mul", self.constant(x, 0.044715), cube))
            inner = self.add("Mul", self.constant(x, math.sqrt(2 / math.pi)), inner)
            gate = self.add("Tanh", inner)
        else:
            gate = self.add("Erf", self.add("Div", x, self.constant(x, math.sqrt(2))))
        gate = self.add("Add", gate, self.constant(x, 1.0))
        return self.add("Mul", self.constant(x, 0.5), self.add("Mul", x, gate))
