"""CPU memory: live tensor storages."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from trainapp.config.schema import Memory
from trainapp.memory.categories import Category
from trainapp.memory.device import DeviceMemory
from trainapp.memory.host import total_bytes
from trainapp.memory.live_tensors import Events, Kinds, LiveTensors, Resident

WATCH_INTERVAL = 1.0  # seconds between watched steps of a proven size


class CpuMemory(DeviceMemory):
    """Counts live tensor storages, and enforces the limit on that count."""

    def __init__(self, device: torch.device, settings: Memory):
        super().__init__(device, settings, total_bytes())
        self._allocated = self._window_peak = 0
        self._lapped = 0  # the highest peak of the present block's laps
        self.counter: LiveTensors | None = None  # of the last watched block
        self._last_peak = self._step_peak = 0  # of the last window; of the last watched step
        self._watched_at = 0.0  # time.monotonic()

    @property
    def watch_is_due(self) -> bool:
        """At most once per WATCH_INTERVAL: watching makes a step of a tiny model several times slower."""
        return time.monotonic() - self._watched_at > WATCH_INTERVAL

    @property
    def watched_peak(self) -> int | None:
        """The peak of the last watched block; None before the first."""
        return None if self.counter is None else self.counter.peak

    def lap(self) -> tuple[int, int] | None:
        counter = self.counter
        if not self.watching or counter is None:
            return None
        peak, counter.peak = counter.peak, counter.live
        self._lapped = max(self._lapped, peak)
        return counter.live, peak

    @contextlib.contextmanager
    def watch(self, resident: Resident, track_modules: bool = True) -> Iterator[None]:
        """Count storages, and enforce the limit if there is one, until the outermost block ends."""
        if self.watching and self.counter is not None:  # nested: only count what is new
            self.counter.register(resident)
            yield
            return
        counter = self.counter = LiveTensors(self.limit, ignored=self.kept.of_data)
        self.watching, self._lapped = True, 0
        try:
            counter.register(resident)
            self.kept_before = counter.register_kept(self.kept)
            with contextlib.ExitStack() as stack:
                if track_modules:
                    stack.enter_context(self.module_path.watch())
                stack.enter_context(counter)
                if self.compiles:
                    stack.enter_context(_uncompiled())
                yield
        finally:
            self.watching, self._watched_at = False, time.monotonic()
            counter.peak = max(counter.peak, self._lapped)
            self.kept.carry(counter.surviving())
            self._allocated, self._window_peak = counter.live, max(self._window_peak, counter.peak)
            self._note_peaks(counter.peak, counter.peak)

    def note_step(self) -> None:
        self._step_peak = self.watched_peak or 0

    def note_buffer(self, buffer: Tensor) -> None:
        if self.watching and self.counter is not None:
            self.counter.label(Category.COMMUNICATION_BUFFERS, buffer)

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, Kinds]:
        """The counter's record. A storage is known to be a gradient only once it has reached its parameter."""
        if self.counter is None:
            return [], {}
        for gradient in gradients:
            self.counter.label(Category.GRADIENTS, gradient)
        return list(self.counter.events), dict(self.counter.kinds)

    def window(self) -> dict[str, float]:
        """Live bytes at the end of the last watched step; the window's peak, of which the last watched step is a part:
        those since then were of its size, or they would have been watched.
        """
        self._last_peak = max(self._window_peak, self._step_peak) or self._last_peak
        scalars = self._scalars(self._allocated, self._allocated, self._last_peak, self._last_peak)
        self._window_peak = 0
        return scalars

    def used(self) -> int:
        """Live bytes at the end of the last watched step."""
        return self._allocated


def _uncompiled() -> contextlib.AbstractContextManager[None]:
    """Inside the block, what `torch.compile` has wrapped runs as it is written.

    A compiled graph allocates where no counter sees it. And a function whose first call is counted would never be
    compiled at all: torch skips its code for good (2.13, _dynamo/convert_frame.py, `CatchErrorsWrapper`). That is left
    so for what a model compiles itself: else it would round otherwise in the steps that the clock chooses to count.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
