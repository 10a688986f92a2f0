"""The command `moonpoly`: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from test_import import BLOCKED
from test_tables import table
from typer.testing import CliRunner, Result

import moonpoly_ort
from moonpoly_ort import packs, tables
from moonpoly_ort.cli import app

HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers()


def moonpoly(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def fails(code: int, *words: Any) -> str:
    """Runs a command that must fail with this code and one line on stderr; gives that line."""
    result = moonpoly(*words)
    assert result.exit_code == code, (result.exit_code, result.output)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_version_and_help_with_its_exit_codes() -> None:
    assert moonpoly("version").stdout == f"moonpoly {moonpoly_ort.__version__}\n"
    text = moonpoly("--help").stdout
    for command in ("rewrite", "run", "explain", "pack", "doctor", "version"):
        assert command in text
    assert "Exit codes" in text


class TestRewrite:
    def test_writes_a_model_that_runs_alike(self, model: Path, x, tmp_path: Path) -> None:
        out = tmp_path / "out.onnx"
        result = moonpoly("rewrite", model, out)
        assert result.exit_code == 0, result.output
        assert "3 of 3 candidate nodes taken" in result.stdout
        nodes = [(node.domain, node.op_type) for node in onnx.load(out).graph.node]
        assert nodes == [("ai.moonpoly", "MatMulRelu"), ("ai.moonpoly", "Gemm")]
        runs = [ort.InferenceSession(path).run(None, {"x": x})[0] for path in (model, out)]
        np.testing.assert_array_equal(*runs)

    def test_dry_run_writes_nothing(self, model: Path, tmp_path: Path) -> None:
        before = contents(tmp_path)
        result = moonpoly("rewrite", model, "--dry-run", "--report")
        assert result.exit_code == 0, result.output
        assert "first" in result.stdout
        assert contents(tmp_path) == before

    def test_json_lists_every_candidate(self, model: Path) -> None:
        data = json.loads(
            moonpoly("rewrite", model, "--dry-run", "--json", "--disable", "gemm").stdout
        )
        assert data["taken"] == 2
        taken = {node["node"]: (node["taken"], node["why_not"]) for node in data["nodes"]}
        assert taken["first"] == (True, "")
        assert taken["r"] == (True, "")  # the Relu, which has no name
        assert taken["second"][0] is False
        assert taken["second"][1].startswith("disabled")

    def test_rules_are_listed_and_wrong_ones_refused(self, model: Path) -> None:
        listed = moonpoly("rewrite", "--list-rules").stdout
        assert "matmul" in listed
        assert "gemm" in listed
        for words in (["--rules", "nope"], ["--disable", "nope"], ["--rules", "merged_products"]):
            result = moonpoly("rewrite", model, "--dry-run", *words)
            assert result.exit_code == 2
            assert f"rules: {words[1]}" in result.stderr
        passes = ["--optimize", "auto", "--disable", "merged_products"]
        assert moonpoly("rewrite", model, "--dry-run", *passes).exit_code == 0

    def test_an_optimizer_must_be_one(self, model: Path) -> None:
        result = moonpoly("rewrite", model, "--dry-run", "--optimize", "mha")
        assert result.exit_code == 2
        assert "'onnxscript'" in result.stderr
        assert moonpoly("rewrite", model, "--dry-run", "--optimize", "auto").exit_code == 0

    @pytest.mark.parametrize("words", [[], ["out.onnx", "--dry-run"]])
    def test_wants_either_an_output_or_a_dry_run(self, model: Path, words: list[str]) -> None:
        assert moonpoly("rewrite", model, *words).exit_code == 2


class TestBadInput:
    """Each gives one clear line, its exit code, and leaves every file as it was."""

    @pytest.fixture(autouse=True)
    def nothing_changes(self, tmp_path: Path) -> Any:
        yield
        assert not list(tmp_path.rglob("*.part"))
        assert not list(tmp_path.rglob("out.*"))

    @pytest.mark.parametrize("data", [b"", b"no model", b"\x08\x07garbage" * 40])
    def test_no_model(self, tmp_path: Path, data: bytes) -> None:
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(data)
        for words in (["rewrite", bad, tmp_path / "out.onnx"], ["run", bad], ["explain", bad]):
            assert "bad.onnx" in fails(3, *words)

    def test_a_truncated_model(self, model: Path, tmp_path: Path) -> None:
        model.write_bytes(model.read_bytes()[:-200])
        assert model.name in fails(3, "rewrite", model, tmp_path / "out.onnx")

    def test_a_missing_model(self, tmp_path: Path) -> None:
        assert "none.onnx" in fails(3, "rewrite", tmp_path / "none.onnx", tmp_path / "out.onnx")

    def test_missing_external_data(self, external_model: Path, tmp_path: Path) -> None:
        (external_model.parent / "mlp.data").unlink()
        assert "mlp.data" in fails(3, "rewrite", external_model, tmp_path / "out.onnx")
        assert "mlp.data" in fails(3, "run", external_model, "--dim", "batch=1")

    def test_output_equal_to_input(self, model: Path) -> None:
        before = model.read_bytes()
        assert model.name in fails(4, "rewrite", model, model)
        assert model.read_bytes() == before

    def test_unwritable_outputs(self, model: Path, tmp_path: Path) -> None:
        fails(4, "rewrite", model, tmp_path / "nowhere" / "out.onnx")
        fails(4, "run", model, "--dim", "batch=1", "--outputs", tmp_path / "nowhere" / "out.npz")
        (tmp_path / "file").write_text("")
        fails(4, "pack", "--arch", "sm_90", "--output", tmp_path / "file" / "packs")
        (tmp_path / "packs" / "sm_90.mpk").mkdir(parents=True)
        fails(4, "pack", "--arch", "sm_90", "--output", tmp_path / "packs")

    def test_kernels_on_trial_do_not_go_into_the_cache(self) -> None:
        result = moonpoly("pack", "--arch", "sm_90", "--trial")
        assert result.exit_code == 2
        assert "--trial needs --output" in result.stderr

    def test_what_is_no_file_is_not_replaced_by_one(self, model: Path, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        fails(4, "rewrite", model, tmp_path / "pipe")
        fails(4, "run", model, "--dim", "batch=1", "--outputs", tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()

    def test_a_data_file_of_another_model(self, external_model: Path, tmp_path: Path) -> None:
        (tmp_path / "mlp.data").write_bytes(b"precious")
        assert "--overwrite" in fails(4, "rewrite", external_model, tmp_path / "new.onnx")
        assert (tmp_path / "mlp.data").read_bytes() == b"precious"
        assert (
            moonpoly("rewrite", external_model, tmp_path / "new.onnx", "--overwrite").exit_code == 0
        )

    def test_packs_that_cannot_be_used(self, model: Path, tmp_path: Path) -> None:
        good = packs.catalog(90).read_bytes()
        version = good[:8] + (99).to_bytes(4, "little") + good[12:]
        explain = ["explain", model, "--dim", "batch=1", "--gpu", "H200", "--pack"]
        for name, data in {"cut": good[: len(good) // 2], "version": version, "empty": b""}.items():
            path = tmp_path / f"{name}.mpk"
            path.write_bytes(data)
            assert path.name in fails(6, *explain, path)
        assert "none.mpk" in fails(6, *explain, tmp_path / "none.mpk")
        (tmp_path / "right.mpk").write_bytes(good)
        assert "sm_90" in fails(6, *explain, tmp_path / "right.mpk", "--gpu", "RTX 4090")

    def test_a_table_for_another_gpu(self) -> None:
        tables.dump(table(), tables.user_folder() / "gemm__nvidia-l4.json")
        assert "NVIDIA H200" in fails(6, "pack", "--arch", "sm_90")

    def test_an_unsupported_architecture_and_an_unknown_gpu(self, model: Path) -> None:
        assert "sm_75" in fails(5, "pack", "--arch", "sm_75")
        assert "foo is no architecture" in fails(2, "pack", "--arch", "foo")
        assert "GTX 1080" in fails(5, "explain", model, "--dim", "batch=1", "--gpu", "GTX 1080")

    @pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime has a CUDA provider")
    def test_no_cuda_here(self, model: Path) -> None:
        words = ["run", model, "--dim", "batch=1"]
        assert "CUDAExecutionProvider" in fails(5, *words, "--backend", "cuda")
        assert "CUDAExecutionProvider" in fails(5, *words, "--provider", "cuda")

    def test_sizes_that_do_not_fit(self, model: Path) -> None:
        assert "'batch'" in fails(3, "run", model)
        assert "'length'" in fails(3, "run", model, "--dim", "length=3")
        assert "batch=many" in fails(3, "explain", model, "--dim", "batch=many")
        assert "rank 2" in fails(3, "explain", model, "--dim", "x=1,2,3")
        assert "'third'" in fails(3, "explain", model, "--dim", "batch=1", "--node", "third")

    def test_sizes_that_contradict_each_other(self, model: Path) -> None:
        words = ["run", model, "--dim", "x=2,64", "--dim"]
        assert moonpoly(*words, "batch=2").exit_code == 0
        assert "'batch' is given as 3" in fails(3, *words, "batch=3")
        assert "there is a --dim for 'x' already" in fails(3, *words, "x=3,64")

    def test_sizes_that_no_memory_holds(self, model: Path) -> None:
        for size in (10**14, 2**62):
            assert "does not fit into memory" in fails(3, "run", model, "--dim", f"batch={size}")
        for command in ("run", "explain"):
            assert "not below 2^63" in fails(3, command, model, "--dim", f"batch={2**63}")
            assert "not below 2^63" in fails(3, command, model, "--dim", f"x={2**63},64")

    def test_a_seed_below_0(self, model: Path) -> None:
        assert moonpoly("run", model, "--dim", "batch=1", "--seed", -1).exit_code == 2

    def test_outputs_in_place_of_what_is_read(self, model: Path, x, tmp_path: Path) -> None:
        np.savez(tmp_path / "in.npz", x=x)
        before = contents(tmp_path)
        words = ["run", model, "--inputs", tmp_path / "in.npz", "--outputs"]
        assert "is the model itself" in fails(4, *words, model)
        assert "inputs itself" in fails(4, *words, tmp_path / "in.npz")
        assert contents(tmp_path) == before

    def test_json_of_what_is_no_list(self) -> None:
        result = moonpoly("pack", "--json")
        assert result.exit_code == 2
        assert "--list" in result.stderr

    def test_inputs_that_do_not_fit(self, model: Path, tmp_path: Path) -> None:
        np.savez(tmp_path / "in.npz", x=np.zeros((1, 63), np.float32))
        assert model.name in fails(3, "run", model, "--inputs", tmp_path / "in.npz")
        (tmp_path / "no.npz").write_bytes(b"no archive")
        assert "no.npz" in fails(3, "run", model, "--inputs", tmp_path / "no.npz")
        assert "none.npz" in fails(3, "run", model, "--inputs", tmp_path / "none.npz")
        np.save(tmp_path / "one.npy", np.zeros((1, 64), np.float32))
        assert "no archive" in fails(3, "run", model, "--inputs", tmp_path / "one.npy")
        with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
            archive.writestr("x", "some text")
        assert "'x' is no array" in fails(3, "run", model, "--inputs", tmp_path / "text.npz")


class TestRun:
    def test_outputs_are_those_of_onnxruntime(self, model: Path, x, tmp_path: Path) -> None:
        np.savez(tmp_path / "in.npz", x=x)
        out = tmp_path / "out.npz"
        result = moonpoly("run", model, "--inputs", tmp_path / "in.npz", "--outputs", out)
        assert result.exit_code == 0, result.output
        with np.load(out) as archive:
            actual = archive["y"]
        (reference,) = ort.InferenceSession(model).run(None, {"x": x})
        np.testing.assert_array_equal(actual, reference)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "mlp.onnx", "out.npz"]

    def test_random_inputs_are_seeded(self, model: Path, tmp_path: Path) -> None:
        results = []
        for i, seed in enumerate((3, 3, 4)):
            out = tmp_path / f"{i}.npz"
            moonpoly("run", model, "--dim", "batch=2", "--seed", seed, "--outputs", out)
            results.append(np.load(out)["y"])
        np.testing.assert_array_equal(results[0], results[1])
        assert not np.array_equal(results[0], results[2])

    def test_json_and_timing(self, model: Path) -> None:
        result = moonpoly(
            "run", model, "--dim", "batch=2", "--repeat", 3, "--json", "--provider", "cpu"
        )
        data = json.loads(result.stdout)
        assert data["inputs"] == {"x": [2, 64]}
        assert data["outputs"] == {"y": [2, 16]}
        assert data["providers"] == ["CPUExecutionProvider"]
        assert 0 < data["time"]["min_ms"] <= data["time"]["median_ms"]

    def test_what_shapes_to_expect(self, model: Path) -> None:
        words = ["run", model, "--dim", "batch=2", "--provider", "cpu", "--shapes"]
        assert moonpoly(*words, "repeating").exit_code == 0
        refused = moonpoly(*words, "fixed")
        assert refused.exit_code == 2
        assert "accepted: 'changing', 'repeating'" in refused.stderr


class TestExplain:
    def test_shows_a_plan_per_node(self, model: Path) -> None:
        result = moonpoly("explain", model, "--dim", "batch=37", "--gpu", "H200")
        assert result.exit_code == 0, result.output
        assert "NVIDIA H200" in result.stdout
        assert "first" in result.stdout
        assert "gemm_" in result.stdout

    def test_json_of_one_node(self, model: Path) -> None:
        words = ["explain", model, "--dim", "batch=37", "--gpu", "L4", "--node", "second", "--json"]
        data = json.loads(moonpoly(*words).stdout)
        assert data["gpu"] == "NVIDIA L4"
        (plan,) = data["plans"]
        assert (plan["name"], plan["m"], plan["n"], plan["k"]) == ("second", 37, 16, 32)
        assert plan["regions"]

    def test_sizes_from_inputs(self, model: Path, x, tmp_path: Path) -> None:
        np.savez(tmp_path / "in.npz", x=x)
        words = ["explain", model, "--inputs", tmp_path / "in.npz", "--gpu", "L4", "--json"]
        assert json.loads(moonpoly(*words).stdout)["plans"][0]["m"] == len(x)

    def test_says_that_no_node_is_taken(self, model: Path) -> None:
        static = onnx.load(model)
        static.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        onnx.save(static, model)
        result = moonpoly("explain", model, "--gpu", "H200")
        assert result.exit_code == 0
        assert "no node is taken; `moonpoly explain MODEL --graph` says why" in result.stdout
        assert "costs: none" in result.stdout


class TestPack:
    def test_lists_none_and_then_what_is_there(self) -> None:
        assert "no packs in" in moonpoly("pack", "--list").stdout
        catalog = packs.catalog(90)
        catalog.rename(catalog.with_name("sm_90.mpk"))
        (found,) = json.loads(moonpoly("pack", "--list", "--json").stdout)
        assert found["sm"] == 90

    def test_without_a_gpu_an_architecture_must_be_given(self) -> None:
        from moonpoly_ort import native

        if native.device_count():
            pytest.skip("there is a GPU, so that its architecture is built")
        assert "--arch" in fails(2, "pack")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = moonpoly("--debug", "rewrite", tmp_path / "none.onnx", tmp_path / "out.onnx")
    assert result.exit_code == 3
    assert "Traceback" in result.stderr
    assert "moonpoly_ort.errors.ModelError: " in result.stderr


def test_as_a_process_with_a_missing_runtime(model: Path) -> None:
    code = f"sys.argv = ['moonpoly', 'run', {str(model)!r}, '--dim', 'batch=1']"
    code = f"{BLOCKED}\n{code}\nfrom moonpoly_ort.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 5
    assert done.stdout == ""
    assert "moonpoly-ort[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_as_a_process(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moonpoly_ort.cli", "rewrite", str(model)]
    done = subprocess.run([*command, str(tmp_path / "out.onnx")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.onnx").is_file()
    done = subprocess.run([*command, str(model)], capture_output=True, text=True)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
