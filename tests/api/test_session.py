"""The session is a drop-in for onnxruntime's, and says what it does."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import moonpoly_ort
from moonpoly_ort import (
    ArgumentError,
    DeviceError,
    InferenceSession,
    ModelError,
    PackError,
    RegistrationError,
    devices,
    native,
    packs,
    register,
)
from moonpoly_ort.session import FOLDER

CPU = ["CPUExecutionProvider"]
HAS_CUDA = "CUDAExecutionProvider" in ort.get_available_providers()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime has a CUDA provider")


def expected(model: Path, x: np.ndarray) -> np.ndarray:
    (y,) = ort.InferenceSession(model, providers=CPU).run(None, {"x": x})
    return np.asarray(y)


def result(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


def test_is_an_onnxruntime_session_with_equal_results(model: Path, x: np.ndarray) -> None:
    session = InferenceSession(model, providers=CPU)
    assert isinstance(session, ort.InferenceSession)
    np.testing.assert_array_equal(result(session, x), expected(model, x))
    plain = ort.InferenceSession(model, providers=CPU)
    for method in ("get_inputs", "get_outputs"):
        ours = [(i.name, i.type, i.shape) for i in getattr(session, method)()]
        assert ours == [(i.name, i.type, i.shape) for i in getattr(plain, method)()]
    assert session.get_providers() == plain.get_providers()


@pytest.mark.parametrize("form", [str, Path, lambda path: path.read_bytes()])
def test_takes_what_the_base_class_takes(model: Path, x: np.ndarray, form) -> None:
    session = InferenceSession(form(model), ort.SessionOptions(), CPU, [{}])
    np.testing.assert_array_equal(result(session, x), expected(model, x))


def test_keyword_arguments_reach_the_base_class(model: Path) -> None:
    session = InferenceSession(
        model, providers=CPU, enable_fallback=0, disabled_optimizers=["ConstantFolding"]
    )
    assert not session._enable_fallback


@pytest.mark.parametrize("wrong", [3, None, bytearray(b"x")])
def test_other_types_fail_as_in_the_base_class(wrong: object) -> None:
    with pytest.raises(TypeError):
        InferenceSession(wrong, providers=CPU)


def test_the_report_tells_what_was_taken(model: Path) -> None:
    session = InferenceSession(model, providers=CPU)
    assert [(entry.name, entry.taken) for entry in session.moonpoly_report] == [
        ("first", True),
        ("second", True),
        ("", True),  # the Relu, taken into the first
    ]
    assert InferenceSession(model, providers=CPU, rewrite=False).moonpoly_report is None


@pytest.mark.parametrize("disable", ["activation", ["activation"], iter(["activation"])])
def test_a_rule_that_is_left_out(model: Path, x: np.ndarray, disable) -> None:
    session = moonpoly_ort.InferenceSession(model, providers=CPU, disable=disable)
    rules = {entry.rule for entry in session.moonpoly_report or () if entry.taken}
    assert rules == {"matmul", "gemm"}
    np.testing.assert_array_equal(result(session, x), expected(model, x))
    session.set_providers(CPU)
    assert rules == {entry.rule for entry in session.moonpoly_report or () if entry.taken}


def test_a_rule_that_is_none_and_one_of_no_rewrite(model: Path) -> None:
    with pytest.raises(moonpoly_ort.ProblemError, match="Unknown rules: nope"):
        moonpoly_ort.InferenceSession(model, providers=CPU, disable=["nope"])
    with pytest.raises(moonpoly_ort.ArgumentError, match="rewrite=False"):
        moonpoly_ort.InferenceSession(model, providers=CPU, disable=["bias"], rewrite=False)


def test_an_already_rewritten_model_runs(model: Path, x: np.ndarray, tmp_path: Path) -> None:
    moonpoly_ort.rewrite(model, tmp_path / "new.onnx")
    for rewrite in (True, False):
        session = InferenceSession(tmp_path / "new.onnx", providers=CPU, rewrite=rewrite)
        np.testing.assert_array_equal(result(session, x), expected(model, x))


def test_options_of_the_caller_are_used_and_serve_several_sessions(model: Path, x) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for _ in range(2):
        session = InferenceSession(model, options, providers=CPU)
        assert session.get_session_options().intra_op_num_threads == 1
        np.testing.assert_array_equal(result(session, x), expected(model, x))
    np.testing.assert_array_equal(
        result(ort.InferenceSession(model, options, providers=CPU), x), expected(model, x)
    )


def test_external_data_is_found_from_any_folder(external_model: Path, x, monkeypatch) -> None:
    reference = expected(external_model, x)
    monkeypatch.chdir(external_model.parent.parent)
    for path in (external_model, Path(external_model.parent.name) / external_model.name):
        session = InferenceSession(path, providers=CPU)
        np.testing.assert_array_equal(result(session, x), reference)


def test_the_callers_folder_of_external_data_is_put_back(external_model: Path, x) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry(FOLDER, "/elsewhere")
    session = InferenceSession(external_model, options, providers=CPU)
    np.testing.assert_array_equal(result(session, x), expected(external_model, x))
    assert options.get_session_config_entry(FOLDER) == "/elsewhere"


def test_bytes_find_external_data_through_the_callers_options(external_model: Path, x) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry(FOLDER, str(external_model.parent))
    session = InferenceSession(external_model.read_bytes(), options, providers=CPU)
    np.testing.assert_array_equal(result(session, x), expected(external_model, x))


def test_a_missing_data_file_is_an_error(external_model: Path) -> None:
    (external_model.parent / "mlp.data").unlink()
    with pytest.raises(Exception, match=r"mlp\.data"):
        InferenceSession(external_model, providers=CPU)


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"bad\.onnx"):
        InferenceSession(tmp_path / "bad.onnx", providers=CPU)
    with pytest.raises(ModelError, match=r"missing\.onnx"):
        InferenceSession(tmp_path / "missing.onnx", providers=CPU)


def test_set_providers_makes_the_session_again(model: Path, x: np.ndarray) -> None:
    session = InferenceSession(model, providers=CPU)
    session.set_providers(CPU)
    np.testing.assert_array_equal(result(session, x), expected(model, x))
    assert session.moonpoly_backend == "onnxruntime"


def test_onnxruntimes_own_format_is_run_as_it_is(model: Path, x, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "mlp.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(model, options, providers=CPU)
    for source in (tmp_path / "mlp.ort", (tmp_path / "mlp.ort").read_bytes()):
        session = InferenceSession(source, providers=CPU)
        assert session.moonpoly_report is None
        np.testing.assert_array_equal(result(session, x), expected(model, x))
    unnamed = (tmp_path / "mlp.ort").rename(tmp_path / "mlp")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.load_model_format", "ORT")
    assert InferenceSession(unnamed, options, providers=CPU).moonpoly_report is None


def test_a_cpu_session_says_once_what_runs_it(model: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "moonpoly_ort"):
        for _ in range(2):
            assert InferenceSession(model, providers=CPU).moonpoly_backend == "onnxruntime"
    assert [record.message for record in caplog.records] == [
        "running on ONNX Runtime's own kernels: CUDAExecutionProvider is not among the providers."
    ]


def test_without_a_choice_of_providers_it_takes_what_onnxruntime_has(
    model: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", *CPU])
    monkeypatch.setattr(native, "device_count", lambda: 0)
    InferenceSession(model)
    assert "there is no GPU 0" in caplog.text  # so it was CUDA that was looked for


def test_a_pack_that_is_named_must_be_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, that is: without one no pack is looked at."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", *CPU])
    monkeypatch.setattr(native, "device_query", lambda _: devices.lookup("H200"))
    missing = tmp_path / "none.mpk"
    for count in (0, 1):
        monkeypatch.setattr(native, "device_count", lambda count=count: count)
        if count:
            with pytest.raises(PackError, match=r"none\.mpk"):
                register(ort.SessionOptions(), pack=missing)
            with pytest.raises(PackError, match=r"sm_90"):
                register(ort.SessionOptions(), pack=packs.catalog(80))
        else:
            assert not register(ort.SessionOptions(), pack=missing)


def test_keeps_the_path_as_the_base_class_does(model: Path) -> None:
    assert InferenceSession(model, providers=CPU)._model_path == os.fspath(model)
    assert InferenceSession(model.read_bytes(), providers=CPU)._model_path is None


@pytest.mark.parametrize("wrong", [{"backend": "gpu"}, {"precision": "fp8"}])
def test_a_wrong_choice_names_the_accepted_ones(model: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match=r"accepted: '(auto|tf32)'"):
        InferenceSession(model, providers=CPU, **wrong)
    with pytest.raises(ArgumentError, match=r"accepted: '(auto|tf32)'"):
        register(ort.SessionOptions(), **wrong)


def test_a_model_in_memory_comes_as_bytes(model: Path) -> None:
    with pytest.raises(TypeError, match=r"is a ModelProto; .*SerializeToString"):
        InferenceSession(onnx.load(model), providers=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "meant"), [("cuda_graph", "cuda_graphs"), ("optimise", "optimize")]
)
def test_a_misspelt_option_is_not_ignored(model: Path, name: str, meant: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}= is no option .* mean {meant}="):
        InferenceSession(model, providers=CPU, **{name: 8})


def test_a_vendor_choice_is_a_switch(model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"vendor = 'yes'; accepted: None, False, True"):
        InferenceSession(model, providers=CPU, vendor="yes")
    with pytest.raises(ArgumentError, match=r"vendor = 3; accepted"):
        register(ort.SessionOptions(), vendor=3)
    # Without the library it changes nothing.
    session = InferenceSession(model, providers=CPU, vendor=False)
    assert session.moonpoly_backend == "onnxruntime"


@pytest.mark.parametrize("wrong", [None, "options"])
def test_registers_on_session_options_alone(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="SessionOptions is needed"):
        register(wrong)


def test_backend_cuda_needs_the_provider(model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"CUDAExecutionProvider.*not \['CPUExec"):
        InferenceSession(model, providers=CPU, backend="cuda")


@without_cuda
def test_without_cuda_auto_falls_back_and_cuda_says_what_is_missing(model: Path, x) -> None:
    providers = ["CUDAExecutionProvider", *CPU]
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):  # onnxruntime's own
        session = InferenceSession(model, providers=providers)
    np.testing.assert_array_equal(result(session, x), expected(model, x))
    with pytest.raises(DeviceError, match=r"has no CUDAExecutionProvider.*moonpoly-ort\[gpu\]"):
        InferenceSession(model, providers=providers, backend="cuda")
    assert register(ort.SessionOptions()) is False
    with pytest.raises(DeviceError, match="has no CUDAExecutionProvider"):
        register(ort.SessionOptions(), backend="cuda")


def close(actual: np.ndarray, reference: np.ndarray) -> bool:
    return float(np.linalg.norm(actual - reference)) < 1e-3 * float(np.linalg.norm(reference))


class TestInterpreter:
    """The real plans and kernels, in Triton's interpreter on the CPU."""

    @pytest.fixture(autouse=True)
    def needs_triton(self) -> None:
        pytest.importorskip("triton", reason="the interpreter backend needs the tune extra")
        pytest.importorskip("torch", reason="Triton's interpreter needs torch")

    def test_session_runs_our_kernels(self, model: Path, x: np.ndarray) -> None:
        session = InferenceSession(model, providers=CPU, backend="interpreter")
        assert session.moonpoly_backend == "interpreter"
        before = native.stats().plan_misses
        actual = result(session, x)
        assert native.stats().plan_misses == before + 2
        assert close(actual, expected(model, x))

    def test_convolutions_run_in_our_kernels(self) -> None:
        """Weights that are inputs, with a bias and without one."""
        model = parser.parse_model(
            """<ir_version: 8, opset_import: ["" : 18]>
            g (float[n, 3, h, w] x, float[3, 3, 3, 3] k, float[3] b, float[5, 4] v) => (y) {
                t = Conv (x, k)  u = Conv (t, k, b)
                z = ConvTranspose (u, k)  y = MatMul (z, v) }"""
        )
        feeds = {
            name: np.random.default_rng(i).standard_normal(shape).astype(np.float32)
            for i, (name, *shape) in enumerate(
                [("x", 1, 3, 6, 7), ("k", 3, 3, 3, 3), ("b", 3), ("v", 5, 4)]
            )
        }
        before = native.stats().plan_misses
        session = InferenceSession(
            model.SerializeToString(), providers=CPU, backend="interpreter", precision="ieee"
        )
        assert [entry.taken for entry in session.moonpoly_report or ()] == [True] * 4
        plain = ort.InferenceSession(model.SerializeToString(), providers=CPU)
        (expected,), (got,) = plain.run(None, feeds), session.run(None, feeds)
        assert native.stats().plan_misses > before + 3
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    def test_options_serve_several_sessions_but_one_setting(self, model: Path, x) -> None:
        options = ort.SessionOptions()
        for _ in range(2):
            session = InferenceSession(model, options, providers=CPU, backend="interpreter")
            assert close(result(session, x), expected(model, x))
        with pytest.raises(RegistrationError, match="Make new SessionOptions"):
            InferenceSession(model, options, providers=CPU, backend="interpreter", precision="ieee")

    def test_registering_twice_is_an_error(self, model: Path, x, tmp_path: Path) -> None:
        options = ort.SessionOptions()
        assert register(options, backend="interpreter") is True
        with pytest.raises(RegistrationError, match="already registered"):
            register(options, backend="interpreter")
        moonpoly_ort.rewrite(model, tmp_path / "new.onnx")
        session = ort.InferenceSession(tmp_path / "new.onnx", options, providers=CPU)
        assert close(result(session, x), expected(model, x))

    def test_another_pack_in_the_same_process_is_an_error(self, model: Path) -> None:
        InferenceSession(model, providers=CPU, backend="interpreter")
        with pytest.raises(RegistrationError, match="one pack per process"):
            InferenceSession(model, providers=CPU, backend="interpreter", pack=packs.catalog(80))

    def test_registered_by_hand_before_is_an_error(self, model: Path) -> None:
        options = ort.SessionOptions()
        options.add_session_config_entry("moonpoly.backend", "interpreter")
        options.add_session_config_entry("moonpoly.pack", os.fspath(packs.catalog(90)))
        options.register_custom_ops_library(os.fspath(moonpoly_ort.library_path()))
        with pytest.raises(RegistrationError, match="registered on these session options already"):
            InferenceSession(model, options, providers=CPU, backend="interpreter")


def test_a_model_with_weights_beyond_the_protobuf_limit(tmp_path: Path) -> None:
    """External data of more than 2 GB: a sparse file, so that it costs neither disk nor time."""
    rows, columns = 2**20, 640  # fp32: 2.5 GiB, of which 640 columns of one row are used
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[rows, columns])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.data")
    weight.external_data.add(key="length", value=str(4 * rows * columns))
    graph = onnx.parser.parse_graph(
        f"g (float[batch, {columns}] x) => (float[batch, {rows}] y)"
        "{ t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) }"
    )
    graph.initializer.append(weight)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8
    )
    (tmp_path / "big.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "w.data", "wb") as file:
        file.truncate(4 * rows * columns)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = InferenceSession(tmp_path / "big.onnx", options, providers=CPU)
    assert [(entry.op_type, entry.taken) for entry in session.moonpoly_report] == [
        ("MatMul", True),
        ("Transpose", True),
    ]
    assert session.get_inputs()[0].shape == ["batch", columns]
