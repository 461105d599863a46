"""Keeps Linux's OOM killer away from a run on the CPU: memory ends with an error instead, which can be recovered from.

Without it, a process that asks for more than there is gets it, and is killed without a word when it uses it. The guard
is RLIMIT_DATA at what the machine (or the cgroup) has left, less a reserve: close to the limit some libraries crash
rather than fail.

Source of malloc's parameters: mallopt(3).
"""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainapp.config import schema
from trainapp.units import bytes_text, parse_memory_size

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
SMALLEST = 256 * 2**20  # under this the interpreter cannot even start a thread
log = logging.getLogger(__name__)


def prepare_allocator() -> None:
    """One arena: what a thread frees, another can use. To be called before torch is imported."""
    _mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """After the host ran out: return what is free, and from now on whatever is freed, to the system.

    Without it the freed memory stays with malloc in pieces, and a job that fits at 512 falls to 8. Costs speed (a
    step took 1.7 times as long where all its allocations were new mappings), so a run pays only once it had to.
    """
    _mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def guarded(settings: schema.Memory, total: int) -> Iterator[None]:
    """RLIMIT_DATA inside the block, if `memory.guard` is set and this is Linux. total: bytes of the machine."""
    if not settings.guard or sys.platform != "linux":
        yield
        return
    import resource

    import numpy as np

    # OpenBLAS ends the process when it cannot have its buffer, and a picture of an incident asks for it: now, then.
    np.linalg.inv(np.eye(3))
    reserve = parse_memory_size(settings.guard_reserve, total)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks of this machine share what is left
    headroom = max(SMALLEST, (available() - reserve) // processes)
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data_size() + headroom
    if before != resource.RLIM_INFINITY:
        wanted = min(wanted, before)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))  # the soft one only: it can be taken back
    log.debug("memory.guard: at most %s more than now", bytes_text(headroom))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def available() -> int:
    """Bytes that this process could still use before the machine or its cgroup runs out."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        free = min(free, int((group / "memory.max").read_text()) - used + int(cached))  # "max" means no limit
    return max(0, free)


def data_size() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))


def _mallopt(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
            ctypes.CDLL(None).mallopt(parameter, value)
