"""Shapes with few outputs, few rows or columns, little K, or many small products: what
`try_kernels --set small` times; and what kernels on the scalar units are for (`--set scalar`).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench_kernels import Shape

Sizes = tuple[int, int, int]

# Few outputs, long K, B stored along K (a column, or a repacked weight).
DOT: tuple[Sizes, ...] = (
    (5, 1, 11952), (145, 1, 26752), (80, 1, 5696), (1, 1, 3144), (1, 1, 65536), (5, 3, 48576),
    (3, 3, 25184), (13, 5, 7100), (19, 95, 43848), (224, 3, 13744), (188, 5, 46400), (29, 3, 1373),
    (1, 257, 2048), (8, 51, 4416), (30, 30, 8192),
)  # fmt: skip
# The same, B as ONNX stores it.
LONG: tuple[Sizes, ...] = (
    (4, 51, 4416), (7, 257, 2176), (2, 257, 960), (29, 3, 1373), (295, 3, 1728), (234, 2, 48960),
    (222, 384, 29568), (39, 448, 30016), (74, 56, 59776), (174, 40, 13696), (405, 8, 6656),
    (760, 8, 7232), (20, 16, 27528), (7, 128, 19040), (101, 640, 26048), (10, 192, 8000),
)  # fmt: skip
SHALLOW: tuple[Sizes, ...] = (
    (57748, 384, 4), (4541, 3392, 4), (4192, 5499, 6), (12477, 1216, 3), (349, 14496, 8),
    (975, 2368, 4), (8192, 4096, 16), (8192, 4096, 32), (8805, 8, 64), (17121, 40, 1600),
    (40000, 16, 512), (4031, 336, 416), (68, 19704, 256),
)  # fmt: skip
ROWS: tuple[Sizes, ...] = (
    (1, 1000, 2048), (5, 1000, 4864), (1, 848, 9152), (1, 9728, 896), (4, 4096, 4096),
    (1, 5120, 5120), (12, 4096, 11008), (1, 15360, 5120), (16, 27648, 5120),
)  # fmt: skip
TINY: tuple[Sizes, ...] = (
    (1, 4, 64), (5, 3, 64), (32, 2, 56), (23, 5, 4), (19, 4, 8), (83, 8, 89), (58, 166, 64),
    (2, 128, 128), (154, 56, 128), (68, 257, 108), (45, 257, 128), (157, 8, 64),
)  # fmt: skip
# Short K, rows of Y aligned: the time is that of storing Y. And long rows of few.
OUTER: tuple[Sizes, ...] = (
    (832, 936, 4), (801, 720, 8), (3075, 1152, 1), (12477, 1216, 3), (6921, 1664, 5),
    (1467, 3200, 6), (349, 14496, 8), (57748, 384, 4),
)  # fmt: skip
OUTER_OF_FP32: tuple[Sizes, ...] = ((405, 27536, 19), (824, 1216, 16), (2128, 5440, 24))
VECTOR: tuple[Sizes, ...] = (
    (1, 768, 768), (1, 4096, 1024), (1, 9728, 896), (1, 848, 9152), (1, 4096, 4096),
    (1, 5120, 5120), (4, 4096, 4096), (2, 27648, 5120),
)  # fmt: skip
# (batch, M, N, head dimension) of attention scores; the context has N and the head's swapped.
HEADS = (
    (256, 3, 3, 32), (64, 9, 13, 32), (8, 335, 335, 32), (24, 284, 626, 32), (32, 15, 15, 64),
    (256, 270, 270, 64), (64, 128, 128, 64), (96, 1, 384, 64), (32, 384, 384, 128),
    (40, 77, 77, 80),
)  # fmt: skip


def scalar_shapes() -> Iterator[Shape]:
    for dtype in ("f32ieee", "f32", "f16"):
        outer = OUTER if dtype == "f16" else OUTER + OUTER_OF_FP32
        for kind, sizes in (("outer", outer), ("vector", VECTOR)):
            for m, n, k in sizes:
                yield Shape(f"{kind}-{m}x{n}x{k}", f"{kind}-{dtype}", m, n, k, dtype)


def small_shapes() -> Iterator[Shape]:
    def made(kind: str, sizes: tuple[Sizes, ...], layout: str) -> Iterator[Shape]:
        for m, n, k in sizes:
            yield Shape(f"{kind}-{m}x{n}x{k}", kind, m, n, k, layout=layout)

    yield from made("dot", DOT, "nt")
    yield from made("long", LONG, "nn")
    yield from made("shallow", SHALLOW, "nn")
    yield from made("tiny", TINY, "nn")
    for layout in ("nn", "nt"):
        yield from made(f"rows-{layout}", ROWS, layout)
    for batch, m, n, head in HEADS:
        name = f"{batch}x{m}x{n}x{head}"
        for layout in ("nn", "nt"):
            yield Shape(f"scores-{name}", f"scores-{layout}", m, n, head, "f16", layout, batch)
        yield Shape(f"context-{name}", "context", m, head, n, "f16", "nn", batch)
