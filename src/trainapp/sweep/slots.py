"""How a sweep divides the machine among its jobs: GPUs, CPU cores, and the memory of devices that jobs share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.units import parse_memory_size

SHARE = 0.9  # of the memory of jobs that share a device: the rest is for what no allocator counts
_PACKED_JOBS = 4  # per device


@dataclass(frozen=True)
class Slot:
    """A share of the machine, in which one job runs at a time."""

    gpus: tuple[str, ...] | None = None  # by their names in CUDA_VISIBLE_DEVICES; None: all
    cores: tuple[int, ...] | None = None  # None: all
    sharing: int = 1  # the number of slots with which it shares its memory, itself included

    def __str__(self) -> str:
        if not self.gpus:
            return ""
        return f"GPU {', '.join(self.gpus)}"

    @property
    def threads(self) -> int | None:
        """Threads of a new trial: as many as it has cores, unless the user has set a number. None: torch's choice."""
        threads_of_user = os.environ.get("OMP_NUM_THREADS")
        if threads_of_user:
            return int(threads_of_user.partition(",")[0])
        return len(self.cores) if self.cores else None

    def memory_overrides(self, config: Config) -> list[str]:
        """Return the override that gives a job an equal share of `memory.limit`, if memory is shared."""
        if self.sharing == 1:
            return []
        limit = SHARE if config.memory.limit is None else config.memory.limit
        size = parse_memory_size(limit, 0)  # 0 for a fraction
        if size == 0:
            return [f"memory.limit={float(limit) / self.sharing:.4g}"]
        return [f"memory.limit={size // self.sharing}"]


def divide_machine(parallel: int | str, config: Config, packs: bool = False) -> list[Slot]:
    """Return the slots of `sweep.parallel` jobs of this configuration, which says how many devices one takes.

    Args:
        parallel: the number of slots. `auto`: one per GPU, or per group of GPUs that a job takes; one without GPUs.
        config: of a job.
        packs: whether jobs share devices by their plans; `auto` is then four per device.

    Raises UserError for a job that needs more GPUs than there are.
    """
    # Groups of GPUs, each for one job; without GPUs the CPU is one group.
    gpus: list[str] = []
    if config.train.device not in ("cpu", "mps") and config.mode != "plan":
        gpus = _visible_gpus()
    gpus_per_job = _devices_per_job(config, len(gpus))
    if gpus_per_job > len(gpus) > 0:
        raise UserError(f"parallel.devices={gpus_per_job}: this machine has {len(gpus)} GPUs")
    group_count = max(1, len(gpus) // gpus_per_job)

    if parallel != "auto":
        count = int(parallel)
    elif packs:
        count = group_count * _PACKED_JOBS
    else:
        count = group_count

    # Each slot gets a group in turn, and its share of the cores.
    cores: list[int] = []
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    sharing = -(-count // group_count)  # rounded up
    slots = []
    for number in range(count):
        gpus_of_slot = None
        cores_of_slot = None
        if gpus:
            first_gpu = number % group_count * gpus_per_job
            gpus_of_slot = tuple(gpus[first_gpu : first_gpu + gpus_per_job])
        if cores and count > 1:
            cores_of_slot = _share_of_cores(cores, number, count)
        slots.append(Slot(gpus_of_slot, cores_of_slot, sharing))
    return slots


def _visible_gpus() -> list[str]:
    """Return the visible CUDA devices, as in CUDA_VISIBLE_DEVICES.

    If the variable is not set and a driver is installed, a separate process asks torch, which is not imported here.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]

    has_driver = shutil.which("nvidia-smi") or Path("/dev/kfd").exists()
    if not has_driver:
        return []
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    gpu_count = int(output or 0)
    return [str(number) for number in range(gpu_count)]


def _devices_per_job(config: Config, gpu_count: int) -> int:
    """Return the number of devices that a job takes. Raises UserError for a strategy that needs several ranks."""
    if config.parallel.strategy == "single":
        return 1
    is_auto = config.parallel.devices == "auto"
    if is_auto:
        devices = max(1, gpu_count)
    else:
        devices = int(config.parallel.devices)

    # A plan starts no ranks; without GPUs, the job itself finds out how many it has.
    is_number_known = gpu_count > 0 or not is_auto
    if config.mode != "plan" and is_number_known:
        require_several_ranks(config, devices, f"parallel.devices={config.parallel.devices}")
    return devices


def _share_of_cores(cores: Sequence[int], number: int, count: int) -> tuple[int, ...]:
    """Return the cores of the slot with this number among `count`; all cores if its share would be empty."""
    start = number * len(cores) // count
    end = (number + 1) * len(cores) // count
    share = cores[start:end]
    return tuple(share) or tuple(cores)
