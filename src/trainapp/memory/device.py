"""The memory of a device: the limit, the peak, and what a watched block of work needs.

Sizes are bytes. On CUDA they are the allocator's; on the CPU they are live tensor storages, counted in watched steps
only. On the CPU the peak and the limit are measured alike. On CUDA the limit bounds the reserved peak, which adds cache
and fragmentation.
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from trainapp.config.schema import Memory
from trainapp.errors import UserError
from trainapp.memory.live_tensors import Events, Resident, StorageCategories
from trainapp.memory.module_path import ModulePath
from trainapp.units import parse_memory_size


class DeviceMemory:
    """The memory of one device. Subclasses measure it and enforce the limit.

    Raises UserError for a limit above the device's memory.
    """

    def __init__(self, device: torch.device, settings: Memory, total: int):
        self.device = device
        self.total = total  # the device's memory
        self.limit: int | None = None  # None: no limit set
        if settings.limit is not None:
            self.limit = parse_memory_size(settings.limit, total)
        if self.limit is not None and self.limit > total:
            raise UserError(
                f"memory.limit={settings.limit}: {self.limit} bytes are more than the {total} bytes that {device} has"
            )
        self.peak = 0  # of the whole run
        self.peak_reserved = 0
        self.out_of_memory_count = 0
        self.module_path = ModulePath()
        self.watching = False
        self.compiles = False  # `train.compile`
        self.keep_events = False  # also keep a successful step's events, for its timeline

    @property
    def budget(self) -> int:
        """The limit, or the device's total without one."""
        return self.limit or self.total

    @property
    def enforced(self) -> int:
        """The bytes above which allocations fail: the budget, or less if others already use the device."""
        return self.budget

    @property
    def watch_is_due(self) -> bool:
        """Whether to watch a logged step of a validated size, whose memory use is otherwise unknown."""
        return False

    @property
    def sees_modules(self) -> bool:
        """Whether watched work runs with hooks on all modules, which tell where it is. A function whose first call is
        watched would be compiled through the hooks: into many small graphs, which stay.
        """
        return not self.compiles

    @contextlib.contextmanager
    def watch(self, resident: Resident) -> Iterator[None]:
        """Measure the work inside the block and enforce the limit on it; record the module that raises an error.

        Blocks may be nested: the measurement lasts until the outermost one ends, and inner ones only register tensors.

        Args:
            resident: the tensors that exist before the block.
        """
        if self.watching:
            self.register(resident)
            yield
            return
        self.watching = True
        try:
            with contextlib.ExitStack() as stack:
                if self.sees_modules:
                    stack.enter_context(self.module_path.watch())
                stack.enter_context(self.measuring(resident))
                yield
        finally:
            self.watching = False

    def measuring(self, resident: Resident) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that measures the outermost watched block, see `watch`."""
        return contextlib.nullcontext()

    def register(self, resident: Resident) -> None:
        """Add existing tensors to those of the watched block."""

    def lap(self) -> tuple[int, int] | None:
        """Return the bytes in use now, and the peak since the last call, within a watched block. None if the peak is
        unknown. Does not wait for kernels.
        """
        return None

    def cache_flushes(self) -> int:
        """Return how often the allocator has freed its cache to serve a request. Does not wait for kernels."""
        return 0

    def others_text(self) -> str:
        """Return how much of the device's memory others use, for a message. Empty where it is not shared."""
        return ""

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, StorageCategories]:
        """Return allocations and frees of the last watched block, and the categories of their storages, for a picture.
        Empty if the allocator has its own record, see `dump`.

        Args:
            gradients: those that exist now.
        """
        return [], {}

    def mark_step(self) -> None:
        """Mark the last watched block as a whole training step."""

    def dump(self, path: Path) -> bool:
        """Write the allocator's own record of the last watched block, and free it. Return False if there is none."""
        return False

    def synchronize(self) -> None:
        """Wait until the device has finished all its work. Raises errors that have not surfaced yet."""

    def enforce(self) -> None:
        """Enforce the limit from now on. Call again after libraries have allocated their own memory."""

    def window(self) -> dict[str, float]:
        """Return scalars since the last call: memory allocated, its peak, the limit and so on. Resets the window's
        peak.
        """
        raise NotImplementedError

    def used(self) -> int:
        """Return the bytes in use now, or at the end of the last watched block."""
        raise NotImplementedError

    def release(self) -> None:
        """Free reference cycles, then the allocator's cache."""
        gc.collect()

    def _scalars(
        self, allocated: int, reserved: int, peak: int, peak_reserved: int, retries: int = 0
    ) -> dict[str, float]:
        self._record_peaks(peak, peak_reserved)
        fragmentation = 0.0
        if reserved:
            fragmentation = 1 - allocated / reserved
        return {
            "memory/allocated": allocated,
            "memory/reserved": reserved,
            "memory/peak": peak,
            "memory/peak_reserved": peak_reserved,
            "memory/limit": self.budget,
            "memory/percent_of_limit": 100 * peak / self.budget,
            "memory/fragmentation": fragmentation,
            "memory/allocator_retries": retries,
            "memory/out_of_memory_count": self.out_of_memory_count,
        }

    def _record_peaks(self, allocated: int, reserved: int) -> None:
        self.peak = max(self.peak, allocated)
        self.peak_reserved = max(self.peak_reserved, reserved)
