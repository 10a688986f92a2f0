"""Random convolutions, planned and executed by the real kernels in the interpreter."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from moonpoly_ort import devices, native, packs
from moonpoly_ort.errors import KernelMissingError, ProblemError
from tests.convolution.conv_case import ConvCase, check

GPUS = ("H200", "L4")
F16, BF16, F32 = native.Dtype.F16, native.Dtype.BF16, native.Dtype.F32
TF32, IEEE = native.Precision.TF32, native.Precision.IEEE


@functools.cache
def catalog(sm: int) -> native.Pack:
    """The kernels without code, in a file that no other checkout on this machine writes."""
    kernels = compiling.catalog_kernels(sm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / packs.pack_name(sm)
        pack_format.write_pack(path, sm, kernels, key="0" * 64, triton="none")
        return native.Pack(path)


@st.composite
def cases(draw: st.DrawFn, most_taps: int = 12) -> ConvCase:
    """Any parameters, few pixels and taps: the interpreter takes milliseconds for each step."""
    rank = draw(st.integers(1, 3))

    def axes(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(rank))

    transposed = draw(st.booleans())
    widest = {1: 9, 2: 4, 3: 3}[rank]
    kernel = axes(1, widest)
    assume(math.prod(kernel) <= most_taps)
    strides, dilations = axes(1, 3), axes(1, 3)
    pads = axes(0, 3) + axes(0, 3)
    size = axes(1, {1: 60, 2: 9, 3: 5}[rank])
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    ends = [pads[i] + pads[rank + i] for i in range(rank)]
    if transposed:
        whole = [s * (n - 1) + r for s, n, r in zip(strides, size, reach, strict=True)]
        assume(all(w > e for w, e in zip(whole, ends, strict=True)))
    else:
        assume(all(n + e >= r for n, e, r in zip(size, ends, reach, strict=True)))
    depthwise = draw(st.sampled_from([False, False, True]))
    padding = tuple(draw(st.integers(0, s - 1)) for s in strides)
    c, k = st.sampled_from([1, 2, 3, 5, 8, 17, 33]), st.sampled_from([1, 3, 16, 20, 65])
    return ConvCase(
        size, kernel,
        c=1 if depthwise else draw(c), k=draw(st.integers(1, 3) if depthwise else k),
        n=draw(st.integers(1, 4)),
        groups=draw(st.integers(2, 5) if depthwise else st.integers(1, 3)),
        strides=strides, dilations=dilations, pads=pads, transposed=transposed,
        output_padding=padding if transposed else (), bias=draw(st.booleans()),
        dtype=draw(st.sampled_from([F16, BF16, F32])),
        precision=draw(st.sampled_from([TF32, IEEE])),
        packed=draw(st.booleans()), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@settings(max_examples=40)
@given(case=cases(), gpu=st.sampled_from(GPUS))
@example(
    case=ConvCase((5, 5), (3, 3), c=16, k=20, pads=(1, 1, 1, 1), dtype=F16, packed=True), gpu="H200"
)
@example(case=ConvCase((1,), (1,), transposed=True), gpu="L4")
@example(  # a tile of many images, another one of parts of two
    case=ConvCase((3, 3), (2, 2), c=5, k=7, n=37, groups=2, bias=True, dtype=F16, packed=True),
    gpu="H200",
)
@example(
    case=ConvCase(
        (3, 2), (3, 2), c=3, k=4, n=19, groups=2, strides=(2, 3), transposed=True, dtype=BF16
    ),
    gpu="H200",
)
def test_planned_convolutions_are_computed(case: ConvCase, gpu: str) -> None:
    device = devices.lookup(gpu)
    assume(case.problem().product is None)
    check(case, catalog(device.sm), device)


@settings(max_examples=40)
@given(case=cases(most_taps=6), gpu=st.sampled_from(GPUS), data=st.data())
def test_any_kernel_that_takes_a_convolution_computes_it(
    case: ConvCase, gpu: str, data: st.DataObject
) -> None:
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    conv = case.problem().conv
    if case.packed:
        conv, _ = native.conv_packed(conv)
    able = []
    for index, record in enumerate(pack.kernels):
        if native.Family(record.family).convolves:
            try:
                pack.plan_conv(device, conv, kernel=index)
            except (KernelMissingError, ProblemError):
                continue  # not this one
            able.append(index)
    check(case, pack, device, kernel=data.draw(st.sampled_from(able)))


@pytest.mark.parametrize("kernel", [(3, 3), (2, 3), (4, 3), (2, 2, 3), (7, 5)])
def test_depthwise_rows_at_once(kernel: tuple[int, ...]) -> None:
    """Fewer, as many and more rows of taps than are loaded at once; several planes."""
    device = devices.lookup("H200")
    pack = catalog(device.sm)
    size = tuple(taps + 4 for taps in kernel)
    for index, record in enumerate(pack.kernels):
        if record.family == native.Family.CONV_DEPTHWISE and record.stages > 1:
            if record.bk != kernel[-1]:
                continue
            dtype = native.Dtype(record.dtype)
            check(ConvCase(size, kernel, k=2, groups=3, n=2, dtype=dtype), pack, device,
                  kernel=index)  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_regions_begin_at_any_image_and_group(transposed: bool) -> None:
    """A plan cut by hand, in images and groups: together they make the whole."""
    device = devices.lookup("H200")
    pack = catalog(device.sm)
    case = ConvCase(
        (4, 5), (3, 2), c=5, k=6, n=7, groups=3, transposed=transposed, bias=True, dtype=F16
    )
    pixels = math.prod(case.problem().conv.out)
    plan = native.Plan()
    for image, images in ((0, 2), (2, 5)):
        for z, groups in ((0, 1), (1, 2)):
            part = replace(case, n=images, groups=groups).problem().conv
            (region,) = pack.plan_conv(device, part).regions
            region.n0, region.z0 = image * pixels, z
            plan._regions[plan.region_count] = region
            plan.region_count += 1
    assert plan.region_count == 4
    check(case, pack, device, plan=plan)


@pytest.mark.parametrize("dtype", list(native.Dtype))
def test_split_sums_have_the_same_bits_every_time(dtype: native.Dtype) -> None:
    device = devices.lookup("H200")
    pack = catalog(device.sm)
    case = ConvCase(
        (6, 5), (3, 3), c=70, k=20, pads=(1, 1, 1, 1), dtype=dtype, precision=TF32, packed=True
    )
    results = [check(case, pack, device, split=2)[1] for _ in range(2)]
    assert results[0].tobytes() == results[1].tobytes()
    check(case, pack, device, split=3)


@pytest.mark.parametrize(
    "case",
    [
        ConvCase((6, 5), (3, 3), c=70, k=20),
        ConvCase((6, 9), (3, 5), c=3, k=20, groups=2, strides=(2, 1), packed=True),
        ConvCase((4, 5), (3, 2), c=40, k=20, strides=(2, 2), transposed=True, packed=True),
    ],
    ids=["as-stored", "few", "transposed"],
)
def test_only_packed_weights_of_many_channels_have_split_sums(case: ConvCase) -> None:
    device = devices.lookup("H200")
    with pytest.raises(KernelMissingError, match="split 2"):
        check(case, catalog(device.sm), device, split=2)


def test_a_step_beyond_the_last_is_not_loaded() -> None:
    """One channel, one tap, one pixel: nothing but the first element may be read."""
    device = devices.lookup("H200")
    for dtype in native.Dtype:
        check(ConvCase((1, 1), (1, 1), strides=(2, 2), dtype=dtype), catalog(90), device)


def test_infinite_weights_meet_zeros_outside_as_in_onnx_runtime() -> None:
    """0 * Inf is NaN where a tap of Inf meets the padding; elsewhere Inf."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    x = np.ones((1, 1, 3), np.float32)
    w = np.array([[[np.inf, 1.0]]], np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 0])], "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xw"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x, "w": w})
    conv = native.conv_problem(
        x.shape, w.shape, native.ConvAttributes.of_node(False, pads=[1, 0]), F32, IEEE
    ).conv
    y = np.empty((1, 1, 3), np.float32)
    from moonpoly_ort import interpreter

    plan = catalog(90).plan_conv(devices.lookup("H200"), conv)
    interpreter.run_conv(catalog(90), conv, plan, x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
    np.testing.assert_array_equal(y, expected)
