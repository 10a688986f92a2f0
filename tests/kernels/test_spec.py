from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from moonpoly_ort.custom_ops.kernels import kernel_list, pack_format, spec
from moonpoly_ort.custom_ops.kernels.kernel_list import small_specs, specs
from moonpoly_ort.custom_ops.kernels.spec import (
    SHARED_LIMIT,
    Dtype,
    Family,
    KernelSpec,
    Precision,
    accepts,
    legal,
    name,
    why_illegal,
)

HEADER = Path(pack_format.__file__).parents[1] / "runtime" / "moonpoly.h"
GOOD = KernelSpec(Family.GEMM_POINTER, Dtype.F16, 64, 64, 32, 4, 3)


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_names_are_unique_and_fit_the_pack(sm: int) -> None:
    names = [name(s) for s in specs(sm)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 96


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_listed_kernels_are_legal_and_within_budget(sm: int) -> None:
    listed = specs(sm)
    assert [why_illegal(s, sm) for s in listed] == [None] * len(listed)
    assert 300 <= len(listed) <= 900  # a pack builds in minutes
    assert 80 <= sum(s.family.convolves for s in listed) <= 110
    on_trial = specs(sm, trial=True)
    assert [why_illegal(s, sm) for s in on_trial] == [None] * len(on_trial)
    assert set(listed) <= set(on_trial)
    assert listed == specs(sm)


def test_the_name_tells_every_field() -> None:
    changes = {
        "family": Family.GEMM_TMA, "dtype": Dtype.BF16, "bm": 128, "bn": 128, "bk": 64, "warps": 8,
        "stages": 4, "trans_a": True, "trans_b": True, "split_k": True, "swap": True,
        "bias_matrix": True, "group_m": 4, "align_a": 2, "align_b": 4, "align_c": 8,
        "sliced": True, "pingpong": True,
    }  # fmt: skip
    assert set(changes) == set(spec.KernelSpec.__dataclass_fields__) - {"precision", "tf32x3"}
    names = {name(replace(GOOD, **{field: value})) for field, value in changes.items()}
    f32 = replace(GOOD, dtype=Dtype.F32)
    ieee = replace(f32, precision=Precision.IEEE)
    names |= {name(GOOD), name(f32), name(ieee), name(replace(ieee, tf32x3=True))}
    assert len(names) == len(changes) + 4


@pytest.mark.parametrize(
    ("change", "sm", "reason"),
    [
        ({}, 75, "sm_75 is not supported; supported are sm_80"),
        ({"bm": 48}, 90, "bm = 48"),
        ({"bk": 512}, 90, "bk = 512"),
        ({"warps": 3}, 90, "3 warps"),
        ({"stages": 0}, 90, "0 stages"),
        ({"group_m": 0}, 90, "group_m = 0"),
        ({"precision": Precision.IEEE}, 90, "ieee precision"),
        ({"align_b": 32}, 90, "align_b = 32"),
        ({"dtype": Dtype.F32, "align_a": 2}, 90, "align_a = 2"),
        ({"family": Family.GEMM_TMA}, 89, "need sm_90"),
        ({"family": Family.GEMM_TMA, "align_c": 8}, 90, "16 bytes"),
        ({"family": Family.GEMM_TMA_MASKED, "align_a": 8}, 90, "16 bytes"),
        ({"family": Family.COPY_PADDED}, 90, "copies are for NT"),
        ({"bm": 256, "bn": 128, "warps": 4}, 90, "128 registers"),
        ({"bm": 128, "bn": 128, "bk": 128, "stages": 6}, 86, "shared memory exceed the 101376"),
    ],
)
def test_illegal_specs_are_refused_with_the_value(
    change: dict[str, object], sm: int, reason: str
) -> None:
    bad = replace(GOOD, **change)  # type: ignore[arg-type]
    assert legal(GOOD, 90)
    assert not legal(bad, sm)
    assert reason in (why_illegal(bad, sm) or "")


DOT = KernelSpec(
    Family.GEMM_DOT, Dtype.F16, 1, 4, 2048, 8, 5, trans_b=True, bias_matrix=True, align_a=2
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trans_b": False}, "layout nt only"),
        ({"trans_a": True}, "layout nt only"),
        ({"split_k": True}, "of all of K"),
        ({"swap": True}, "upright"),
        ({"bias_matrix": False}, "matrix C"),
        ({"bm": 16}, "16x4 outputs"),
        ({"bn": 3}, "1x3 outputs"),
        ({"bk": 128}, "bk = 128"),
        ({"bm": 8, "bn": 8, "bk": 4096}, "64 sums of 4096 parts"),
        ({"warps": 3}, "3 warps"),
    ],
)
def test_dot_products_are_of_rows_and_few(change: dict[str, object], reason: str) -> None:
    bad = replace(DOT, **change)  # type: ignore[arg-type]
    for sm in SHARED_LIMIT:
        assert legal(DOT, sm)
        assert reason in (why_illegal(bad, sm) or "")


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_small_products_have_kernels_of_their_own(sm: int) -> None:
    """For each way of being unaligned; those of tensor maps on sm_90 alone."""
    listed = small_specs(sm)
    assert set(listed) <= set(specs(sm))
    for dtype, layout in product((Dtype.F16, Dtype.BF16), (False, True)):
        small = [
            s for s in listed
            if (s.family, s.dtype, s.trans_a, s.trans_b)
            == (Family.GEMM_POINTER, dtype, False, layout) and (s.bm, s.bn) == (16, 16)
        ]  # fmt: skip
        aligns = {(s.align_a, s.align_b, s.align_c) for s in small}
        assert (2, 2, 2) in aligns
        assert ((16, 16, 2) if layout else (16, 2, 2)) in aligns
    dots = [s for s in listed if s.family is Family.GEMM_DOT]
    kinds = {(s.dtype, s.precision) for s in dots}
    assert kinds == {(d, Precision.TF32) for d in Dtype} | {(Dtype.F32, Precision.IEEE)}
    single = [s for s in listed if s.family is Family.GEMM_TMA and s.warps == 1]
    assert bool(single) == (sm == 90)


