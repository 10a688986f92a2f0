"""`moonpoly tune` on a GPU, with few shapes; the stand-in driver covers the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpoly_ort import native, packs, tables, tuning
from moonpoly_ort.tuning import cuda, journal, measuring, shapes

pytestmark = pytest.mark.gpu


def test_a_gpu_is_tuned_for_a_few_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(number: str, layout: str, seed: int = 0) -> dict[Any, list[shapes.Shape]]:
        sizes = ((37 + seed, 768, 768), (512 + seed, 1024, 4096), (100 + seed, 1001, 1003))
        plain = [shapes.Shape(number, layout, *size) for size in sizes]
        many = [shapes.Shape(number, layout, 129 + seed, 64, 200, 16)]
        return {(number, layout, False): plain, (number, layout, True): many}

    monkeypatch.setattr(shapes, "synthetic", few)
    device = native.device_query(0)
    pack = packs.ensure_pack(device.sm)
    tuned = tmp_path / "tuned.mpk"
    outcome = tuning.tune(
        tuning.Options(
            pack=pack, numbers=("f16",), layouts=("nn",), output=tmp_path, tuned_pack=tuned,
            force=True, minutes=5,
        )
    )  # fmt: skip
    assert outcome.blocked == {}
    assert outcome.shapes == 4
    assert outcome.verified is not None
    assert outcome.verified.mean > 0.8
    # Whatever the GPU: copying reaches a part of the data sheet, a launch takes microseconds.
    facts = journal.read(outcome.journal).facts
    peak = device.memory_clock_mhz * device.memory_bus_bits / 4000
    assert 0.4 * peak < facts["bandwidth_gbps"] < 1.1 * peak
    assert 0.3 < facts["launch_us"] < 20
    assert tables.load(outcome.table, gpu=device.name).costs
    assert packs.is_tuned(tuned, device.name, device.sm_count)


def test_a_product_on_bare_driver_calls() -> None:
    shape = shapes.Shape("f32ieee", "nt", 65, 33, 129, 3)
    device = native.device_query(0)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 65, 129), np.float32)
    b = rng.standard_normal((3, 33, 129), np.float32)
    y = np.empty((3, 65, 33), np.float32)
    with (
        native.Pack(packs.ensure_pack(device.sm)) as pack,
        native.Launcher(pack, 0) as launcher,
        cuda.Gpu(0) as gpu,
    ):
        plan = pack.plan(device, shape.problem())
        left, right, out = (gpu.allocate(array.nbytes) for array in (a, b, y))
        scratch, counters = gpu.allocate(plan.workspace_bytes), gpu.allocate(4 * plan.counters)
        gpu.fill(counters, 4 * plan.counters)
        gpu.upload(left, a)
        gpu.upload(right, b)

        def launch() -> None:
            launcher.launch(shape.problem(), plan, a=left, b=right, y=out, workspace=scratch,
                            counters=counters, stream=gpu.stream.value)  # fmt: skip

        launch()
        with gpu.capture(launch) as graph:
            gpu.fill(out, y.nbytes, 0x7FC00000)
            stopwatch = measuring.Stopwatch(gpu)
            stopwatch.start()
            graph.replay()
            stopwatch.stop()
            gpu.download(out, y)
        assert 0 < stopwatch.us() < 1e5
    exact = a.astype(np.float64) @ b.swapaxes(1, 2).astype(np.float64)
    assert np.linalg.norm(y - exact) <= 2e-5 * np.linalg.norm(exact)
