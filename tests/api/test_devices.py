"""Known GPUs by name."""

from __future__ import annotations

import pytest

from moonpoly_ort import DeviceError, devices


def test_h200_has_the_documented_attributes() -> None:
    device = devices.lookup("H200")
    assert device.name == "NVIDIA H200"
    assert (device.sm, device.sm_count) == (90, 132)
    assert (device.shared_per_block, device.shared_per_sm) == (232448, 233472)
    assert (device.registers_per_sm, device.threads_per_sm, device.blocks_per_sm) == (
        65536,
        2048,
        32,
    )
    assert (device.clock_mhz, device.l2_bytes) == (1980, 60 * 2**20)
    assert device.bandwidth_gbps == 4800


@pytest.mark.parametrize("gpu", devices.GPUS, ids=lambda gpu: gpu.alias)
def test_both_names_find_the_gpu_and_its_numbers_agree(gpu: devices.GPU) -> None:
    assert devices.find(gpu.alias) is devices.find(gpu.name.upper()) is gpu
    device = devices.lookup(gpu.name)
    assert device.shared_per_block < device.shared_per_sm
    # Double data rate: the pins can deliver the data sheet's bandwidth, within what vendors round.
    pins = 2 * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8 / 1e9
    assert gpu.bandwidth_gbps == pytest.approx(pins, rel=0.03)


def test_names_are_unique() -> None:
    assert len(devices._BY_KEY) == 2 * len(devices.GPUS)


@pytest.mark.parametrize("name", ["A100", "", "RTX 2080", "4090"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown GPU.*A100-80GB.*H200"):
        devices.lookup(name)
