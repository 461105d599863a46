"""Measures a traced step: its peak by phase, what the peak consists of, in which module it lies. Sizes are bytes."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainapp.config.schema import Memory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.kept import WeakStorages
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import Events, Kinds, LiveTensors, Resident
from trainapp.torch_private import ForwardModuleTracker
from trainapp.train.phase import Phase
from trainapp.train.run import Attempt

TEMPORARIES = "temporaries"  # freed in the phase that allocates them
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
    Phase.EVALUATE: "evaluation",
}
PHASES = tuple(dict.fromkeys(_NAMES.values()))


@dataclass(frozen=True)
class Peak:
    """The highest point of one or more traced pieces of work.

    phases: the peak of each. kinds: what the highest consists of; the sum is `total`. module: "" outside of all.
    """

    total: int = 0
    phase: str = ""
    module: str = ""
    phases: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    events: Events = field(default_factory=list)
    numbered_kinds: Kinds = field(default_factory=dict)

    def joined(self, other: "Peak") -> "Peak":
        """The higher one, with the phases of both."""
        higher = self if self.total >= other.total else other
        both = {
            name: max(self.phases.get(name, 0), other.phases.get(name, 0))
            for name in PHASES
            if name in self.phases or name in other.phases
        }
        return Peak(higher.total, higher.phase, higher.module, both, higher.kinds, higher.events, higher.numbered_kinds)


class _Counter(LiveTensors):
    """Also notes in which module the peak lies, and at which event each phase begins."""

    def __init__(
        self,
        running: Callable[[], str],
        phase: Phase,
        devices: tuple[str, ...] | None,
        limit: int | None,
        ignored: WeakStorages,
    ):
        super().__init__(limit, devices, ignored)
        self._running = running
        self.module = ""
        self.marks: list[tuple[int, Phase]] = [(0, phase)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > before:
            self.module = self._running()
        return result

    def passes(self, size: int) -> None:
        """Count `size` bytes that are allocated and freed at once."""
        if self.devices is not None:
            return  # in the host's memory
        self._number += 1
        self.events += [(self._number, size), (self._number, -size)]
        if self.live + size > self.peak:
            self.peak, self.module = self.live + size, ""


class TracedMemory(DeviceMemory):
    """Counts fake storages: all where the device is the CPU, else those that claim to be on it.

    `highest` is of all watched blocks since `reset`. most: bytes above which a step that is run for real ends with
    MemoryLimitExceeded.
    """

    def __init__(self, device: torch.device, total: int = 1, most: int | None = None):
        super().__init__(device, Memory(limit=None), total)
        self._most = most
        self.resident: Callable[[], Resident] = dict  # what exists after a block, for the kinds of what it allocated
        self.phase: Phase | None = None
        self.draws = False  # whether a forward has drawn from Python's or NumPy's generator
        self.buffers_grow = self.kept_grows = False  # from one traced step to the next
        self.moving: set[str] = set()  # names of what the model counts or draws
        self.left: set[str] = set()  # names of what steps or evaluations have set, created or replaced
        self.kept_by_steps = self.kept_by_evaluation = 0  # bytes
        self._generators: tuple[Any, ...] = ()
        self._devices = None if device.type == "cpu" else (device.type,)
        self.reset()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.peak, self.highest = 0, Peak()
        self._counter: _Counter | None = None

    def enters(self, phase: Phase) -> None:
        """Note that the run is now in this phase."""
        if self.phase is Phase.FORWARD:
            self.draws |= self._generators != _host_generators()
        if phase is Phase.FORWARD:
            self._generators = _host_generators()
        is_same = phase.updates_in_backward and self.phase is not None and _NAMES.get(self.phase) == _NAMES[phase]
        self.phase = phase
        if self._counter is not None and not is_same:  # each update would end a phase, and make temporaries outlive it
            self._counter.marks.append((len(self._counter.events), phase))

    def note_buffer(self, buffer: torch.Tensor) -> None:
        if self._counter is not None:
            self._counter.label(MemoryKind.COMMUNICATION_BUFFERS, buffer)

    def passes(self, size: int) -> None:
        """Count memory that is already free again: what fetching a batch has allocated on the way."""
        if self._counter is not None and size:
            self._counter.passes(size)

    @contextlib.contextmanager
    def watch(self, resident: Resident, track_modules: bool = True) -> Iterator[None]:
        """Count until the end of the outermost block."""
        if self._counter is not None:
            self._counter.register(resident)
            yield
            return
        tracker = ForwardModuleTracker()

        def running() -> str:
            deepest = max(tracker.parents, key=lambda name: name.count("."), default="")
            return deepest.partition(".")[2]  # the first part is the class of the whole model

        phase, ignored = self.phase or Phase.START, self.kept.of_data
        counter = self._counter = _Counter(running, phase, self._devices, self._most, ignored)
        self.watching = True
        try:
            counter.register(resident)
            self.kept_before = counter.register_kept(self.kept)
            with tracker, counter:
                yield
            for kind, tensors in self.resident().items():
                for tensor in tensors:
                    counter.label(kind, tensor)
        finally:
            self.watching, self._counter = False, None
            self.kept.carry(counter.surviving())
        self.peak = max(self.peak, counter.peak)
        self.highest = self.highest.joined(_peak_of(counter))

    def kept_bytes(self) -> int:
        """What exists now and is not resident."""
        counter = LiveTensors(devices=self._devices, ignored=self.kept.of_data)
        counter.register(self.resident())
        return counter.register_kept(self.kept)

    def window(self) -> dict[str, float]:
        """The scalars of a log step."""
        return self._scalars(0, 0, self.peak, self.peak)

    def used(self) -> int:
        """The peak: the end of a block is not recorded."""
        return self.peak


def _host_generators() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), *rest


class PhaseLog(Attempt):
    """An attempt that tells the memory of every change of phase."""

    _memory: TracedMemory

    def __init__(self, memory: TracedMemory):
        self.__dict__["_memory"] = memory
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "phase":
            self._memory.enters(value)
        super().__setattr__(name, value)


def _peak_of(counter: _Counter) -> Peak:
    sizes = np.array([size for _, size in counter.events], dtype=np.int64)
    live = sizes.cumsum()
    ends = [start for start, _ in counter.marks[1:]] + [len(live)]
    spans = [(start, end, phase) for (start, phase), end in zip(counter.marks, ends, strict=True)]
    phases: dict[str, int] = {}
    for start, end, phase in spans:
        # What the phase before it has left counts, too: a phase may allocate nothing.
        highest = int(live[max(0, start - 1) : end].max(initial=0))
        phases[_NAMES[phase]] = max(phases.get(_NAMES[phase], 0), highest)
    if not len(live):
        return Peak(phases=phases)
    top = int(live.argmax())
    phase = next((phase for start, end, phase in spans if start <= top < end), Phase.START)
    kinds = _kinds_at(counter, top, sorted({end for start, end, _ in spans if end > start}))
    return Peak(
        total=int(live[top]),
        phase=_NAMES[phase],
        module=counter.module,
        phases=phases,
        kinds=kinds,
        events=list(counter.events),
        numbered_kinds=dict(counter.kinds),
    )


def _kinds_at(counter: _Counter, top: int, ends: list[int]) -> dict[str, int]:
    """Bytes by kind after event `top`. ends: where phases end, in order.

    A storage without a kind is an activation if it outlives the phase that allocated it, else temporary.
    """
    born: dict[int, int] = {}
    freed: dict[int, int] = {}
    for position, (number, size) in enumerate(counter.events):
        (born if size >= 0 else freed)[number] = position
    kinds: dict[str, int] = {}
    for number, size in counter.events[: top + 1]:
        kind = counter.kinds.get(number)
        if kind is not None:
            name = kind.value
        else:
            end = next(end for end in ends if end > born[number])
            name = MemoryKind.ACTIVATIONS.value if freed.get(number, end) >= end else TEMPORARIES
        kinds[name] = kinds.get(name, 0) + size
    return {name: size for name, size in sorted(kinds.items(), key=lambda item: -item[1]) if size}
