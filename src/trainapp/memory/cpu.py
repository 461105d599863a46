"""Memory of the CPU: live tensor storages."""

import contextlib
import time
from collections.abc import Iterable

import torch

from trainapp.config import schema
from trainapp.memory.device import DeviceMemory, available_total
from trainapp.memory.live_tensors import LiveTensors, Resident

LOOK_EVERY = 1.0  # seconds between two watched steps of a proven size on the CPU


class CpuMemory(DeviceMemory):
    """Live tensor storages; the limit is enforced by counting them."""

    def __init__(self, device: torch.device, settings: schema.Memory):
        super().__init__(device, settings, available_total())
        self._allocated = self._window_peak = 0
        self.counter: LiveTensors | None = None  # of the last watched block
        self._last_peak = 0
        self._looked_at = 0.0  # time.monotonic()

    @property
    def wants_look(self) -> bool:
        """Not more often than LOOK_EVERY: watching makes a step of a tiny model several times slower."""
        return time.monotonic() - self._looked_at > LOOK_EVERY

    @contextlib.contextmanager
    def watch(self, resident: Resident, where: bool = True):
        """Counts (and with a limit, enforces) from here to the end of the block."""
        if self.watching:  # inside a watched step: what is new here counts, too
            self.counter.register(resident)
            yield
            return
        counter = self.counter = LiveTensors(self.limit)
        self.watching = True
        try:
            counter.register(resident)
            with self.module_path.watch() if where else contextlib.nullcontext(), counter:
                yield
        finally:
            self.watching, self._looked_at = False, time.monotonic()
            self._allocated, self._window_peak = counter.live, max(self._window_peak, counter.peak)
            self.peak = max(self.peak, counter.peak)

    def events(self, gradients: Iterable[torch.Tensor]) -> tuple[list[tuple[int, int]], dict[int, str]]:
        """What the counter saw; gradients are known as such only now."""
        if self.counter is None:
            return [], {}
        for gradient in gradients:
            self.counter.label("gradients", gradient)
        return list(self.counter.events), dict(self.counter.kinds)

    def window(self) -> dict[str, float]:
        """The tensors alive at the end of the last watched step, and the window's peak, or else the one before it."""
        self._last_peak = self._window_peak or self._last_peak
        scalars = self._scalars(self._allocated, self._allocated, self._last_peak)
        self._window_peak = 0
        return scalars

    def used(self) -> int:
        """Live bytes at the end of the last watched step."""
        return self._allocated
