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
from dataclasses import dataclass, field
from typing import NamedTuple

MARGIN = 0.98  # fraction tried of the size at which the line reaches the limit
WORTH = 0.05  # smallest relative gain worth risking a failed step
NOISE = 0.01  # fraction of a request by which memory in use may differ between two attempts, as by a sum per metric


class Measured(NamedTuple):
    """Bytes `needed` by full-size micro-batches beyond resident memory, and the `room` that the limit leaves."""

    needed: int
    room: int

    def worst(self, other: "Measured | None") -> "Measured":
        """The larger need and the smaller room."""
        return self if other is None else Measured(max(self.needed, other.needed), min(self.room, other.room))


class Demand(NamedTuple):
    """What a failed allocation asked for, in bytes, and in which micro-batch."""

    place: str  # phase and module, and whether gradients of earlier micro-batches were in memory
    samples: int
    elements: int  # 0 if unknown
    requested: int
    used: int  # before it
    limit: int
    is_fixed: bool = False  # whether it is known to be the same for every size
    is_of_update: bool = False  # whether the update of the parameters asked for it, which works on no samples

    def is_constant(self, before: "Demand | None") -> bool:
        """Return whether the request evidently does not shrink with the size: the same allocation failed before with at
        least twice the samples, on average no shorter ones, and extrapolating what was saved to zero samples still does
        not make room. before: the demand of the previous failure, at a larger size.
        """
        if self.is_fixed or before is None:
            return self.is_fixed
        is_same = (self.place, self.requested) == (before.place, before.requested)
        is_half = 2 * self.samples <= before.samples
        is_no_longer = 0 < self.elements * before.samples <= before.elements * self.samples
        saved = before.used - self.used
        if not (is_same and is_half and is_no_longer) or saved < -NOISE * self.requested:
            return False
        left_to_save = max(0, saved) * self.elements / (before.elements - self.elements)
        return self.used + self.requested - left_to_save > self.limit


@dataclass
class SizeSearch:
    """The micro-batch size for one kind of work on one shape of data. Sizes are samples per forward on one rank.

    clean_steps: successes in a row until a size is validated and, if `grow`, a larger one is tried. Independent of
    runs: the caller reports what fitted and what failed.
    """

    size: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1  # no micro-batch has fewer samples: some models cannot train on single ones
    clean: int = 0  # steps with this size
    works: int = 0  # the largest validated size
    fails: int | None = None  # the smallest micro-batch that failed
    errors: int = 0  # in a row
    search_has_ended: bool = True  # no larger size is worth trying
    measured: dict[int, Measured] = field(default_factory=dict)  # by size
    last_demand: Demand | None = None  # of the last failure in a row
    asks_the_same: bool = False  # whether fewer samples asked for as much, since one last fitted

    @property
    def is_validated(self) -> bool:
        """Whether the size is validated: its memory is then no longer watched, which costs time on the CPU."""
        return self.clean >= self.clean_steps

    def fitted(self, ran: int, measured: Measured | None = None) -> int | None:
        """Record a clean step. Returns the larger size to try next, or None.

        ran: the largest micro-batch in it; only full-size ones count. measured: None if the peak is not known.
        """
        if not self.is_full_size(ran):
            return None
        self.errors, self.clean = 0, self.clean + 1
        self.last_demand, self.asks_the_same = None, False
        if measured is not None:
            self.measured[self.size] = measured.worst(self.measured.get(self.size))
        if not self.is_validated:
            return None
        self.works = max(self.works, self.size)
        if self.search_has_ended or not self.grow:
            return None
        larger = self._larger()
        self.search_has_ended = larger is None
        if larger is not None:
            self.try_size(larger)
        return larger

    def is_full_size(self, ran: int) -> bool:
        """Whether a micro-batch of `ran` samples is one of this size: the first may have given its last samples to a
        remainder that is too small, see `data.batch.ranges` and `size_for`.
        """
        return ran >= min(self.size - 1, max(self.smallest, self.size - self.smallest + 1))

    def failed(self, ran: int, demand: Demand | None = None) -> bool:
        """Memory ran out: fall back to the largest validated size, otherwise to half of what ran or, after two errors
        in a row and if larger sizes will be tried, to a quarter; to the smallest size if fewer samples asked for the
        same. False if none can fit.

        ran: the largest micro-batch of the attempt. It is less than `size` if the step has fewer samples; sizes in
        between would then run the same samples at once and fail again. It is more if fewer samples would be left over.
        demand: what was asked for, if known.
        """
        has_failed_before = self.fails is not None and ran >= self.fails
        if ran <= self.smallest or (self.size <= self.smallest and has_failed_before):
            return False
        before, self.last_demand = self.last_demand, demand
        if demand is not None and demand.is_constant(before) and not 0 < self.works < ran:
            self.asks_the_same = True
            if demand.is_of_update:
                return False
        self.errors += 1
        self.fails = min(ran, self.fails or ran)
        if self.works >= ran:
            self.works = 0  # a size that fitted once need not fit again
        smaller = max(self.smallest, min(self.size, ran // (4 if self.errors > 1 and self.grow else 2)))
        if self.asks_the_same:
            smaller = self.smallest
        self.try_size(self.works or smaller)
        if self.works:
            self.clean = self.clean_steps - 1  # it was validated before
        self.search_has_ended = not self.grow
        return True

    def require_more_than(self, samples: int) -> None:
        """The model cannot run so few samples: from now on, no micro-batch has fewer than one more. A size that is too
        small is doubled, but stays below what has failed.
        """
        self.smallest = max(self.smallest, samples + 1)
        self.errors, self.last_demand = 0, None
        if self.size < self.smallest:
            doubled = self.works or 2 * samples
            below_failure = doubled if self.fails is None else min(doubled, self.fails - 1)
            self.try_size(max(self.smallest, below_failure))

    def try_size(self, size: int) -> None:
        """Continue with this unvalidated size."""
        self.size, self.clean = size, 0

    def _larger(self) -> int | None:
        """The next size after a validated one; None if the line or a failure excludes every size worth trying."""
        worth, line = self.size + max(1, math.ceil(WORTH * self.size)), self._reaches_limit()
        if self.fails is None or self.fails <= worth:
            return None
        if line < worth:  # a single size does not determine the line, so it excludes nothing
            return None if min(self.measured) < self.size else worth
        next_size = MARGIN * line
        if next_size >= self.fails:  # not measured, or disproved
            return (self.size + self.fails) // 2
        return max(self.size + 1, int(next_size))

    def _reaches_limit(self) -> float:
        """The size at which the line through the measurements reaches the limit; inf if it never does."""
        if self.size not in self.measured:
            return math.inf
        needed, room = self.measured[self.size]
        smaller = max((size for size in self.measured if size < self.size), default=0)
        rise = needed - (self.measured[smaller].needed if smaller else 0)
        return self.size + (room - needed) * (self.size - smaller) / rise if rise > 0 else math.inf
