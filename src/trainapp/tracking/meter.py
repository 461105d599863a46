"""Measurements during training: time, throughput, memory by category, model-FLOPs utilisation (MFU).

MFU is the fraction of the device's peak FLOP/s used by the model itself. As in PaLM (Chowdhery et al. 2022, appendix
B), recomputation in the backward does not count. The FLOPs per sample are counted once per update, in the first logged
step, by the formulas of torch's FlopCounterMode.
"""

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils import flop_counter

from trainapp.checkpoint.train_state import TrainState
from trainapp.memory import host
from trainapp.memory.device import DeviceMemory, optimizer_tensors, static_bytes
from trainapp.memory.live_tensors import Category
from trainapp.parallel.ranks import Ranks
from trainapp.torch_private import DispatchMode

OF_EVERY_RANK = tuple(
    f"memory/{name}" for name in ("allocated", "reserved", "peak", "peak_reserved", "host_rss", "host_rss_peak")
)
# FLOP/s of dense bf16 or fp16 matmuls with fp32 accumulation, by words of the device name that torch reports, from the
# manufacturers' data sheets. The first match counts.
PEAKS = (
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100|H200|GH200|H800", 989.4e12),
    ("A100|A800", 312e12),
    ("A6000", 154.8e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # torch sees each of its two dies as a device
)
# Relative to bf16; fp32 does not use tensor cores, and its ratio is not fixed.
WITHOUT_TF32 = ("V100", "T4", "MI250X")
OF_MODE = {"bf16": 1.0, "bf16_pure": 1.0, "fp16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8": 2.0}


def spread_over_ranks(scalars: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """The minimum and maximum of each memory scalar over ranks, with their ranks. Empty for a single rank."""
    if ranks.world_size == 1:
        return {}
    found: dict[str, float] = {}
    by_rank = ranks.all_gather_object([scalars[name] for name in OF_EVERY_RANK])
    for name, values in zip(OF_EVERY_RANK, zip(*by_rank, strict=True), strict=True):
        for which, value in (("min", min(values)), ("max", max(values))):
            found |= {f"{name}_{which}": value, f"{name}_{which}_rank": values.index(value)}
    return found


class Meter:
    """Counts samples and seconds since the last log step, and since the start.

    gradients, communication_buffers, hook_tensors: functions returning tensors that currently exist; the last
    returns those of metrics.
    counts_tokens: whether the loss's counts are numbers of tokens. utilisation: None if unknown.
    Attributes: began, when (in `time.monotonic`) the run would have begun without interruptions; samples; waited,
    seconds spent waiting for data; paused, seconds that are not training time; static, bytes that persist between
    steps, by category.
    """

    def __init__(
        self,
        state: TrainState,
        memory: DeviceMemory,
        gradients: Callable[[], Iterable[torch.Tensor]],
        communication_buffers: Callable[[], Iterable[torch.Tensor]],
        hook_tensors: Callable[[], Iterable[torch.Tensor]] = tuple,
        counts_tokens: bool = False,
        utilisation: "Utilisation | None" = None,
    ):
        self.state, self.memory, self.gradients = state, memory, gradients
        self.communication_buffers, self.hook_tensors = communication_buffers, hook_tensors
        self.counts_tokens, self.utilisation = counts_tokens, utilisation
        self.static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
        self.samples, self.waited = 0, 0.0
        self._tokens: Any = 0  # since the last log step; a tensor stays on the device until then
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Start training time: earlier work, such as planning the first size, does not count."""
        self._started, self.paused = time.monotonic(), 0.0
        self._logged = (0.0, self.samples, self.waited)  # seconds, samples and waiting until the last log step

    def resident(self) -> dict[Category, Iterable[torch.Tensor]]:
        """The tensors in memory before a forward and backward, by category."""
        outside = [own for name, own in self.state.stateful.modules.items() if not name.startswith("callbacks.")]
        tensors = (tensor for own in outside for tensor in (*own.parameters(), *own.buffers()))  # such as a teacher's
        return {
            Category.KEPT: (tensor for tensor in tensors if not is_lazy(tensor)),
            Category.PARAMETERS: self.state.model.parameters(),
            Category.GRADIENTS: self.gradients(),
            Category.COMMUNICATION_BUFFERS: self.communication_buffers(),
            Category.BUFFERS: itertools.chain(self.state.model.buffers(), self.hook_tensors()),
            Category.OPTIMIZER_STATE: itertools.chain(*map(optimizer_tensors, self.state.optimizers)),
            Category.WEIGHT_AVERAGE: self.state.average.averages,
        }

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches and counts the time spent waiting for them."""
        while True:
            with self.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block, such as reading a stream's samples, as time spent waiting for data."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - started

    def count(self, samples: int, divisor: Any = 0) -> None:
        """Count a finished step's samples. divisor: its loss's count, a number or a tensor."""
        if self.counts_tokens:
            self._tokens = self._tokens + divisor
        self.samples += samples

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block, such as an evaluation or a save, from training time."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.paused += time.monotonic() - started

    def _seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._started - self.paused)

    @property
    def seconds(self) -> float:
        """Seconds of the run, over all its processes."""
        return time.monotonic() - self.began

    def samples_per_second(self) -> float:
        """Samples per second over this process's training time."""
        return self.samples / self._seconds()

    def scalars(self) -> dict[str, float]:
        """Time, throughput and memory since the last call."""
        before, self._logged = self._logged, (self._seconds(), self.samples, self.waited)
        seconds, samples, waited = (now - then for now, then in zip(self._logged, before, strict=True))
        seconds = max(1e-9, seconds)
        values = {
            "samples_per_second": samples / seconds,
            "data_wait": waited / seconds,
            "skipped_steps": self.state.progress.skipped,
            **self.memory.window(),
            **{f"memory/{kind}": size for kind, size in self.static.items()},
            "memory/left_for_activations": max(0, self.memory.budget - sum(self.static.values())),
            **host.resident(),
        }
        if self.counts_tokens:
            values["tokens_per_second"] = float(self._tokens) / seconds
            self._tokens = 0
        if self.utilisation is not None and (flops := sum(self.utilisation.flops_per_sample.values())):
            values["mfu"] = flops * values["samples_per_second"] / self.utilisation.peak
        for update in self.state.updates:
            if update.precision.scaler.is_enabled():
                values[update.named("loss_scale")] = update.precision.scaler.get_scale()
        return values


def peak_of(device: torch.device, mode: str, given: float | None) -> float | None:
    """Peak FLOP/s of one device: `given`, otherwise from the table; None if unknown.

    mode: as `precision.mode`.
    """
    if given is not None or device.type != "cuda" or mode not in OF_MODE:
        return given
    name = torch.cuda.get_device_name(device)
    half = next((peak for part, peak in PEAKS if re.search(rf"\b({part})\b", name)), None)
    if half is None or (mode == "tf32" and any(part in name for part in WITHOUT_TF32)):
        return None
    return half * OF_MODE[mode]


class Utilisation(DispatchMode):
    """Counts the model's FLOPs per sample, whose fraction of the devices' peak is the utilisation.

    Used in place of FlopCounterMode, whose hooks in all modules keep graphs alive and would change the memory of the
    counted step.

    peak: FLOP/s of all ranks' devices together. in_backward: returns whether the current operation belongs to a
    backward. recomputes: whether backwards repeat forwards; their FLOPs are then taken as twice the forward's.
    """

    def __init__(self, peak: float, in_backward: Callable[[], bool], recomputes: bool):
        super().__init__()
        self.peak, self._in_backward, self._recomputes = peak, in_backward, recomputes
        self.flops_per_sample: dict[str, float] = {}  # by update

    @contextlib.contextmanager
    def counting(self, update: str, samples: int) -> Iterator[None]:
        """Around forward and backward of a micro-batch: counts the update's first one that completes."""
        if update in self.flops_per_sample:
            yield
            return
        self._forward = self._backward = 0
        with self:
            yield
        backward = 2 * self._forward if self._recomputes else self._backward
        self.flops_per_sample[update] = (self._forward + backward) / samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Of matmuls, convolutions and attention; torch 2.13 has none of the CPU's attention.
        if formula := flop_counter.flop_registry.get(func.overloadpacket):
            with contextlib.suppress(Exception):  # formulas make assertions that must not fail a run
                flops = int(formula(*args, **kwargs, out_val=result))
                if self._in_backward():
                    self._backward += flops
                else:
                    self._forward += flops
        return result
