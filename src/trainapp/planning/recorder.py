"""Measures a step: its peak by phase and category, and the module where it occurs. Sizes are bytes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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


class Span(NamedTuple):
    """The memory during a phase. A phase may come several times: once per micro-batch."""

    phase: str
    levels: dict[str, np.ndarray]  # by category: bytes before the phase's first event, and after each event

    @property
    def total(self) -> np.ndarray:
        """The bytes of all categories."""
        total: np.ndarray = sum(self.levels.values(), np.zeros((), np.int64))
        return total


@dataclass(frozen=True)
class Breakdown:
    """The highest point of some work, in bytes, and what the work has shown of the model.

    Attributes:
        total: the peak.
        phase: of the peak.
        module: of the peak; "" outside of all modules.
        phases: the peak of each phase.
        categories: bytes by category at the peak; they sum to `total`, unless unknown.
        events: allocations and frees up to the end of the work, for a plot.
        kinds: the category of each storage in `events`, for a plot.
        seconds: duration of a step, if measured.
        notes: remarks on the figures.
        smallest: the fewest samples that the model accepts.
        blocks: the number of the model's blocks.
        techniques: those that apply and are not in use.
        spans: the phases of the work, in order. Empty if not recorded.
        leaves_out_blocks: whether it was extrapolated from traces of a few of the model's blocks.
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
    spans: tuple[Span, ...] = ()
    leaves_out_blocks: bool = False

    def joined(self, other: "Breakdown") -> "Breakdown":
        """Return the higher of both, with the phases and the spans of both, of which `other` is the later."""
        names = dict.fromkeys([*self.phases, *other.phases])
        phases = {name: max(self.phases.get(name, 0), other.phases.get(name, 0)) for name in names}
        higher = self if self.total >= other.total else other
        return replace(higher, phases=phases, spans=self.spans + other.spans)

    def with_constant(self, category: str, size: int) -> "Breakdown":
        """Return the breakdown with bytes that are there all the time, in a category of their own."""
        spans = []
        for span in self.spans:
            constant = np.full_like(span.total, size)
            spans.append(span._replace(levels=span.levels | {category: constant}))
        return replace(
            self,
            total=self.total + size,
            phases={name: phase_size + size for name, phase_size in self.phases.items()},
            categories=self.categories | {category: size},
            spans=tuple(spans),
        )


class Recorder(CpuMemory):
    """Stands in for the device's memory. Counts storages, fake or real: all on the CPU, otherwise those that claim to
    be on the device. `highest` covers all watched blocks.

    Args:
        device: that of the recorded work.
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
        # What the block has made and left is categorised now that it has its place, such as in an optimizer's state.
        for category, tensors in self.resident().items():
            for tensor in tensors:
                self.counter.label(category, tensor)
        self.highest = self.highest.joined(_breakdown(self.counter))

    def bytes_between_steps(self) -> int:
        """Return the bytes of the tensors that exist now, and of those that the last block has left."""
        counter = LiveTensors(devices=self._devices, before=self.counter)
        counter.register(self.resident())
        counter.register_retained()
        return counter.live


class _PhaseStart(NamedTuple):
    """The event at which a phase starts, and the phase's name in a plan."""

    event: int
    phase: str


class _Counter(LiveTensors):
    """Also records the module of the peak, and the event at which each phase starts."""

    def __init__(self, recorder: Recorder, devices: tuple[str, ...] | None):
        super().__init__(recorder.limit, devices, before=recorder.counter)
        self._recorder = recorder
        self.module = ""
        self.phase_starts = [_PhaseStart(0, _NAMES[recorder.phase()])]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = _NAMES[self._recorder.phase()]
        if phase != self.phase_starts[-1].phase:
            self.phase_starts.append(_PhaseStart(len(self.events), phase))
        peak_before = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > peak_before:
            self.module = self._recorder.module_path.running
        return result


def _breakdown(counter: _Counter) -> Breakdown:
    """Return the peak of what was counted, and the peaks of its phases."""
    changes = [size for _, size in counter.events]
    live = np.array(changes, dtype=np.int64).cumsum()  # bytes after each event

    # Each phase ends where the next one starts.
    starts = counter.phase_starts
    ends = [next_start.event for next_start in starts[1:]]
    ends.append(len(live))

    # The peak of each phase. A phase may come several times: once per micro-batch.
    phases: dict[str, int] = {}
    for (start, phase), end in zip(starts, ends, strict=True):
        # Includes memory left by the previous phase: a phase may allocate nothing.
        highest = int(live[max(0, start - 1) : end].max(initial=0))
        phases[phase] = max(phases.get(phase, 0), highest)
    if not len(live):
        return Breakdown(phases=phases)

    # What was in memory at the highest of all, and all the time.
    by_category = {category.value: s for category, s in stacked(counter.events, counter.categories).items()}
    peak_event = int(live.argmax())
    peak_phase = ""
    for (start, phase), end in zip(starts, ends, strict=True):
        if start <= peak_event < end:
            peak_phase = phase
    spans = []
    for (start, phase), end in zip(starts, ends, strict=True):
        first = max(0, start - 1)  # as above
        levels = {name: sizes[first : max(end, first + 1)] for name, sizes in by_category.items()}
        spans.append(Span(phase, levels))
    at_peak = {name: int(sizes[peak_event]) for name, sizes in by_category.items()}
    largest_first = sorted(at_peak.items(), key=lambda category_and_size: -category_and_size[1])
    return Breakdown(
        total=int(live[peak_event]),
        phase=peak_phase,
        module=counter.module,
        phases=phases,
        categories={category: size for category, size in largest_first if size},
        events=list(counter.events),
        numbered=dict(counter.categories),
        spans=tuple(spans),
    )
