"""What a plan predicts of the memory of a step at any micro-batch size, corrected by what a run measures."""

from dataclasses import dataclass, field

from trainapp.data.size_search import CLOSE_ENOUGH

MARGIN = 0.98  # of the limit: how near to it a corrected prediction may come


@dataclass
class Forecast:
    """For one shape of data. Sizes are samples per micro-batch, all others bytes.

    size: the largest that is predicted to fit. peaks: by traced size, of whichever way of the run needs the most.
    least: what a step with `size` needs at least if the plan is right. fixed: what persists between steps.
    """

    size: int
    peaks: dict[int, int]
    least: int
    fixed: int
    limit: int
    measured: dict[int, int] = field(default_factory=dict)  # by size, the highest peak of a clean step

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
        peak = self.measured[size] = max(measured, self.measured.get(size, 0))
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
