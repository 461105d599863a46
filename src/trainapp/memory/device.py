"""The memory of a device: the limit, the peak, and what persists between steps, by category.

Sizes are bytes. On CUDA they are the allocator's; on the CPU they are live tensor storages, counted in watched steps
only. On the CPU the peak and the limit are measured alike. On CUDA the limit bounds the reserved peak, which adds cache
and fragmentation.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainapp.config.schema import Memory
from trainapp.errors import UserError
from trainapp.memory.host import total_bytes
from trainapp.memory.live_tensors import Category, Events, Kinds, LiveTensors, ModulePath, Resident
from trainapp.torch_private import local, storage_id, strided_parts
from trainapp.units import parse_memory_size

# On the CPU, a step of a validated size is watched after this many seconds, and after this many times as long as the
# last watched block took, watching included: where kernels are tiny, it makes a step four times slower.
WATCH_INTERVAL = 5.0
WATCH_FACTOR = 10


def static_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: list[Tensor],
    keeps_gradients: bool = True,
) -> dict[Category, int]:
    """Bytes that persist between steps, by category. Gradients are counted in full, whether or not they exist now; with
    several optimizers, those of the one with the most, since they take turns.

    keeps_gradients: whether all gradients exist at once, between backward and update.
    """
    parameters = list(model.parameters())
    trained = [[p for p in parameters if p.requires_grad]]
    if len(optimizers) > 1:
        trained = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    return {
        Category.PARAMETERS: size_of(parameters),
        Category.GRADIENTS: max(size_of(own) for own in trained) if keeps_gradients else 0,
        Category.OPTIMIZER_STATE: size_of(t for optimizer in optimizers for t in optimizer_tensors(optimizer)),
        Category.BUFFERS: size_of(model.buffers()),
        Category.WEIGHT_AVERAGE: size_of(averages),
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that the optimizer keeps on the parameters' device."""
    by_parameter = [
        (key, value) for key, state in optimizer.state.items() for value in state.values() if torch.is_tensor(value)
    ]
    tensors = [value for key, value in by_parameter if not torch.is_tensor(key) or key.device.type == value.device.type]
    is_on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    return [*tensors, *getattr(optimizer, "tables", ()), *(getattr(optimizer, "host_copies", ()) if is_on_cpu else ())]


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = [part.untyped_storage() for tensor in tensors for part in strided_parts(local(tensor))]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())  # tied weights share one


def build(settings: Memory, device: torch.device) -> "DeviceMemory":
    """The device's memory, with `memory.limit` enforced. Raises UserError for a limit above the device's memory."""
    from trainapp.memory.cuda import CudaMemory  # late: it extends the class below

    return {"cpu": CpuMemory, "cuda": CudaMemory, "mps": MpsMemory}[device.type](device, settings)


class DeviceMemory:
    """The memory of one device. Subclasses measure it and enforce the limit.

    `limit`: None if the user set none; `total`: the device's memory. Raises UserError for a limit above it.
    """

    def __init__(self, device: torch.device, settings: Memory, total: int):
        self.device, self.total = device, total
        self.limit = None if settings.limit is None else parse_memory_size(settings.limit, total)
        if self.limit is not None and self.limit > total:
            raise UserError(
                f"memory.limit={settings.limit}: {self.limit} bytes are more than the {total} bytes that {device} has"
            )
        self.peak = self.peak_reserved = 0  # of the whole run
        self.out_of_memory_count = 0
        self.module_path = ModulePath()
        self.watching = False
        self.compiles = False  # `train.compile`: watched work runs uncompiled
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

    @contextlib.contextmanager
    def watch(self, resident: Resident) -> Iterator[None]:
        """Measure the work inside the block and enforce the limit on it; record the module that raises an error. Blocks
        may be nested: until the outermost one ends. resident: the tensors that exist before the block.
        """
        if self.watching:
            self.register(resident)
            yield
            return
        self.watching = True
        try:
            with self.module_path.watch(), self.measuring(resident):
                yield
        finally:
            self.watching = False

    def measuring(self, resident: Resident) -> contextlib.AbstractContextManager[None]:
        """The outermost watched block."""
        return contextlib.nullcontext()

    def register(self, resident: Resident) -> None:
        """Add existing tensors to those of the watched block."""

    def lap(self) -> tuple[int, int] | None:
        """Bytes in use now, and the peak since the last call, within a watched block. None if the peak is unknown. Does
        not wait for kernels.
        """
        return None

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, Kinds]:
        """Allocations and frees of the last watched block, and the categories of their storages, for `timeline`. Empty
        if the allocator has its own record, see `dump`.
        """
        return [], {}

    def note_step(self) -> None:
        """Mark the last watched block as a whole training step."""

    def dump(self, path: Path) -> bool:
        """Write the allocator's own record of the last watched block, and free it. False if there is none."""
        return False

    def synchronize(self) -> None:
        """Wait until the device has finished all its work. Raises errors that have not surfaced yet."""

    def enforce(self) -> None:
        """Enforce the limit from now on. Call again after libraries have allocated their own memory."""

    def window(self) -> dict[str, float]:
        """Scalars since the last call: memory allocated, its peak, the limit and so on. Resets the window's peak."""
        raise NotImplementedError

    def used(self) -> int:
        """Bytes in use now, or at the end of the last watched block."""
        raise NotImplementedError

    def release(self) -> None:
        """Free reference cycles, then the allocator's cache."""
        gc.collect()

    def _scalars(
        self, allocated: int, reserved: int, peak: int, peak_reserved: int, retries: int = 0
    ) -> dict[str, float]:
        self._note_peaks(peak, peak_reserved)
        return {
            "memory/allocated": allocated,
            "memory/reserved": reserved,
            "memory/peak": peak,
            "memory/peak_reserved": peak_reserved,
            "memory/limit": self.budget,
            "memory/percent_of_limit": 100 * peak / self.budget,
            "memory/fragmentation": 1 - allocated / reserved if reserved else 0.0,
            "memory/allocator_retries": retries,
            "memory/out_of_memory_count": self.out_of_memory_count,
        }

    def _note_peaks(self, allocated: int, reserved: int) -> None:
        self.peak, self.peak_reserved = max(self.peak, allocated), max(self.peak_reserved, reserved)


