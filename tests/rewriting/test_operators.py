"""Every operator of the domain: its body against what its name says, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from equivalence import random, run
from moonpoly_ort.graph_passes import domain
from moonpoly_ort.graph_passes.operators import (
    ACTIVATIONS,
    ALPHA,
    BASES,
    BETA,
    OPERATORS,
    Operator,
    Residual,
)

Array = np.ndarray
erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PARAMETERS = {ALPHA: 0.375, BETA: 0.75}
EXACT: dict[str, Callable[[Array, float, float], Array]] = {
    "": lambda x, a, b: x,
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "Clip": lambda x, a, b: np.clip(x, a, b),
    "Sigmoid": lambda x, a, b: sigmoid(x),
    "Tanh": lambda x, a, b: np.tanh(x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "HardSwish": lambda x, a, b: x * np.clip(x / 6 + 0.5, 0, 1),
    "Gelu": lambda x, a, b: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "GeluTanh": lambda x, a, b: gelu_tanh(x),
    "QuickGelu": lambda x, a, b: x * sigmoid(a * x),
    "Silu": lambda x, a, b: x * sigmoid(x),
}


def operands(operator: Operator) -> dict[str, Array]:
    """Small ones for each input, a product of 3 x 5 in the middle."""
    columns = 10 if BASES[operator.base].gated else 5
    shapes = {
        "A": (3, 4),
        "B": (5, 4) if BASES[operator.base].turned else (4, columns),
        "bias": (columns,),
        "C": (5,),
        "R": (3, 5),
    }
    if operator.standard.startswith("Conv"):
        channels = (4, 6) if operator.standard == "ConvTranspose" else (6, 4)
        shapes = {"X": (2, 4, 3), "W": (*channels, 1), "B": (6,), "R": (2, 6, 3)}
    return {name: random(*shapes[name], seed=i) for i, name in enumerate(operator.inputs)}


def product(operator: Operator, given: dict[str, Array]) -> Array:
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    if BASES[operator.base].turned:
        return 0.5 * wide["A"] @ wide["B"].T
    if BASES[operator.base].scaled:
        return 0.5 * wide["A"] @ wide["B"] + 2.0 * wide.get("bias", 0)
    if operator.standard == "MatMul":
        return wide["A"] @ wide["B"] + wide.get("bias", 0)
    if operator.standard == "Gemm":
        return 0.5 * wide["A"] @ wide["B"] + 2.0 * wide["C"]
    weight = wide["W"][..., 0]
    if operator.standard == "ConvTranspose":
        weight = weight.T
    result = np.einsum("oc,ncx->nox", weight, wide["X"])
    return result + wide["B"][:, None] if "B" in wide else result


def expected(operator: Operator, given: dict[str, Array]) -> Array:
    y = product(operator, given)
    r = given["R"].astype(np.float64) if "R" in given else np.zeros(())
    if operator.residual is Residual.BEFORE:
        y = y + r
    values = y[:, 1::2]
    if BASES[operator.base].gated:
        y = y[:, 0::2]
    y = EXACT[operator.activation](y, PARAMETERS[ALPHA], PARAMETERS[BETA])
    if BASES[operator.base].gated:
        return y * values
    if operator.residual is Residual.AFTER:
        return y + r
    return y * r if operator.residual is Residual.FACTOR else y


def model_of(
    operator: Operator, opset: int, dtype: int = onnx.TensorProto.FLOAT
) -> onnx.ModelProto:
    attributes: dict[str, object] = {
        name: PARAMETERS[name] for name in operator.attributes if name in PARAMETERS
    }
    numbers: dict[str, object] = {
        "alpha": 0.5,
        "beta": 2.0,
        "transA": 0,
        "transB": 0,
        "perm": [1, 0],
    }
    attributes |= {name: value for name, value in numbers.items() if name in operator.attributes}
    node = onnx.helper.make_node(
        operator.name, operator.inputs, ["Y"], domain=domain.DOMAIN, **attributes
    )
    infos = [
        onnx.helper.make_tensor_value_info(name, dtype, array.shape)
        for name, array in operands(operator).items()
    ]
    output = onnx.helper.make_tensor_value_info(
        "Y", dtype, expected(operator, operands(operator)).shape
    )
    graph = onnx.helper.make_graph([node], "g", infos, [output])
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    domain.declare(model, [operator.name], opset)
    return model


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_body_computes_what_the_name_says(operator: Operator) -> None:
    given = operands(operator)
    for opset in (max(operator.min_opset, 13), 20):
        model = model_of(operator, opset)
        onnx.checker.check_model(model, full_check=True)
        (got,) = run(model, given)
        np.testing.assert_allclose(got, expected(operator, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("opset", [15, 20])
@pytest.mark.parametrize("base", ["MatMulBias", "ScaledMatMulBias"])
def test_bodies_fit_half_precision(activation: str, opset: int, base: str) -> None:
    operator = Operator(base, activation, Residual.BEFORE)
    given = {name: array.astype(np.float16) for name, array in operands(operator).items()}
    model = model_of(operator, opset, onnx.TensorProto.FLOAT16)
    onnx.checker.check_model(model, full_check=True)
    (got,) = run(model, given)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected(operator, given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bodies_fit_bfloat16(activation: str) -> None:
    """ONNX Runtime's CPU provider has no such kernels; that the types fit can be inferred."""
    model = model_of(Operator("MatMul", activation), 15, onnx.TensorProto.BFLOAT16)
    model.graph.output[0].type.tensor_type.ClearField("elem_type")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    assert inferred.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: str) -> None:
    operator = Operator("MatMul", activation)
    given = operands(operator)
    given["A"][1, 2] = np.nan
    (got,) = run(model_of(operator, 20), given)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


def test_a_gemm_may_lack_c_in_front_of_r() -> None:
    model = model_of(OPERATORS["GemmAddRelu"], 17)
    given = operands(OPERATORS["GemmAddRelu"])
    model.graph.node[0].input[2] = ""
    del model.graph.input[2]
    wanted = np.maximum(0.5 * given["A"] @ given["B"] + given["R"], 0)
    del given["C"]
    for level in ort.GraphOptimizationLevel.__members__.values():
        np.testing.assert_allclose(run(model, given, level)[0], wanted, rtol=1e-5, atol=1e-5)


def test_names_tell_the_structures_apart() -> None:
    assert all(operator.name == name for name, operator in OPERATORS.items())
    assert len(set(OPERATORS.values())) == len(OPERATORS)
    assert {operator.base for operator in OPERATORS.values()} == set(BASES)
    for name in ("MatMulBias", "MatMulAdd", "MatMulBiasAddRelu", "MatMulMul", "GemmAddTanh"):
        assert name in OPERATORS
    for name in ("ConvAddRelu", "ConvSiluAdd", "ConvNoBiasHardSwish", "ConvTransposeRelu"):
        assert name in OPERATORS
    for name in ("MatMulReluAdd", "ConvMul", "ConvTransposeAdd", "MatMulReluMul", "ConvAddReluAdd"):
        assert name not in OPERATORS
