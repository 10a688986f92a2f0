"""What sessions ask of the CUDA provider beside what their caller does."""

from __future__ import annotations

import onnxruntime as ort

from moonpoly_ort.provider_settings import CUDA, for_changing_shapes, with_settings

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
