"""Plans of a model's nodes, made without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from small_models import mlp

import moonpoly_ort
from moonpoly_ort import (
    ArgumentError,
    DeviceError,
    InputError,
    ModelError,
    PackError,
    ProblemError,
    devices,
    explain,
    native,
    packs,
)


def test_every_taken_node_has_a_plan(model: Path) -> None:
    plans = explain(model, {"batch": 37}, gpu="H200")
    assert [(p.name, p.op, p.dtype, p.calls) for p in plans] == [
        ("first", "MatMul", "f32", 1),
        ("second", "Gemm", "f32", 1),
    ]
    assert plans[0].inputs == ((37, 64), (64, 32))
    assert plans[1].inputs == ((37, 32), (32, 16), (16,))
    assert [(p.m, p.n, p.k) for p in plans] == [(37, 32, 64), (37, 16, 32)]
    names = {kernel.name for kernel in native.Pack(packs.catalog(90))}
    for plan in plans:
        assert sum(r.m * r.n * r.z for r in plan.regions) == plan.m * plan.n * plan.batch
        assert all(r.kernel in names and r.waves > 0 and r.grid > 0 for r in plan.regions)
        assert plan.predicted_us >= max(r.predicted_us for r in plan.regions) > 0
        assert not plan.why_not


def test_a_plan_for_cublaslt_is_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(pack: native.Pack, device: native.Device, problem: native.Problem) -> native.Plan:
        plan = plain(pack, device, problem, kernel=native.VENDOR)
        plan._regions[0].predicted_us = plan.predicted_us = 5.0
        return plan

    plain = native.Pack.plan
    monkeypatch.setattr(native.Pack, "plan", forced)
    shown = explain(model, {"batch": 37}, gpu="H200")
    relu, gemm = shown
    assert "activation" in relu.why_not  # which it does not compute
    assert [r.kernel for r in gemm.regions] == ["cuBLASLt"]
    assert "cuBLASLt" in str(shown)
    json.dumps(shown.as_dict(), allow_nan=False)


@pytest.mark.parametrize("form", [Path, str, onnx.load, lambda path: path.read_bytes()])
def test_takes_every_form_of_a_model(model: Path, form) -> None:
    assert explain(form(model), {"batch": 1}, gpu="L4").plans[0].regions


def test_a_rewritten_model_is_explained_alike(model: Path, tmp_path: Path) -> None:
    moonpoly_ort.rewrite(model, tmp_path / "new.onnx")
    assert explain(tmp_path / "new.onnx", {"batch": 5}, gpu="H200") == explain(
        model, {"batch": 5}, gpu="H200"
    )


def test_the_model_given_is_not_changed() -> None:
    model = mlp()
    before = model.SerializeToString(deterministic=True)
    explain(model, {"batch": 3}, gpu="H200")
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("gpu", devices.GPUS, ids=lambda gpu: gpu.alias)
def test_every_known_gpu_has_plans(model: Path, gpu: devices.GPU) -> None:
    plans = explain(model, {"batch": 512}, gpu=gpu.alias)
    assert plans.gpu == gpu.name
    assert plans.pack.startswith("catalog")
    assert all(plan.regions for plan in plans)


def test_the_pack_that_was_used_is_named(model: Path, tmp_path: Path) -> None:
    pack = packs.catalog(90).rename(tmp_path / "own.mpk")
    assert explain(model, {"batch": 1}, gpu="H200", pack=pack).pack == str(pack)
    with pytest.raises(PackError):
        explain(model, {"batch": 1}, gpu="A100-80GB", pack=pack)


def test_precision_reaches_the_kernels(model: Path) -> None:
    for precision in ("tf32", "ieee"):
        plans = explain(model, {"batch": 512}, gpu="H200", precision=precision)
        found = {("ieee" in r.kernel) for plan in plans for r in plan.regions}
        assert found == {precision == "ieee"}
    with pytest.raises(ArgumentError, match="fp8"):
        explain(model, {"batch": 1}, precision="fp8")


def test_one_node_and_an_unknown_one(model: Path) -> None:
    (plan,) = explain(model, {"batch": 2}, gpu="H200", node="second")
    assert plan.name == "second"
    with pytest.raises(InputError, match=r"no node 'third' is taken.*first, second"):
        explain(model, {"batch": 2}, node="third")


def test_batch_broadcast_and_attributes_are_those_of_the_op() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float16[b, h, s, 8] q, float16[b, 1, 8, t] k, float16[t, s] w, float16[s, 1] c)
          => (float16[b, h, s, t] y, float16[s, s] z)
        { y = MatMul (q, k) z = Gemm <transA = 1, transB = 1> (w, w2, c) }"""
    text = text.replace("transB = 1> (w, w2, c)", "alpha = 0.5> (w, w, c)")
    sizes = {"b": 2, "h": 3, "s": 5, "t": 16}
    product, gemm = explain(parser.parse_model(text), sizes, gpu="H200")
    assert (product.m, product.n, product.k, product.batch) == (5, 16, 8, 6)
    assert (gemm.m, gemm.n, gemm.k, gemm.batch) == (5, 5, 16, 1)
    assert product.dtype == "f16"


