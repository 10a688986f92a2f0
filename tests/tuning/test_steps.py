"""The steps of tuning that need neither GPU nor driver."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpoly_ort.custom_ops.kernels.kernel_list import specs
from moonpoly_ort.custom_ops.kernels.spec import name

from moonpoly_ort import devices, errors, native, packs, tables
from moonpoly_ort.tuning import (
    busy,
    candidates,
    journal,
    schedule,
    selecting,
    shapes,
    weights,
)
from moonpoly_ort.tuning.measuring import Timed, launches_for, rotation
from moonpoly_ort.tuning.shapes import Shape

HEADER = {"gpu": "NVIDIA H200", "pack_key": "0" * 64, "driver": "580"}
SHAPE = Shape("f16", "nn", 5, 64, 96)
TIMES = [Timed("a", 1, 3.25, True), Timed("b", 2, 4.0, False)]


class TestShapes:
    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_an_early_prefix_covers_the_range(self, layout: str) -> None:
        groups = shapes.synthetic("f16", layout)
        plain = groups["f16", layout, False]
        assert len(plain) == len(set(plain))
        first = plain[:16]
        for axis in ("m", "n", "k"):
            sizes = [math.log2(getattr(shape, axis)) for shape in first]
            assert max(sizes) - min(sizes) > 6, axis
        aligns = {p.align_b for p in (shape.problem() for shape in first)}
        assert {2, 16} <= aligns
        assert all(shape.batch > 1 for shape in groups["f16", layout, True])

    def test_they_are_the_same_every_time_and_no_list_is_another(self) -> None:
        assert shapes.synthetic("f16", "nn") == shapes.synthetic("f16", "nn")
        one, other = (shapes.synthetic(n, "nn")[n, "nn", True] for n in ("f16", "bf16"))
        assert [(s.m, s.n) for s in one] != [(s.m, s.n) for s in other]

    @given(
        st.sampled_from(list(shapes.NUMBERS)), st.sampled_from(shapes.LAYOUTS),
        st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(1, 7),
    )  # fmt: skip
    def test_every_shape_is_a_problem_with_a_plan(
        self, number: str, layout: str, m: int, n: int, k: int, batch: int
    ) -> None:
        shape = Shape(number, layout, m, n, k, batch)
        with native.Pack(packs.catalog(90)) as catalog:
            plan = catalog.plan(devices.lookup("H200"), shape.problem())
        assert sum(region.z for region in plan.regions) >= batch
        a, b, y = shape.operand_bytes
        size = shapes.element_bytes(number)
        assert (a, b, y) == (batch * m * k * size, batch * k * n * size, batch * m * n * size)

    def test_a_models_row_counts(self) -> None:
        assert shapes.heights(1, 1) == [1]
        found = shapes.heights(1, 4096)
        assert (found[0], found[-1]) == (1, 4096)
        assert len(found) > 8


class TestMeasuring:
    def test_rotation_goes_beyond_the_cache(self) -> None:
        for size in (1, 1000, 10**6, 10**9):
            sets = rotation(size, 50 << 20)
            assert sets >= 1
            assert sets == 128 or sets * size >= 2 * (50 << 20)

    def test_graphs_are_neither_short_nor_endless(self) -> None:
        assert launches_for(1.0, 100, (2, 24)) == 24
        assert launches_for(1e6, 100, (2, 24)) == 2
        assert launches_for(0.0, 100, (2, 24)) == 24
        assert launches_for(20.0, 100, (2, 24)) == 5

    def test_only_promising_candidates_are_timed(self) -> None:
        found = candidates.promising(
            [
                candidates.Candidate("x", kernel, split, SimpleNamespace(predicted_us=us))  # type: ignore[arg-type]
                for kernel, split, us in (
                    (0, 1, 9.0), (1, 2, 4.0), (1, 3, 3.0), (1, 4, 5.0), (2, 1, 6.0)
                )
            ],
            2.0, splits=2,
        )  # fmt: skip
        assert [(one.kernel, one.split) for one in found] == [(1, 3), (1, 2), (2, 1)]
        assert candidates.promising([], 2.0) == []

    def test_kernels_that_are_avoided_are_no_candidates(self) -> None:
        device = devices.lookup("H200")
        with native.Pack(packs.catalog(90)) as catalog:
            found = candidates.Kernels(catalog, device).legal(SHAPE.problem())
            names = {one.name for one in found}
            avoided = min(names)
            others = candidates.Kernels(catalog, device, {avoided}).legal(SHAPE.problem())
            assert {one.name for one in others} == names - {avoided}
            only = candidates.Kernels(catalog, device, (), lambda n: n == avoided)
            assert {one.name for one in only.legal(SHAPE.problem())} == {avoided}


class TestJournal:
    def test_what_was_noted_is_there_again(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        with journal.Journal(path, HEADER) as book:
            book.facts({"launch_us": 1.5})
            book.begin_check("a")
            book.end_check("a", "")
            book.begin_check("b")
            book.end_check("b", "wrong")
            book.timed(SHAPE, TIMES)
        with journal.Journal(path, HEADER) as book:
            assert book.record.facts == {"launch_us": 1.5}
            assert book.record.checked == {"a": "", "b": "wrong"}
            assert book.record.blocked == {"b": "wrong"}
            assert book.record.timings == {SHAPE: TIMES}

    @pytest.mark.parametrize("torn", ['{"sha', '{"shape": {}}', "\udcff"])
    def test_a_torn_last_line_is_cut(self, tmp_path: Path, torn: str) -> None:
        path = tmp_path / "j.jsonl"
        with journal.Journal(path, HEADER) as book:
            book.timed(SHAPE, TIMES)
        with path.open("ab") as file:
            file.write(torn.encode(errors="surrogateescape"))
        assert journal.read(path).timings == {SHAPE: TIMES}
        with journal.Journal(path, HEADER) as book:
            book.end_check("a", "")
        record = journal.read(path)
        assert (record.timings, record.checked) == ({SHAPE: TIMES}, {"a": ""})

    def test_damage_before_the_end_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        for text in ("nonsense\n", json.dumps({"journal": 99}) + "\n",
                     json.dumps({"journal": 1}) + '\n{"shape"\n{"facts": {}}\n'):  # fmt: skip
            path.write_text(text)
            with pytest.raises(errors.TableError, match="damaged in line"):
                journal.Journal(path, HEADER)
        with journal.Journal(path, HEADER, fresh=True) as book:
            assert not book.record.timings

    def test_another_driver_starts_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        with journal.Journal(path, HEADER) as book:
            book.timed(SHAPE, TIMES)
        with journal.Journal(path, HEADER | {"driver": "590"}) as book:
            assert not book.record.timings
        assert journal.read(tmp_path / "j.jsonl.old").timings == {SHAPE: TIMES}

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        with (
            journal.Journal(path, HEADER),
            pytest.raises(errors.OutputError, match="another process"),
        ):
            journal.Journal(path, HEADER)
        journal.Journal(path, HEADER).close()

    def test_a_check_that_never_ends_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        for attempts in range(1, journal.ATTEMPTS + 1):
            with journal.Journal(path, HEADER) as book:
                assert book.record.blocked == {}
                book.begin_check("a")
                book.begin_check("b")
                book.interrupted("b")
            assert journal.read(path).begun == {"a": attempts}
        assert list(journal.read(path).blocked) == ["a"]

    def test_one_file_for_each_gpu_and_set_of_kernels(self) -> None:
        assert journal.file_name("NVIDIA L4", "ab" * 32) == "gemm__nvidia-l4.abababababab.jsonl"
        assert "gemm_ws" in journal.file_name("NVIDIA L4", "ab" * 32, "gemm_ws")


class TestSchedule:
    def groups(self) -> dict[schedule.Group, list[Shape]]:
        return {
            (number, layout, False): [Shape(number, layout, 1, 8, 8 * i + 8) for i in range(20)]
            for number in ("f16", "f32") for layout in ("nn", "tn")
        }  # fmt: skip

    def test_time_is_shared_by_weight(self) -> None:
        plan, spent = schedule.Schedule(self.groups()), dict.fromkeys(self.groups(), 0.0)
        for _ in range(25):
            shape = plan.next()
            assert shape is not None
            seconds = 3.0 if shape.number == "f32" else 1.0  # each f32 shape takes longer
            plan.spent(shape, seconds)
            spent[shape.group] += seconds
        assert spent["f16", "nn", False] == pytest.approx(spent["f32", "nn", False], abs=3)
        assert spent["f16", "tn", False] == pytest.approx(spent["f16", "nn", False] / 4, abs=3)

    def test_each_group_comes_in_its_own_order_and_once(self) -> None:
        groups = self.groups()
        plan, seen = schedule.Schedule(groups), []
        while (shape := plan.next()) is not None:
            seen.append(shape)
            plan.spent(shape, 1.0)
        assert len(plan) == 0
        for group, expected in groups.items():
            assert [shape for shape in seen if shape.group == group] == expected

    def test_what_is_done_is_left_out_and_counted(self) -> None:
        groups = self.groups()
        done = groups["f16", "nn", False][:15]
        plan = schedule.Schedule(groups, done)
        assert len(plan) == 65
        order = []
        for _ in range(20):
            shape = plan.next()
            assert shape is not None
            order.append(shape)
            plan.spent(shape, 1.0)
        assert not set(order) & set(done)
        # One to learn how long its shapes take: then the 15 of before count.
        assert sum(s.number == "f16" and s.layout == "nn" for s in order) == 1


class TestBusy:
    def smi(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        path = folder / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    @pytest.mark.parametrize(
        ("apps", "gpu", "reason"),
        [("", "3, 580.1, 1980, 1980", None), ("", "[N/A], 580.1, 1, 1", None),
         ("", "42, 580.1, 1980, 1980", "42% busy"), ("77", "0, 580.1, 1, 1", "compute on it: 77")],
    )  # fmt: skip
    def test_what_nvidia_smi_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apps: str, gpu: str,
        reason: str | None,
    ) -> None:  # fmt: skip
        self.smi(tmp_path, monkeypatch,
                 f'case "$*" in *compute-apps*) echo "{apps}";; *) echo "{gpu}"; esac')  # fmt: skip
        if reason is None:
            assert busy.refuse_busy("0000:01:00.0", 0, force=False, pause=0) == ""
            return
        with pytest.raises(errors.DeviceError, match=f"{reason}.*--force"):
            busy.refuse_busy("0000:01:00.0", 0, force=False, pause=0)
        assert reason in busy.refuse_busy("0000:01:00.0", 0, force=True, pause=0)

    def test_work_that_has_just_ended_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = tmp_path / "looked"
        self.smi(tmp_path, monkeypatch,
                 f'case "$*" in *compute-apps*) ;; *) if [ -e {state} ]; then echo "0, a, 1, 1"; '
                 f'else echo "90, a, 1, 1"; touch {state}; fi;; esac')  # fmt: skip
        assert busy.refuse_busy("x", 0, force=False, pause=0) == ""

    def test_where_nothing_can_be_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
        assert "No devices" in busy.refuse_busy("x", 0, force=False, pause=0)
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        assert "comes with the driver" in busy.refuse_busy("x", 0, force=False, pause=0)
        assert busy.state("x") == ("unknown", "unknown")


class TestSelection:
    def kernels(self, trans_b: int = 0) -> list[native.KernelRecord]:
        with native.Pack(packs.catalog(90)) as catalog:
            key = (int(native.Dtype.F16), 0, 0, trans_b)
            return [kernel for kernel in catalog.kernels if selecting.class_of(kernel) == key]

    def timings(
        self, us: dict[str, float], count: int = 30, layout: str = "nn"
    ) -> list[tuple[Shape, list[Timed]]]:
        rng = np.random.default_rng(0)
        return [
            (Shape("f16", layout, i + 1, 64, 64),
             [Timed(n, 1, value * (1 + 1e-4 * rng.uniform()), True) for n, value in us.items()])
            for i in range(count)
        ]  # fmt: skip

    def test_what_gains_nothing_goes_and_what_is_needed_stays(self) -> None:
        kernels = self.kernels()
        aligned = [k.name for k in kernels if k.family == 0 and not k.bias_matrix]
        good, slow = aligned[0], aligned[1]
        dropped = selecting.superfluous(kernels, self.timings({good: 10.0, slow: 11.0}))
        assert dropped == [slow]  # of the others nothing is known
        every = {k.name: 10.0 if k.name == good else 11.0 for k in kernels}
        dropped = selecting.superfluous(kernels, self.timings(every))
        assert slow in dropped
        assert good not in dropped
        kept = [kernel for kernel in kernels if kernel.name not in dropped]
        assert all(k in kept for k in kernels if k.bias_matrix)
        # Every problem that had a kernel still has one, also without scratch memory.
        with native.Pack(packs.catalog(90)) as catalog:
            left = candidates.Kernels(catalog, devices.lookup("H200"), dropped)
            for size in ((1, 1, 1), (7, 9, 11), (64, 64, 64), (3, 8, 1), (5, 1002, 1024)):
                legal = left.legal(Shape("f16", "nn", *size).problem())
                assert any("split" not in one.name for one in legal), size

    def test_a_copying_kernel_is_no_kernel_for_a_product(self) -> None:
        """It counts for no problem, so the last kernel of a problem stays; and what multiplies
        copies stays, though it is slow on operands that need none."""
        family = native.Family
        kernels = [k for k in self.kernels(trans_b=1) if not k.bias_matrix]
        assert any(k.family == family.COPY_PADDED for k in kernels)
        good = next(k.name for k in kernels if k.family == family.GEMM_TMA)
        every = {
            k.name: 10.0 if k.name == good else 11.0
            for k in kernels if k.family != family.COPY_PADDED
        }  # fmt: skip
        dropped = selecting.superfluous(kernels, self.timings(every, layout="nt"))
        assert dropped
        kept = [k for k in kernels if k.name not in dropped]
        assert any(
            k.family == family.GEMM_POINTER and k.align_a == k.align_b == 2 and not k.split_k
            for k in kept
        )
        for always in (family.COPY_PADDED, family.GEMM_TMA_MASKED):
            wanted = [k.name for k in kernels if k.family == always]
            assert wanted
            assert [k.name for k in kept if k.family == always] == wanted

    def test_a_kernel_that_wins_on_some_shapes_stays(self) -> None:
        kernels = self.kernels()
        one, two = [k.name for k in kernels if k.family == 0 and not k.bias_matrix][:2]
        timings = self.timings({one: 10.0, two: 12.0}, 29)
        timings.append((Shape("f16", "nn", 99, 64, 64), [Timed(one, 1, 12.0, True),
                                                        Timed(two, 1, 10.0, True)]))  # fmt: skip
        # On average its loss is small, but one shape would lose 20%.
        assert not {one, two} & set(selecting.superfluous(kernels, timings))

    def test_few_shapes_drop_nothing(self) -> None:
        kernels = self.kernels()
        one, two = [k.name for k in kernels][:2]
        few = self.timings({one: 1.0, two: 9.0}, selecting.LEAST_SHAPES - 1)
        assert selecting.superfluous(kernels, few) == []

    def test_blocked_kernels_are_not_counted_on(self) -> None:
        kernels = self.kernels()
        best, next_best = [k.name for k in kernels if k.family == 0 and not k.bias_matrix][:2]
        timings = self.timings({best: 1.0, next_best: 2.0})
        dropped = selecting.superfluous(kernels, timings, blocked=[best])
        assert next_best not in dropped
        assert best not in dropped


class TestTables:
    def table(self, **changes: Any) -> tables.Table:
        names = [name(spec) for spec in specs(90)]
        base = {
            "gpu": "NVIDIA H200", "sm": 90, "sm_count": 132, "shared_per_block": 232448,
            "bandwidth_gbps": 4300.0, "launch_us": 1.5, "triton": "3.9.0", "cuda": "13.0",
            "driver": "580", "key": "0" * 64, "date": "2026-11-30", "clocks": "free",
            "costs": (tables.Cost(names[2], 3.0, 0.25, 0.2, 1.0),),
        }  # fmt: skip
        return tables.Table(**(base | changes))

    def test_blocked_and_dropped_kernels_are_never_chosen(self, tmp_path: Path) -> None:
        device = devices.lookup("H200")
        problem = SHAPE.problem()
        out = self.table()
        # Excluding each choice in turn must give other choices, as long as one is left.
        gone: list[str] = []
        for _ in range(5):
            path = packs.write_with_tables(packs.catalog(90), tmp_path / "p.mpk", [out])
            with native.Pack(path) as pack:
                chosen = pack.kernels[pack.plan(device, problem).regions[0].kernel].name
                assert chosen not in gone
                if gone:
                    index = [kernel.name for kernel in pack.kernels].index(gone[-1])
                    with pytest.raises(errors.KernelMissingError, match="excluded on NVIDIA H200"):
                        pack.plan(device, problem, kernel=index)
                other = pack.plan(devices.lookup("H100"), problem)  # another GPU, same pack
                assert other.regions
            gone.append(chosen)
            out = self.table(blocked=tuple(gone[::2]), dropped=tuple(gone[1::2]))

    def test_they_survive_the_file(self, tmp_path: Path) -> None:
        table = self.table(blocked=("x", "y"), dropped=("z",))
        tables.dump(table, tmp_path / table.name)
        assert tables.load(tmp_path / table.name) == table
        data = json.loads((tmp_path / table.name).read_text())
        data["blocked"] = "x"
        (tmp_path / table.name).write_text(json.dumps(data))
        with pytest.raises(errors.TableError, match="`blocked` must be a list"):
            tables.load(tmp_path / table.name)
        del data["blocked"], data["dropped"]  # a table of before there were such
        (tmp_path / table.name).write_text(json.dumps(data))
        assert tables.load(tmp_path / table.name).blocked == ()


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    import onnx

    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[a, b] x, float[b, c] w) => (float[a, c] y) { y = MatMul(x, w) }
    """
    path = tmp_path / "g.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    with pytest.raises(errors.InputError, match=r"g\.onnx has no MatMul, Gemm, Conv"):
        weights.weights(path)


