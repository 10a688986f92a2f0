"""Convolutions from the node to the launch: what kernels are given suffices to compute them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conv_launches import compute, decode, fake_cubin, size_of
from fake_gpu import Aligned, driver, launches
from fake_ort import Context, FakeOrt
from moonpoly_ort.custom_ops.kernels import compiling, pack_format
from moonpoly_ort.custom_ops.kernels.pack_format import Param
from moonpoly_ort.graph_passes.operators import OPERATORS
from reference import DTYPES

from moonpoly_ort import native
from moonpoly_ort.errors import ProblemError
from tests.epilogues import (
    AFTER_CONVOLUTIONS,
    AFTER_TRANSPOSED,
    PRODUCTS,
    TO_FLOAT,
    finished,
)

STREAM = 0x5EED
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def pack_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of the catalog, with code that the fake driver takes."""
    kernels = []
    for kernel in compiling.catalog_kernels(90):
        if kernel.spec.family.convolves:
            kernels.append(replace(kernel, entry="kernel", cubin=fake_cubin(kernel)))
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return path


@pytest.fixture(autouse=True)
def clean() -> None:
    driver.fake_set_context(0)
    driver.fake_set_capturing(0)
    driver.fake_reset()


@cache
def open_pack(path: Path) -> native.Pack:
    return native.Pack(path)


