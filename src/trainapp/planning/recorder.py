"""Measures a step: its peak by phase and category, and the module where it occurs. Sizes are bytes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from trainapp.config.schema import Memory
from trainapp.memory.device import CpuMemory
from trainapp.memory.live_tensors import Events, Kinds, LiveTensors, ModulePath, Resident, stacked
from trainapp.techniques.catalogue import Technique
from trainapp.training.engine import Engine
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
    numbered: Kinds = field(default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    smallest: int = 1
    blocks: int = 0
    techniques: tuple[Technique, ...] = ()

    def joined(self, other: "Breakdown") -> "Breakdown":
        """The higher of both, with the phases of both."""
        names = dict.fromkeys([*self.phases, *other.phases])
        return replace(
            self if self.total >= other.total else other,
            phases={name: max(self.phases.get(name, 0), other.phases.get(name, 0)) for name in names},
            seconds=self.seconds or other.seconds,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            smallest=max(self.smallest, other.smallest),
            blocks=max(self.blocks, other.blocks),
            techniques=self.techniques or other.techniques,
        )


class Recorder(CpuMemory):
    """Stands in for the device's memory. Counts storages, fake or real: all on the CPU, otherwise those that claim to
    be on the device. `highest` covers all watched blocks since `reset`.

    most: bytes above which a real step ends with MemoryLimitExceeded.
    """

    counter: "_Counter"

    def __init__(self, device: torch.device, total: int, most: int | None = None):
        super().__init__(device, Memory(limit=None))
        self.total, self._most = total, most
        self.resident: Callable[[], Resident] = dict  # tensors that exist after a block, to categorise those it made
        self.engine: Engine | None = None  # whose step is recorded
        self._devices = None if device.type == "cpu" else (device.type,)
        self.reset()

    def reset(self) -> None:
        """Forget all measurements."""
        self.peak, self.highest = 0, Breakdown()

    @property
    def phase(self) -> Phase:
        """Where the step is."""
        return Phase.START if self.engine is None else self.engine.phase

    def new_counter(self) -> "_Counter":
        return _Counter(self.module_path, self._most, self._devices, self.counter, lambda: _NAMES[self.phase])

    @contextlib.contextmanager
    def watch(self, resident: Resident) -> Iterator[None]:
        """Count until the end of the outermost block."""
        is_nested = self.watching
        with super().watch(resident):
            yield
        if not is_nested:
            for kind, tensors in self.resident().items():
                for tensor in tensors:
                    self.counter.label(kind, tensor)
            self.highest = self.highest.joined(_breakdown(self.counter))

    def lap(self) -> None:
        """None: no peaks in between are needed."""

    def kept_bytes(self) -> int:
        """Bytes that exist now and are not resident."""
        counter = LiveTensors(devices=self._devices, before=self.counter)
        counter.register(self.resident())
        return counter.register_kept()


class _Counter(LiveTensors):
    """Also records the module of the peak, and the event at which each phase starts, by its name."""

    def __init__(
        self,
        path: ModulePath,
        limit: int | None,
        devices: tuple[str, ...] | None,
        before: LiveTensors | None,
        phase: Callable[[], str],
    ):
        super().__init__(limit, devices, before)
        self._path, self._phase = path, phase
        self.module = ""
        self.marks = [(0, phase())]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, phase = self.peak, self._phase()
        if phase != self.marks[-1][1]:
            self.marks.append((len(self.events), phase))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > before:
            self.module = self._path.running
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
    at_peak = [(kind, int(sizes[top])) for kind, sizes in stacked(counter.events, counter.kinds).items()]
    phase = next((phase for start, end, phase in spans if start <= top < end), "data")
    return Breakdown(
        total=int(live[top]),
        phase=phase,
        module=counter.module,
        phases=phases,
        categories={kind.value: size for kind, size in sorted(at_peak, key=lambda one: -one[1]) if size},
        events=list(counter.events),
        numbered=dict(counter.kinds),
    )