def test_batch_groups_beyond_two_are_launched_one_by_one() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 1, b, 4, 8] x, float[1, 3, b, 8, 4] w) => (float[2, 3, b, 4, 4] y)
        { y = MatMul (x, w) }"""
    (plan,) = explain(parser.parse_model(text), {"b": 5}, gpu="H200")
    assert plan.batch * plan.launches == 2 * 3 * 5
    assert plan.launches > 1
    assert plan.predicted_us == pytest.approx(
        plan.launches * sum(r.predicted_us for r in plan.regions), rel=0.5
    )


def _with_weights(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    model = parser.parse_model(text)
    for name, shape in weights.items():
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros(shape, np.float16), name)
        )
    return model


def test_convolutions_are_planned_as_sessions_plan_them() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float16[b, 64, h, w] x, float16[64, 1, 3, 3] d) => (float16[b, 8, h2, w2] y) {
          [wide] t = Conv <pads = [1, 1, 1, 1], strides = [2, 1]> (x, k)
          [point] s = Conv (t, p)
          [depth] r = Conv <group = 64, auto_pad = "SAME_UPPER"> (s, d)
          [up] y = ConvTranspose <strides = [2, 2]> (r, u) }"""
    model = _with_weights(text, k=(32, 64, 3, 3), p=(64, 32, 1, 1), u=(64, 8, 2, 2))
    plans = {plan.name: plan for plan in explain(model, {"b": 2, "h": 20, "w": 16}, gpu="H200")}
    extents = {name: (p.m, p.n, p.k, p.batch) for name, p in plans.items()}
    assert extents == {
        "wide": (32, 2 * 160, 64 * 9, 1),
        "point": (64, 160, 32, 2),
        "depth": (1, 2 * 160, 9, 64),
        "up": (8, 2 * 640, 64 * 4, 1),
    }
    families = {name: plan.regions[0].kernel.split("_f16")[0] for name, plan in plans.items()}
    assert families["wide"] == "conv"
    assert families["point"].startswith("gemm_")
    assert families["depth"] == "conv_depthwise"
    assert families["up"] == "conv_transposed"
    assert [name for name, plan in plans.items() if plan.repacked] == ["wide", "up"]
    assert all(plan.predicted_us > 0 and plan.regions[0].waves > 0 for plan in plans.values())
    assert plans["depth"].regions[0].m == 64
    assert "(w repacked)" in str(explain(model, {"b": 2, "h": 20, "w": 16}, node="wide"))


def test_a_pointwise_convolution_of_odd_rows_may_be_convolved() -> None:
    """79 pixels are loaded one by one either way; convolutions load them a step ahead."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float16[b, 512, 1, w] x) => (float16[b, 512, 1, w] y) { y = Conv (x, k) }"""
    model = _with_weights(text, k=(512, 512, 1, 1))
    kernels = {}
    for width in (64, 79):
        (plan,) = explain(model, {"b": 8, "w": width}, gpu="H200")
        assert (plan.m, plan.n, plan.k, plan.batch, plan.repacked) == (512, width, 512, 8, False)
        kernels[width] = plan.regions[0].kernel
    assert kernels[64].startswith(("gemm_tma_f16", "gemm_ws"))
    assert not kernels[79].startswith(("gemm_tma_f16", "gemm_ws"))