def execute(path: Path, dtype: native.Dtype, transposed: bool) -> int:
    """Does on host memory what was launched, from the arguments alone; the address of W."""
    pack, weight = open_pack(path), 0
    stored = {pack_format.name(k.spec): k for k in pack_format.read_pack(path).kernels}
    for launch in launches():
        fits = [
            k for k in pack.kernels
            if [len(v) for v in launch.raw] == [size_of(p) for p in stored[k.name].params]
            and (launch.block, launch.shared) == (32 * k.warps, k.shared_bytes)
            and k.dtype == dtype
        ]  # fmt: skip
        fits = [k for k in fits if ("transposed" in k.name) == transposed]
        assert fits, "no kernel of the pack matches the launch"
        values = decode(launch.raw, stored[fits[0].name].params)
        depthwise = "depthwise" in fits[0].name
        assert launch.stream == STREAM
        split = values.get(Param.SPLIT, 1)
        tiled = []
        for k in fits:
            tiles = -(-values[Param.M] // k.bm) * -(-values[Param.N] // k.bn) * split
            if launch.grid % tiles == 0 and bool(k.split_k) == (split > 1):
                tiled.append(launch.grid // tiles)
        assert tiled
        weight = values[Param.CONV_W]
        compute(values, DTYPES[dtype], min(tiled), depthwise, transposed)
    return weight


def array(*shape: int, seed: int = 0) -> Aligned:
    rng = np.random.default_rng(seed + sum(shape))
    return Aligned(rng.standard_normal(shape).astype(np.float16))


CASES = {
    "plain": ((2, 6, 5, 4), (8, 6, 3, 3), {"pads": [1, 1, 1, 1]}),
    "many": ((1, 70, 3, 4), (5, 70, 2, 2), {"strides": [2, 1]}),
    "groups": ((2, 6, 5, 4), (8, 3, 3, 2), {"group": 2, "dilations": [2, 1]}),
    "depthwise": ((2, 3, 5, 4), (6, 1, 3, 3), {"group": 3, "pads": [0, 1, 1, 0]}),
    "wide": ((2, 1, 40), (4, 1, 9), {"strides": [3]}),
    "volume": ((1, 2, 3, 4, 3), (3, 2, 2, 1, 3), {}),
    "transposed": ((2, 4, 3, 4), (4, 5, 3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
    "transposed depthwise": ((1, 4, 3, 2), (4, 1, 2, 2), {"group": 4, "strides": [2, 2]}),
}


def expected(
    x: Aligned, w: Aligned, b: Aligned | None, transposed: bool, **attributes: Any
) -> Array:
    """By ONNX Runtime's own kernels in fp32."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    names = ["x", "w", "b"] if b is not None else ["x", "w"]
    op = "ConvTranspose" if transposed else "Conv"
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)], "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = (x, w, b)
    return session.run(
        None, {n: a.array.astype(np.float32) for n, a in zip(names, given, strict=False)}
    )[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("constant", [False, True], ids=["w fed", "w constant"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_nodes_launch_what_computes_them(
    pack_path: Path, case: str, bias: bool, constant: bool
) -> None:
    x_shape, w_shape, attributes = CASES[case]
    transposed = case.startswith("transposed")
    x, w = array(*x_shape), array(*w_shape, seed=1)
    outputs = w_shape[1] * attributes.get("group", 1) if transposed else w_shape[0]
    b = array(outputs, seed=2) if bias else None
    ort = FakeOrt(
        {"moonpoly.pack": str(pack_path)}, attributes=attributes,
        constants={1: w} if constant else {},
    )  # fmt: skip
    ort.register()
    name = ("ConvTranspose" if transposed else "Conv") + ("" if bias else "NoBias")
    op = ort.op(name, native.Dtype.F16)
    kernel = ort.create(op)
    want = expected(x, w, b, transposed, **attributes)
    if constant:  # what is packed is a copy: the stored one is not read again
        w.array[...] = np.nan if "depthwise" not in case else w.array
    driver.fake_reset()
    context = Context([x, w, b] if bias else [x, w], x.array.dtype, STREAM)
    ort.compute(op, kernel, context)
    read = execute(pack_path, native.Dtype.F16, transposed)
    assert (read == w.address) == (not constant or "depthwise" in case)
    assert context.output is not None
    assert context.output.array.shape == want.shape
    np.testing.assert_allclose(context.output.array, want, rtol=2e-2, atol=2e-2)
    assert ort.live == {"info": 0, "allocator": 1, "status": 0}
    assert sorted(ort.freed) == sorted(ort.scratch_memory)
    ort.destroy(op, kernel)
    assert ort.live == {"info": 0, "allocator": 0, "status": 0}


EPILOGUES = {
    "Relu": (native.Activation.RELU, native.Residual.NONE),
    "Clip": (native.Activation.CLIP, native.Residual.NONE),
    "Add": (native.Activation.NONE, native.Residual.BEFORE),
    "AddRelu": (native.Activation.RELU, native.Residual.BEFORE),
    "SiluAdd": (native.Activation.SILU, native.Residual.AFTER),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("case", ["plain", "groups", "depthwise", "wide"])
def test_what_follows_is_launched_too(pack_path: Path, case: str, epilogue: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    activation, residual = EPILOGUES[epilogue]
    numbers = {}
    if activation is native.Activation.CLIP:
        numbers = {"activation_alpha": -0.25, "activation_beta": 0.5}
    x, w, b = array(*x_shape), array(*w_shape, seed=1), array(w_shape[0], seed=2)
    want = expected(x, w, b, False, **attributes)
    r = array(*want.shape, seed=3)
    want = finished(
        want.astype(np.float64), activation, residual, -0.25, 0.5,
        r.array.astype(np.float64) if residual else None,
    )  # fmt: skip
    ort = FakeOrt({"moonpoly.pack": str(pack_path)}, attributes=attributes | numbers)
    ort.register()
    op = ort.op(f"Conv{epilogue}", native.Dtype.F16)
    kernel = ort.create(op)
    driver.fake_reset()
    context = Context([x, w, b, r] if residual else [x, w, b], x.array.dtype, STREAM)
    ort.compute(op, kernel, context)
    execute(pack_path, native.Dtype.F16, False)
    assert context.output is not None
    np.testing.assert_allclose(context.output.array, want, rtol=2e-2, atol=2e-2)
    ort.destroy(op, kernel)


def test_ops_are_registered_under_every_name(pack_path: Path) -> None:
    ort = FakeOrt({"moonpoly.pack": str(pack_path)})
    ort.register()
    names = [
        base + name
        for bases, after in (
            (("Conv", "ConvNoBias"), AFTER_CONVOLUTIONS),
            (("ConvTranspose", "ConvTransposeNoBias"), AFTER_TRANSPOSED),
        )
        for base in bases
        for name, _, _ in after
    ]
    for name in names:
        for dtype in native.Dtype:
            assert ort.provider(ort.op(name, dtype)) == b"CUDAExecutionProvider"
    assert {*names, *PRODUCTS} == set(OPERATORS)  # those that have function bodies
    assert len(ort.ops) == 3 * len(OPERATORS) - len(TO_FLOAT)


def test_without_repacking_a_constant_weight_is_read_as_it_is(pack_path: Path) -> None:
    x_shape, w_shape, attributes = CASES["plain"]
    x, w = array(*x_shape), array(*w_shape, seed=1)
    ort = FakeOrt(
        {"moonpoly.pack": str(pack_path), "moonpoly.repack": "0"}, attributes=attributes,
        constants={1: w},
    )  # fmt: skip
    ort.register()
    op = ort.op("ConvNoBias", native.Dtype.F16)
    kernel = ort.create(op)
    driver.fake_reset()
    ort.compute(op, kernel, Context([x, w], x.array.dtype, STREAM))
    assert execute(pack_path, native.Dtype.F16, False) == w.address
    ort.destroy(op, kernel)


def test_a_region_begins_at_an_image_of_its_own(pack_path: Path) -> None:
    pack = open_pack(pack_path)
    attributes = native.ConvAttributes.of_node(False, pads=[1, 1, 1, 1])
    x, w, y, r = array(5, 6, 5, 4), array(8, 6, 3, 3), array(5, 8, 5, 4), array(5, 8, 5, 4, seed=1)
    device, problems = native.device_query(0), {}
    for images in (2, 3, 5):
        problems[images] = native.conv_problem(
            [images, 6, 5, 4], [8, 6, 3, 3], attributes, native.Dtype.F16
        ).conv
        problems[images].residual = native.Residual.BEFORE
    plan = native.Plan()
    for first, images in ((0, 2), (2, 3)):
        (region,) = pack.plan_conv(device, problems[images], flags=1).regions
        region.n0 = first * 20
        plan._regions[first // 2] = region
    plan.region_count = 2
    driver.fake_reset()
    with native.Launcher(pack) as launcher:
        launcher.launch_conv(
            problems[5], plan, x=x.address, w=w.address, y=y.address, residual=r.address,
            stream=STREAM,
        )  # fmt: skip
    assert len(launches()) == 2
    execute(pack_path, native.Dtype.F16, False)
    want = expected(x, w, None, False, pads=[1, 1, 1, 1]) + r.array
    np.testing.assert_allclose(y.array, want, rtol=2e-2, atol=2e-2)


def test_a_weight_that_is_not_where_it_says_is_refused(pack_path: Path) -> None:
    pack = open_pack(pack_path)
    attributes = native.ConvAttributes.of_node(False, strides=[2, 2])
    conv = native.conv_problem([1, 8, 5, 5], [8, 8, 1, 1], attributes, native.Dtype.F16).conv
    plan = pack.plan_conv(native.device_query(0), conv, flags=1)
    x, y = array(1, 8, 5, 5), array(1, 8, 3, 3)
    w = Aligned(array(8, 8, 1, 1).array, offset=2)
    with native.Launcher(pack) as launcher, pytest.raises(ProblemError, match="not 16-byte"):
        launcher.launch_conv(conv, plan, x=x.address, w=w.address, y=y.address)


def test_an_empty_output_launches_nothing(pack_path: Path) -> None:
    ort = FakeOrt({"moonpoly.pack": str(pack_path)}, attributes={})
    ort.register()
    op = ort.op("Conv", native.Dtype.F16)
    kernel = ort.create(op)
    driver.fake_reset()
    context = Context([array(0, 6, 5, 4), array(8, 6, 3, 3)], np.dtype(np.float16), STREAM)
    assert ort.compute(op, kernel, context).shape == (0, 8, 3, 2)
    assert launches() == []
    ort.destroy(op, kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: setattr(plan._regions[0], "kernel", 9999), "names kernel 9999"),
        (lambda plan: setattr(plan._regions[0], "m", 3), "lies outside the convolution"),
        (lambda plan: setattr(plan._regions[0], "z", 3), "lies outside the convolution"),
        (lambda plan: setattr(plan._regions[0], "n0", 6), "lies outside the convolution"),
        (lambda plan: setattr(plan._regions[0], "n", 5), "cuts an image"),
        (lambda plan: setattr(plan._regions[0], "grid", 0), "lies outside the convolution"),
        (lambda plan: setattr(plan, "region_count", 99), "0 to 16 regions"),
        (lambda plan: setattr(plan, "workspace_bytes", 64), "needs 64 bytes of workspace"),
    ],
)
def test_plans_that_do_not_fit_are_refused(pack_path: Path, change: Any, message: str) -> None:
    pack = open_pack(pack_path)
    conv = native.conv_problem(
        [2, 6, 5, 4], [8, 6, 3, 3], native.ConvAttributes.of_node(False), native.Dtype.F16
    ).conv
    plan = pack.plan_conv(native.device_query(0), conv, flags=1)
    change(plan)
    x, w, y = array(2, 6, 5, 4), array(8, 6, 3, 3), array(2, 8, 3, 2)
    with native.Launcher(pack) as launcher, pytest.raises(ProblemError, match=message):
        launcher.launch_conv(conv, plan, x=x.address, w=w.address, y=y.address)
