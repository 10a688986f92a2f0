"""The ways in which bench_unaligned multiplies a shape: each computes it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.bench_kernels import Shape  # noqa: E402
from benchmarks.bench_unaligned import Unaligned, unaligned  # noqa: E402
from benchmarks.machine import Setting  # noqa: E402
from benchmarks.operands import Operands, Product, relative_error, repack  # noqa: E402
from benchmarks.running import CPU, Provider  # noqa: E402
from moonpoly_ort import packs  # noqa: E402
from moonpoly_ort.errors import ProblemError  # noqa: E402


@pytest.fixture(scope="module")
def bench() -> Unaligned:
    made = object.__new__(Unaligned)  # without the GPU that its constructor asks
    made.setting = Setting(Provider(CPU), packs.catalog(90))
    return made


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        (Shape("1", "", 20, 45, 72), {"stored", "repacked", "copied"}),
        (
            Shape("2", "", 9, 40, 77, layout="nt"),
            {"stored", "repacked", "copied", "repacked+copied"},
        ),
        (Shape("3", "", 33, 30, 40, "f32"), {"stored", "repacked"}),
    ],
    ids=["nn", "nt", "f32"],
)
def test_every_way_computes_the_product(bench: Unaligned, shape: Shape, ways: set[str]) -> None:
    assert unaligned(shape)
    candidates, chosen = bench.candidates(shape.problem())
    assert {way for way, _, _ in candidates} <= ways
    assert len({way for way, _, _ in candidates}) >= 2
    assert 0 <= chosen < len(candidates)
    operands = Operands.allocate(shape.product(), "cpu")
    sets = [(operands, repack(operands, bench.setting.pack, None))]
    reference = operands.reference()
    for way in sorted({way for way, _, _ in candidates}):  # the likeliest of each
        one = next(candidate for candidate in candidates if candidate[0] == way)
        operands.y.poison(operands.product.dtype)
        bench.launch_of(sets, one)(0)
        assert relative_error(operands.y.view, reference) <= operands.limit(reference)
        assert operands.y.stray_writes(operands.product.dtype) == 0


def test_aligned_weights_are_not_repacked(bench: Unaligned) -> None:
    assert not unaligned(Shape("4", "", 20, 48, 72))
    operands = Operands.allocate(Product(20, 48, 72, packed=True), "cpu")
    with pytest.raises(ProblemError, match="used as it is stored"):
        repack(operands, bench.setting.pack, None)
