"""Finds the largest micro-batch that fits: halves after a failure, then follows a line through measured peaks.

Halving alone ends at 64 if 100 would fit. Once full-size micro-batches have fitted, a line through the origin and the
measured peak (beyond the resident memory) predicts the size that reaches the limit; with two sizes, the line through
the two largest. That size, less a margin, is tried next, and the step itself decides whether it fits: memory is only
piecewise affine in the size. Without a known peak, or after a failure has disproved the line, the middle between the
largest size that worked and the smallest that failed is tried. The search ends when the line or a failure excludes 5%
more (below 20 samples: one more).

Going down ends where the model itself cannot run so few samples. Where what is asked for does not get smaller with the
micro-batch, the smallest is tried next: if that fails, too, none can fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAFETY_FACTOR = 0.98  # fraction tried of the size at which the line reaches the limit
# Fraction of the limit that several ranks leave free: they do not vote on a validated size any more, and an error then
# costs all of them the steps since the last checkpoint.
RESERVE_OF_RANKS = 0.03
SMALLEST_GAIN = 0.05  # smallest relative gain worth risking a failed step
# Fraction of a request by which memory in use may differ between two attempts, as by a sum per metric.
USAGE_TOLERANCE = 0.01

_EMPTY_STATE = (1, 0, None, True, 1, None, None)  # in the order of `SizeSearch.state_dict`


class PeakSample(NamedTuple):
    """Bytes `needed` by full-size micro-batches beyond resident memory, and the `headroom` that the limit leaves."""

    needed: int
    headroom: int

    def worst(self, other: "PeakSample | None") -> "PeakSample":
        """Return the larger need and the smaller headroom."""
        if other is None:
            return self
        return PeakSample(max(self.needed, other.needed), min(self.headroom, other.headroom))


class FailedAllocation(NamedTuple):
    """An allocation that failed: its size in bytes, and the micro-batch in which it was asked for."""

    location: str  # phase and module, and whether gradients of earlier micro-batches were in memory
    samples: int
    elements: int  # 0 if unknown
    requested: int
    used: int  # before it
    limit: int
    is_size_independent: bool = False  # whether it is known to be the same for every size
    is_optimizer_update: bool = False  # whether the update of the parameters asked for it, which works on no samples

    def repeats(self, previous: "FailedAllocation | None") -> bool:
        """Return whether the request evidently does not shrink with the size: the same allocation failed before with at
        least twice the samples, on average no shorter ones, and extrapolating what was saved to zero samples still does
        not fit.

        Args:
            previous: the previous failure, at a larger size.
        """
        if self.is_size_independent:
            return True
        if previous is None:
            return False

        # Only the same allocation, at half the size and not for longer samples, can be compared.
        is_same_request = (self.location, self.requested) == (previous.location, previous.requested)
        has_half_the_samples = 2 * self.samples <= previous.samples
        has_no_longer_samples = 0 < self.elements * previous.samples <= previous.elements * self.samples
        if not (is_same_request and has_half_the_samples and has_no_longer_samples):
            return False

        # What the smaller size has saved, extrapolated to zero samples, must leave too little headroom.
        saved = previous.used - self.used
        if saved < -USAGE_TOLERANCE * self.requested:  # something else has grown meanwhile
            return False
        still_to_save = max(0, saved) * self.elements / (previous.elements - self.elements)
        return self.used + self.requested - still_to_save > self.limit


@dataclass
class SizeSearch:
    """The micro-batch size for one kind of work on one shape of data. Sizes are samples per forward on one rank.

    clean_steps: successes in a row until a size is validated and, if `grow`, a larger one is tried. reserve: the
    fraction of the largest size that fits, by the peaks, which is left out; a validated size that is larger is given
    back. Independent of runs: the caller reports what fitted and what failed.
    """

    size: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1  # no micro-batch has fewer samples: some models cannot train on single ones
    reserve: float = 0.0
    clean: int = 0  # clean steps with this size so far, also before a resume
    clean_in_process: int = 0  # those of this process: a new one may have less memory, so it watches a size again
    largest_validated: int = 0
    smallest_excluded: int | None = None  # the smallest micro-batch that failed, or that a failure rules out
    failures_in_a_row: int = 0
    search_has_ended: bool = True  # no larger size is worth trying
    peaks: dict[int, PeakSample] = field(default_factory=dict)  # by size
    last_failure: FailedAllocation | None = None  # of the last failure in a row
    must_try_smallest: bool = False  # whether fewer samples asked for as much, since a size last fitted
    flushed_steps: int = 0  # steps of this size for which the device's allocator had to free its cache
    most: int = 0  # the largest size worth trying where none has failed yet: of a search that began with a small one

    @property
    def is_validated(self) -> bool:
        """Whether the size is validated: its memory is then no longer watched, which costs time on the CPU."""
        return self.clean_in_process >= self.clean_steps

    def record_success(self, largest: int, peak: PeakSample | None = None, has_flushed: bool = False) -> int | None:
        """Record a clean step. Return the size to try next, if it is another one: larger or, after the second step with
        a flush or without a reserve, smaller.

        Args:
            largest: samples of the largest micro-batch in it; only full-size ones count.
            peak: None if it is not known.
            has_flushed: whether the device's allocator had to free its cache to serve it. Then each step may free
                memory and map it again, which is slow. Once may be chance, from fragments of other sizes: the size is
                repeated.
        """
        if not self.is_full_size(largest):
            return None
        if has_flushed and self.grow and largest > self.smallest:
            self.flushed_steps += 1
            if self.flushed_steps == 1:
                return None
            self.failures_in_a_row = 0
            self.record_failure(largest)
            return self.size

        # A success ends the row of failures.
        self.clean = min(self.clean + 1, self.clean_steps)
        self.clean_in_process += 1
        self.failures_in_a_row = 0
        self.last_failure = None
        self.must_try_smallest = False
        if peak is not None:
            self.peaks[self.size] = peak.worst(self.peaks.get(self.size))
        if self.clean < self.clean_steps:
            return None

        # The size is validated: give back what leaves too little, or try a larger one, if any is worth it.
        self.largest_validated = max(self.largest_validated, self.size)
        if self.search_has_ended or not self.grow:
            return None
        next_size = self._size_with_reserve() or self._larger_size()
        if next_size is None:
            self.search_has_ended = True
        else:
            self.try_size(next_size)
        return next_size

    def is_full_size(self, samples: int) -> bool:
        """Return whether a micro-batch of so many samples is one of this size.

        The first of a step may be shorter by the samples that it has given to a remainder, which would have been too
        small, see `data.batch.ranges` and `size_for`: with size 32 and at least 2 samples, 31 are full-size.
        """
        shortest_after_ranges = self.size - 1
        shortest_after_size_for = max(self.smallest, self.size - self.smallest + 1)
        return samples >= min(shortest_after_ranges, shortest_after_size_for)

    def record_failure(self, largest: int, failure: FailedAllocation | None = None) -> bool:
        """Record that memory ran out, and choose the next size: the largest validated one, otherwise half of what ran
        or, after two failures in a row and if larger sizes will be tried, a quarter; the smallest one if fewer samples
        asked for the same.

        Args:
            largest: samples of the largest micro-batch of the attempt. They are fewer than `size` if the step has fewer
                samples; sizes in between would then run the same samples at once and fail again. They are more if fewer
                samples would be left over.
            failure: the allocation that failed, if known.

        Returns:
            False if no size can fit.
        """
        # Nothing smaller is left, or it has failed, too.
        has_failed_before = self.smallest_excluded is not None and largest >= self.smallest_excluded
        if largest <= self.smallest or (self.size <= self.smallest and has_failed_before):
            return False

        # A request that does not shrink with the size: only the smallest is worth a try.
        previous_failure = self.last_failure
        self.last_failure = failure
        a_smaller_size_worked = 0 < self.largest_validated < largest
        if failure is not None and failure.repeats(previous_failure) and not a_smaller_size_worked:
            self.must_try_smallest = True
            if failure.is_optimizer_update:
                return False

        # What is known of sizes so far.
        self.failures_in_a_row += 1
        self.smallest_excluded = min(largest, self.smallest_excluded or largest)
        if self.largest_validated >= largest:
            self.largest_validated = 0  # a size that fitted once need not fit again
        self.search_has_ended = not self.grow

        # The next size.
        if self.largest_validated:
            self._return_to_validated()
        elif self.must_try_smallest:
            self.try_size(self.smallest)
        else:
            divisor = 4 if self.failures_in_a_row > 1 and self.grow else 2
            smaller = min(self.size, largest // divisor)
            self.try_size(max(self.smallest, smaller))
        return True

    def require_more_than(self, samples: int) -> None:
        """Record that the model cannot run so few samples: from now on, no micro-batch has fewer than one more. A size
        that is too small is doubled, but stays below what has failed.
        """
        self.smallest = max(self.smallest, samples + 1)
        self.failures_in_a_row = 0
        self.last_failure = None
        if self.size >= self.smallest:
            return

        larger = self.largest_validated or 2 * samples
        if self.smallest_excluded is not None:
            larger = min(larger, self.smallest_excluded - 1)
        self.try_size(max(self.smallest, larger))

    def reject_size(self) -> None:
        """Record that the model itself fails with this size, which was tried after a smaller one had been validated: go
        back to that one, and try no others.
        """
        self._return_to_validated()
        self.search_has_ended = True

    def _return_to_validated(self) -> None:
        self.try_size(self.largest_validated)
        self.clean = self.clean_steps - 1  # one more clean step: it was validated before
        self.clean_in_process = self.clean

    def try_size(self, size: int) -> None:
        """Continue with this unvalidated size."""
        self.size = size
        self.clean = 0
        self.clean_in_process = 0
        self.flushed_steps = 0

    def state_dict(self) -> list[Any]:
        """Return plain values: a resumed run tries the same sizes in the same steps. `load_state_dict` reads them."""
        allocation = None
        if self.last_failure is not None:
            allocation = list(self.last_failure)
        progress = {
            "clean": self.clean,
            "failures_in_a_row": self.failures_in_a_row,
            "must_try_smallest": self.must_try_smallest,
            "peaks": {size: list(peak) for size, peak in self.peaks.items()},
        }
        if self.flushed_steps:
            progress["flushed_steps"] = self.flushed_steps
        if self.most:
            progress["most"] = self.most
        return [
            self.size,
            self.largest_validated,
            self.smallest_excluded,
            self.search_has_ended,
            self.smallest,
            allocation,
            progress,
        ]

    def load_state_dict(self, saved: Sequence[Any], largest_size: int) -> None:
        """Restore a `state_dict`, whose keys may be strings, as in JSON. Earlier versions have only the first values.

        Args:
            saved: a `state_dict`.
            largest_size: samples on this rank in a step of this run, which may have fewer than the saved one.
        """
        values = [*saved, *_EMPTY_STATE[len(saved) :]]
        size, largest_validated, smallest_excluded, has_ended, smallest, allocation, progress = values

        # From a larger global batch: unreachable here, so it would never be validated.
        if smallest_excluded is not None and smallest_excluded > largest_size:
            smallest_excluded = None
            has_ended = True

        # Bring all sizes into the range of this run.
        self.smallest = max(self.smallest, min(smallest, largest_size))
        self.size = max(self.smallest, min(size, largest_size))
        self.largest_validated = min(largest_validated, self.size)
        self.smallest_excluded = smallest_excluded
        self.search_has_ended = has_ended or not self.grow
        if allocation is not None:
            self.last_failure = FailedAllocation(*allocation)
        if progress is not None:
            self.most = min(progress.get("most", 0), largest_size)

        # How far it has come holds for the saved size only.
        if progress is not None and self.size == size:
            self.clean = progress["clean"]
            self.failures_in_a_row = progress["failures_in_a_row"]
            self.must_try_smallest = progress["must_try_smallest"]
            self.flushed_steps = progress.get("flushed_steps", 0)
            self.peaks = {int(size): PeakSample(*peak) for size, peak in progress["peaks"].items()}

    def begin_below(self, bytes_less: int) -> bool:
        """Begin with the largest size that fits by the peaks measured under a higher limit, if there are any. Return
        whether there are.

        Args:
            bytes_less: by how many bytes the limit is lower now.
        """
        if not self.peaks:
            return False
        if self.size not in self.peaks:  # one that was not validated yet
            self.size = max(self.peaks)
        peaks = {}
        for size, (needed, headroom) in sorted(self.peaks.items()):
            peaks[size] = PeakSample(needed, headroom - bytes_less)
        self.peaks = peaks

        too_large = [size for size, peak in peaks.items() if peak.needed > peak.headroom]
        if not too_large:
            self.try_size(self.size)  # validated anew
            return True
        self.smallest_excluded = too_large[0]  # smaller than what failed before
        self.largest_validated = 0
        self.failures_in_a_row = 0
        self.last_failure = None
        self.must_try_smallest = False
        self.search_has_ended = not self.grow
        fitting = int(SAFETY_FACTOR * self._largest_fitting(too_large[0]))
        self.try_size(max(self.smallest, fitting))
        return True

    def _largest_fitting(self, too_large: int) -> float:
        """Return the size below the smallest one that is `too_large` at which the line through it and a neighbour
        reaches the limit, less the reserve: the next smaller measured size, or the next larger one, or the origin.
        """
        needed, headroom = self.peaks[too_large]
        smaller = [size for size in self.peaks if size < too_large]
        larger = [size for size in self.peaks if size > too_large]
        neighbour = 0
        excess_of_neighbour = -headroom  # of the origin, where nothing is needed
        if smaller or larger:
            neighbour = max(smaller) if smaller else min(larger)
            excess_of_neighbour = self.peaks[neighbour].needed - self.peaks[neighbour].headroom
        rise = (needed - headroom - excess_of_neighbour) / (too_large - neighbour)  # bytes per sample
        if rise <= 0:
            return 0.0
        return (1 - self.reserve) * (too_large - (needed - headroom) / rise)

    def _size_with_reserve(self) -> int | None:
        """Return the next size after a validated one that leaves less than the reserve, and exclude that one. None if
        it leaves enough.
        """
        if not self.reserve or not self.grow or self.size not in self.peaks:
            return None
        needed, headroom = self.peaks[self.size]
        if needed <= (1 - self.reserve) * headroom:
            return None
        smaller = max(self.smallest, int(self._size_at_limit()))
        if smaller >= self.size:
            return None
        self.smallest_excluded = self.size
        return smaller

    def _larger_size(self) -> int | None:
        """Return the next size after a validated one; None if the line or a failure excludes every one worth trying."""
        smallest_worth_trying = self.size + max(1, math.ceil(SMALLEST_GAIN * self.size))
        if self.smallest_excluded is None:
            return self._larger_untried_size(smallest_worth_trying)
        if self.smallest_excluded <= smallest_worth_trying:
            return None

        # The line excludes them: believe it, unless a single measured size determines it.
        size_at_limit = self._size_at_limit()
        if size_at_limit < smallest_worth_trying:
            return None if self._line_has_two_sizes() else smallest_worth_trying

        # Otherwise the size on the line, less a margin.
        next_size = SAFETY_FACTOR * size_at_limit
        if next_size >= self.smallest_excluded:  # no peak is known, or a failure has disproved the line
            return (self.size + self.smallest_excluded) // 2
        return max(self.size + 1, int(next_size))

    def _larger_untried_size(self, smallest_worth_trying: int) -> int | None:
        """Return the next size where none has failed: as large as the line allows, and at most `most`."""
        if self.size >= self.most:
            return None
        size_at_limit = self._size_at_limit()
        if size_at_limit < smallest_worth_trying:
            return None if self._line_has_two_sizes() else min(smallest_worth_trying, self.most)
        next_size = int(min(SAFETY_FACTOR * size_at_limit, self.most))
        return max(self.size + 1, next_size)

    def _line_has_two_sizes(self) -> bool:
        """Return whether two measured sizes determine the line, not one and the origin."""
        return min(self.peaks) < self.size

    def _size_at_limit(self) -> float:
        """Return the size at which the line through the measured peaks reaches the limit, less the reserve; inf if it
        never does.
        """
        if self.size not in self.peaks:
            return math.inf
        needed, headroom = self.peaks[self.size]

        # The second point: the next smaller measured size, or the origin.
        smaller = max((size for size in self.peaks if size < self.size), default=0)
        needed_by_smaller = 0
        if smaller:
            needed_by_smaller = self.peaks[smaller].needed
        rise = needed - needed_by_smaller
        if rise <= 0:
            return math.inf
        return (1 - self.reserve) * (self.size + (headroom - needed) * (self.size - smaller) / rise)
