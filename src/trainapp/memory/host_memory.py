"""The host's memory: how much there is, and how much of it this process uses. Sizes are bytes."""

import contextlib
import resource
import sys

import psutil


def total_bytes() -> int:
    """Memory of this machine, or of the process's cgroup if that is less."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))  # "max" means no limit
    return total


class HostMemory:
    """The process's resident memory and its peak since the last call."""

    def window(self) -> dict[str, float]:
        """Resident memory now, and its peak since the last call.

        Where the system cannot reset the peak, it is that of the whole process.
        """
        with contextlib.suppress(OSError, KeyError), open("/proc/self/status") as file:
            sizes = dict(line.split(":", 1) for line in file)
            resident, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # resets VmHWM
            return {"memory/host_rss": resident, "memory/host_rss_peak": peak}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory/host_rss": psutil.Process().memory_info().rss, "memory/host_rss_peak": peak}