def test_unsupported_architecture_lists_the_supported() -> None:
    with pytest.raises(ValueError, match=r"sm_70 .* sm_80, .* sm_120"):
        specs(70)


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_every_problem_has_a_kernel(sm: int) -> None:
    listed = specs(sm)
    kinds = [(d, Precision.TF32) for d in Dtype] + [(Dtype.F32, Precision.IEEE)]
    for (dtype, precision), trans_a, trans_b in product(kinds, (False, True), (False, True)):
        same = [
            s for s in listed
            if (s.dtype, s.precision, s.trans_a, s.trans_b) == (dtype, precision, trans_a, trans_b)
        ]  # fmt: skip
        aligns = [a for a in (2, 4, 8, 16) if a >= dtype.bytes]
        for a, b, c, k, matrix in product(aligns, aligns, aligns, (0, 1, 4096), (False, True)):
            takers = [
                s for s in same
                if accepts(
                    s, dtype=dtype, precision=precision, trans_a=trans_a, trans_b=trans_b, k=k,
                    bias_matrix=matrix, align_a=a, align_b=b, align_c=c,
                )
            ]  # fmt: skip
            assert takers, (sm, dtype, precision, trans_a, trans_b, a, b, c, k, matrix)
            # A split-K kernel needs at least two slices, and long K with little output needs one.
            assert any(not s.split_k for s in takers)
            assert matrix or any(s.split_k for s in takers)


def test_what_a_kernel_does_not_accept() -> None:
    problem = {"dtype": Dtype.F16, "k": 8}
    assert accepts(GOOD, **problem)  # type: ignore[arg-type]
    for change in (
        {"dtype": Dtype.BF16}, {"trans_a": True}, {"trans_b": True}, {"bias_matrix": True},
        {"align_a": 8}, {"align_b": 2}, {"align_c": 4},
    ):  # fmt: skip
        assert not accepts(GOOD, **{**problem, **change})  # type: ignore[arg-type]
    f32 = replace(GOOD, dtype=Dtype.F32)
    assert not accepts(f32, dtype=Dtype.F32, k=8, precision=Precision.IEEE)
    assert accepts(GOOD, dtype=Dtype.F16, k=0)
    assert not accepts(replace(GOOD, family=Family.GEMM_TMA), dtype=Dtype.F16, k=0)


def test_the_list_needs_neither_triton_nor_torch() -> None:
    program = (
        "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
        "from moonpoly_ort.custom_ops.kernels import compiling, pack_format\n"
        "pack_format.encode(90, compiling.catalog_kernels(90), key='0' * 64, triton='none')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_codes_are_those_of_the_header() -> None:
    header = re.sub(r"//[^\n]*", "", HEADER.read_text())

    def enum(kind: str, prefix: str) -> dict[str, int]:
        body = re.search(rf"enum {kind} {{(.*?)}}", header, re.DOTALL)
        assert body is not None
        codes, last = {}, -1
        for item in filter(None, (i.strip() for i in body.group(1).split(","))):
            key, _, value = (part.strip() for part in item.partition("="))
            last = int(value) if value else last + 1
            codes[key.removeprefix(prefix)] = last
        return codes

    assert enum("mp_param", "MP_P_") == {p.name: int(p) for p in pack_format.Param}
    assert enum("mp_family", "MP_") == {f.name: c for f, c in pack_format.FAMILY_CODE.items()}
    assert enum("mp_dtype", "MP_") == {d.name: c for d, c in pack_format.DTYPE_CODE.items()}
    precisions = {p.name: c for p, c in pack_format.PRECISION_CODE.items()}
    assert enum("mp_precision", "MP_") == precisions
    version = re.search(r"#define MP_PACK_VERSION (\d+)", header)
    assert version is not None
    assert int(version.group(1)) == pack_format.VERSION


def test_what_is_left_out_would_be_listed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, without = {name(s) for s in specs(90)}, kernel_list.LEFT_OUT[90]
    monkeypatch.setattr(kernel_list, "LEFT_OUT", {})
    assert {name(s) for s in specs(90)} - listed == without


def test_small_and_large_tiles_are_left_for_every_alignment() -> None:
    """What one GPU does without may be what another needs: no class of operands loses its kind."""
    listed = specs(90)
    kinds = [(d, Precision.TF32) for d in Dtype] + [(Dtype.F32, Precision.IEEE)]
    for (dtype, precision), trans_a, trans_b in product(kinds, (False, True), (False, True)):
        aligns = [a for a in (2, 4, 8, 16) if a >= dtype.bytes]
        for a, b, c in product(aligns, aligns, aligns):
            takers = [
                s for s in listed
                if accepts(
                    s, dtype=dtype, precision=precision, trans_a=trans_a, trans_b=trans_b, k=512,
                    align_a=a, align_b=b, align_c=c,
                ) and s.family is not Family.GEMM_DOT
            ]  # fmt: skip
            for small, split_k in product((False, True), (False, True)):
                assert any(
                    s.split_k == split_k and (min(s.bm, s.bn) <= 16) == small
                    for s in takers
                ), (dtype, precision, trans_a, trans_b, a, b, c, small, split_k)  # fmt: skip
