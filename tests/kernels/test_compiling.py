from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from moonpoly_ort.custom_ops.kernels import compiling, loading
from moonpoly_ort.custom_ops.kernels.compiling import compile_spec, compile_specs, content_key
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.pack_format import PackedKernel
from moonpoly_ort.custom_ops.kernels.signature import PARAMETERS
from moonpoly_ort.custom_ops.kernels.spec import (
    SHARED_LIMIT,
    Dtype,
    Family,
    KernelSpec,
    estimated_resources,
    is_wide,
    name,
)

from moonpoly_ort.errors import MissingDependencyError, PackError

SMALL = KernelSpec(Family.GEMM_POINTER, Dtype.F16, 16, 16, 16, 4, 2)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


ALL_KERNELS = "MOONPOLY_TEST_ALL_KERNELS"


def _chosen(sm: int) -> list[KernelSpec]:
    """Of each source with each combination of its switches, the kernel of most registers, where
    spills show first: 265 of the 3,978 that the lists of all architectures have, which take two
    cores 50 minutes.
    """
    wanted = specs(sm, trial=True)
    if os.environ.get(ALL_KERNELS):
        return wanted
    found: dict[tuple[object, ...], KernelSpec] = {}
    for spec in sorted(wanted, key=lambda spec: -estimated_resources(spec, sm)[1]):
        f32 = spec.dtype is Dtype.F32
        switches = (spec.source, f32, spec.precision, spec.split_k, spec.bias_matrix, spec.swap)
        found.setdefault(switches, spec)
    return list(found.values())


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_kernels_compile_within_the_limits_of_their_architecture(sm: int) -> None:
    wanted = _chosen(sm)
    kernels = compile_specs(wanted, sm)
    assert [kernel.spec for kernel in kernels] == wanted
    faults = []
    for kernel in kernels:
        shared, registers = estimated_resources(kernel.spec, sm)
        # ptxas keeps a few values of a prologue in local memory over the loop: where it makes room
        # for one more block on an SM (conv), where addresses are worked out before the wait, and
        # where a tile leaves no register free. 96 bytes a thread at most; more would be sums. The
        # branch of activations may have more: what it needs for each column is worked out ahead.
        if kernel.local_bytes > 320:
            faults.append(f"{name(kernel.spec)} spills {kernel.local_bytes} bytes")
        if kernel.shared_bytes > SHARED_LIMIT[sm]:
            faults.append(f"{name(kernel.spec)} takes {kernel.shared_bytes} bytes of shared memory")
        # Shared memory limits how many blocks an SM holds, those of conv kernels apart.
        # One-stage tiles of other architectures than the lists were made for take up to 2 KB less.
        slack = 64 if sm in (80, 90) else 2 << 10
        slack = 16 << 10 if kernel.spec.family.convolves else slack
        if abs(kernel.shared_bytes - shared) > 0.05 * shared + slack:
            faults.append(f"{name(kernel.spec)}: {kernel.shared_bytes} shared, expected {shared}")
        if kernel.registers * 32 * kernel.spec.warps > 65536 or kernel.registers > 255:
            faults.append(f"{name(kernel.spec)} takes {kernel.registers} registers")
        if not 16 <= registers <= 255:
            faults.append(f"{name(kernel.spec)}: {registers} registers expected")
        if kernel.cubin[:4] != b"\x7fELF" or kernel.entry.encode() not in kernel.cubin:
            faults.append(f"{name(kernel.spec)}: no code for {kernel.entry}")
    assert faults == []


@pytest.mark.parametrize("source", PARAMETERS)
def test_parameters_are_those_of_the_kernel(source: str) -> None:
    spec = replace(SMALL, family=Family(source.removesuffix("_x3")), tf32x3=source.endswith("_x3"))
    assert spec.source == source
    assert loading.kernel(source).arg_names == [*PARAMETERS[source], *loading.constants(spec)]


