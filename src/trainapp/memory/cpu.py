"""CPU memory: live tensor storages, counted in watched steps only. The peak and the limit are measured alike."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from trainapp.config.schema import Memory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.host import total_bytes
from trainapp.memory.live_tensors import Category, Events, LiveTensors, Resident, StorageCategories

# A step of a validated size is watched after this many seconds, and after this many times as long as the last watched
# block took, watching included: where kernels are tiny, it makes a step four times slower.
WATCH_INTERVAL = 5.0
WATCH_FACTOR = 10


class CpuMemory(DeviceMemory):
    """The CPU's memory: counts live tensor storages, and enforces the limit on that count."""

    def __init__(self, device: torch.device, settings: Memory):
        super().__init__(device, settings, total_bytes())
        self.counter = LiveTensors()  # of the current or last watched block
        self._allocated = 0  # at the end of the last watched block
        # Peaks: of the current block's laps, of the blocks since the last `window`, of the last watched training step.
        self._lap_peak = 0
        self._window_peak = 0
        self._step_peak = 0
        self._watched_at = 0.0  # the end of the last watched block, in time.monotonic()
        self._watch_seconds = 0.0  # how long it took

    @property
    def sees_modules(self) -> bool:
        """True: watched work runs uncompiled."""
        return True

    @property
    def watch_is_due(self) -> bool:
        """Whether a watched step is due: at most once per WATCH_INTERVAL, and in less than a tenth of the time."""
        interval = max(WATCH_INTERVAL, WATCH_FACTOR * self._watch_seconds)
        return time.monotonic() - self._watched_at > interval

    def lap(self) -> tuple[int, int] | None:
        counter = self.counter
        peak = counter.peak
        counter.peak = counter.live  # the next lap's peak starts from what is in use now
        self._lap_peak = max(self._lap_peak, peak)
        return counter.live, peak

    @contextlib.contextmanager
    def measuring(self, resident: Resident) -> Iterator[None]:
        counter = self.new_counter()
        self.counter = counter
        self._lap_peak = 0
        started = time.monotonic()
        try:
            counter.register(resident)
            counter.register_retained()
            with counter, contextlib.ExitStack() as stack:
                if self.compiles:
                    stack.enter_context(uncompiled())
                yield
        finally:
            self._watched_at = time.monotonic()
            self._watch_seconds = self._watched_at - started

            # Each lap restarts the counter's peak: that of the block is the highest of them.
            counter.peak = max(counter.peak, self._lap_peak)
            self._allocated = counter.live
            self._window_peak = max(self._window_peak, counter.peak)
            self._record_peaks(counter.peak, counter.peak)

    def new_counter(self) -> LiveTensors:
        """Return the counter for a watched block that starts now."""
        return LiveTensors(self.limit, before=self.counter)

    def register(self, resident: Resident) -> None:
        self.counter.register(resident)

    def mark_step(self) -> None:
        self._step_peak = self.counter.peak

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, StorageCategories]:
        """Return the counter's record. A storage is known to be a gradient only once it has reached its parameter."""
        for gradient in gradients:
            self.counter.label(Category.GRADIENTS, gradient)
        return list(self.counter.events), dict(self.counter.categories)

    def window(self) -> dict[str, float]:
        """Return scalars since the last call. Allocated: live bytes at the end of the last watched block. Peak: of the
        window's blocks and of the last watched step, since steps that are not watched are of its size.
        """
        peak = max(self._window_peak, self._step_peak)
        self._window_peak = 0
        return self._scalars(self._allocated, self._allocated, peak, peak)

    def used(self) -> int:
        return self._allocated


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Return a context manager inside which functions wrapped by `torch.compile` run uncompiled.

    A compiled graph allocates where no counter sees it. A function whose first call is counted would also never be
    compiled: torch then permanently skips its code (2.13, _dynamo/convert_frame.py, `CatchErrorsWrapper`). This is not
    changed for functions that a model compiles itself: results would round differently in steps chosen by the clock.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
