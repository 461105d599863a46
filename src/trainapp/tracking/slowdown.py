"""Noticing that training has become much slower without an error, as when others take the device's memory.

Windows and WSL move a process's memory to the host when the GPU's is full, instead of refusing an allocation. Nothing
fails, and each step takes many times as long.
"""

import statistics

SLOWER = 4  # times slower than the median: more than a changed micro-batch or some other load explains
WINDOWS_BEFORE = 5  # logged windows whose median counts


class Slowdown:
    """The speed of the logged windows so far, in samples per second without the time spent waiting for data."""

    def __init__(self) -> None:
        self._speeds: list[float] = []
        self._recoveries = 0

    def text(self, samples_per_second: float, data_wait: float, recoveries: int) -> str:
        """Return by how much a logged window was slower than those before; empty if it was not, or if something failed
        in it, which explains it.

        Args:
            samples_per_second: of the window.
            data_wait: the fraction of its time in which it waited for data.
            recoveries: of the run so far.
        """
        has_failed = recoveries > self._recoveries
        self._recoveries = recoveries
        computing = 1 - data_wait
        if has_failed or computing <= 0 or samples_per_second <= 0:
            return ""

        speed = samples_per_second / computing
        before = self._speeds[-WINDOWS_BEFORE:]
        self._speeds = [*before, speed]
        if len(before) < WINDOWS_BEFORE:
            return ""
        usual = statistics.median(before)
        if speed * SLOWER > usual:
            return ""
        return f"{speed:.3g} samples/s while it computes, where {usual:.3g} were usual, and nothing has failed"
