"""What is measured while training: time, throughput, memory by kind. Keeps the loop free of bookkeeping."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trainapp.checkpoint.train_state import TrainState
from trainapp.data.batch import tensors_in
from trainapp.memory.device import DeviceMemory, optimizer_tensors, static_bytes
from trainapp.memory.host_memory import HostMemory
from trainapp.memory.kinds import MemoryKind
from trainapp.parallel.ranks import Ranks

OF_EVERY_RANK = tuple(
    f"memory/{name}" for name in ("allocated", "reserved", "peak", "peak_reserved", "host_rss", "host_rss_peak")
)


MOST_COUNTS = 256  # that are kept apart: a run may never log


def _sum(counts: list[Any]) -> Any:
    """Of numbers and tensors, without waiting for the device."""
    tensors = [count for count in counts if isinstance(count, torch.Tensor)]
    numbers = sum(count for count in counts if not isinstance(count, torch.Tensor))
    return torch.stack(tensors).sum() + numbers if tensors else numbers


def spread_over_ranks(scalars: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """The minimum and maximum of each memory scalar over ranks, with their ranks. Empty for a single rank."""
    if ranks.world == 1:
        return {}
    found: dict[str, float] = {}
    by_rank = ranks.all_gather_object([scalars[name] for name in OF_EVERY_RANK])
    for name, values in zip(OF_EVERY_RANK, zip(*by_rank, strict=True), strict=True):
        for which, value in (("min", min(values)), ("max", max(values))):
            found |= {f"{name}_{which}": value, f"{name}_{which}_rank": values.index(value)}
    return found


class Meter:
    """Counts samples and seconds since the last log step, and since the start.

    communication_buffers, hook_tensors: functions that give tensors in memory which neither model nor optimizer hold;
    the latter what metrics and callbacks keep.
    counts_tokens: whether the counts of the loss are numbers of tokens.
    """

    def __init__(
        self,
        state: TrainState,
        memory: DeviceMemory,
        communication_buffers: Callable[[], Iterable[torch.Tensor]] = tuple,
    ):
        self.state, self.memory, self.host = state, memory, HostMemory()
        self.communication_buffers = communication_buffers
        self.hook_tensors: Callable[[], Iterable[torch.Tensor]] = tuple
        self.counts_tokens = False
        self._window_counts: list[Any] = []  # tensors stay on the device until a log step
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
        self.samples = self._window_samples = 0
        self._waited = self.waited = 0.0
        self._weights: dict[int, torch.Tensor] = {}
        self.start()

    def start(self) -> None:
        """Training time begins here: what came before, such as planning the first size, does not count."""
        self.started = self._window_start = time.monotonic()
        self.paused = self._window_paused = 0.0

    def weight(self, samples: int) -> torch.Tensor:
        """1 / samples, a scalar on the device: created once per step size, and filled there, since a copy waits."""
        if samples not in self._weights:
            self._weights[samples] = torch.full((), 1.0 / samples, device=self.state.device)
        return self._weights[samples]

    def resident(self, batch: Any = None) -> dict[MemoryKind, Iterable[torch.Tensor]]:
        """The tensors in memory before a forward and backward, by kind."""
        return {
            MemoryKind.PARAMETERS: self.state.model.parameters(),
            MemoryKind.GRADIENTS: self.gradients(),
            MemoryKind.COMMUNICATION_BUFFERS: self.communication_buffers(),
            MemoryKind.BUFFERS: itertools.chain(self.state.model.buffers(), self.hook_tensors()),
            MemoryKind.OPTIMIZER_STATE: itertools.chain(*map(optimizer_tensors, self.state.optimizers)),
            MemoryKind.WEIGHT_AVERAGE: self.state.average.averages,
            MemoryKind.BATCH: tensors_in(batch),  # last, so that an error names it
        }

    def gradients(self) -> list[torch.Tensor]:
        """Gradients that currently exist."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches and counts the time spent waiting for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            seconds = time.perf_counter() - start
            self._waited += seconds
            self.waited += seconds
            if batch is None:
                return
            yield batch
            del batch

    def count(self, samples: int, divisor: Any = 0) -> None:
        """Count a finished step's samples. divisor: of its loss, a number or a tensor."""
        if self.counts_tokens:
            self._window_counts.append(divisor)
            if len(self._window_counts) == MOST_COUNTS:
                self._window_counts = [_sum(self._window_counts)]
        self.samples += samples
        self._window_samples += samples

    def pause(self, seconds: float) -> None:
        """Exclude `seconds`, spent on evaluation, saving or planning, from training time."""
        self.paused += seconds
        self._window_paused += seconds

    @property
    def static_bytes(self) -> int:
        """Bytes that persist between steps."""
        return sum(self.static.values())

    def samples_per_second(self) -> float:
        """Samples per second over this process's training time."""
        return self.samples / max(1e-9, time.monotonic() - self.started - self.paused)

    def scalars(self) -> dict[str, float]:
        """Time, throughput and memory since the last call; starts a new window."""
        now, state = time.monotonic(), self.state
        seconds = max(1e-9, now - self._window_start - self._window_paused)
        values = {
            "samples_per_second": self._window_samples / seconds,
            "data_wait": self._waited / seconds,
            "skipped_steps": state.progress.skipped,
            **self.memory.window(),
            **{f"memory/{kind}": size for kind, size in self.static.items()},
            "memory/left_for_activations": max(0, self.memory.budget - self.static_bytes),
            **self.host.window(),
        }
        if self.counts_tokens:
            values["tokens_per_second"] = float(_sum(self._window_counts)) / seconds
            self._window_counts.clear()
        for update in state.updates:
            if update.precision.scaler.is_enabled():
                values[update.named("loss_scale")] = update.precision.scaler.get_scale()
        self._window_start, self._window_samples = now, 0
        self._window_paused = self._waited = 0.0
        return values