def test_convolutions_that_cannot_run_say_why() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b, 3, h, 9] x, float[4, 3, 3, 3] k, float[h, h] w) => (y, z)
        { [first] t = Conv (x, k)  [up] y = ConvTranspose (t, k)  z = MatMul (w, w) }"""
    model = moonpoly_ort.rewrite(parser.parse_model(text)).model
    conv, transposed, product = explain(model, {"b": 2, "h": 7}, gpu="H200")
    assert (conv.name, conv.op, conv.dtype) == ("first", "Conv", "f32")
    assert conv.inputs == ((2, 3, 7, 9), (4, 3, 3, 3))
    assert transposed.inputs == ((2, 4, 5, 7), (4, 3, 3, 3))
    for plan in (conv, transposed, product):
        assert plan.regions
        assert not plan.why_not
    empty, _, _ = explain(model, {"b": 0, "h": 7}, gpu="H200")
    assert (empty.regions, empty.why_not) == ((), "the output is empty: nothing is launched")


def test_an_empty_product_launches_nothing(model: Path) -> None:
    plans = explain(model, {"batch": 0}, gpu="H200")
    assert all(not plan.regions and "empty" in plan.why_not for plan in plans)


def test_sizes_of_values_are_taken_from_the_values(model: Path) -> None:
    assert explain(model, {"x": np.zeros((9, 64), np.float32)}, gpu="H200")[0].m == 9


def test_bfloat16_is_explained_although_the_cpu_cannot_run_it() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (bfloat16[b, 8] x, bfloat16[8, 4] w) => (bfloat16[b, 4] y) { y = MatMul (x, w) }"""
    (plan,) = explain(parser.parse_model(text), {"b": 5}, gpu="H200")
    assert plan.dtype == "bf16"
    assert plan.regions


def test_prints_as_a_table_and_as_plain_data(model: Path) -> None:
    plans = explain(model, {"batch": 37}, gpu="H200")
    lines = str(plans).splitlines()
    assert "NVIDIA H200" in lines[0]
    assert any("first" in line and "MatMul" in line for line in lines)
    assert json.loads(json.dumps(plans.as_dict()))["plans"][0]["name"] == "first"


def test_bad_models_and_gpus(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"bad")
    with pytest.raises(ModelError):
        explain(tmp_path / "bad.onnx", {})
    with pytest.raises(DeviceError, match="Voodoo"):
        explain(model, {"batch": 1}, gpu="Voodoo")
    with pytest.raises(InputError, match="'batch'"):
        explain(model, {})


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 3), (4, 5), "differ: 3 and 4"),
        ((), (4,), "rank 1"),
        ((2, 3, 4), (3, 4, 5), "2 and 3"),
        ((2, -1), (3, 4), "negative"),
        ((2**40, 2**40, 1, 1), (1, 1), "too large"),
    ],
)
def test_shapes_that_do_not_fit_a_matmul(a: tuple[int, ...], b: tuple[int, ...], message) -> None:
    with pytest.raises(ProblemError, match=message):
        native.matmul_problem(a, b, native.Dtype.F32)


def test_shapes_that_do_not_fit_a_gemm() -> None:
    for a, b, c in (((2, 3), (4, 5), None), ((2, 3, 4), (4, 5), None), ((2, 3), (3, 4), (5,))):
        with pytest.raises(ProblemError, match="Gemm"):
            native.gemm_problem(a, b, c, native.Dtype.F32)
    transposed = native.gemm_problem(
        (3, 2), (4, 3), None, native.Dtype.F32, trans_a=True, trans_b=True
    )
    assert (transposed.m, transposed.n, transposed.k) == (2, 4, 3)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[native.Problem]:
    """The problems that are planned from now on."""
    problems = []
    plain = native.Pack.plan

    def recorded(
        pack: native.Pack, device: native.Device, problem: native.Problem, **options: int
    ) -> native.Plan:
        problems.append(native.Problem.from_buffer_copy(problem))
        return plain(pack, device, problem, **options)

    monkeypatch.setattr(native.Pack, "plan", recorded)
    return problems


