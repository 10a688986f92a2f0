"""Tuning of convolutions: shapes, gate, candidates, fit, selection and tables, without a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from moonpoly_ort.custom_ops.kernels import compiling, pack_format
from moonpoly_ort.custom_ops.kernels.spec import Dtype, Precision

from moonpoly_ort import devices, native, tables
from moonpoly_ort.errors import MoonPolyError, TableError
from moonpoly_ort.tuning import (
    candidates,
    conv_gate,
    conv_shapes,
    fitting,
    journal,
    measuring,
    running,
    selecting,
    weights,
    work,
)
from moonpoly_ort.tuning.conv_shapes import ConvShape
from moonpoly_ort.tuning.shapes import Shape
from tests.convolution.conv_case import ConvCase, exact
from tests.convolution.test_conv_kernels import cases
from tests.tuning.host_gpu import HostGpu, HostLauncher

H200 = devices.lookup("H200")
FEW = ("conv_f16_", "conv_taps8_f16_", "conv_depthwise_f16_", "conv_transposed_f16_")


@pytest.fixture(scope="module")
def pack_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuning") / "sm_90.mpk"
    kernels = compiling.catalog_kernels(90)
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return path


@pytest.fixture(scope="module")
def pack(pack_path: Path) -> native.Pack:
    return native.Pack(pack_path)


@pytest.fixture(scope="module")
def planner(pack_path: Path, tmp_path_factory: pytest.TempPathFactory) -> fitting.Planner:
    return fitting.Planner(pack_path, H200, 2.0, tmp_path_factory.mktemp("planner"))


@settings(max_examples=60)
@given(case=cases())
def test_the_gates_reference_is_right(case: ConvCase) -> None:
    x, w, bias = replace(case, bias=False).operands()
    assume(bias is None)
    conv = replace(case, bias=False).problem().conv
    images = x.reshape(conv.n, conv.groups, conv.c, *conv.inputs)
    weights = w.reshape(
        (conv.groups, conv.c, conv.k, *conv.kernel)
        if case.transposed
        else (conv.groups, conv.k, conv.c, *conv.kernel)
    )
    if case.transposed:
        weights = weights.swapaxes(1, 2)
    want = exact(case, x, w, None)
    got = conv_gate.reference(conv, images, weights)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "conv_f16_64x64x32_w4_s3_split_a16b2c2",
        "conv_f32_16x128x16_w4_s3_swap_a4b4c4",
        "conv_taps4_f16_16x128x32_w4_s3_swap_a16b2c2",
        "conv_taps8_f32ieee_16x128x16_w4_s2_a16b4c4",
        "conv_depthwise_f32_4x256x5_w4_s1_a4b4c4",
        "conv_depthwise_transposed_f16_4x256x1_w4_s1_a2b2c2",
    ],
)
def test_the_gate_lets_right_kernels_pass(pack: native.Pack, name: str) -> None:
    index = next(i for i, kernel in enumerate(pack.kernels) if kernel.name == name)
    gpu: Any = HostGpu()
    right: Any = HostLauncher(pack)
    assert conv_gate.check_conv(gpu, right, pack, H200, index) == ""
    assert not gpu.memory  # nothing is left allocated


def test_the_gate_lets_no_wrong_kernel_pass(pack: native.Pack) -> None:
    name = "conv_taps4_f16_16x128x32_w4_s3_swap_a16b2c2"
    index = next(i for i, kernel in enumerate(pack.kernels) if kernel.name == name)
    gpu: Any = HostGpu()

    class Strays(HostLauncher):
        def launch_conv(self, conv: native.Conv, plan: native.Plan, **given: Any) -> None:
            super().launch_conv(conv, plan, **given)
            count = math.prod((conv.n, conv.groups, conv.k, *conv.out))
            size = 4 if conv.dtype == native.Dtype.F32 else 2
            gpu.upload(given["y"] + count * size, np.zeros(size, np.uint8))

    class Forgets(HostLauncher):
        def launch_conv(self, conv: native.Conv, plan: native.Plan, **given: Any) -> None:
            super().launch_conv(conv, plan, **given | {"bias": None})

    strays: Any = Strays(pack)
    forgets: Any = Forgets(pack)
    assert "beside the result" in conv_gate.check_conv(gpu, strays, pack, H200, index)
    assert "relative error" in conv_gate.check_conv(gpu, forgets, pack, H200, index)


def test_every_kernel_is_checked_by_cases_that_it_takes(pack: native.Pack) -> None:
    for index, kernel in enumerate(pack.kernels):
        if native.Family(kernel.family).convolves:
            found = list(conv_gate.cases(kernel))
            assert len(found) == 3, kernel.name
            split = conv_gate.SPLIT if kernel.split_k else 1
            for conv in found:
                (region,) = pack.plan_conv(H200, conv, kernel=index, split=split).regions
                assert (region.kernel, region.split) == (index, split), kernel.name


@pytest.mark.parametrize("number", ["f16", "f32ieee"])
def test_shapes_are_of_every_kind_and_are_no_products(number: str, pack: native.Pack) -> None:
    groups = conv_shapes.synthetic(number)
    assert {kind for _, kind, _ in groups} == {
        kind for kind in conv_shapes.KINDS if (number, kind) != ("f32ieee", "depthwise")
    }
    assert groups == conv_shapes.synthetic(number)
    again = conv_shapes.synthetic(number, seed=1)
    kernels = candidates.Kernels(pack, H200)
    for group, shapes in groups.items():
        assert all(shape.group == group for shape in shapes)
        assert len(set(again[group]) - set(shapes)) > 0.7 * len(shapes)
        for shape in shapes[:6]:
            found = kernels.legal(shape.problem())
            assert found, shape
            assert all(c.name.startswith("conv") for c in found)
            assert len({(c.kernel, c.split) for c in found}) == len(found)
            assert all(size > 0 for size in shape.operand_bytes)


def test_a_journal_keeps_convolutions(tmp_path: Path) -> None:
    shape = conv_shapes.synthetic("f16")["f16", "conv", False][0]
    times = [measuring.Timed("conv_f16_x", 2, 3.5, True)]
    with journal.Journal(tmp_path / "j.jsonl", {"gpu": "x"}) as book:
        book.timed(shape, times)
    assert journal.read(tmp_path / "j.jsonl").timings == {shape: times}


def _costs(planner: fitting.Planner, indices: set[int]) -> np.ndarray:
    """Analytic costs, each off by a factor of its own."""
    rng = np.random.default_rng(0)
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    analytic = fitting.analytic_costs(planner, indices)
    for index in sorted(indices):
        values = analytic[index] * np.exp(rng.normal(0, 0.3, 3))
        costs[index] = (*values, planner.occupancy[index])
    return costs


def _rows(planner: fitting.Planner, seed: int = 0) -> list[fitting.Row]:
    """All candidates of f16 shapes with the times of a table that the fit does not know."""
    found = []
    with planner.without_table() as plain:
        kernels = candidates.Kernels(plain, H200, only=lambda name: name.startswith(FEW))
        for shapes in conv_shapes.synthetic("f16", seed).values():
            for shape in shapes[:12]:
                for one in candidates.promising(kernels.legal(shape.problem()), 3.0):
                    found.append(fitting.Row(shape, one.kernel, one.split, math.nan))
    costs = _costs(planner, {row.kernel for row in found})
    with planner.with_costs(costs, 3000.0) as pack:
        us = planner.predict(pack, found)
    return [replace(row, us=float(t)) for row, t in zip(found, us, strict=True)]


def test_analytic_costs_are_what_the_planner_predicts_with(planner: fitting.Planner) -> None:
    wanted = {
        i
        for i, kernel in enumerate(planner.kernels)
        if kernel.spec.family.convolves and kernel.spec.dtype is Dtype.F32
    }
    costs = fitting.analytic_costs(planner, wanted)[sorted(wanted)]
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    assert (costs[:, 1] >= 0.9 * costs[:, 2]).all()  # a step among others takes no less


def test_the_fit_finds_costs_that_explain_the_timings(planner: fitting.Planner) -> None:
    rows = _rows(planner)
    fitted = fitting.fit_all(planner, rows, 3000.0, 3000.0)
    assert fitted.bandwidth == 3000.0
    assert fitted.own.error < 0.05 < fitted.analytic.error
    assert fitted.own.mean > max(0.98, fitted.analytic.mean)


def test_kernels_that_gain_nothing_go_but_every_family_stays(planner: fitting.Planner) -> None:
    record: dict[ConvShape, list[measuring.Timed]] = {}
    for row in _rows(planner):
        assert isinstance(row.shape, ConvShape)
        timed = measuring.Timed(planner.names[row.kernel], row.split, row.us, True)
        record.setdefault(row.shape, []).append(timed)
    with planner.without_table() as plain:
        dropped = selecting.superfluous(plain.kernels, record.items())
    assert dropped
    assert all(name.startswith(FEW) for name in dropped)
    kept = [k.spec for k in planner.kernels if planner_name(k) not in dropped]
    for family in {s.family for s in kept if s.family.convolves}:
        own = [s for s in kept if s.family is family and s.dtype is Dtype.F16 and not s.split_k]
        assert own, family
    widths = {s.bk for s in kept if s.family.value == "conv_depthwise" and s.dtype is Dtype.F16}
    assert 1 in widths


def planner_name(kernel: pack_format.PackedKernel) -> str:
    from moonpoly_ort.custom_ops.kernels.spec import name

    return name(kernel.spec)


def _table(names: list[str], **changes: Any) -> tables.Table:
    costs = tuple(tables.Cost(name, 1.0, 0.5, 0.4, 2.0) for name in names)
    values: dict[str, Any] = {
        "gpu": H200.name, "sm": 90, "sm_count": H200.sm_count, "shared_per_block": 1,
        "bandwidth_gbps": 4000.0, "launch_us": 2.0, "triton": "3.9.0", "cuda": "13.0",
        "driver": "580", "key": "0" * 64, "date": "2026-01-01", "clocks": "free", "costs": costs,
    }  # fmt: skip
    return tables.Table(**values | changes)


def test_a_pack_holds_both_tables_of_a_gpu(
    planner: fitting.Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = [name for name in planner.names if name.startswith("gemm")]
    convolving = [name for name in planner.names if name.startswith("conv")]
    both = (
        _table(convolving[1:], bandwidth_gbps=1.0, dropped=(convolving[0],)),
        _table(products),
    )
    for table in both:
        tables.dump(table, tmp_path / table.name)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "conv__nvidia-h200.json", "gemm__nvidia-h200.json",
    ]  # fmt: skip
    monkeypatch.setenv("MOONPOLY_TABLES", str(tmp_path))
    found = tables.find(H200.name, "conv")
    assert found is not None
    assert (found.costs, found.dropped) == (tuple(sorted(both[0].costs)), both[0].dropped)
    (made,) = tables.cost_tables(90)
    assert made.bandwidth_gbps == 4000.0  # that of the products
    place = {name: i for i, name in enumerate(planner.names)}
    assert made.costs[place[convolving[0]]]["blocks_per_sm"] < 0
    assert made.costs[place[convolving[1]]]["step_us"] == 0.5
    shape = conv_shapes.synthetic("f16")["f16", "conv", False][0]
    with planner.with_table(*both) as tuned, planner.without_table() as plain:
        assert work.plan(tuned, H200, shape.problem()).measured
        assert not work.plan(plain, H200, shape.problem()).measured
        with pytest.raises(MoonPolyError, match="is excluded"):
            tuned.plan_conv(H200, shape.problem(), kernel=place[convolving[0]])


def test_a_table_of_products_scales_no_convolution(planner: fitting.Planner) -> None:
    slow = _table([name for name in planner.names if name.startswith("gemm")])
    shape = conv_shapes.synthetic("f16")["f16", "conv", False][0]
    alike = replace(slow, bandwidth_gbps=H200.bandwidth_gbps * 0.9, launch_us=planner.launch_us)
    slower = replace(alike, costs=tuple(replace(c, step_us=50 * c.step_us) for c in alike.costs))
    us = []
    for table in (alike, slower):
        with planner.with_table(table) as pack:
            us.append(work.plan(pack, H200, shape.problem()).predicted_us)
    assert us[0] == us[1]


def test_a_table_of_both_kinds_is_refused(tmp_path: Path) -> None:
    tables.dump(_table(["gemm_x", "conv_x"]), tmp_path / "t.json")
    with pytest.raises(TableError, match="kernels of conv and gemm"):
        tables.load(tmp_path / "t.json")


def test_groups_of_both_operations_are_measured() -> None:
    every = running._groups(running.Options())
    assert {group[1] for group in every} == {*conv_shapes.KINDS, "nn", "nt", "tn", "tt"}
    only = running._groups(running.Options(operations=("conv",), numbers=("bf16",)))
    assert {group[:2] for group in only} == {("bf16", kind) for kind in conv_shapes.KINDS}
    products = running._groups(running.Options(layouts=("nn",)))
    assert {group[1] for group in products} == {"nn"}
    with pytest.raises(MoonPolyError, match="unknown operation"):
        running.Options(operations=("pool",))


def test_a_models_layers_on_images_of_many_sizes(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 18]>
    net (float[n, 4, t] x, float[n, 6, d, h, w] v, float[n, 8, a, b] u, float[6, 3, 1, 1, 1] fed)
        => (float[n, 6, l] y, float z, float p, float q)
    { y = Conv <strides = [3], dilations = [2]> (x, line)
      z = Conv <group = 2, strides = [1, 2, 2]> (v, volume)
      p = Conv (u, point)
      q = Conv <group = 2> (v, fed) }
    """
    model = onnx.parser.parse_model(text)
    for name, shape in (("line", (6, 4, 5)), ("volume", (4, 3, 3, 3, 3)), ("point", (5, 8, 1, 1))):
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
        )
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    found = weights.weights(model)
    assert found.matrices == ()
    line, volume, point = found.layers  # the one that is fed has no size
    assert line == conv_shapes.Layer(
        "f32", False, 1, 1, 4, 6, (1, 1, 5), (1, 1, 3), (1, 1, 2), padded=False
    )
    assert (volume.kind, volume.axes, volume.kernel) == ("conv", 3, (3, 3, 3))
    assert (line.kind, point.is_product, line.is_product) == ("first", True, False)
    assert weights.weights(model, ieee=True).layers[0].number == "f32ieee"

    counts = [64, 500, 4096, 65536]
    groups = conv_shapes.for_layers(found.layers, counts)
    assert set(groups) == {
        ("f32", "first", False), ("f32", "conv", False), ("f32", "nn", False)
    }  # fmt: skip
    assert {(s.m, s.n, s.k) for s in groups["f32", "nn", False] if isinstance(s, Shape)} == {
        (5, count, 8) for count in counts
    }
    for shape in (s for group in groups.values() for s in group if isinstance(s, ConvShape)):
        pixels = shape.n * math.prod(shape.problem().out)
        assert any(0.6 * count < pixels < 1.6 * count for count in counts), shape
        assert shape.size[0] == 1 or shape.kernel == volume.kernel

    chosen = running.Options(model=path, operations=("conv",), pixels=(64, 512))
    assert {group[1] for group in running._groups(chosen)} == {"first", "conv"}
    chosen = running.Options(model=path, operations=("gemm",))
    assert {group[1] for group in running._groups(chosen)} == {"nn"}
    both = running._groups(running.Options(model=path, numbers=("f32", "f32ieee")))
    assert {group[0] for group in both} == {"f32", "f32ieee"}
    with pytest.raises(MoonPolyError, match=r"no weight of .*net\.onnx is of dtype f16"):
        running._groups(running.Options(model=path, numbers=("f16",)))
    with pytest.raises(MoonPolyError, match="pixels from 0 to 4"):
        running.Options(pixels=(0, 4))
    for ranges in ({"pixels": (64, 512)}, {"rows": (1, 8)}):
        with pytest.raises(MoonPolyError, match="there is no model; name one with --model"):
            running.Options(**ranges)


def test_kernels_of_the_groups_are_checked(pack: native.Pack) -> None:
    groups = running._groups(running.Options(operations=("conv",), numbers=("f32",)))
    asked = {k.name for k in pack.kernels if running._concerns(k, groups)}
    own = {
        planner_name(k)
        for k in compiling.catalog_kernels(90)
        if k.spec.family.convolves
        and (k.spec.dtype, k.spec.precision) == (Dtype.F32, Precision.TF32)
    }
    assert asked == own
