"""The lowest and the highest peak with given sizes: of the ways that a run may go, those furthest apart are traced."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainapp.errors import UserError
from trainapp.planning.certainty import Certainty, Noticed, certainty_of
from trainapp.planning.recorder import Peak
from trainapp.planning.traced_run import Trace
from trainapp.planning.ways import FIRST, Way, other_ways

T = TypeVar("T")
At = Callable[[int, int, Way], Trace]  # sizes of training and of evaluation, and a way


@dataclass(frozen=True)
class Bounds:
    """noticed: why they differ, or might."""

    low: Peak
    high: Peak
    noticed: Noticed

    @property
    def certainty(self) -> Certainty:
        """Of the highest peak."""
        return certainty_of(self.noticed, self.low.total, self.high.total)


def bounds(at: At, grad_clip: float | None, size: int, eval_size: int, is_low_asked: bool = True) -> Bounds:
    """Of training steps and an evaluation with these sizes; 0 leaves it out. Takes up to six traces of each. Where one
    leaves what may change the other, both are also traced in turn.

    at: traces. grad_clip: `train.grad_clip`. is_low_asked: False leaves out what can only be lower.
    """

    def traced(way: Way) -> list[Trace]:
        return [*([at(size, 0, way)] if size else []), *([at(0, eval_size, way)] if eval_size else [])]

    first = traced(FIRST)
    changes = any(trace.leaves for trace in first) and not any(trace.unsettled for trace in first)
    in_turn = [at(size, eval_size, FIRST)] if size and eval_size and changes else []
    high = joined([*first, *in_turn])
    low = min(joined(first), joined(in_turn or first), key=lambda peak: peak.total)
    untraced: list[str] = []
    for traces in traced_ways(traced, ways_beside(first, grad_clip, is_low_asked), untraced):
        other = joined(traces)
        low = other if other.total < low.total else low
        high = other if other.total > high.total else high
    return Bounds(low, high, Noticed.by([*first, *in_turn], untraced))


def ways_beside(first: Sequence[Trace], grad_clip: float | None, is_low_asked: bool = True) -> list[Way]:
    """The other ways that a run may go: what these traces of the first way have made up may be otherwise.

    Whether gradients are clipped is not known either, which counts where the peak is there.
    """
    clips = grad_clip is not None and joined(first).phase == "clip"
    reads, assumed = any(trace.reads for trace in first), any(trace.assumed for trace in first)
    shortest = [Way(which="shortest")] if is_low_asked and any(trace.varies for trace in first) else []
    return [*shortest, *other_ways(reads or clips, assumed)]


def traced_ways(traced: Callable[[Way], T], ways: Iterable[Way], untraced: list[str] | None = None) -> Iterator[T]:
    """What `traced` returns for each. untraced: gets the reasons of those that cannot be traced."""
    for way in ways:
        try:
            found = traced(way)
        except UserError:
            raise
        except Exception as error:
            if untraced is not None:
                untraced.append(reason_of(error))
        else:
            yield found


def joined(traces: Iterable[Trace]) -> Peak:
    """The highest of their peaks, with the phases of all."""
    return functools.reduce(Peak.joined, [trace.peak for trace in traces], Peak())


def reason_of(error: BaseException) -> str:
    """The error in one line, with its type: torch names the operation in its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
