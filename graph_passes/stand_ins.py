"""Standard operators with the types and shapes of ONNX Runtime's own ones, for inference.

Shape inference knows no `com.microsoft`. In the skeleton that it works on, these nodes are
replaced; in the model they stay, until a rule takes them.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

CONTRIB = "com.microsoft"

_ACTIVATIONS = frozenset({"Gelu", "QuickGelu", "FastGelu", "BiasGelu"})
_OF_ACTIVATION = ("activation", "activation_params")
_TRANSPOSES = ("transA", "transB")
_BATCH_TRANSPOSES = ("transBatchA", "transBatchB")


DOMAIN = "ai.moonpoly.stand_ins"
"""Of functions that only skeletons have."""

TRANSPOSED = {
    ("transA",): "MatMulTN",
    ("transB",): "MatMulNT",
    ("transA", "transB"): "MatMulTT",
}
"""MatMul of operands of rank 2 and more, of which some have their last two axes exchanged. No
standard operator is that: Gemm takes matrices, and inference of Einsum takes the batch axes of its
first operand for those of the output.
"""

_OPSET = 13  # of ai.onnx; MatMul and Einsum have been what they are since 9 and 12


def replace(node: onnx.NodeProto, own_functions: Collection[str]) -> None:
    """Replaces a node in place by one that shape inference knows, if there is one.

    Args:
        node: A node of any domain.
        own_functions: Operators of `com.microsoft` that the model defines itself.
    """
    if node.domain != CONTRIB or node.op_type in own_functions:
        return
    operands = len([name for name in node.input if name])
    if node.op_type in _ACTIVATIONS:
        _become(node, "Identity" if operands == 1 else "Add", ())
    elif node.op_type == "FusedGemm":
        _become(node, "Gemm", (*_TRANSPOSES, "alpha", "beta"))
    elif node.op_type == "FusedConv":
        kept = [a.name for a in node.attribute if a.name not in _OF_ACTIVATION]
        _become(node, "Conv", kept)
        del node.input[3:]
    elif node.op_type == "FusedMatMul":
        turned = {a.name for a in node.attribute if a.i}
        by_call = {a.name for a in node.attribute if a.ref_attr_name}
        if by_call.intersection(_TRANSPOSES) or (turned | by_call).intersection(_BATCH_TRANSPOSES):
            return
        flags = tuple(flag for flag in _TRANSPOSES if flag in turned)
        _become(node, TRANSPOSED.get(flags, "MatMul"), ())
        node.domain = DOMAIN if flags else ""


def define(model: onnx.ModelProto) -> None:
    """Gives a model the functions that stand for operators. They come behind its own."""
    imports = [onnx.helper.make_opsetid("", _OPSET)]
    for holder in (model, *model.functions):
        holder.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    for flags, name in TRANSPOSED.items():
        operands = {"transA": "A", "transB": "B"}
        nodes = []
        for flag in flags:
            turned = f"{operands[flag]}/turned"
            node = onnx.helper.make_node(
                "Einsum", [operands[flag]], [turned], equation="...ij->...ji"
            )
            nodes.append(node)
            operands[flag] = turned
        nodes.append(onnx.helper.make_node("MatMul", list(operands.values()), ["Y"]))
        function = onnx.helper.make_function(DOMAIN, name, ["A", "B"], ["Y"], nodes, imports)
        model.functions.append(function)


def _become(node: onnx.NodeProto, op_type: str, attributes: Collection[str]) -> None:
    node.domain, node.op_type = "", op_type
    for attribute in [a for a in node.attribute if a.name not in attributes]:
        node.attribute.remove(attribute)
