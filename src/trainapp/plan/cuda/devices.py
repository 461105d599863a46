"""The devices that `plan.device` names, and what of them a plan depends on. Imports no torch.

Memory is what torch reports as `total_memory`, which is less than the name. These figures are approximate and have not
been checked against a source or a device: where some hundred MiB matter, set `memory.limit`.
"""

import contextlib
import re
from dataclasses import dataclass

from trainapp.errors import UserError
from trainapp.units import parse_memory_size

MIB = 2**20
# Bytes of the driver's context and of the libraries' code, which no allocator counts: about half a GiB, more with NCCL.
CONTEXT = 512 * MIB
HEADROOM = 2**30  # as `memory.cuda.HEADROOM`, which a run without a limit leaves


@dataclass(frozen=True)
class Device:
    """`memory` in bytes; `capability` as (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]

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
        available = self.memory - CONTEXT
        return available - min(HEADROOM, available // 8)


DEVICES = {
    device.name: device
    for device in (
        Device("t4-16gb", 14_912 * MIB, (7, 5)),
        Device("v100-16gb", 16_151 * MIB, (7, 0)),
        Device("v100-32gb", 32_494 * MIB, (7, 0)),
        Device("a10-24gb", 22_515 * MIB, (8, 6)),
        Device("a100-40gb", 40_326 * MIB, (8, 0)),
        Device("a100-80gb", 81_038 * MIB, (8, 0)),
        Device("rtx3090-24gb", 24_113 * MIB, (8, 6)),
        Device("l4-24gb", 22_478 * MIB, (8, 9)),
        Device("l40s-48gb", 45_495 * MIB, (8, 9)),
        Device("rtx4090-24gb", 24_091 * MIB, (8, 9)),
        Device("h100-80gb", 81_008 * MIB, (9, 0)),
        Device("h200-141gb", 143_167 * MIB, (9, 0)),
    )
}


def find(name: str) -> Device:
    """The device of that name, or one of this memory and compute capability, such as `24GiB@8.9`.

    Raises UserError for any other name.
    """
    if name in DEVICES:
        return DEVICES[name]
    size, _, capability = name.partition("@")
    version = re.fullmatch(r"(\d+)\.(\d)", capability)
    with contextlib.suppress(ValueError):
        if version and (memory := parse_memory_size(size, 0)) > 2 * CONTEXT:
            return Device(name, memory, (int(version[1]), int(version[2])))
    raise UserError(
        f"plan.device={name}: unknown; known are {', '.join(DEVICES)}. Others are named by their memory and compute "
        "capability, such as plan.device=24GiB@8.9"
    )


def spelled(memory: int, capability: tuple[int, int]) -> str:
    """What `plan.device` calls a device of so many bytes, whatever its name."""
    return f"{memory}@{capability[0]}.{capability[1]}"
