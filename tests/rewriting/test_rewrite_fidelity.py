"""What a rewrite must leave alone: everything but the nodes it takes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence import check, op_types, parse, random, refusals, run

from moonpoly_ort.errors import ModelError, ProblemError
from moonpoly_ort.rewriting import list_rules, rewrite

LINEAR = "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { y = MatMul (a, w) }"
FEEDS = {"a": random(3, 4), "w": random(4, 4)}


def test_nodes_out_of_order() -> None:
    model = parse(
        """g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) {
            y = Relu (u)  u = MatMul (t, w)  t = MatMul (a, w) }"""
    )
    result = check(model, FEEDS, taken=2)
    assert [node.output[0] for node in result.model.graph.node] == ["y", "u", "t"]


def test_nodes_out_of_order_in_a_subgraph() -> None:
    """The shape of `t`, and with them the refusal, come from inference in the right order."""
    model = parse(
        """g (float[4, 4] a, float[4, 4] w, bool c) => (float[4, 4] y) {
            y = If (c) <
                then_branch = g1 () => (float[4, 4] u) {
                    u = MatMul (t, w)  t = Neg (s)  s = Relu (a) },
                else_branch = g2 () => (float[4, 4] v) { v = Identity (a) }
            > }"""
    )
    assert refusals(check(model, taken=0)) == ["static"]


def test_overload_of_a_standard_operator_stays() -> None:
    model = parse(LINEAR, ir_version=10)
    model.graph.node[0].overload = "own"
    assert refusals(check(model)) == ["invalid"]


def test_both_names_of_the_standard_domain() -> None:
    model = parse(
        LINEAR.replace("float[n, 4] a", "float[3, 4] a").replace("y = ", "t = Relu (a)  y = ")
    )
    model.graph.node[1].input[0] = "t"
    for renamed in (model.graph.node[0], model.opset_import[0]):
        renamed.domain = "ai.onnx"
        assert refusals(rewrite(model)) == ["static"]


def test_cycle_is_refused() -> None:
    model = parse("g (float[n, 4] a) => (float[n, 4] y) { y = Add (a, t)  t = Relu (y) }")
    with pytest.raises(ModelError, match="cycle"):
        rewrite(model)


def test_two_producers_of_a_tensor_are_refused() -> None:
    model = parse("g (float[n, 4] a) => (float[n, 4] y) { y = Relu (a)  y = Neg (a) }")
    with pytest.raises(ModelError, match="'y' is redeclared"):
        rewrite(model)


@pytest.mark.parametrize("names", [("", ""), ("one", "two"), ("same", "same")])
def test_names_and_metadata_of_nodes(names: tuple[str, str]) -> None:
    model = parse(LINEAR.replace("y = MatMul (a, w)", "t = MatMul (a, w) y = MatMul (t, w)"))
    for node, name in zip(model.graph.node, names, strict=True):
        node.name, node.doc_string = name, f"doc of {name}"
        node.metadata_props.add(key="pkg.origin", value="layer.1")
    loads = names[0] != names[1] or not names[0]
    result = check(model, *([FEEDS] if loads else []), taken=2)
    for node in result.model.graph.node:
        assert {entry.key: entry.value for entry in node.metadata_props} == {
            "pkg.origin": "layer.1",
            "moonpoly.rule": "matmul",
        }


@pytest.mark.parametrize(("before", "after"), [(3, 8), (4, 8), (7, 8), (8, 8), (10, 10)])
def test_ir_version_is_raised_to_8_only(before: int, after: int) -> None:
    assert check(parse(LINEAR, ir_version=before), FEEDS, taken=1).model.ir_version == after


def test_ir_version_3_keeps_its_initializers_constant() -> None:
    model = parse("g (float[n, 2] a, float[2, 2] w) => (y) { y = MatMul (a, w) }", ir_version=3)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(2, dtype="f"), "w"))
    result = check(model, {"a": random(3, 2)}, taken=1)
    session = ort.InferenceSession(result.model.SerializeToString())
    assert session.get_overridable_initializers() == []


def test_model_without_taken_nodes_stays_byte_for_byte() -> None:
    model = parse(LINEAR.replace("MatMul", "Add"), ir_version=3)
    assert rewrite(model.SerializeToString()).model.SerializeToString() == model.SerializeToString()


def test_opset_imports_and_functions_are_added_once() -> None:
    result = check(parse(LINEAR), FEEDS, taken=1)
    imports = {entry.domain: entry.version for entry in result.model.opset_import}
    assert imports == {"": 17, "ai.moonpoly": 1}
    assert [function.name for function in result.model.functions] == ["MatMul"]


def test_second_rewrite_takes_what_the_first_left() -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { t = MatMul (a, w) y = Gemm (t, w) }"
    )
    first = rewrite(model, disable=["gemm"])
    assert refusals(first) == ["disabled"]
    second = check(first.model, FEEDS, taken=1)
    assert refusals(second) == ["already-rewritten"]
    assert op_types(second.model) == ["ai.moonpoly.MatMul", "ai.moonpoly.Gemm"]


def test_initializer_that_is_an_input_stays_overridable() -> None:
    model = parse("g (float[n, 2] a, float[2, 2] w) => (float[n, 2] y) { y = MatMul (a, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(2, dtype="f"), "w"))
    a = random(3, 2)
    result = check(model, {"a": a}, {"a": a, "w": random(2, 2)}, taken=1)
    np.testing.assert_array_equal(run(result.model, {"a": a})[0], a)


def test_shared_and_computed_weights() -> None:
    model = parse(
        """g (float[n, 2] a) => (float[n, 2] y, float[2, 2] z)
            <float[2, 2] w = {1, 2, 3, 4}> {
            c = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
            v = Transpose (w)
            t = MatMul (a, w)  u = MatMul (t, c)  y = Gemm (u, v, w)  z = Identity (w) }"""
    )
    check(model, {"a": random(2, 2)}, taken=3)


def test_sparse_initializer() -> None:
    model = parse("g (float[n, 3] a) => (float[n, 2] y) { d = Identity (w)  y = MatMul (a, d) }")
    values = onnx.numpy_helper.from_array(np.array([2, 5], np.float32), "w")
    indices = onnx.numpy_helper.from_array(np.array([1, 4], np.int64), "w_indices")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [3, 2]))
    result = check(model, {"a": random(2, 3)}, taken=1)
    assert result.model.graph.sparse_initializer == model.graph.sparse_initializer


def test_value_info_of_values_that_are_not_outputs_of_nodes() -> None:
    model = parse(LINEAR)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("ghost", 1, ["x"]))
    check(model, FEEDS, taken=1)


def test_what_onnx_ir_cannot_represent_passes_through() -> None:
    model = parse(LINEAR, imports=', "other" : 1')
    scalar = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    info = onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, scalar)
    model.graph.output.append(
        onnx.helper.make_value_info("m", onnx.helper.make_sequence_type_proto(info))
    )
    node = onnx.helper.make_node("Zip", ["y"], ["m"], domain="other", labels=[b"\xff\xfe"])
    values = onnx.numpy_helper.from_array(np.ones(1, np.float32), "v")
    indices = onnx.numpy_helper.from_array(np.zeros(1, np.int64), "i")
    node.attribute.append(
        onnx.helper.make_attribute("s", onnx.helper.make_sparse_tensor(values, indices, [4]))
    )
    node.attribute.append(onnx.helper.make_attribute("map", info))
    model.graph.node.append(node)
    model.training_info.add().algorithm.name = "train"
    result = check(model, taken=1)
    assert result.model.graph.node[1] == node
    assert result.model.training_info == model.training_info


def test_shape_inference_that_fails_does_not_fail_the_rewrite() -> None:
    model = parse(LINEAR.replace("y = ", "t = Reshape (a, w)  u = Cast (w)  y = "))
    assert [entry.taken for entry in check(model).report] == [True]


def test_large_weights_are_not_needed_for_inference() -> None:
    model = parse("g (float[n, 64] a) => (float[n, 64] y) { y = MatMul (a, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(random(64, 64), "w"))
    check(model, {"a": random(2, 64)}, taken=1)


def test_rules_can_be_named_one_by_one() -> None:
    model = parse(
        """g (float[n, 2, h, w] x, float[2, 2, 1, 1] k) => (float[n, 2, h, w] y)
            { t = Conv (x, k)  y = ConvTranspose (t, k) }"""
    )
    rules = ["conv", "conv_transpose"]
    assert [entry.rule for entry in rewrite(model).taken] == rules
    for rule in rules:
        assert [entry.rule for entry in rewrite(model, rules=[rule]).taken] == [rule]
        (left,) = (e for e in rewrite(model, disable=[rule]).report if not e.taken)
        assert (left.rule, str(left.reason)) == (rule, "disabled")
        assert left.detail == f"rule {rule!r} is switched off"


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"rules": ["gemm"]}, ["gemm"]),
        ({"rules": []}, []),
        ({"disable": "gemm"}, ["matmul"]),
        ({"rules": ["gemm"], "disable": ["gemm"]}, []),
    ],
)
def test_rules_are_selected_by_name(options: dict[str, list[str]], taken: list[str]) -> None:
    model = parse(
        "g (float[n, 4] a, float[4, 4] w) => (float[n, 4] y) { t = MatMul (a, w) y = Gemm (t, w) }"
    )
    result = rewrite(model, **options)  # type: ignore[arg-type]
    assert [entry.rule for entry in result.taken] == taken


@pytest.mark.parametrize("options", [{"rules": ["gem"]}, {"disable": ["matmul", "gem"]}])
def test_unknown_rules_are_an_error(options: dict[str, list[str]]) -> None:
    with pytest.raises(ProblemError, match=r"Unknown rules: gem\. The rules are: matmul, gemm"):
        rewrite(parse(LINEAR), **options)  # type: ignore[arg-type]


def test_list_of_rules() -> None:
    assert [(rule.name, rule.op_type) for rule in list_rules()] == [
        ("matmul", "MatMul"),
        ("gemm", "Gemm"),
        ("conv", "Conv"),
        ("conv_transpose", "ConvTranspose"),
        ("fused_matmul", "FusedMatMul"),
        ("fused_gemm", "FusedGemm"),
        ("fused_conv", "FusedConv"),
        ("batch_normalization", "BatchNormalization"),
        ("transpose", "Transpose"),
        ("flatten", "Reshape"),
        (
            "activation",
            "Relu, LeakyRelu, Clip, Sigmoid, Tanh, HardSigmoid, HardSwish, Gelu, GeluTanh, "
            "QuickGelu, Silu",
        ),
        ("bias", "Add"),
        ("offset", "Add"),
        ("gated", "Mul"),
        ("packed_gate", "Split, Slice, Mul"),
        ("residual", "Add, Mul"),
        ("scale", "Mul, Div"),
        ("cast", "Cast"),
    ]
    assert all(" -> ai.moonpoly." in rule.transformation for rule in list_rules())


FOREIGN = '<domain: "ai.moonpoly", opset_import: ["" : 17]> '


@pytest.mark.parametrize(
    ("call", "imports", "functions", "message"),
    [
        ("y = ai.moonpoly.MatMul (a, w)", ', "ai.moonpoly" : 2', "", "imports version 2"),
        ("y = ai.moonpoly.Gemm (a, w)", ', "ai.moonpoly" : 1', "", "calls 'Gemm'"),
        (
            "y = ai.moonpoly.MatMul (a, w)",
            ', "ai.moonpoly" : 1',
            FOREIGN + "MatMul (A, B) => (Y) { Y = Add (A, B) }",
            "function 'MatMul'",
        ),
        (
            "y = ai.moonpoly.Poly (a, w)",
            ', "ai.moonpoly" : 1',
            FOREIGN + "Poly (A, B) => (Y) { Y = Add (A, B) }",
            "function 'Poly'",
        ),
    ],
)
def test_foreign_use_of_the_domain_is_refused(
    call: str, imports: str, functions: str, message: str
) -> None:
    model = parse(LINEAR.replace("y = MatMul (a, w)", call), imports=imports, functions=functions)
    with pytest.raises(ModelError, match=message):
        rewrite(model)


def test_an_import_alone_is_no_use_of_the_domain() -> None:
    """As ONNX Runtime leaves it in what it saves where the library is registered."""
    model = parse(LINEAR, imports=', "ai.moonpoly" : 1000')
    imports = {e.domain: e.version for e in rewrite(model).model.opset_import}
    assert imports["ai.moonpoly"] == 1
