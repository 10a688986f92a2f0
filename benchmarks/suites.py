"""The operator suites: matrix products of many sizes, drawn from a seed.

    python -m benchmarks.suites FOLDER [--seed 2026]     # writes gemm.csv and bmm.csv

`gemm`: the ten classes of shapes that the published evaluation of micro-kernel polymerization uses
(MikPoly, ASPLOS 2024, table 3), and the weights of models that people export, each with M in six
ranges. M is the dynamic dimension; N and K belong to a weight, which mostly is a multiple of 64,
sometimes of 8, sometimes anything. `bmm`: the two products of attention, any sequence length with
or without a past. About one row in six is marked as core: what fits a short time on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 2026
CORE_SHARE = 1 / 6
# One product stays under about 4 ms in fp16 on an H200, and its operands in fp32 under 6 GB.
MOST_FLOPS = 2e12
MOST_BYTES = 6e9

Range = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """Y (batch, m, n) = A (batch, m, k) @ B (batch, k, n); in `gemm`, B is a constant weight."""

    op: str
    id: str
    kind: str
    batch: int
    m: int
    n: int
    k: int
    core: bool
    seed: int = SEED

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Of A, B and Y together: what a product has to move at least."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        sizes = f"{self.m}x{self.n}x{self.k}"
        return f"{self.op} {self.id} {sizes if self.op == 'gemm' else f'{self.batch}x{sizes}'}"


@dataclass(frozen=True)
class ShapeClass:
    """Shapes whose sizes are spread evenly over the logarithms of three ranges."""

    name: str
    m: Range
    n: Range
    k: Range
    rows: int


CLASSES = (
    ShapeClass("deepbench", (2, 10752), (1, 48000), (128, 65536), 166),
    ShapeClass("small", (1, 256), (1, 256), (1, 256), 299),
    ShapeClass("small-longk", (1, 256), (1, 256), (257, 65536), 218),
    ShapeClass("skinny-midn", (1, 256), (257, 1024), (1, 65536), 232),
    ShapeClass("skinny-widen", (1, 256), (1025, 65536), (1, 16384), 97),
    ShapeClass("midm-narrown", (257, 1024), (1, 256), (1, 65536), 64),
    ShapeClass("midm-widen", (257, 1024), (257, 65536), (1, 8192), 87),
    ShapeClass("tall-narrown", (1025, 8192), (1, 256), (1, 16384), 65),
    ShapeClass("tall-widen", (1025, 8192), (257, 8192), (1, 8192), 136),
    ShapeClass("verytall", (8193, 65536), (1, 8192), (1, 4096), 69),
)
# The (N, K) of each model's weights.
WEIGHTS: dict[str, tuple[tuple[int, int], ...]] = {
    "bert-base": ((768, 768), (2304, 768), (3072, 768), (768, 3072)),
    "bert-large": ((1024, 1024), (4096, 1024), (1024, 4096)),
    "vit-l": ((3072, 1024), (4096, 1024), (1024, 4096), (1000, 1024)),
    "gpt2": ((2304, 768), (3072, 768), (768, 3072), (50257, 768)),
    "llama2-7b": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "llama2-13b": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "qwen-0.5b": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "resnet-fc": ((1000, 2048), (1000, 512)),
}
ROW_COUNTS: tuple[Range, ...] = ((1, 1), (2, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))
# A weight's dimension is a multiple of these, with these chances in percent.
STEPS, CHANCES = (64, 8, 1), (65, 20, 15)
HEAD_DIMS = (32, 64, 80, 128)
BATCHES, HEADS = (1, 2, 4, 8, 16), (8, 12, 16, 32)
LONGEST, DRAWS_PER_HEAD_DIM = 1024, 20

Sizes = tuple[str, int, int, int, int]  # class, batch, m, n, k


class Draw:
    """Random sizes; every call takes its numbers from the generator in a fixed order."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def size(self, limits: Range) -> int:
        """Even over the logarithm."""
        low, high = limits
        return round(math.exp(self._random.uniform(math.log(low), math.log(high))))

    def weight_size(self, limits: Range) -> int:
        """As `size`, rounded down to a multiple of a step that is at most as large."""
        size = self.size(limits)
        step = int(self._random.choices(STEPS, CHANCES)[0])
        while step > size:
            step //= 8
        return min(max(size // step * step, limits[0]), limits[1])

    def one_of(self, values: tuple[int, ...]) -> int:
        return self._random.choice(values)

    def between(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def chance(self) -> float:
        return self._random.random()


def _gemm_sizes(draw: Draw) -> Iterator[Sizes]:
    for shapes in CLASSES:
        left = shapes.rows
        while left:
            m, n, k = draw.size(shapes.m), draw.weight_size(shapes.n), draw.weight_size(shapes.k)
            moved = 4 * (m * k + k * n + m * n)
            if 2 * m * n * k <= MOST_FLOPS and moved <= MOST_BYTES:
                left -= 1
                yield shapes.name, 1, m, n, k
    for model, weights in WEIGHTS.items():
        for n, k in weights:
            for limits in ROW_COUNTS:
                yield model, 1, draw.size(limits), n, k


def _bmm_sizes(draw: Draw) -> Iterator[Sizes]:
    for dim in HEAD_DIMS:
        for _ in range(DRAWS_PER_HEAD_DIM):
            batch = draw.one_of(BATCHES) * draw.one_of(HEADS)
            queries = draw.size((1, LONGEST))
            past = draw.one_of((0, 0, draw.size((1, LONGEST))))
            yield f"scores-d{dim}", batch, queries, queries + past, dim
            yield f"context-d{dim}", batch, queries, dim, queries + past


_SIZES: dict[str, Callable[[Draw], Iterator[Sizes]]] = {"gemm": _gemm_sizes, "bmm": _bmm_sizes}
OPS = tuple(_SIZES)


def rows(op: str, seed: int = SEED) -> list[Row]:
    """The suite of `op`, one of `OPS`; the same seed gives the same rows everywhere.

    Raises:
        ValueError: there is no such suite.
    """
    if op not in _SIZES:
        raise ValueError(f"there is no suite {op!r}; there are: {', '.join(OPS)}")
    core = Draw(f"core-{op}-{seed}")
    return [
        Row(op, str(number), kind, batch, m, n, k, core.chance() < CORE_SHARE, seed)
        for number, (kind, batch, m, n, k) in enumerate(_SIZES[op](Draw(f"{op}-{seed}")))
    ]


def write(suite: list[Row], path: Path) -> None:
    """One line a row: id, class, (B in a batched suite), M, N, K, core."""
    batched = suite[0].op == "bmm"
    with path.open("w", newline="") as target:
        out = csv.writer(target, lineterminator="\n")
        out.writerow(["id", "class", *(["B"] if batched else []), "M", "N", "K", "core"])
        for row in suite:
            sizes = [*([row.batch] if batched else []), row.m, row.n, row.k]
            out.writerow([row.id, row.kind, *sizes, int(row.core)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for op in OPS:
        suite = rows(op, arguments.seed)
        write(suite, arguments.folder / f"{op}.csv")
        print(f"{op}.csv: {len(suite)} rows, {sum(row.core for row in suite)} of them core")


if __name__ == "__main__":
    main()