def _sass(kernel: PackedKernel, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.cubin)
    command = [TOOLS / "nvdisasm", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _loops(sass: str) -> list[str]:
    """The instructions from the target of each backward branch over a tensor-core instruction to
    that branch, the shortest first."""
    loops = []
    for label in re.finditer(r"^(\.L_x_\d+):", sass, re.MULTILINE):
        for branch in re.finditer(rf"\bBRA\b.*\({re.escape(label[1])}\)", sass):
            body = sass[label.start() : branch.end()]
            if "HGMMA" in body:
                loops.append(body)
    return sorted(loops, key=len)


def _main_loop(sass: str) -> str:
    return _loops(sass)[0]


def test_tensor_maps_and_wgmma_on_hopper(tmp_path: Path) -> None:
    for spec in specs(90):
        if spec.family is Family.GEMM_TMA and not spec.trans_a and spec.dtype is not Dtype.BF16:
            tiny = spec.warps == 1 and max(spec.bm, spec.bn) <= 32
            assert is_wide(spec, 90) or tiny, spec
    wanted = [
        s for s in specs(90)
        if s.family is Family.GEMM_TMA and (s.bm, s.bn) in ((128, 256), (64, 128), (16, 64))
        and s.dtype is not Dtype.BF16 and not (s.trans_a or s.split_k or s.tf32x3)
    ]  # fmt: skip
    assert len(wanted) >= 6
    for kernel in compile_specs(wanted, 90):
        sass = _sass(kernel, tmp_path)
        assert re.search(r"\bHGMMA\.", sass), kernel.spec
        assert re.search(r"\bUTMALDG\.3D", sass), kernel.spec
        assert re.search(r"\bUTMASTG\.3D", sass), kernel.spec
        assert not re.search(r"\b(HMMA|LDL|STL)\b", sass), kernel.spec
        assert not re.search(r"\bSTS\b", _main_loop(sass)), kernel.spec


def test_warp_specialised_kernels_on_hopper(tmp_path: Path) -> None:
    own = [s for s in specs(90) if s.source == "gemm_ws"]
    wanted = [
        own[0],
        next(s for s in own if s.consumers == 3 and s.split_k),
        next(s for s in own if s.bn == 192),
        next(s for s in own if s.dtype is Dtype.F32 and not s.split_k),
        next(s for s in own if s.pingpong and s.bm == 128),
        own[-1],
    ]
    assert own[-1].sliced
    for kernel in compile_specs(wanted, 90):
        spec, sass = kernel.spec, _sass(kernel, tmp_path)
        assert re.search(r"\bHGMMA\.", sass), spec
        assert re.search(r"\bUTMALDG\.3D", sass), spec
        assert bool(re.search(r"\bUTMASTG\.3D", sass)) != spec.sliced, spec
        assert re.search(r"\bUSETMAXREG\b", sass), spec  # registers move to those that multiply
        assert kernel.local_bytes <= 368, spec  # of the branches of activations and gated pairs
        # In the K loop one value at most: three consumers with stream-K reload a bound of it.
        assert len(re.findall(r"\b(?:LDL|STL)\b", _main_loop(sass))) <= 1, spec
        assert kernel.dependent_launch
        assert re.search(r"\bACQBULK\b", sass), spec  # it waits for the kernel in front
        shared, registers = estimated_resources(spec, 90)
        assert kernel.shared_bytes == pytest.approx(shared, rel=0.05)
        assert kernel.registers == pytest.approx(registers, abs=8)
        a, b, y = kernel.descriptors
        assert (a.box[1:], b.box[0], y.box[1]) == (
            (spec.consumer_rows, 128 // spec.dtype.bytes),
            1,
            spec.consumer_rows,
        )


def test_products_of_split_factors_on_hopper(tmp_path: Path) -> None:
    tiles = {Family.GEMM_TMA: (64, 64, 32), Family.GEMM_WS: (128, 128, 32)}
    wanted = [
        s for s in specs(90, trial=True)
        if s.tf32x3 and (s.bm, s.bn, s.bk) == tiles.get(s.family)
        and not (s.split_k or s.bias_matrix)
    ]  # fmt: skip
    assert [s.family for s in wanted] == [Family.GEMM_TMA] + [Family.GEMM_WS] * 2
    for kernel in compile_specs(wanted, 90):
        assert kernel.local_bytes <= 96  # of the branch of activations
        # Another loop computes again what is NaN, with one product.
        loops = _loops(_sass(kernel, tmp_path))
        loop = next(loop for loop in loops if len(re.findall(r"\bHGMMA\b", loop)) == 12)
        # Three products of four instructions each, all with the left factor from registers, and no
        # wait between those of one product: the compiler did not serialise them.
        instruction = rf"\bHGMMA\.64x{kernel.spec.bn}x8\S* R\d+, R\d+, gdesc"
        assert len(re.findall(instruction, loop)) == 12, kernel.spec
        assert len(re.findall(r"\bWARPGROUP\.DEPBAR", loop)) <= 3, kernel.spec


@pytest.mark.parametrize("family", [Family.GEMM_TMA, Family.GEMM_TMA_MASKED, Family.GEMM_POINTER])
def test_a_block_knows_where_it_works_before_it_waits(family: Family, tmp_path: Path) -> None:
    spec = next(s for s in specs(90) if s.family is family and s.bm == 16 and not s.split_k)
    kernel = compile_spec(spec, 90)
    assert kernel.dependent_launch
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/(.*)", _sass(kernel, tmp_path))
    load = next(i for i, line in enumerate(lines) if re.search(r"\b(LDG|UTMALDG)\b", line))
    places = [
        (i, found.group()) for i, line in enumerate(lines[:load])
        if (found := re.search(r"\b(ACQBULK|PREEXIT)\b", line))
    ]  # fmt: skip
    assert places[0][0] > 100
    wait, let_next_in = "ACQBULK", "PREEXIT"
    # Without a branch, or one for a kernel that lets the next one join and one for all others.
    paths = {
        Family.GEMM_POINTER: [wait, let_next_in],
        Family.GEMM_TMA: [wait, let_next_in, let_next_in, wait],
        Family.GEMM_TMA_MASKED: [wait, let_next_in, let_next_in, wait],
    }
    assert [what for _, what in places] == paths[family]


def test_a_factor_of_tf32_would_be_copied_if_it_did_not_pass_through_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = next(s for s in specs(90) if name(s).startswith("gemm_tma_f32_nn_64x128"))
    monkeypatch.setattr(compiling, "_rounded", lambda spec, sm: "none")
    assert re.search(r"\bSTS\b", _main_loop(_sass(compile_spec(spec, 90), tmp_path)))


@pytest.mark.parametrize(("sm", "align", "bits"), [(80, 16, 128), (80, 8, 64), (90, 4, 32)])
def test_alignment_decides_the_width_of_loads(
    sm: int, align: int, bits: int, tmp_path: Path
) -> None:
    spec = replace(
        SMALL, bm=64, bn=64, bk=32, align_a=align, align_b=align, align_c=align, stages=3
    )
    sass = _sass(compile_spec(spec, sm), tmp_path)
    suffixes = set(re.findall(r"\bLDGSTS\.E((?:\.[A-Z0-9_]+)*)", sass))
    assert suffixes
    widths = {128 if ".128" in s else 64 if ".64" in s else 32 for s in suffixes}
    assert widths == {bits}, suffixes


def test_descriptors_are_the_boxes_of_the_tiles() -> None:
    spec = next(s for s in specs(90) if name(s).startswith("gemm_tma_f16_tn_128x256x64"))
    a, b, y = compile_spec(spec, 90).descriptors
    # Rows of 64 halves, 128 bytes, take the widest swizzle; the kernel loads several boxes.
    assert (a.box, b.box, y.box) == ((1, 64, 64), (1, 64, 64), (1, 128, 64))
    assert {a.swizzle, b.swizzle, y.swizzle} == {3}


def test_registers_are_what_cuobjdump_reads(tmp_path: Path) -> None:
    for kernel in compile_specs(specs(90)[::75], 90):
        path = tmp_path / "kernel.cubin"
        path.write_bytes(kernel.cubin)
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", path]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None
        assert (kernel.registers, kernel.local_bytes) == tuple(map(int, found.groups()))


def test_spilled_bytes_are_noticed() -> None:
    spec = KernelSpec(Family.GEMM_TMA, Dtype.F16, 128, 128, 64, 4, 3, bias_matrix=True)
    assert compile_spec(spec, 90).local_bytes > 0


def test_compilation_does_not_depend_on_the_machine() -> None:
    cubin = compile_spec(SMALL, 90).cubin
    assert os.getcwd().encode() not in cubin
    assert str(Path(compiling.__file__).parent).encode() not in cubin


def test_progress_and_order() -> None:
    wanted = [replace(SMALL, bn=n) for n in (64, 16, 32)]
    seen: list[tuple[int, int, str]] = []
    kernels = compile_specs(wanted, 80, progress=lambda *step: seen.append(step))
    assert [k.spec for k in kernels] == wanted
    assert [(done, total) for done, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    assert {last for _, _, last in seen} == set(map(name, wanted))


def test_an_illegal_kernel_fails_the_build_with_its_name() -> None:
    bad = replace(SMALL, family=Family.GEMM_TMA)
    with pytest.raises(PackError, match=f"{name(bad)} cannot be compiled for sm_80: .*need sm_90"):
        compile_specs([SMALL, bad], 80)


def test_a_compiler_failure_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "constants", lambda spec, **_: {"BM": "wide"})
    with pytest.raises(PackError, match=rf"Triton cannot compile {name(SMALL)} for sm_80"):
        compile_spec(SMALL, 80)


def test_an_unwritable_cache_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.raises(PackError, match="TRITON_CACHE_DIR names another folder"):
        compile_spec(replace(SMALL, bn=128), 80)


@pytest.mark.parametrize("version", ["3.6.0", None])
def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(_: str) -> str:
        if version is None:
            raise compiling.importlib.metadata.PackageNotFoundError("triton")
        return version

    monkeypatch.setattr(compiling.importlib.metadata, "version", find)
    with pytest.raises(MissingDependencyError, match=r"Triton 3\.9, .*moonpoly-ort\[tune\]"):
        compile_spec(SMALL, 80)


def test_interpretation_of_all_of_triton_excludes_compilation() -> None:
    program = (
        "from moonpoly_ort.custom_ops.kernels import compiling, kernel_list\n"
        "compiling.compile_spec(kernel_list.specs(80)[0], 80)"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.returncode == 1
    assert "PackError: kernels cannot be compiled while TRITON_INTERPRET is set" in run.stderr


def test_key_depends_on_content_only(monkeypatch: pytest.MonkeyPatch) -> None:
    key = content_key(90, "3.9.0")
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key == content_key(90, "3.9.0")
    trial = content_key(90, "3.9.0", trial=True)
    assert len({key, trial, content_key(90, "3.9.1"), content_key(89, "3.9.0")}) == 4
    monkeypatch.setattr(compiling, "specs", lambda sm, **_: specs(sm)[1:])
    shorter = content_key(90, "3.9.0")
    monkeypatch.setattr(compiling, "specs", specs)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#")
    assert len({key, shorter, content_key(90, "3.9.0")}) == 3
