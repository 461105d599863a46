"""What a plan predicts of the memory of a step at any micro-batch size, corrected by what a run measures."""

from dataclasses import dataclass, field
from typing import NamedTuple

from trainapp.data.size_search import CLOSE_ENOUGH

MARGIN = 0.98  # of the limit: how near to it a corrected prediction may come


class Promise(NamedTuple):
    """What a plan says of the step with its size, and how far off it may be. Bytes, but for `slack`, a share of them.

    setting: that asked the plan. certainty: of the peak. is_exact: whether a step that needs less contradicts it, too.
    """

    setting: str
    certainty: str
    most: int
    slack: float
    is_exact: bool


class Deviation(NamedTuple):
    """A step that contradicts a plan: the samples of its largest micro-batch, and bytes."""

    size: int
    planned: int
    measured: int


@dataclass
class Forecast:
    """For one shape of data. Sizes are samples per micro-batch, all others bytes.

    size: the largest that is predicted to fit. peaks: by traced size, of whichever way of the run needs the most.
    least: what a step with `size` needs at least if the plan is right. fixed: what persists between steps.
    promise: None where the plan is of another shape.
    """

    size: int
    peaks: dict[int, int]
    least: int
    fixed: int
    limit: int
    promise: Promise | None = None
    measured: dict[int, int] = field(default_factory=dict)  # by size, the highest peak of a clean step

    def deviation(self, size: int, ran: int, measured: int, is_typical: bool) -> Deviation | None:
        """How the peak of a clean step contradicts the plan; None if it does not, or the plan says nothing of it.

        size: the present one. ran: the largest micro-batch of the step, which is smaller where samples are cut evenly;
        it must not need more than `size`. is_typical: whether the step does all that a planned one does; others may
        need less.
        """
        promise = self.promise
        if promise is None or not 0 < ran <= size:
            return None
        if ran == self.size or (ran not in self.peaks and size == self.size):
            planned = promise.most
        elif ran in self.peaks:
            planned = self.peaks[ran]
        else:
            return None  # predicted on a line, which is no promise
        is_more = measured > planned * (1 + promise.slack)
        is_less = promise.is_exact and is_typical and ran == self.size and measured < planned * (1 - promise.slack)
        return Deviation(ran, planned, measured) if is_more or is_less else None

    def note(self, size: int, measured: int) -> None:
        """Remember the peak of a clean step: later predictions follow it."""
        self.measured[size] = max(measured, self.measured.get(size, 0))

    def peak(self, size: int) -> float:
        """Predicted, on the line through the nearest traced sizes; through `fixed` for no samples below them."""
        points = sorted({0: self.fixed, **self.peaks}.items())
        above = next((number for number, (known, _) in enumerate(points) if known >= size), len(points) - 1)
        (a, low), (b, high) = points[max(0, above - 1)], points[above]
        return float(high) if a == b else low + (size - a) * (high - low) / (b - a)

    def next_size(self, size: int, measured: int, fails: int) -> int | None:
        """The size to try after a clean step with `size`: the largest that fits if all others need as much more, or
        less, than predicted as this one. None where it is within 5% of `size`, or the step is as predicted.

        fails: the smallest size that has failed.
        """
        self.note(size, measured)
        peak = self.measured[size]
        if size == self.size and peak >= CLOSE_ENOUGH * self.least:
            return None
        expected = self.peak(size) - self.fixed
        ratio = (peak - self.fixed) / expected if expected > 0 else 1.0
        fitting = size
        for larger in range(size + 1, fails):
            if self.fixed + ratio * (self.peak(larger) - self.fixed) > MARGIN * self.limit:
                break
            fitting = larger
        return fitting if size < CLOSE_ENOUGH * fitting else None
