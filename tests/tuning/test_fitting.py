"""Costs that made timings are found again, and the planner then makes the best choices."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
from moonpoly_ort.custom_ops.kernels import compiling, kernel_list, pack_format
from moonpoly_ort.custom_ops.kernels.spec import Family

from moonpoly_ort import devices
from moonpoly_ort.errors import MoonPolyError
from moonpoly_ort.tuning import fitting
from moonpoly_ort.tuning.candidates import SPLITS
from moonpoly_ort.tuning.fitting import COSTS, Coefficients, Fit, Planner, Row, quality
from moonpoly_ort.tuning.shapes import Shape, anchors

SIZES = [(m, n, k) for m in (1, 37, 300, 2000) for n, k in ((768, 768), (4096, 1024), (256, 8192))]
SHAPES = [Shape("f16", "nn", *size) for size in SIZES]
BATCHED = Shape("f16", "nn", 129, 64, 512, 24)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Of every fp16 kernel, those included that packs do without."""
    with mock.patch.object(kernel_list, "LEFT_OUT", {}):
        kernels = [k for k in compiling.catalog_kernels(90) if k.spec.dtype == "f16"]
    folder = tmp_path_factory.mktemp("pack")
    pack_format.write_pack(folder / "sm_90.mpk", 90, kernels, key="0" * 64, triton="none")
    return Planner(folder / "sm_90.mpk", devices.lookup("H200"), 1.5, folder)


def timings(planner: Planner) -> list[Row]:
    """What would be measured if the model were true for costs drawn at random."""
    rng = np.random.default_rng(0)
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    for index, kernel in enumerate(planner.kernels):
        spec, blocks = kernel.spec, planner.occupancy[index]
        step = spec.bm * spec.bn * spec.bk * rng.uniform(0.7, 1.8) / 1.7e6
        costs[index] = (rng.uniform(0.8, 3), 0.05 + step * blocks, 0.08 + step, blocks)
    rows = []
    with planner.with_costs(costs, 4300.0) as true:
        for shape in (*SHAPES, BATCHED):
            for index, kernel in enumerate(planner.kernels):
                for split in SPLITS if kernel.spec.split_k else (1,):
                    row = Row(shape, index, split, 0.0)
                    try:
                        us = planner.predict(true, [row])[0]
                    except MoonPolyError:
                        continue
                    rows.append(dataclasses.replace(row, us=us))
    return rows


def test_the_costs_behind_timings_are_found(planner: Planner) -> None:
    rows = timings(planner)
    fitted = fitting.fit_all(planner, rows, copied=4300.0)
    assert fitted.bandwidth == pytest.approx(4300.0, rel=0.15)  # few shapes are bound by it
    assert fitted.own.error < 0.03
    assert fitted.own.mean > 0.99
    assert fitted.own.mean > fitted.analytic.mean
    assert fitted.held_out is not None
    assert fitted.held_out.shapes == len(SHAPES) // 2
    assert fitted.held_out.mean > fitted.analytic.mean
    assert fitted.untuned < 0.99
    assert fitted.own.chosen.keys() == {*SHAPES, BATCHED}


