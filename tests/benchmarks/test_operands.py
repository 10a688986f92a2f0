"""The checks on kernels must catch what kernels do wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.operands import (  # noqa: E402
    BITS,
    DTYPES,
    PATTERNS,
    Operands,
    Product,
    dense,
    dense_problem,
    relative_error,
)
from moonpoly_ort import native  # noqa: E402

PRODUCTS = [
    Product(5, 7, 9, align_a=2, align_b=2, align_c=2),
    Product(5, 16, 24, "bf16", trans_b=True, bias="row"),
    Product(8, 3, 6, "f32", trans_a=True, align_b=4, align_c=4, bias="column", beta=-1.5),
    Product(4, 8, 8, batch=6, a_map=(2, 3), b_map=(1, 2), bias="matrix", alpha=0.5),
    Product(4, 8, 8, batch=3, a_map=(1, 1), b_map=(1, 3), bias="scalar", packed=True),
]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_reference_is_the_product(product: Product) -> None:
    operands = Operands.allocate(product, "cpu")
    a, b = operands.a.view.double().numpy(), operands.b.view.double().numpy()
    c = None if operands.c is None else operands.c.view[0].double().numpy()
    reference = operands.reference().numpy()
    assert reference.shape == (product.batch, product.m, product.n)
    for z in range(product.batch):
        left = a[z // product.a_map[0] % product.a_map[1]]
        right = b[z // product.b_map[0] % product.b_map[1]]
        value = product.alpha * (
            (left.T if product.trans_a else left) @ (right.T if product.trans_b else right)
        )
        if c is not None:
            value = value + product.beta * (c.T if product.bias == "column" else c)
        np.testing.assert_allclose(reference[z], value, rtol=1e-12)
    assert torch.equal(operands.reference(slice(1, 3)), operands.reference()[:, 1:3])


def test_the_reference_of_a_gated_product_and_of_one_in_fp32() -> None:
    gated = Product(3, 8, 9, align_a=2, align_b=2, align_c=2, gated=True)
    gated = replace(gated, activation=native.Activation.SIGMOID)
    operands = Operands.allocate(gated, "cpu")
    linear = operands._linear().numpy()
    want = linear[..., 1::2] / (1 + np.exp(-linear[..., 0::2]))
    np.testing.assert_allclose(operands.reference().numpy(), want, rtol=1e-12)
    assert operands.y.view.shape == (1, 3, 4)
    assert relative_error(operands.reference().half(), operands.reference()) < 1e-3
    wide = Operands.allocate(Product(3, 8, 9, align_a=2, align_b=2, align_c=2, wide=True), "cpu")
    assert (wide.y.view.dtype, wide.y.stray_writes("f32")) == (torch.float32, 0)
    assert wide.limit(wide.reference()) == wide.product.limit


@pytest.mark.parametrize("align", [2, 4, 8, 16])
@pytest.mark.parametrize("form", [{}, {"gated": True}, {"wide": True}])
def test_rows_of_y_have_the_alignment_of_the_product_s_type(
    form: dict[str, bool], align: int
) -> None:
    product = Product(5, 7, 9, align_a=2, align_b=2, align_c=align, **form).fitted()
    operands = Operands.allocate(product, "cpu")
    assert product.n % (2 if product.gated else 1) == 0
    assert math.gcd(2 * operands.y.pitch, 2 * product.y_columns, 16) >= align
    assert operands.y.pointer % align == 0
    assert operands.problem.ldc == operands.y.pitch


@pytest.mark.parametrize("align", [2, 4, 8, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_operands_have_exactly_the_alignment_asked_for(align: int, packed: bool) -> None:
    product = Product(5, 7, 9, align_a=align, align_b=align, align_c=align, packed=packed).fitted()
    operands = Operands.allocate(product, "cpu")
    for stack, columns in ((operands.a, product.k), (operands.b, product.n)):
        facts = (stack.pointer, 2 * stack.pitch, 2 * stack.stride, 2 * columns, 16)
        assert math.gcd(*facts) >= align
        assert math.gcd(2 * stack.pitch, 16) == align
        if not packed:
            assert math.gcd(stack.pointer, 2 * align) == align


def test_what_surrounds_an_operand_is_nan() -> None:
    operands = Operands.allocate(PRODUCTS[0], "cpu")
    outside = torch.isnan(operands.a.storage).sum().item()
    assert outside == operands.a.storage.numel() - operands.a.view.numel()
    assert torch.isfinite(operands.a.view).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_stray_and_missing_writes_are_counted(dtype: str) -> None:
    size = DTYPES[dtype].itemsize
    product = replace(PRODUCTS[0], dtype=dtype, align_a=size, align_b=size, align_c=size)
    y = Operands.allocate(product, "cpu").y
    assert (y.stray_writes(dtype), y.unwritten(dtype)) == (0, y.view.numel())
    y.view.zero_()
    assert (y.stray_writes(dtype), y.unwritten(dtype)) == (0, 0)
    behind_a_row = y.start + product.n
    y.storage[[behind_a_row, 0, -1]] = 0
    y.storage.view(BITS[dtype])[y.start] = PATTERNS[dtype]
    assert (y.stray_writes(dtype), y.unwritten(dtype)) == (3, 1)
    y.poison(dtype)
    assert (y.stray_writes(dtype), y.unwritten(dtype)) == (0, y.view.numel())


def test_special_values_must_stand_in_their_places() -> None:
    exact = torch.tensor([1.0, math.nan, math.inf, -math.inf, 1e6], dtype=torch.float64)
    assert relative_error(exact.half(), exact) == 0.0  # 1e6 is Inf in fp16
    for place, value in ((0, math.nan), (1, 0.0), (3, math.inf), (4, 1.0)):
        wrong = exact.tolist()
        wrong[place] = value
        assert relative_error(torch.tensor(wrong).half(), exact) == math.inf
    zeros = torch.zeros(3, dtype=torch.float64)
    assert relative_error(zeros.half(), zeros) == 0.0
    assert relative_error(zeros.half() + 1, zeros) == math.inf


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_a_planned_problem_is_the_one_that_is_measured(layout: str) -> None:
    for sizes in ((7, 24, 40), (8, 13, 16), (5, 1, 24), (1, 9, 8)):
        for batch in (1, 3):
            measured = Operands.allocate(dense(*sizes, "f16", layout, batch=batch), "cpu").problem
            planned = dense_problem(*sizes, "f16", layout, batch=batch)
            for name in (
                "trans_a", "trans_b", "lda", "ldb", "ldc", "align_a", "align_b", "align_c", "m",
                "n", "batch", "a_mod", "b_mod", "a_batch_stride", "b_batch_stride",
                "c_batch_stride",
            ):  # fmt: skip
                assert getattr(measured, name) == getattr(planned, name), name


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_a_single_row_or_column_is_described_as_the_runtime_does(layout: str) -> None:
    for m, n, k in ((5, 1, 24), (1, 9, 8), (1, 1, 16), (6, 1, 7)):
        a = [k, m] if layout[0] == "t" else [m, k]
        b = [n, k] if layout[1] == "t" else [k, n]
        ours = dense_problem(m, n, k, "f16", layout)
        theirs = native.gemm_problem(
            a, b, None, native.Dtype.F16, trans_a=layout[0] == "t", trans_b=layout[1] == "t"
        )
        for name in ("m", "n", "k", "trans_a", "trans_b", "align_a", "align_b", "align_c"):
            assert getattr(ours, name) == getattr(theirs, name), name
