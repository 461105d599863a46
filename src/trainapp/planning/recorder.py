"""Measures a step: its peak by phase and category, and the module where it occurs. Sizes are bytes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from trainapp.config.schema import Memory
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.live_tensors import Events, LiveTensors, Resident, StorageCategories
from trainapp.memory.picture import stacked
from trainapp.techniques.catalogue import Technique
from trainapp.training.phase import Phase

_NAMES = {
    Phase.START: "data",
    Phase.DATA: "data",
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.UPDATE_IN_BACKWARD: "backward",
    Phase.BACKWARD_AFTER_UPDATES: "backward",
    Phase.METRIC: "metrics",
    Phase.GRADIENTS: "clip",
    Phase.UNSCALE: "clip",
    Phase.CLIP: "clip",
    Phase.COMMIT: "optimizer_step",
    Phase.COMMITTED: "optimizer_step",
}


@dataclass(frozen=True)
class Breakdown:
    """The highest point of some work, in bytes.

    phases: the peak of each phase. categories: bytes by category at the highest peak; they sum to `total`, unless
    unknown. module: the module of the peak, "" outside of all. events, numbered: for a plot. seconds: duration of a
    step, if measured. notes: remarks on the figures. About the model: smallest, the fewest samples it accepts; blocks,
    their number; techniques, those that apply and are not in use.
    """

    total: int = 0
    phase: str = ""
    module: str = ""
    phases: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    events: Events = field(default_factory=list)
    numbered: StorageCategories = field(default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    smallest: int = 1
    blocks: int = 0
    techniques: tuple[Technique, ...] = ()

    def joined(self, other: "Breakdown") -> "Breakdown":
        """The higher of both, with the phases of both."""
        names = dict.fromkeys([*self.phases, *other.phases])
        phases = {name: max(self.phases.get(name, 0), other.phases.get(name, 0)) for name in names}
        return replace(self if self.total >= other.total else other, phases=phases)


class Recorder(CpuMemory):
    """Stands in for the device's memory. Counts storages, fake or real: all on the CPU, otherwise those that claim to
    be on the device. `highest` covers all watched blocks.

    most: bytes above which a real step ends with MemoryLimitExceeded.
    """

    counter: "_Counter"

    def __init__(self, device: torch.device, most: int | None = None):
        super().__init__(device, Memory(limit=most))
        self.phase: Callable[[], Phase] = lambda: Phase.START  # where the recorded step is
        self.resident: Callable[[], Resident] = dict  # tensors that exist after a block, to categorise those it made
        self.highest = Breakdown()
        self._devices = None if device.type == "cpu" else (device.type,)

    def new_counter(self) -> "_Counter":
        return _Counter(self, self._devices)

    @contextlib.contextmanager
    def measuring(self, resident: Resident) -> Iterator[None]:
        with super().measuring(resident):
            yield
        for kind, tensors in self.resident().items():
            for tensor in tensors:
                self.counter.label(kind, tensor)
        self.highest = self.highest.joined(_breakdown(self.counter))

    def bytes_between_steps(self) -> int:
        """Bytes of the tensors that exist now, and of those that the last block has left."""
        counter = LiveTensors(devices=self._devices, before=self.counter)
        counter.register(self.resident())
        counter.register_retained()
        return counter.live


class _Counter(LiveTensors):
    """Also records the module of the peak, and the event at which each phase starts."""

    def __init__(self, recorder: Recorder, devices: tuple[str, ...] | None):
        super().__init__(recorder.limit, devices, before=recorder.counter)
        self._recorder = recorder
        self.module = ""
        self.marks = [(0, _NAMES[recorder.phase()])]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, phase = self.peak, _NAMES[self._recorder.phase()]
        if phase != self.marks[-1][1]:
            self.marks.append((len(self.events), phase))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > before:
            self.module = self._recorder.module_path.running
        return result


def _breakdown(counter: _Counter) -> Breakdown:
    live = np.array([size for _, size in counter.events], dtype=np.int64).cumsum()
    ends = [start for start, _ in counter.marks[1:]] + [len(live)]
    spans = [(start, end, phase) for (start, phase), end in zip(counter.marks, ends, strict=True)]
    phases: dict[str, int] = {}
    for start, end, phase in spans:
        # Includes memory left by the previous phase: a phase may allocate nothing.
        highest = int(live[max(0, start - 1) : end].max(initial=0))
        phases[phase] = max(phases.get(phase, 0), highest)
    if not len(live):
        return Breakdown(phases=phases)
    top = int(live.argmax())
    at_peak = [(kind, int(sizes[top])) for kind, sizes in stacked(counter.events, counter.categories).items()]
    return Breakdown(
        total=int(live[top]),
        phase=next(phase for start, end, phase in spans if start <= top < end),
        module=counter.module,
        phases=phases,
        categories={kind.value: size for kind, size in sorted(at_peak, key=lambda one: -one[1]) if size},
        events=list(counter.events),
        numbered=dict(counter.categories),
    )
