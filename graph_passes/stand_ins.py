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

ROWS = "MatMulOfRows"
"""A MatMul whose B has its last two axes exchanged, of any ranks from 2 on. No standard operator is
that: inference of Einsum takes the batch axes of its first operand for those of the output.
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
        turned = {a.name for a in node.attribute if a.i or a.ref_attr_name}
        if turned.isdisjoint(_BATCH_TRANSPOSES):
            rank_2 = not turned.isdisjoint(_TRANSPOSES)
            if turned.intersection(_TRANSPOSES) == {"transB"}:
                _become(node, ROWS, ())
                node.domain = DOMAIN
                return
            _become(node, "Gemm" if rank_2 else "MatMul", _TRANSPOSES if rank_2 else ())


def define(model: onnx.ModelProto) -> None:
    """Gives a model the functions that stand for operators. They come behind its own."""
    columns = onnx.helper.make_node("Einsum", ["B"], ["columns"], equation="...nk->...kn")
    product = onnx.helper.make_node("MatMul", ["A", "columns"], ["Y"])
    imports = [onnx.helper.make_opsetid("", _OPSET)]
    rows = onnx.helper.make_function(DOMAIN, ROWS, ["A", "B"], ["Y"], [columns, product], imports)
    for holder in (model, *model.functions):
        holder.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    model.functions.append(rows)


def _become(node: onnx.NodeProto, op_type: str, attributes: Collection[str]) -> None:
    node.domain, node.op_type = "", op_type
    for attribute in [a for a in node.attribute if a.name not in attributes]:
        node.attribute.remove(attribute)
