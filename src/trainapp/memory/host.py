"""The host's memory: its size, this process's use of it, and a guard. Sizes are bytes.

The guard turns a kill by Linux's OOM killer into an error from which a CPU run can recover. Without it, Linux grants
more memory than the machine has, and kills the process for using it. The guard sets RLIMIT_DATA to the free memory of
the machine or cgroup, less a reserve: close to the limit some libraries crash rather than fail.

Source of malloc's parameters: mallopt(3).
"""

import contextlib
import ctypes
import functools
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainapp.config.schema import Memory
from trainapp.units import bytes_text, parse_memory_size

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
SMALLEST = 256 * 2**20  # bytes of headroom; with less the interpreter cannot start a thread
_process = functools.cache(psutil.Process)  # by process id; psutil takes 50 microseconds to make one
log = logging.getLogger(__name__)


def prepare_allocator() -> None:
    """Use one malloc arena, so that memory freed by one thread can serve another. Call before torch is imported."""
    _call_malloc("mallopt", _M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Return freed memory to the system, now and from now on. Call after the host ran out of memory.

    Otherwise malloc keeps freed memory in fragments, and a run that fits at 512 falls to 8. Costs speed (a step took
    1.7 times as long with every allocation a new mapping), hence only after an out-of-memory error.
    """
    _call_malloc("mallopt", _M_MMAP_THRESHOLD, 64 * 1024)
    _call_malloc("malloc_trim", 0)


def _call_malloc(function: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has neither function
            getattr(ctypes.CDLL(None), function)(*arguments)


@contextlib.contextmanager
def guarded(settings: Memory, total: int) -> Iterator[None]:
    """Set RLIMIT_DATA inside the block: on Linux, if `memory.guard` is set.

    Args:
        settings: of memory.
        total: the machine's memory in bytes.
    """
    if not settings.guard or sys.platform != "linux":
        yield
        return
    import numpy as np

    # OpenBLAS exits the process if it cannot allocate its buffer, which drawing a report needs: allocate it now.
    np.linalg.inv(np.eye(3))

    # The free memory, less the reserve, shared by the ranks on this machine.
    reserve = parse_memory_size(settings.guard_reserve, total)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    headroom = max(SMALLEST, (available_bytes() - reserve) // processes)

    # This process may grow by the headroom, unless a lower limit is in force.
    soft_before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = data_size() + headroom
    if soft_before != resource.RLIM_INFINITY:
        soft = min(soft, soft_before)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))  # the soft limit alone can be raised again
    log.debug("memory.guard: headroom of %s", bytes_text(headroom))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_before, hard))


def available_bytes() -> int:
    """Return the bytes that this process can still use before the machine or its cgroup runs out."""
    available = psutil.virtual_memory().available
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no limit, for which the file has "max"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics_lines = (cgroup / "memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in statistics_lines)
        reclaimable = int(statistics["inactive_file"])  # cached files
        available = min(available, limit - used + reclaimable)
    return max(0, available)


def data_size() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmData")]
    _, kibibytes, _ = line.split()  # "VmData:    5120 kB"
    return int(kibibytes) * 1024


def total_bytes() -> int:
    """Return the memory of this machine, or of the process's cgroup if that is less."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))  # "max" means no limit
    return total


def resident() -> dict[str, float]:
    """Return the resident memory of this process now, and its peak since the process began, as scalars."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    rss = _process(os.getpid()).memory_info().rss
    return {"memory/host_rss": rss, "memory/host_rss_peak": max(peak, rss)}  # the kernel counts the peak late