def test_what_follows_a_product_counts_in_its_plan(planned: list[native.Problem]) -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17, "ai.moonpoly" : 1]>
        g (float[37, 64] a, float[64, 40] b, float[40] c, float[37, 40] r) => (float[37, 40] y)
        {
            h = ai.moonpoly.MatMulBiasAddLeakyRelu <activation_alpha: float = 0.1> (a, b, c, r)
            y = Identity (h)
        }
    """
    model = parser.parse_model(text)
    from moonpoly_ort.graph_passes import domain

    domain.declare(model, ["MatMulBiasAddLeakyRelu"], 17)
    (plan,) = explain(model, gpu="H200")
    assert (plan.op, plan.m, plan.n, plan.k) == ("MatMul", 37, 40, 64)
    (problem,) = planned[:1]
    assert (problem.bias, problem.bias_stride_n) == (native.Bias.VECTOR, 1)
    assert problem.activation == native.Activation.LEAKY_RELU
    assert problem.residual == native.Residual.BEFORE


@pytest.mark.parametrize("rewritten", [False, True])
def test_gated_products_and_results_in_fp32(rewritten: bool, planned: list[native.Problem]) -> None:
    """Nodes behind them have the shapes that their outputs give."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        mlp (float16[n, 64] x) => (float[n, 40] y)
        {
            a = MatMul (x, g)
            s = Sigmoid (a)
            t = Mul (a, s)
            u = MatMul (x, v)
            h = Mul (t, u)
            w = MatMul (h, d)
            y = Cast <to: int = 1> (w)
        }
    """
    model = parser.parse_model(text)
    for name, shape in (("g", (64, 96)), ("v", (64, 96)), ("d", (96, 40))):
        values = np.zeros(shape, np.float16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    if rewritten:
        model = moonpoly_ort.rewrite(model).model
        assert [node.op_type for node in model.graph.node] == ["MatMulGatedSilu", "MatMulToFloat"]
    plans = explain(model, {"x": (37, 64)}, gpu="H200")
    assert [(plan.m, plan.n, plan.k) for plan in plans] == [(37, 192, 64), (37, 40, 96)]
    gated, wide = planned[0], planned[-1]
    assert (gated.gated, gated.ldc, gated.activation) == (1, 96, native.Activation.SILU)
    assert (wide.wide, wide.gated, wide.ldc) == (1, 0, 40)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_product_of_rows(rewritten: bool, planned: list[native.Problem]) -> None:
    """Keys whose last two axes are exchanged are multiplied as they are stored."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        scores (float16[b, 12, s, 64] q, float16[b, 12, t, 64] k) => (float16[b, 12, s, t] y)
        {
            u = Transpose <perm = [0, 1, 3, 2]> (k)
            w = MatMul (q, u)
            y = Softmax <axis = -1> (w)
        }
    """)
    if rewritten:
        model = moonpoly_ort.rewrite(model).model
        assert [node.op_type for node in model.graph.node] == ["MatMulTransposed", "Softmax"]
    (plan,) = explain(model, {"b": 2, "s": 37, "t": 41}, gpu="H200")
    assert (plan.m, plan.n, plan.k, plan.batch, plan.why_not) == (37, 41, 64, 24, "")
    assert (planned[-1].trans_b, planned[-1].ldb, planned[-1].align_b) == (1, 64, 16)


def test_values_called_as_something_new_could_be() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        scores (float[b, s, 64] q, float[b, t, 64] k) => (y, z)
        {
            u = Transpose <perm = [0, 2, 1]> (k)
            y = MatMul (q, u)
            z = Neg (q)
        }
    """)
    for names in (model.graph.node[1].input, model.graph.node[2].input):
        names[0] = "y/turned"
    model.graph.input[0].name = "y/turned"
    (plan,) = explain(model, {"b": 2, "s": 37, "t": 41}, gpu="H200")
    assert (plan.m, plan.n, plan.k, plan.batch, plan.why_not) == (37, 41, 64, 2, "")