class CpuMemory(DeviceMemory):
    """Counts live tensor storages, and enforces the limit on that count."""

    def __init__(self, device: torch.device, settings: Memory):
        super().__init__(device, settings, total_bytes())
        self.counter = LiveTensors()  # of the current or last watched block
        self._lapped = 0  # highest peak of the current block's laps
        self._allocated = self._window_peak = self._step_peak = 0
        self._watched_at = 0.0  # the end of the last watched block, in time.monotonic()
        self._watch_seconds = 0.0  # how long it took

    @property
    def watch_is_due(self) -> bool:
        """At most once per WATCH_INTERVAL, and in less than a tenth of the time."""
        return time.monotonic() - self._watched_at > max(WATCH_INTERVAL, WATCH_FACTOR * self._watch_seconds)

    def lap(self) -> tuple[int, int] | None:
        counter = self.counter
        peak, counter.peak = counter.peak, counter.live
        self._lapped = max(self._lapped, peak)
        return counter.live, peak

    @contextlib.contextmanager
    def measuring(self, resident: Resident) -> Iterator[None]:
        counter = self.counter = self.new_counter()
        self._lapped = 0
        started = time.monotonic()
        try:
            counter.register(resident)
            counter.register_kept()
            with counter, uncompiled() if self.compiles else contextlib.nullcontext():
                yield
        finally:
            self._watched_at = time.monotonic()
            self._watch_seconds = self._watched_at - started
            peak = counter.peak = max(counter.peak, self._lapped)
            self._allocated, self._window_peak = counter.live, max(self._window_peak, peak)
            self._note_peaks(peak, peak)

    def new_counter(self) -> LiveTensors:
        """The counter for a watched block that starts now."""
        return LiveTensors(self.limit, before=self.counter)

    def register(self, resident: Resident) -> None:
        self.counter.register(resident)

    def note_step(self) -> None:
        self._step_peak = self.counter.peak

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, Kinds]:
        """The counter's record. A storage is known to be a gradient only once it has reached its parameter."""
        for gradient in gradients:
            self.counter.label(Category.GRADIENTS, gradient)
        return list(self.counter.events), dict(self.counter.kinds)

    def window(self) -> dict[str, float]:
        """Live bytes at the end of the last watched block; the peak of the window's blocks and the last watched step
        (steps that are not watched are of its size).
        """
        peak, self._window_peak = max(self._window_peak, self._step_peak), 0
        return self._scalars(self._allocated, self._allocated, peak, peak)

    def used(self) -> int:
        return self._allocated


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Inside the block, functions wrapped by `torch.compile` run uncompiled.

    A compiled graph allocates where no counter sees it. A function whose first call is counted would also never be
    compiled: torch then permanently skips its code (2.13, _dynamo/convert_frame.py, `CatchErrorsWrapper`). This is not
    changed for functions that a model compiles itself: results would round differently in steps chosen by the clock.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


class MpsMemory(DeviceMemory):
    """Metal's driver keeps no peak, so the current value is reported instead."""

    def __init__(self, device: torch.device, settings: Memory):
        total = torch.mps.recommended_max_memory()
        super().__init__(device, settings, total)
        if self.limit:
            torch.mps.set_per_process_memory_fraction(self.limit / total)

    def window(self) -> dict[str, float]:
        used, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return self._scalars(used, reserved, used, reserved)

    def used(self) -> int:
        return torch.mps.current_allocated_memory()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.mps.empty_cache()