def takes(planner: Planner, shape: Shape, index: int) -> bool:
    """Whether K is short enough, and two slices of every tile fit the GPU at once if they must."""
    spec = planner.kernels[index].spec
    if spec.family is Family.GEMM_SHALLOW and shape.k > spec.bk:
        return False
    tiles = -(-shape.m // spec.bm) * -(-shape.n // spec.bn) * shape.batch
    return not spec.sliced or 2 * tiles <= planner.device.sm_count * planner.occupancy[index]


def test_analytic_costs_are_those_behind_the_predictions(planner: Planner) -> None:
    costs = np.zeros(len(planner.kernels), pack_format.COST)
    for name, values in zip(
        COSTS, fitting.analytic_costs(planner, range(len(planner.kernels))).T, strict=True
    ):
        costs[name] = values
    costs["blocks_per_sm"] = planner.occupancy
    zeros = np.zeros(len(planner.kernels), pack_format.COST)
    rows = [
        Row(shape, index, 2 if kernel.spec.split_k else 1, 0.0)
        for shape in SHAPES
        for index, kernel in enumerate(planner.kernels)
        if (kernel.spec.trans_a, kernel.spec.trans_b) == (False, False)
        and not kernel.spec.family.convolves
        and takes(planner, shape, index)
    ]
    assert sum(planner.kernels[row.kernel].spec.sliced for row in rows) > 0
    with planner.with_costs(costs, 4300.0) as given, planner.with_costs(zeros, 4300.0) as derived:
        np.testing.assert_allclose(
            planner.predict(given, rows), planner.predict(derived, rows), rtol=1e-4
        )


def test_few_timings_leave_the_rest_to_the_analytic_model(planner: Planner) -> None:
    """One timing, twice as long as predicted: the costs move, and none by more than that."""
    prior = fitting.analytic_costs(planner, [0])
    assert np.isnan(prior[1:]).all()
    row = Row(Shape("f16", "nn", 300, 768, 768), 0, 1, 0.0)
    with planner.without_table() as analytic:
        row = dataclasses.replace(row, us=2 * planner.predict(analytic, [row])[0])
    fitted = Fit(planner, [row], Coefficients.probe(planner, [row]), prior)
    costs, _ = fitted.at(4300.0)
    ratios = np.array([costs[name][0] for name in COSTS]) / prior[0]
    assert ratios.max() > 1.1
    assert ratios.min() > 0.9
    assert ratios.max() < 2.2
    assert not costs["step_us"][1:].any()


def test_kernels_are_fitted_independently(planner: Planner) -> None:
    """The search goes over all kernels at once; each must end where it does alone."""
    rows = timings(planner)
    prior = fitting.analytic_costs(planner, (row.kernel for row in rows))
    whole = Fit(planner, rows, Coefficients.probe(planner, rows), prior)
    together, _ = whole.at(4300.0)
    for place, kernel in ((0, whole._kernels[0]), (-1, whole._kernels[-1])):
        own = [row for row in rows if row.kernel == kernel]
        alone = Fit(planner, own, Coefficients.probe(planner, own), prior)
        # Weights compare with the fastest kernel of a shape, which is not among its own rows.
        alone._weights = whole._weights[whole._place == whole._place[place]]
        for name in COSTS:
            assert alone.at(4300.0)[0][name][kernel] == pytest.approx(together[name][kernel])


def test_every_kernel_can_be_timed_on_the_anchors(planner: Planner) -> None:
    for layout in ("nn", "nt"):
        wanted = {
            i for i, k in enumerate(planner.kernels)
            if "nt"[k.spec.trans_a] + "nt"[k.spec.trans_b] == layout and not k.spec.family.convolves
        }  # fmt: skip
        with planner.without_table() as catalog:
            for size in anchors():
                for index in sorted(wanted):
                    split = 2 if planner.kernels[index].spec.split_k else 1
                    row = Row(Shape("f16", layout, *size), index, split, 0.0)
                    try:
                        planner.predict(catalog, [row])
                    except MoonPolyError:
                        continue
                    wanted.discard(index)
        assert not wanted


def test_choices_of_several_regions_count_as_untimed(planner: Planner) -> None:
    rows = timings(planner)
    row = next(row for row in rows if row.shape == SHAPES[5])
    with planner.without_table() as analytic:
        found = quality(planner, analytic, [row])
        chosen = analytic.plan(planner.device, row.shape.problem()).regions
    same = len(chosen) == 1 and (chosen[0].kernel, chosen[0].split) == (row.kernel, row.split)
    assert found.untimed == (0 if same else 1)
    assert found.chosen == {row.shape: row.us}


def test_a_choice_with_copies_counts_as_untimed(planner: Planner) -> None:
    """The kernel behind a copy was timed alone, which is not what the choice takes."""
    shape = Shape("f16", "nn", 4096, 1000, 2047)
    with planner.without_table() as pack:
        plan = pack.plan(planner.device, shape.problem())
        assert plan.copies
        region = plan.regions[0]
        pointer = next(
            i for i, k in enumerate(planner.kernels)
            if k.spec.family == "gemm_pointer" and (k.spec.trans_a, k.spec.trans_b) == (0, 0)
            and k.spec.align_a == k.spec.align_b == 2 and not k.spec.split_k
        )  # fmt: skip
        assert region.kernel != pointer
        found = fitting.quality(planner, pack, [Row(shape, pointer, 1, 500.0)])
    assert (found.untimed, found.shapes) == (1, 1)
    assert found.chosen == {shape: 500.0}
