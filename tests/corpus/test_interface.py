"""`require_only_taken` lets a taken node pass and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest

from . import cases
from .comparing import Mismatch
from .interface import DOMAIN, RULE_KEY, operators, require_only_taken


def _taken(case_id: str = "if_capture") -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A case, and by hand what a rewrite makes of its first node, a MatMul."""
    original = cases.get(case_id).model()
    model = onnx.ModelProto()
    model.CopyFrom(original)
    node = model.graph.node[0]
    node.domain = DOMAIN
    node.metadata_props.add(key=RULE_KEY, value="matmul")
    model.functions.append(
        onnx.helper.make_function(
            DOMAIN,
            "MatMul",
            ["A", "B"],
            ["Y"],
            [onnx.helper.make_node("MatMul", ["A", "B"], ["Y"])],
            [onnx.helper.make_opsetid("", 18)],
        )
    )
    model.opset_import.add(domain=DOMAIN, version=1)
    return original, model


def test_an_untouched_model_has_no_taken_node() -> None:
    for case in cases.ALL:
        assert require_only_taken(case.model(), case.model()) == []


def test_a_taken_node_is_returned() -> None:
    original, model = _taken()
    assert [list(node.output) for node in require_only_taken(original, model)] == [["t"]]


def _rename_dimension(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "other"


def _swap_inputs(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[:] = reversed(model.graph.node[0].input)


def _edit_weight(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.raw_data = bytes(len(tensor.raw_data))


def _edit_branch(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute[0].g.node[0].input[0] = "a"


def _drop_rule(model: onnx.ModelProto) -> None:
    del model.graph.node[0].metadata_props[:]


def _drop_function(model: onnx.ModelProto) -> None:
    del model.functions[:]


def _drop_node(model: onnx.ModelProto) -> None:
    del model.graph.node[1]


def _add_metadata(model: onnx.ModelProto) -> None:
    model.metadata_props.add(key="made", value="up")


def _raise_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version += 1


def _raise_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version += 1


@pytest.mark.parametrize(
    "edit",
    [
        _rename_dimension,
        _swap_inputs,
        _edit_weight,
        _edit_branch,
        _drop_rule,
        _drop_function,
        _drop_node,
        _add_metadata,
        _raise_opset,
        _raise_ir_version,
    ],
)
def test_any_other_change_is_refused(edit: Callable[[onnx.ModelProto], None]) -> None:
    original, model = _taken()
    edit(model)
    with pytest.raises(Mismatch):
        require_only_taken(original, model)


def test_order_counts_only_where_there_was_one() -> None:
    original, model = cases.get("unsorted").model(), cases.get("unsorted").model()
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    require_only_taken(original, model)
    with pytest.raises(Mismatch, match="node order"):
        require_only_taken(model, original)


def test_operators_of_branches_and_functions_are_listed() -> None:
    assert sorted(operators(cases.get("if_capture").model())) == [
        ("", "Add"),
        ("", "If"),
        ("", "MatMul"),
        ("", "MatMul"),
    ]
    assert ("", "Add") in set(operators(cases.get("functions").model()))
