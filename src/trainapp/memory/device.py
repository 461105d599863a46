"""What all devices have in common: the limit, the peak, and the memory that persists between steps, by kind.

Sizes are bytes. On CUDA they are the allocator's; on the CPU they are live tensor storages, counted in watched steps
only. On the CPU the peak and the limit are measured alike. On CUDA the limit bounds the reserved peak, which adds cache
and fragmentation.
"""

import contextlib
import gc
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainapp.config.schema import Memory
from trainapp.errors import UserError
from trainapp.memory.categories import Category
from trainapp.memory.kept import KeptStorages
from trainapp.memory.live_tensors import Events, Kinds, ModulePath, Resident
from trainapp.optim.on_host import copies_of
from trainapp.parallel.strategy import local
from trainapp.torch_private import storage_id, strided_parts
from trainapp.units import parse_memory_size


def static_bytes(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    averages: list[Tensor],
    keeps_gradients: bool = True,
) -> dict[Category, int]:
    """Bytes that persist between steps, by kind. Gradients are counted in full, whether or not they exist now; of
    several optimizers, those of the one with the most: each has its turn.

    keeps_gradients: whether all of them exist at once, between backward and update.
    """
    parameters = list(model.parameters())
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
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
    """Every tensor that the optimizer keeps, but those on the host where the parameters are on a device."""
    by_parameter = [
        (key, value) for key, state in optimizer.state.items() for value in state.values() if torch.is_tensor(value)
    ]
    tensors = [value for key, value in by_parameter if not torch.is_tensor(key) or key.device.type == value.device.type]
    is_on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    return [*tensors, *getattr(optimizer, "tables", ()), *(copies_of(optimizer) if is_on_cpu else [])]


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = [part.untyped_storage() for tensor in tensors for part in strided_parts(local(tensor))]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())  # tied weights share one


class DeviceMemory:
    """The memory of one device. Subclasses measure it and enforce the limit.

    `limit` is None where the user set none; `total` is what the device has. Raises UserError for a limit above it.
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
        self.kept = KeptStorages()  # of the run; where live tensors are counted
        self.kept_before = 0  # bytes of it at the beginning of the last watched block
        self.watching = False
        self.compiles = False  # `train.compile`: watched work runs uncompiled
        self.keep_events = False  # keep a successful step's events too, for its timeline

    @property
    def budget(self) -> int:
        """The limit, or the device's total where there is none."""
        return self.limit or self.total

    @property
    def enforced(self) -> int:
        """The bytes above which allocations fail: the budget, or less where others already use the device."""
        return self.budget

    @property
    def watch_is_due(self) -> bool:
        """Whether a logged step of a proven size should be watched, because its memory use is not known otherwise."""
        return False

    @property
    def watched_peak(self) -> int | None:
        """The peak of the last watched block; None where it is not known."""
        return None

    def lap(self) -> tuple[int, int] | None:
        """Bytes in use now, and the peak since the last call, within a watched block. None where a peak is not known.
        Waits for no kernel.
        """
        return None

    def watch(self, resident: Resident, track_modules: bool = True) -> contextlib.AbstractContextManager[None]:
        """Measure the work inside the block and enforce the limit on it. Blocks may be nested.

        resident: the tensors that exist before it. track_modules: also note which module is running, so that an error
        in a backward names it; hooks in every module cost as much as counting.
        """
        return contextlib.nullcontext()

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, Kinds]:
        """Allocations and frees of the last watched block, and the kinds of their storages, for `timeline`."""
        return [], {}

    def note_step(self) -> None:
        """Note that the last watched block was a whole step of training."""

    def note_buffer(self, buffer: Tensor) -> None:
        """Note a tensor that the present watched block has allocated as a buffer for communication."""

    def dump(self, path: Path) -> bool:
        """Write the allocator's own record of the last watched block. False where there is none."""
        return False

    def forget_record(self) -> None:
        """Free what `events` and `dump` read, once they are no longer needed."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it. Raises errors that have not surfaced yet."""

    def enforce(self) -> None:
        """Enforce the limit from now on. Call again when libraries have allocated more for themselves."""

    def refused_allocations(self) -> int:
        """How many allocations have failed in this process, whether or not something caught the error. 0 where the
        allocator does not count them. Waits for no kernel.
        """
        return 0

    def unused_cache(self) -> int:
        """Bytes that the allocator holds in its cache. Releasing them may be all that a retry needs."""
        return 0

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
