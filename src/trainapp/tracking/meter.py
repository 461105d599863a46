"""Measurements during training: time, throughput, memory by category."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from trainapp.checkpoint.train_state import TrainState
from trainapp.memory import host
from trainapp.memory.device import DeviceMemory
from trainapp.memory.live_tensors import Category
from trainapp.memory.static import optimizer_tensors, static_bytes
from trainapp.parallel.ranks import Ranks
from trainapp.tracking.slowdown import Slowdown
from trainapp.tracking.utilisation import Utilisation

_MEMORY_SCALARS = (  # these differ between ranks
    "memory/allocated",
    "memory/reserved",
    "memory/peak",
    "memory/peak_reserved",
    "memory/host_rss",
    "memory/host_rss_peak",
)


def spread_over_ranks(scalars: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """Return the minimum and maximum of each memory scalar over ranks, with their ranks. Empty for a single rank."""
    if ranks.world_size == 1:
        return {}
    values_by_rank = ranks.all_gather_object([scalars[name] for name in _MEMORY_SCALARS])
    spread: dict[str, float] = {}
    for index, name in enumerate(_MEMORY_SCALARS):
        values = [values_of_rank[index] for values_of_rank in values_by_rank]
        smallest = min(values)
        largest = max(values)
        spread[f"{name}_min"] = smallest
        spread[f"{name}_min_rank"] = values.index(smallest)
        spread[f"{name}_max"] = largest
        spread[f"{name}_max_rank"] = values.index(largest)
    return spread


class _Totals(NamedTuple):
    """What a process has done up to a log step."""

    seconds: float  # of training
    samples: int
    waited: float  # seconds


class Meter:
    """The counts of samples and seconds since the last log step, and since the start.

    Args:
        state: of the run.
        memory: of the device.
        gradients: returns the gradients that currently exist.
        communication_buffers: returns those that currently exist.
        hook_tensors: returns the tensors of metrics that currently exist.
        counts_tokens: whether the loss's counts are numbers of tokens.
        utilisation: counts the model's FLOPs; None if the device's peak is unknown.

    Attributes:
        began: when (in `time.monotonic`) the run would have begun without interruptions.
        samples: trained by this process.
        waited: seconds spent waiting for data.
        paused: seconds that are not training time.
        static: bytes that persist between steps, by category.
    """

    def __init__(
        self,
        state: TrainState,
        memory: DeviceMemory,
        gradients: Callable[[], Iterable[torch.Tensor]],
        communication_buffers: Callable[[], Iterable[torch.Tensor]],
        hook_tensors: Callable[[], Iterable[torch.Tensor]] = tuple,
        counts_tokens: bool = False,
        utilisation: Utilisation | None = None,
    ):
        self.state = state
        self.memory = memory
        self.gradients = gradients
        self.communication_buffers = communication_buffers
        self.hook_tensors = hook_tensors
        self.counts_tokens = counts_tokens
        self.utilisation = utilisation
        self.slowdown = Slowdown()
        self.static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
        self.samples = 0
        self.waited = 0.0
        self._tokens: Any = 0  # since the last log step; a tensor stays on the device until then
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start training time: earlier work, such as planning the first size, does not count."""
        self._started_at = time.monotonic()
        self.paused = 0.0
        self._last_logged = _Totals(0.0, self.samples, self.waited)

    def resident(self) -> dict[Category, Iterable[torch.Tensor]]:
        """Return the tensors in memory before a forward and backward, by category."""
        return {
            Category.KEPT: self._tensors_outside_model(),
            Category.PARAMETERS: self.state.model.parameters(),
            Category.GRADIENTS: self.gradients(),
            Category.COMMUNICATION_BUFFERS: self.communication_buffers(),
            Category.BUFFERS: itertools.chain(self.state.model.buffers(), self.hook_tensors()),
            Category.OPTIMIZER_STATE: itertools.chain(*map(optimizer_tensors, self.state.optimizers)),
            Category.WEIGHT_AVERAGE: self.state.average.averages,
        }

    def _tensors_outside_model(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of modules that are not the model's, such as a teacher's, without those of callbacks."""
        for name, module in self.state.stateful.modules.items():
            if name.startswith("callbacks."):
                continue
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if not is_lazy(tensor):
                    yield tensor

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and count the time spent waiting for them."""
        while True:
            with self.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch  # not kept while the next one is fetched

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block, such as reading a stream's samples, as time spent waiting for data."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - started

    def count(self, samples: int, divisor: Any = 0) -> None:
        """Count a finished step.

        Args:
            samples: of the step, over all ranks.
            divisor: its loss's count, a number or a tensor.
        """
        if self.counts_tokens:
            self._tokens = self._tokens + divisor
        self.samples += samples

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block, such as an evaluation or a save, from training time."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.paused += time.monotonic() - started_at

    @property
    def seconds(self) -> float:
        """Seconds of the run, over all its processes."""
        return time.monotonic() - self.began

    def samples_per_second(self) -> float:
        """Return the samples per second over this process's training time."""
        return self.samples / self._training_seconds()

    def _training_seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._started_at - self.paused)

    def scalars(self) -> dict[str, float]:
        """Return time, throughput and memory since the last call."""
        # Time and throughput.
        before = self._last_logged
        self._last_logged = _Totals(self._training_seconds(), self.samples, self.waited)
        seconds = max(1e-9, self._last_logged.seconds - before.seconds)
        values = {
            "samples_per_second": (self.samples - before.samples) / seconds,
            "data_wait": (self.waited - before.waited) / seconds,
            "skipped_steps": self.state.progress.skipped,
        }

        # Memory.
        values |= self.memory.window()
        for category, size in self.static.items():
            values[f"memory/{category}"] = size
        values["memory/left_for_activations"] = max(0, self.memory.budget - sum(self.static.values()))
        values |= host.resident()

        # What only some runs have: tokens, utilisation, loss scales.
        if self.counts_tokens:
            values["tokens_per_second"] = float(self._tokens) / seconds
            self._tokens = 0
        if self.utilisation is not None:
            flops = sum(self.utilisation.flops_per_sample.values())
            if flops:
                values["mfu"] = flops * values["samples_per_second"] / self.utilisation.peak
        for update in self.state.updates:
            scaler = update.precision.scaler
            if scaler.is_enabled():
                values[update.named("loss_scale")] = scaler.get_scale()
        return values
