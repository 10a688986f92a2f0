"""Plans of convolutions: each output once, forced choices, refusals."""

from __future__ import annotations

import contextlib
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpoly_ort import devices, native
from moonpoly_ort.errors import KernelMissingError, ProblemError
from tests.convolution.test_conv_kernels import catalog

GPUS = ("H200", "A100-80GB", "L4", "B200", "RTX 5090")
COUNTS = st.one_of(st.sampled_from([1, 3, 16, 64, 512]), st.integers(1, 3000))


@st.composite
def convs(draw: st.DrawFn) -> native.Conv:
    kernel = [draw(st.integers(1, 4)) for _ in range(2)]
    depthwise, transposed = draw(st.booleans()), draw(st.booleans())
    groups = draw(st.integers(1, 300))
    c, k = (1, draw(st.integers(1, 2))) if depthwise else (draw(COUNTS), draw(COUNTS))
    x = [draw(st.integers(1, 64)), groups * c, draw(COUNTS), draw(COUNTS)]
    w = [groups * c, k, *kernel] if transposed else [groups * k, c, *kernel]
    attributes = native.ConvAttributes.of_node(
        transposed, group=groups, strides=[draw(st.integers(1, 3)) for _ in range(2)],
        auto_pad="SAME_UPPER",
    )  # fmt: skip
    conv = native.conv_problem(x, w, attributes, draw(st.sampled_from(native.Dtype))).conv
    return native.conv_packed(conv)[0] if draw(st.booleans()) else conv


@settings(max_examples=300)
@given(conv=convs(), gpu=st.sampled_from(GPUS))
def test_every_output_is_covered_once(conv: native.Conv, gpu: str) -> None:
    device = devices.lookup(gpu)
    pack = catalog(device.sm)
    if conv.n * conv.groups * conv.k * math.prod(conv.out) > 2**42:  # beyond every memory
        with contextlib.suppress(ProblemError):  # more than 16 launches
            pack.plan_conv(device, conv)
        return
    plan = pack.plan_conv(device, conv)
    pixels = math.prod(conv.out)
    depthwise = False
    covered = []  # (first image, images), (first entry, entries)
    for region in plan.regions:
        kernel = pack.kernels[region.kernel]
        depthwise = native.Family(kernel.family) >= native.Family.CONV_DEPTHWISE
        assert region.m0 == 0
        assert region.m == (conv.groups * conv.k if depthwise else conv.k)
        assert region.n0 % pixels == region.n % pixels == 0
        tiles = -(-region.m // kernel.bm) * -(-region.n // kernel.bn) * region.z
        assert region.n + kernel.bn < 2**31
        assert region.grid == tiles * region.split < 2**31
        assert (region.split > 1) == bool(kernel.split_k)
        assert region.counters == (tiles if region.split > 1 else 0)
        columns, entries = (region.n0 // pixels, region.n // pixels), (region.z0, region.z)
        assert not depthwise or columns == (0, 1)
        covered.append((columns, entries))
    images, entries = (1, conv.n) if depthwise else (conv.n, conv.groups)
    # In rows of images, each cut into the same stretches of entries.
    at = (0, 0)
    for (image, count), (z, stretch) in covered:
        assert (image, z) == at
        at = (image, z + stretch) if z + stretch < entries else (image + count, 0)
    assert at == (images, 0)
    assert plan.predicted_us > 0
    assert pack.plan_conv(device, conv, flags=1).workspace_bytes == 0


def _conv(**changes: int) -> native.Conv:
    attributes = native.ConvAttributes.of_node(False, pads=[1, 1, 1, 1])
    conv = native.conv_problem([1, 8, 5, 5], [8, 8, 3, 3], attributes, native.Dtype.F16).conv
    for name, value in changes.items():
        setattr(conv, name, value)
    return conv


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": 7}, "dtype code 7 is unknown"),
        ({"precision": 2}, "precision code 2"),
        ({"transposed": 3}, "transposed = 3"),
        ({"w_taps": 5}, "cannot be stored for 5 taps"),
        ({"groups": 0}, "groups = 0"),
        ({"c": -1}, "c = -1"),
        ({"w_k": -4}, "strides of W are impossible"),
        ({"n": 2**31}, "2147483648 images times groups"),
        ({"c": 2**29}, "products to a sum"),
    ],
)
def test_impossible_convolutions_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(message)):
        catalog(90).plan_conv(devices.lookup("H200"), _conv(**changes))


def test_axes_out_of_reach_are_refused() -> None:
    conv = _conv()
    conv.dilation[1] = 2**30
    with pytest.raises(ProblemError, match=r"axis 1: .* reach beyond 1073741824 pixels"):
        catalog(90).plan_conv(devices.lookup("H200"), conv)


