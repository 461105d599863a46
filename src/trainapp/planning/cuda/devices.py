"""The devices that `plan.device` names, and what of them a plan depends on. Imports no torch.

Memory is what torch reports as `total_memory` (MiB there), which is less than the name says and differs by some MiB to
some hundred between drivers and boards: where that matters, set `memory.limit`. Of several reports, the lowest; where
none is as low as the figure, it is an assumption on the safe side.
"""

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

from trainapp.config.schema import Parallel
from trainapp.errors import UserError
from trainapp.units import bytes_text, parse_memory_size

MIB = 2**20
# Compute capabilities of the GPUs that exist, as (major, minor): from Maxwell on those of torch 2.13,
# utils/cpp_extension.py.
CAPABILITIES = (
    (5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0),
    (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip
MOST_MEMORY = 2**40  # bytes; the largest GPUs have a quarter of it
# Bytes of the driver's context and of the libraries' code, which no allocator counts: about half a GiB.
CONTEXT = 512 * MIB
# Bytes that NCCL allocates for a group of ranks, past torch's allocator, on A100s with NVLink (NVIDIA/nccl#964).
# It grows with the channels, which the network decides, and hardly with the ranks beyond two hosts (NVIDIA/nccl#986).
COMMUNICATOR = 688 * MIB
HEADROOM = 2**30  # as `memory.cuda.HEADROOM`, which a run without a limit leaves


@dataclass(frozen=True)
class Device:
    """`memory` in bytes; `capability` as (major, minor).

    reported: the names by which drivers know it. source: who has reported its memory.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    reported: tuple[str, ...] = ()
    source: str = ""

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 rather than emulate it: from Ampere on."""
        return self.capability >= (8, 0)

    @property
    def has_flash_attention(self) -> bool:
        """From Ampere on."""
        return self.capability >= (8, 0)

    @property
    def cublas_workspace(self) -> int:
        """Bytes per thread that multiplies, without CUBLAS_WORKSPACE_CONFIG; cuBLASLt shares it. From an excerpt of
        aten/src/ATen/cuda/CublasHandlePool.cpp whose version is not known.
        """
        return 32 * MIB if self.capability[0] in (9, 10, 12) else 8320 * 2**10

    @property
    def cap(self) -> int:
        """The bytes that a run without `memory.limit` may reserve, on a device that nothing else uses."""
        return self.cap_with(0)

    def cap_with(self, communicators: int) -> int:
        """The same, less what NCCL takes for so many groups of ranks."""
        available = self.memory - CONTEXT - communicators * COMMUNICATOR
        return available - min(HEADROOM, available // 8)


_PRINTED = "torch.cuda.get_device_properties, printed in "
DEVICES = {
    device.name: device
    for device in (
        Device("t4-16gb", 15_079 * MIB, (7, 5), ("Tesla T4",), _PRINTED + "logs of runs on Colab: 15079 to 15109"),
        Device(
            "v100-16gb",
            16_130 * MIB,
            (7, 0),
            ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"),
            _PRINTED + "logs of YOLOv3 (SXM2); 16160 of PCIe in notes of a cluster",
        ),
        Device(
            "v100-32gb",
            32_494 * MIB,
            (7, 0),
            ("Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"),
            _PRINTED + "a log of YOLOv5 (SXM2, torch 1.12); 32510 in others, of SXM2 and PCIe",
        ),
        Device(
            "a10-24gb",
            22_515 * MIB,
            (8, 6),
            ("NVIDIA A10", "NVIDIA A10G"),
            "none for A10; of A10G, torch has printed 22723 and 22587 (torch 2.15 nightly)",
        ),
        Device(
            "a100-40gb",
            40_326 * MIB,
            (8, 0),
            ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
            _PRINTED + "UPPMAX's lessons (PCIe, torch 1.9); 40339 of SXM4 in bottlerocket-os/bottlerocket#3873",
        ),
        Device(
            "a100-80gb",
            81_038 * MIB,
            (8, 0),
            ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
            "none for SXM4; of PCIe, ekondis/mixbench#47 has 81049",
        ),
        Device(
            "rtx3090-24gb",
            24_113 * MIB,
            (8, 6),
            ("NVIDIA GeForce RTX 3090",),
            "none so low; torch has printed 24268 in the documentation of Transformers, 24259 elsewhere",
        ),
        Device(
            "l4-24gb",
            22_478 * MIB,
            (8, 9),
            ("NVIDIA L4",),
            "none so low; torch has printed 22563 in a log of Ultralytics (torch 2.11), 22700 in one of Unsloth (2.3)",
        ),
        Device(
            "l40s-48gb",
            45_495 * MIB,
            (8, 9),
            ("NVIDIA L40S",),
            "none so low; torch has printed 45589 in an article on sharing GPUs in Kubernetes",
        ),
        Device(
            "rtx4090-24gb",
            24_091 * MIB,
            (8, 9),
            ("NVIDIA GeForce RTX 4090",),
            "none so low; 23.68 GiB in zai-org/CogVideo#36, and torch has printed 24563 on Windows",
        ),
        Device(
            "h100-80gb",
            81_008 * MIB,
            (9, 0),
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"),
            _PRINTED + "a report of torch on PCIe; of SXM, 81082, 81089 (stas00/ml-engineering) and 81090",
        ),
        Device(
            "h200-141gb",
            143_156 * MIB,
            (9, 0),
            ("NVIDIA H200",),
            _PRINTED + "a script for Modal",
        ),
    )
}


def find(name: str) -> Device:
    """The device of that name, or one of this memory and compute capability, such as `24GiB@8.9`; a blank and the name
    that the driver gives it may follow.

    Raises UserError for any other name, and for a capability or a memory that no GPU has.
    """
    if name in DEVICES:
        return DEVICES[name]
    by_size, _, reported = name.partition(" ")
    size, _, capability = by_size.partition("@")
    version = re.fullmatch(r"(\d+)\.(\d)", capability)
    memory = 0
    with contextlib.suppress(ValueError):
        memory = parse_memory_size(size, 0)
    if version and memory:
        device = _unnamed(by_size, memory, (int(version[1]), int(version[2])))
        return replace(device, name=reported, reported=(reported,)) if reported else device
    raise UserError(
        f"plan.device={name}: unknown; known are {', '.join(DEVICES)}. Others are named by their memory and compute "
        "capability, such as plan.device=24GiB@8.9"
    )


def _unnamed(name: str, memory: int, capability: tuple[int, int]) -> Device:
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        raise UserError(
            f"plan.device={name}: no GPU has compute capability {capability[0]}.{capability[1]}; use one of {known}"
        )
    if not 2 * CONTEXT < memory <= MOST_MEMORY:
        raise UserError(
            f"plan.device={name}: a GPU has between {bytes_text(2 * CONTEXT)} and {bytes_text(MOST_MEMORY)}; give its "
            "memory in bytes or as a size, such as plan.device=24GiB@8.9"
        )
    return Device(name, memory, capability)


def communicators_of(parallel: Parallel) -> int:
    """The groups for which a run has NCCL's buffers: that of all ranks, the shards', the replicas'."""
    if parallel.strategy == "single":
        return 0
    if parallel.strategy == "ddp":
        return 1
    return 2 if parallel.fsdp.replicas == 1 else 3


def spelled(properties: Any, is_named: bool = False) -> str:
    """What `plan.device` calls a device with these properties, as torch reads them. is_named: also with its name."""
    by_size = f"{properties.total_memory}@{properties.major}.{properties.minor}"
    return f"{by_size} {properties.name}" if is_named else by_size
