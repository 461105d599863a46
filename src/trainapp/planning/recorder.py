"""Measures a step: its peak by phase and category, and the module where it occurs. Sizes are bytes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
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


# --- a model with more blocks than were recorded

LEAST_EQUAL = 8  # equal events in a row, or all that are left, by which a place of one trace is found in the other


class UnequalBlocks(Exception):
    """Blocks of the model cannot be left out of a trace."""


class _Moment(NamedTuple):
    """A point of a step."""

    phase: str
    categories: dict[str, int]  # bytes, of which some may be 0

    @property
    def total(self) -> int:
        return sum(self.categories.values())


class _Run(NamedTuple):
    """Events in a row that two traces have in common."""

    few: int  # number of the first one in the trace with fewer blocks
    more: int  # and in that with more
    length: int


def extrapolated(traces: Mapping[int, Breakdown], blocks: int) -> Breakdown:
    """Return the breakdown of a model with more equal blocks than in its traces.

    Raises UnequalBlocks if the phases of their steps differ.

    Args:
        traces: two, by their number of blocks, the smaller first.
        blocks: number of blocks.
    """
    (few_count, few), (more_count, more) = traces.items()
    if [span.phase for span in few.spans] != [span.phase for span in more.spans]:
        raise UnequalBlocks("steps with more blocks have other phases")
    growth = (blocks - few_count) / (more_count - few_count)
    moments: list[_Moment] = []
    for span_of_few, span_of_more in zip(few.spans, more.spans, strict=True):
        moments.extend(_highest_moments(span_of_few, span_of_more, growth))

    phases: dict[str, int] = {}
    for moment in moments:
        phases[moment.phase] = max(phases.get(moment.phase, 0), moment.total)
    highest = max(moments, key=lambda moment: moment.total)
    return replace(
        more,
        total=highest.total,
        phase=highest.phase,
        module="",
        phases=phases,
        categories={name: size for name, size in highest.categories.items() if size > 0},
        events=[],
        numbered={},
        blocks=blocks,
        spans=(),
        leaves_out_blocks=True,
    )


def _highest_moments(few: Span, more: Span, growth: float) -> Iterator[_Moment]:
    """Yield the points of a phase at which memory may be highest.

    Memory at one point of the step, such as the start of the head, grows by equal bytes with each block. So each point
    of one trace is compared with the same one of the other: found from the start, so that the first blocks of both are
    the same, and from the end, with the last blocks. Between these, memory rises or falls steadily from block to block.

    Args:
        few: the phase with fewer blocks.
        more: the same with more.
        growth: by how many times the difference between both it grows.
    """
    few = _with_falls_at_once(few)
    more = _with_falls_at_once(more)
    total_of_few = few.total
    total_of_more = more.total
    changes_of_few = np.diff(total_of_few)
    changes_of_more = np.diff(total_of_more)

    runs = [_Run(0, 0, 0), _Run(len(changes_of_few), len(changes_of_more), 0)]  # where the phase begins and ends
    runs.extend(_runs_in_common(changes_of_few, changes_of_more))
    for run in _runs_in_common(changes_of_few[::-1], changes_of_more[::-1]):
        first_of_few = len(changes_of_few) - run.few - run.length
        first_of_more = len(changes_of_more) - run.more - run.length
        runs.append(_Run(first_of_few, first_of_more, run.length))

    for run in runs:  # the points are those before its first event, and after each
        levels_of_few = total_of_few[run.few : run.few + run.length + 1]
        levels_of_more = total_of_more[run.more : run.more + run.length + 1]
        point = int((levels_of_few + growth * (levels_of_more - levels_of_few)).argmax())
        categories = {}
        for name, levels in few.levels.items():
            few_bytes = int(levels[run.few + point])
            difference = int(more.levels[name][run.more + point]) - few_bytes
            categories[name] = few_bytes + round(growth * difference)
        yield _Moment(few.phase, categories)


def _with_falls_at_once(span: Span) -> Span:
    """Return the span with all that is freed in a row as one event: its order may be random, as when autocast ends."""
    falls = np.diff(span.total) < 0
    is_inside_fall = np.zeros(len(falls) + 1, dtype=bool)
    is_inside_fall[1:-1] = falls[:-1] & falls[1:]
    return span._replace(levels={name: levels[~is_inside_fall] for name, levels in span.levels.items()})


def _runs_in_common(few: np.ndarray, more: np.ndarray) -> list[_Run]:
    """Return the runs of changes in memory that both traces have, from the first change on. Between two runs, `more`
    has the changes of its additional blocks.
    """
    least = min(LEAST_EQUAL, len(few))
    runs = []
    at_few = 0
    at_more = 0
    while True:
        run = _Run(at_few, at_more, _common_length(few[at_few:], more[at_more:]))
        if run.length < least:  # additional blocks end where the changes are again those of `few`
            run = _longest_run(few, more, at_few, at_more)
        if run.length >= least:
            runs.append(run)
            at_few = run.few + run.length
            at_more = run.more + run.length
        else:  # one operation on all blocks, which allocates more, or frees more
            at_few += 1
        if at_few >= len(few):
            return runs


def _longest_run(few: np.ndarray, more: np.ndarray, at_few: int, at_more: int) -> _Run:
    """Return the longest run from one place of `few`, at this or a later place of `more`; empty if there is none."""
    longest = _Run(at_few, at_more, 0)
    for place in at_more + np.flatnonzero(more[at_more:] == few[at_few : at_few + 1]):
        length = _common_length(few[at_few:], more[place:])
        if length > longest.length:
            longest = _Run(at_few, int(place), length)
    return longest


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of values with which both begin."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter
