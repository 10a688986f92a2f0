"""Every kernel on a row of the suite: in the interpreter, with a clock of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from moonpoly_ort.custom_ops.kernels import compiling, pack_format

from benchmarks import conv_sets, try_conv
from benchmarks.conv_suite import ConvRow
from benchmarks.interleaved import Loop
from benchmarks.machine import Setting
from benchmarks.measuring import Launch, Timing
from benchmarks.running import CPU, Provider

DEPTHWISE = ConvRow("3", "mobilenet", 2, 6, 7, 9, 6, 3, 2, 6, True)
ONLY = ["depthwise_f16_4x256x3_w4_s1", "depthwise_f16_16x64x3", "depthwise_f16_16x64x1"]


class Clock:
    """Runs every launch once; the later one is listed, the less it takes."""

    l2_bytes = 1000

    def single_us(self, launch: Launch) -> float:
        launch(0)
        return 100.0

    def compare(self, candidates: Mapping[str, Launch], loop: Loop) -> dict[str, Timing]:
        names = list(candidates)
        return {name: Timing.of([float(len(names) - i)]) for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path = tmp_path_factory.mktemp("pack") / "sm_90.mpk"
    kernels = compiling.catalog_kernels(90)
    pack_format.write_pack(path, 90, kernels, key="0" * 64, triton="none")
    return Setting(Provider(CPU, pack=path), path)


def test_kernels_are_timed_beside_the_plan(setting: Setting) -> None:
    clock: Any = Clock()
    lines, wrong = try_conv.measure(setting, clock, DEPTHWISE, "f16", ONLY)
    assert wrong == 0
    assert len(lines) == 1 + len(ONLY)
    assert all(len(line) == len(try_conv.HEAD) for line in lines)
    assert [float(str(line[5])) for line in lines] == [1.0, 2.0, 3.0, 4.0]
    names = [str(line[2]) for line in lines]
    assert names[-1].startswith("plan = conv_depthwise_f16")
    assert all(any(part in name for part in ONLY) for name in names[:-1])


def test_what_differs_from_the_plan_is_not_timed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = conv_sets.ours, []

    def spoiled(where: Setting, sets: conv_sets.ConvSets, plan: conv_sets.ConvPlan) -> Launch:
        launch = real(where, sets, plan)
        calls.append(plan)
        if len(calls) != 2:  # the first one behind the plan
            return launch

        def off(index: int) -> None:
            launch(index)
            sets.y[index][0, 0, 0, 0] += 9

        return off

    monkeypatch.setattr(conv_sets, "ours", spoiled)
    clock: Any = Clock()
    lines, wrong = try_conv.measure(setting, clock, DEPTHWISE, "f16", ONLY)
    assert (len(lines), wrong) == (len(ONLY), 1)
