"""What sessions ask of the CUDA provider beside what their caller does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from moonpoly_ort import ArgumentError, InferenceSession, registering, session
from moonpoly_ort.provider_settings import (
    ANY_LENGTHS,
    CHANGING_SHAPES,
    CUDA,
    for_changing_shapes,
    with_settings,
)

CPU = "CPUExecutionProvider"
CUDNN = 8


def test_fused_attention_goes_without_plans_of_cudnn_for_every_length() -> None:
    (cuda, cpu) = for_changing_shapes([CUDA, CPU], None)
    assert cpu == (CPU, {})
    chosen = int(cuda[1]["sdpa_kernel"])
    assert chosen & 1
    assert not chosen & CUDNN


def test_what_the_caller_asks_for_stays() -> None:
    asked = {"sdpa_kernel": "8", "device_id": "1"}
    assert for_changing_shapes([(CUDA, asked)], None) == [(CUDA, asked)]
    assert for_changing_shapes([CUDA, CPU], [asked, {"a": "b"}]) == [
        (CUDA, asked),
        (CPU, {"a": "b"}),
    ]
    assert asked == {"sdpa_kernel": "8", "device_id": "1"}


def test_settings_go_on_top_and_to_cuda_alone() -> None:
    listed = with_settings([(CUDA, {"x": "0", "y": "1"}), CPU], None, {"x": "2"})
    assert listed == [(CUDA, {"x": "2", "y": "1"}), (CPU, {})]


def test_without_providers_those_of_onnxruntime_are_meant() -> None:
    assert [name for name, _ in with_settings(None, None, {})] == ort.get_available_providers()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of each session on our kernels, what it asks of the CUDA provider, if anything; it then runs
    on the CPU.
    """
    found: list[dict[str, str]] = []
    make = ort.InferenceSession.__init__

    def init(self: Any, source: Any, options: Any, providers: Any, own: Any, **kwargs: Any) -> None:
        cuda = providers[0]
        found.append(cuda[1] if isinstance(cuda, tuple) else (own or [{}])[0])
        make(self, source, ort.SessionOptions(), [CPU], None, **kwargs)

    registration = registering.Registration("cuda", "tf32", "no.mpk")
    monkeypatch.setattr(registering, "resolve", lambda *_: registration)
    monkeypatch.setattr(registering, "attach", lambda *_: None)
    monkeypatch.setattr(ort.InferenceSession, "__init__", init)
    return found


def test_sessions_are_set_for_changing_shapes_unless_told_otherwise(
    model: Path, asked: list[dict[str, str]]
) -> None:
    InferenceSession(model, providers=[CUDA, CPU])
    InferenceSession(model, providers=[CUDA, CPU], shapes="changing")
    InferenceSession(model, providers=[CUDA, CPU], shapes="repeating")
    assert asked == [CHANGING_SHAPES, CHANGING_SHAPES, {}]


@pytest.mark.parametrize("shapes", ["changing", "repeating"])
def test_the_caller_choice_of_attention_goes_before_it(
    model: Path, asked: list[dict[str, str]], shapes: session.Shapes
) -> None:
    InferenceSession(model, providers=[(CUDA, {"sdpa_kernel": "8"}), CPU], shapes=shapes)
    InferenceSession(
        model, None, [CUDA, CPU], [{"sdpa_kernel": "16"}, {}], shapes=shapes
    )  # fmt: skip
    assert asked == [{"sdpa_kernel": "8"}, {"sdpa_kernel": "16"}]


def test_set_providers_keeps_it(model: Path, asked: list[dict[str, str]]) -> None:
    made = InferenceSession(model, providers=[CUDA, CPU], shapes="repeating")
    made.set_providers([CUDA, CPU])
    assert asked == [{}, {}]


@pytest.mark.parametrize("rewrite", [True, False])
@pytest.mark.parametrize(
    ("total", "settings"), [("total", ANY_LENGTHS), ("length", CHANGING_SHAPES)]
)
def test_attention_to_other_keys_goes_without_the_memory_efficient_kernel(
    asked: list[dict[str, str]], rewrite: bool, total: str, settings: dict[str, str]
) -> None:
    """Also of a model that is not rewritten in the session, but perhaps was before."""
    info = helper.make_tensor_value_info
    sizes = {
        "q": ["length", 8],
        "k": [2, total, 4],
        "v": [2, total, 4],
        "mask": [1, "length", total],
    }
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v", "", "", "mask"], ["y"], domain="com.microsoft",
        num_heads=2,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "g",
        [info(name, TensorProto.FLOAT, ["batch", *dims]) for name, dims in sizes.items()],
        [info("y", TensorProto.FLOAT, ["batch", "length", 8])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    proto: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    InferenceSession(proto.SerializeToString(), providers=[CUDA, CPU], rewrite=rewrite)
    assert asked == [settings]


def test_of_a_model_that_is_run_as_it_is_onnxruntime_says_what_is_wrong(
    tmp_path: Path, asked: list[dict[str, str]]
) -> None:
    with pytest.raises(Exception, match=r"NO_SUCHFILE|NoSuchFile|doesn't exist"):
        InferenceSession(tmp_path / "none.onnx", providers=[CUDA, CPU], rewrite=False)
    assert asked == [CHANGING_SHAPES]


def test_other_shapes_are_refused(model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"shapes = 'fixed'; accepted: 'changing', 'repeating'"):
        InferenceSession(model, providers=[CPU], shapes="fixed")  # type: ignore[arg-type]