def test_a_models_weights_are_found_in_subgraphs_and_constants() -> None:
    import onnx
    from onnx import TensorProto, helper

    def constant(name: str, dims: list[int]) -> onnx.NodeProto:
        tensor = helper.make_tensor(name, TensorProto.FLOAT, dims, [0.0] * math.prod(dims))
        return helper.make_node("Constant", [], [name], value=tensor)

    def branch(name: str, dims: list[int]) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, None)
        product = helper.make_node("MatMul", ["x", name], [f"y_{name}"])
        return helper.make_graph([constant(name, dims), product], name, [], [output])

    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("v", [8, 16]),
                          else_branch=branch("w", [8, 24]))],
        "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert sorted(weights.weights(model).matrices) == [("f32", "nn", 16, 8), ("f32", "nn", 24, 8)]
    assert {number for number, *_ in weights.weights(model, ieee=True).matrices} == {"f32ieee"}


def test_a_matrix_that_is_transposed_is_one_of_rows() -> None:
    """Tied weights, with more axes than a Gemm takes."""
    from onnx import numpy_helper, parser

    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[b, s, 8] x) => (y) { t = Transpose (w)  y = MatMul (x, t) }
    """)
    matrix = np.zeros((24, 8), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(matrix, "w"))
    assert weights.weights(model).matrices == (("f32", "nt", 24, 8),)