def test_forced_kernels_say_why_they_refuse() -> None:
    pack, device = catalog(90), devices.lookup("H200")
    names = [kernel.name for kernel in pack.kernels]

    def index(start: str) -> int:
        return next(i for i, name in enumerate(names) if name.startswith(start))

    for start, conv, why in (
        ("gemm_tma_f16", _conv(), "it computes matrix products"),
        ("conv_bf16", _conv(), "another dtype"),
        ("conv_transposed_f16", _conv(), "it computes transposed convolutions"),
        ("conv_f16", _conv(transposed=1), "the convolution is transposed"),
        ("conv_depthwise_f16", _conv(), "more than one channel"),
        ("conv_depthwise_f16_4x256x5", _conv(c=1, groups=8, k=1), "another width of the kernel"),
        ("conv_f16_128x128x64_w8_s3_a16", _conv(), "W is not stored"),
    ):
        kernel = index(start)
        with pytest.raises(KernelMissingError, match=why):
            pack.plan_conv(device, conv, kernel=kernel)
    problem, _ = native.matmul_problem([8, 8], [8, 8], native.Dtype.F16)
    with pytest.raises(KernelMissingError, match="it computes convolutions"):
        pack.plan(device, problem, kernel=index("conv_f16"))
    with pytest.raises(ProblemError, match="does not exist"):
        pack.plan_conv(device, _conv(), kernel=len(names))
    split = index("conv_f16_64x64x32_w4_s3_split_a16")
    packed, _ = native.conv_packed(_conv(c=32))
    assert pack.plan_conv(device, packed, kernel=split, split=9).regions[0].split == 9
    with pytest.raises(ProblemError, match="cannot cut 9 K steps into 10 slices"):
        pack.plan_conv(device, packed, kernel=split, split=10)


def test_channels_of_many_pixels_go_to_kernels_with_wide_addresses() -> None:
    pack, device = catalog(90), devices.lookup("H200")
    attributes = native.ConvAttributes.of_node(False, strides=[3, 3])
    names = {}
    for side in (5000, 9000):
        shape = [1, 64, side, side]
        conv = native.conv_problem(shape, [64, 64, 3, 3], attributes, native.Dtype.F16).conv
        conv, _ = native.conv_packed(conv)
        names[side] = pack.kernels[pack.plan_conv(device, conv).regions[0].kernel].name
    assert "_a16" in names[5000]
    assert "_a2" in names[9000]


def test_many_images_are_cut_into_launches() -> None:
    """Their pixels, and those that fill the last tile, are counted in 32 bits."""
    pack, device = catalog(90), devices.lookup("H200")
    attributes = native.ConvAttributes.of_node(False, pads=[1, 1, 1, 1])
    shape = [200_000, 8, 128, 128]
    conv = native.conv_problem(shape, [8, 8, 3, 3], attributes, native.Dtype.F16).conv
    plan = pack.plan_conv(device, conv)
    first, second = plan.regions
    assert (first.n0, second.n0, first.n + second.n) == (0, first.n, 200_000 * 128 * 128)
    assert first.n % (128 * 128) == 0
    assert first.n > 2**31 - 2 * 128 * 128
    assert plan.predicted_us == pytest.approx(first.predicted_us + second.predicted_us)
    conv.n *= 20
    with pytest.raises(ProblemError, match="needs more than 16 launches"):
        pack.plan_conv(device, conv)


def test_images_too_large_for_a_tile_of_two_go_to_kernels_with_wide_addresses() -> None:
    pack, device = catalog(90), devices.lookup("H200")
    attributes = native.ConvAttributes.of_node(False, pads=[1, 1, 1, 1])
    names = {}
    for images, channels in ((1, 256), (2, 256), (2, 64)):
        shape = [images, channels, 3000, 3000]
        conv = native.conv_problem(shape, [64, channels, 3, 3], attributes, native.Dtype.F16).conv
        conv, _ = native.conv_packed(conv)
        plan = pack.plan_conv(device, conv)
        names[images, channels] = pack.kernels[plan.regions[0].kernel].name
    assert "_a16" in names[1, 256]
    assert "_a2" in names[2, 256]
    assert "_a16" in names[2, 64]
    shape = [2, 64, 3000, 3000]
    conv = native.conv_problem(shape, [300, 64, 3, 3], attributes, native.Dtype.F16).conv
    conv, _ = native.conv_packed(conv)
    index = next(i for i, k in enumerate(pack.kernels) if k.name.startswith("conv_f16_64x64x32"))
    with pytest.raises(KernelMissingError, match="images too large"):
        pack.plan_conv(device, conv, kernel=index)


def test_no_images_launch_nothing() -> None:
    plan = catalog(90).plan_conv(devices.lookup("H200"), _conv(n=0))
    assert (plan.region_count, plan.workspace_bytes, plan.counters) == (0, 0, 0)


def test_a_plan_for_a_new_size_is_quick() -> None:
    """Budget of a miss: 20 us on an idle machine; here others run beside it."""
    pack, device = catalog(90), devices.lookup("H200")
    times = []
    for width in range(40, 60):
        attributes = native.ConvAttributes.of_node(False, pads=[1, 1, 1, 1])
        shape = [1, 64, 50, width]
        conv = native.conv_problem(shape, [64, 64, 3, 3], attributes, native.Dtype.F16).conv
        conv = native.conv_packed(conv)[0]
        start = time.perf_counter()
        pack.plan_conv(device, conv)
        times.append(time.perf_counter() - start)
    assert min(times) < 200e-6
