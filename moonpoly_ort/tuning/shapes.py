"""What is measured: shapes over the whole range of sizes, or a model's own weights.

A prefix of a class's shapes is spread over the range as evenly as so few can be, so that tuning
that runs out of time has seen the most telling ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import native
from .spreading import farthest_first

# How numbers are held and multiplied, by the names that timings go by.
NUMBERS = {
    "f16": (native.Dtype.F16, native.Precision.TF32),
    "bf16": (native.Dtype.BF16, native.Precision.TF32),
    "f32": (native.Dtype.F32, native.Precision.TF32),
    "f32ieee": (native.Dtype.F32, native.Precision.IEEE),
}
LAYOUTS = ("nn", "nt", "tn", "tt")
LIGHT = ("tn", "tt")  # transposed A is rare in models: fewer shapes
HEADS = (32, 64, 80, 96, 128)
# Shapes of a class: (matrix products beside the anchors, batched products).
DRAWN, BATCHED = 60, 36
LIGHT_SHAPES, LIGHT_BATCHED = 28, 8


def element_bytes(number: str) -> int:
    return 4 if NUMBERS[number][0] is native.Dtype.F32 else 2


@dataclass(frozen=True, order=True)
class Shape:
    """A product of dense matrices at aligned addresses, as a runtime hands them over.

    `number` is a key of `NUMBERS`; `layout` is two of n (stored as multiplied) and t (stored
    transposed), for A and for B; with a `batch`, both operands have one.
    """

    number: str
    layout: str
    m: int
    n: int
    k: int
    batch: int = 1

    def __str__(self) -> str:
        many = f"{self.batch} x " if self.batch > 1 else ""
        return f"{many}{self.m}x{self.n}x{self.k} {self.number} {self.layout}"

    @property
    def group(self) -> tuple[str, str, bool]:
        """What the time for tuning is shared between: number, layout, whether batched."""
        return self.number, self.layout, self.batch > 1

    @property
    def operand_bytes(self) -> tuple[int, int, int]:
        """Bytes of A, B and Y."""
        size = element_bytes(self.number) * self.batch
        return self.m * self.k * size, self.k * self.n * size, self.m * self.n * size

    def problem(self) -> native.Problem:
        """The `mp_problem`."""
        dtype, precision = NUMBERS[self.number]
        size = element_bytes(self.number)
        trans_a, trans_b = self.layout[0] == "t", self.layout[1] == "t"
        lda, ldb = (self.m if trans_a else self.k), (self.k if trans_b else self.n)
        align_a, align_b, align_c = (math.gcd(count * size, 16) for count in (lda, ldb, self.n))
        return native.Problem(
            dtype=dtype, precision=precision, trans_a=trans_a, trans_b=trans_b,
            m=self.m, n=self.n, k=self.k, batch=self.batch, lda=lda, ldb=ldb, ldc=self.n,
            a_batch_stride=self.m * self.k, b_batch_stride=self.k * self.n,
            c_batch_stride=self.m * self.n, a_div=1, a_mod=self.batch, b_div=1, b_mod=self.batch,
            align_a=align_a, align_b=align_b, align_c=align_c, alpha=1.0,
        )  # fmt: skip


def anchors() -> Iterator[tuple[int, int, int]]:
    """(m, n, k) that show each kernel's costs: few and many K steps, waves that are partly full,
    full and several, K split or not, the memory's speed, every way of being unaligned, and a K so
    short that storing the result is what takes the time."""
    aligned = (768, 768), (4096, 1024), (1024, 4096), (4096, 4096), (256, 8192)
    # N, K or both a multiple of 2 elements only, or odd.
    unaligned = (1002, 1024), (1024, 1002), (1001, 1024), (1024, 1001), (1001, 1003), (257, 4095)
    shallow = (1024, 1), (2048, 4), (640, 4), (2048, 7), (640, 8), (2048, 16), (2048, 32)
    for sizes, heights in (
        (aligned, (1, 16, 48, 160, 512, 1536, 4096)),
        (unaligned, (8, 100, 700, 3000)),
        (shallow, (300, 900, 5000)),
    ):
        for n, k in sizes:
            for m in heights:
                yield m, n, k


def drawn(count: int, rng: np.random.Generator, element: int) -> list[tuple[int, int, int]]:
    """(m, n, k) with logarithms drawn uniformly: m from 1 to 8192, n and k from 16 to 16384. A
    third has n and k aligned to 16 bytes, a third one of them, a third neither."""
    unit = 16 // element
    found = []
    for index in range(count):
        m, n, k = (round(2 ** rng.uniform(low, high)) for low, high in
                   ((0, 13), (4, 14), (4, 14)))  # fmt: skip
        way = index % 3
        n_odd, k_odd = (
            way == 2 or (way == 1 and index % 2),
            way == 2 or (way == 1 and index % 2 == 0),
        )
        n = n if n_odd else max(unit, n // unit * unit)
        k = k if k_odd else max(unit, k // unit * unit)
        found.append((m, n, k))
    return found


def batched(count: int, rng: np.random.Generator, layout: str) -> list[tuple[int, int, int, int]]:
    """(m, n, k, batch): mostly attention over sequences of any length (scores for B stored
    transposed, else their products with the values), and general ones."""
    found = []
    for index in range(count):
        batch = round(2 ** rng.uniform(1, 9))
        queries, keys = (round(2 ** rng.uniform(low, 11)) for low in (0, 4))
        head = int(rng.choice(HEADS))
        if index % 4 == 3:
            found.append((queries, keys, round(2 ** rng.uniform(4, 11)), batch))
        elif layout[1] == "t":
            found.append((queries, keys, head, batch))
        else:
            found.append((queries, head, keys, batch))
    return found


def spread(shapes: list[Shape]) -> list[Shape]:
    """The same shapes, each as far as possible from those before it: distances between the
    logarithms of the sizes, and between alignments."""
    if not shapes:
        return []
    points = np.array(
        [
            [math.log2(s.m), math.log2(s.n), math.log2(s.k), math.log2(s.batch),
             1.5 * math.log2(p.align_a), 1.5 * math.log2(p.align_b), 1.5 * math.log2(p.align_c)]
            for s, p in ((shape, shape.problem()) for shape in shapes)
        ]
    )  # fmt: skip
    return [shapes[index] for index in farthest_first(points)]


def synthetic(number: str, layout: str, seed: int = 0) -> dict[tuple[str, str, bool], list[Shape]]:
    """The shapes of one dtype and layout by group, the most telling first."""
    rng = np.random.default_rng([seed, list(NUMBERS).index(number), LAYOUTS.index(layout)])
    element = element_bytes(number)
    sizes = list(dict.fromkeys([*anchors(), *drawn(DRAWN, rng, element)]))
    plain = spread([Shape(number, layout, *size) for size in sizes])
    many = spread(
        [Shape(number, layout, *size) for size in dict.fromkeys(batched(BATCHED, rng, layout))]
    )
    if layout in LIGHT:
        plain, many = plain[:LIGHT_SHAPES], many[:LIGHT_BATCHED]
    return {(number, layout, False): plain, (number, layout, True): many}


def heights(low: int, high: int, count: int = 12) -> list[int]:
    """Row counts from low to high in even ratios, odd ones among them."""
    ratios = np.geomspace(low, high, count)
    return sorted({low, high, *(round(value) for value in ratios)})


def for_weights(
    weights: list[tuple[str, str, int, int]], rows: list[int]
) -> dict[tuple[str, str, bool], list[Shape]]:
    """The shapes of a model's weights, given as (number, layout, n, k), at every row count."""
    groups: dict[tuple[str, str, bool], list[Shape]] = {}
    for number, layout, n, k in dict.fromkeys(weights):
        for m in rows:
            shape = Shape(number, layout, m, n, k)
            groups.setdefault(shape.group, []).append(shape)
    return {group: spread(shapes) for group, shapes in groups.items()}
