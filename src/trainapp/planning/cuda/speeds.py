"""How long a traced step takes on a GPU that is not here, for comparing configurations: an estimate by data sheets.

Each operation takes what the roofline says (Williams et al. 2009), at the part of the data sheet's rates that large
operations reach. Python works ahead of the GPU, and copies between host and GPU run beside it: the longest of the three
counts. Left out, as on the CPU: fetching batches, metrics, evaluation, writing files, traffic between ranks.
"""

from dataclasses import dataclass

import torch

from trainapp.config.schema import Config
from trainapp.planning.checkpointing_times import Delay
from trainapp.planning.cuda.devices import DEVICES, Device
from trainapp.planning.operation import FUNCTION, HOST, LINK, Counts, Operation
from trainapp.tracking.meter import WITHOUT_TF32, half_peak_of

OF_ARITHMETIC, OF_MEMORY = 0.7, 0.85  # of the data sheet's rates; large products and copies reach about so much
HOST_MEMORY = 20e9  # bytes per second of a host's thread
KERNEL = 2.5e-6  # seconds that the smallest kernel takes
# Seconds of Python, autograd and the driver per operation, per view and for what checkpointing adds: a fast core, as
# measured for a CPU without caches to fill (`Speeds`), and a launch of about five microseconds.
OPERATION, VIEW = 8e-6, 2e-6
DELAYS = {False: Delay(300e-6, 15e-6), True: Delay(500e-6, 35e-6)}  # by whether checkpointing is selective


@dataclass(frozen=True)
class Rates:
    """Of data sheets. half: FLOP/s of products in bf16 or fp16 with sums in fp32. tf32, single: in fp32, with and
    without TF32. memory, link: bytes per second of the device's memory, and to or from pinned memory of the host.
    """

    half: float
    tf32: float
    single: float
    memory: float
    link: float


# FLOP/s in fp32, bytes per second of memory and of the link, by the names in DEVICES: the makers' data sheets; of a
# link three quarters of it.
_SHEETS = {
    "t4-16gb": (8.1e12, 320e9, 12e9),
    "v100-16gb": (15.7e12, 900e9, 12e9),
    "v100-32gb": (15.7e12, 900e9, 12e9),
    "a10-24gb": (31.2e12, 600e9, 24e9),
    "a100-40gb": (19.5e12, 1555e9, 24e9),
    "a100-80gb": (19.5e12, 2039e9, 24e9),
    "rtx3090-24gb": (35.5e12, 936e9, 24e9),
    "l4-24gb": (30.3e12, 300e9, 12e9),
    "l40s-48gb": (91.6e12, 864e9, 24e9),
    "rtx4090-24gb": (82.6e12, 1008e9, 24e9),
    "h100-80gb": (66.9e12, 3350e9, 48e9),
    "h200-141gb": (66.9e12, 4800e9, 48e9),
}


def rates_of(device: Device) -> Rates:
    """Those of the device or, if it is not known by name, of the one with the closest capability and memory."""

    def distance(known: Device) -> tuple[bool, int, int]:
        (major, minor), (other, below) = known.capability, device.capability
        is_other = not set(known.reported) & set(device.reported)
        return is_other, abs(10 * major + minor - 10 * other - below), abs(known.memory - device.memory)

    known = min(DEVICES.values(), key=distance)
    single, memory, link = _SHEETS[known.name]
    half = half_peak_of(known.reported[0])
    assert half is not None, f"{known.reported[0]} has no peak"
    has_tf32 = not any(part in known.reported[0] for part in WITHOUT_TF32)
    return Rates(half, half / 2 if has_tf32 else single, single, memory, link)


class GpuSpeeds:
    """As `plan.step_time.Speeds`, from data sheets."""

    view = VIEW

    def __init__(self, rates: Rates, config: Config):
        self.missing: set[Operation] = set()
        self._rates = rates
        self._single = rates.tf32 if config.precision.mode == "tf32" else rates.single

    def measure(self, operations: Counts) -> None:
        """Nothing can be run."""

    def busy(self, operation: Operation) -> float:
        """Seconds of the operation itself."""
        if operation.name.startswith(("empty", "new_empty")):  # memory of the allocator's cache
            return 0.0
        if operation.place == HOST:
            return operation.moved / HOST_MEMORY
        if operation.place == LINK:  # what is moved was read once and written once
            return operation.moved / 2 / self._rates.link
        moving = operation.moved / (OF_MEMORY * self._rates.memory)
        work = 0 if operation.kind == FUNCTION else operation.work
        return max(work / (OF_ARITHMETIC * self._arithmetic(operation.dtype)), moving, KERNEL)

    def call(self, operation: Operation) -> float:
        """Seconds of Python from it to the next one."""
        return OPERATION

    def delay(self, moved: int, selective: bool) -> Delay:
        """What checkpointing adds to a block, and to each of its operations."""
        return DELAYS[selective]

    def step(self, busy: float, copying: float, between: float) -> float:
        """Seconds of a step: all three at the same time."""
        return max(busy, copying, between)

    def _arithmetic(self, dtype: torch.dtype) -> float:
        if dtype in (torch.bfloat16, torch.float16):
            return self._rates.half
        return self._rates.single / 2 if dtype == torch.float64 else self._single
