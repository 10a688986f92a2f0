"""Attributes of known GPUs by name, so that plans can be explained for a GPU that is not here.

The numbers are those the CUDA driver reports for the device (clock: the highest boost clock) and
the vendor's data sheet for the peak bandwidth. A GPU that is present is asked itself
(`native.device_query`); this list is never used for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import DeviceError

if TYPE_CHECKING:
    from .native import Device

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Architecture:
    """Per-SM limits of one compute capability (CUDA C++ Programming Guide, technical
    specifications).
    """

    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, opt-in limit
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536


ARCHITECTURES = {
    80: Architecture(164 * KIB, 163 * KIB, 2048, 32),
    86: Architecture(100 * KIB, 99 * KIB, 1536, 16),
    89: Architecture(100 * KIB, 99 * KIB, 1536, 24),
    90: Architecture(228 * KIB, 227 * KIB, 2048, 32),
    100: Architecture(228 * KIB, 227 * KIB, 2048, 32),
    120: Architecture(100 * KIB, 99 * KIB, 1536, 24),
}


@dataclass(frozen=True)
class GPU:
    """One product. `alias` is the short name that `lookup` takes beside the exact device name."""

    alias: str
    name: str
    sm: int
    sm_count: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    bandwidth_gbps: float  # peak, 1e9 bytes per second
    l2_mib: int
    memory_mib: int


# fmt: off
GPUS = (
    GPU("A100-40GB", "NVIDIA A100-SXM4-40GB", 80, 108, 1410, 1215, 5120, 1555, 40, 40960),
    GPU("A100-80GB", "NVIDIA A100-SXM4-80GB", 80, 108, 1410, 1593, 5120, 2039, 40, 81920),
    GPU("A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB", 80, 108, 1410, 1215, 5120, 1555, 40, 40960),
    GPU("A100-PCIE-80GB", "NVIDIA A100 80GB PCIe", 80, 108, 1410, 1512, 5120, 1935, 40, 81920),
    GPU("A10", "NVIDIA A10", 86, 72, 1695, 6251, 384, 600, 6, 23028),
    GPU("RTX 3090", "NVIDIA GeForce RTX 3090", 86, 82, 1695, 9751, 384, 936, 6, 24576),
    GPU("L4", "NVIDIA L4", 89, 58, 2040, 6251, 192, 300, 48, 23034),
    GPU("L40S", "NVIDIA L40S", 89, 142, 2520, 9001, 384, 864, 96, 46068),
    GPU("RTX 4060 Laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", 89, 24, 2370, 8001, 128,
        256, 32, 8188),
    GPU("RTX 4090", "NVIDIA GeForce RTX 4090", 89, 128, 2520, 10501, 384, 1008, 72, 24564),
    GPU("H100", "NVIDIA H100 80GB HBM3", 90, 132, 1980, 2619, 5120, 3352, 50, 81559),
    GPU("H100-PCIE", "NVIDIA H100 PCIe", 90, 114, 1755, 1593, 5120, 2039, 50, 81559),
    GPU("H200", "NVIDIA H200", 90, 132, 1980, 3201, 6144, 4800, 60, 143771),
    GPU("B200", "NVIDIA B200", 100, 148, 1965, 3996, 8192, 8000, 126, 183359),
    GPU("RTX 5090", "NVIDIA GeForce RTX 5090", 120, 170, 2407, 14001, 512, 1792, 96, 32607),
)
# fmt: on


def _key(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` and `rtx4090` are written the same way: letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY = {_key(name): gpu for gpu in GPUS for name in (gpu.alias, gpu.name)}


def find(name: str) -> GPU:
    """The known GPU of that exact device name or alias (case, spaces and hyphens are ignored).

    Raises `DeviceError`, which lists the known names. A part of a name is not enough: an "A100" of
    40 GB and one of 80 GB differ in bandwidth.
    """
    gpu = _BY_KEY.get(_key(name))
    if gpu is None:
        known = ", ".join(g.alias for g in GPUS)
        raise DeviceError(
            f"unknown GPU {name!r}. Known: {known} (or the exact device name, such as "
            f"{GPUS[0].name!r})."
        )
    return gpu


def lookup(name: str) -> Device:
    """`native.Device` of a known GPU, as the driver would report it. Raises `DeviceError`."""
    from .native import Device

    gpu = find(name)
    arch = ARCHITECTURES[gpu.sm]
    return Device(
        name=gpu.name,
        sm=gpu.sm,
        sm_count=gpu.sm_count,
        shared_per_sm=arch.shared_per_sm,
        shared_per_block=arch.shared_per_block,
        registers_per_sm=arch.registers_per_sm,
        threads_per_sm=arch.threads_per_sm,
        blocks_per_sm=arch.blocks_per_sm,
        clock_mhz=gpu.clock_mhz,
        memory_clock_mhz=gpu.memory_clock_mhz,
        memory_bus_bits=gpu.memory_bus_bits,
        l2_bytes=gpu.l2_mib * MIB,
        memory_bytes=gpu.memory_mib * MIB,
        bandwidth_gbps=gpu.bandwidth_gbps,
    )
