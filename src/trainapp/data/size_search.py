"""Finds the micro-batch size that fits: halves after a failure, then bisects between the bounds.

Halving alone ends at 64 where 100 would fit. After a number of clean steps a larger size is tried: the middle between
the largest that worked and the smallest that failed. A failed attempt costs that one step's retry. The search ends
when the two bounds are within 5% of each other.

Halving is also a slow way to find out that nothing fits. Two failures in a row that ask for the same number of bytes,
more than is free without any batch, suggest an allocation that does not shrink with the micro-batch. They do not prove
it: the second may be a layer twice as wide. So the smallest size is tried next. If it fails, no size fits; if it fits,
halving continues where it stopped.
"""

from dataclasses import dataclass

CLOSE_ENOUGH = 0.95  # of the smallest size that failed


@dataclass(frozen=True)
class Failure:
    """An allocation that failed. Sizes are bytes.

    requested: None if the error does not say. fixed_bytes: in use whatever the micro-batch. limit: the memory limit.
    """

    requested: int | None
    fixed_bytes: int
    limit: int

    @property
    def exceeds_limit_alone(self) -> bool:
        """Whether the allocation would fail with nothing else of the batch in memory."""
        return self.requested is not None and self.fixed_bytes + self.requested > self.limit


@dataclass
class SizeSearch:
    """The micro-batch size for one kind of work on one shape of data. Sizes are samples per forward on one rank.

    clean_steps: successes in a row until a size is proven, and a larger one is tried if `grow`.
    """

    size: int
    clean_steps: int = 3
    grow: bool = True
    clean: int = 0
    works: int = 0  # the largest proven size
    fails: int | None = None  # the smallest micro-batch that failed
    search_has_ended: bool = True  # no larger size is worth trying
    smallest: int = 1  # some models cannot train on single samples
    last_failure: tuple[int, Failure | None] | None = None  # samples that ran, and why; None after a success
    halve_on_from: int | None = None  # where to resume halving if the smallest size, tried early, fits

    @property
    def is_proven(self) -> bool:
        """Whether the size is proven: it is then no longer watched, since watching costs time on the CPU."""
        return self.clean >= self.clean_steps

    def succeeded(self, ran: int) -> int | None:
        """Record a clean step. Returns the larger size to try next, or None.

        ran: the largest micro-batch in it; only full ones prove anything (one less: see `micro_batch.cut`). The bytes
        that the step used say little about a larger size: another cut of the same samples peaks elsewhere.
        """
        self.last_failure = None
        if self.halve_on_from is not None:
            self.size, self.halve_on_from = self.halve_on_from, None
            return self.size
        if ran < self.size - 1:
            return None
        self.clean += 1
        if not self.is_proven:
            return None
        self.works = max(self.works, self.size)
        if self.search_has_ended or not self.grow:
            return None
        larger = self._larger()
        self.search_has_ended = larger is None
        if larger is not None:
            self.size, self.clean = larger, 0
        return larger

    def _larger(self) -> int | None:
        if self.fails is None or self.size >= CLOSE_ENOUGH * self.fails or self.fails - self.size <= 1:
            return None
        return (self.size + self.fails) // 2

    def failed(self, ran: int, failure: Failure | None = None) -> bool:
        """Memory ran out: fall back to the largest proven size, else to half of what ran. False if none can fit.

        ran: the largest micro-batch of the attempt. It is less than `size` where the step has fewer samples, and then
        the sizes in between would run the same samples at once and fail again.
        """
        if ran <= self.smallest:
            return False
        before, self.last_failure = self.last_failure, (ran, failure)
        self.fails = min(ran, self.fails or ran)
        if self.works >= ran:
            self.works = 0  # a size that fitted once need not fit again
        # A size that was proven before needs only one clean step.
        self.clean = self.clean_steps - 1 if self.works else 0
        self.size = self.works or max(self.smallest, min(self.size, ran // 2))
        self.search_has_ended = not self.grow
        if not self.works and before is not None and _ask_for_the_same(before, self.last_failure):
            self.halve_on_from, self.size = self.size, self.smallest
        return True


def _ask_for_the_same(a: tuple[int, Failure | None], b: tuple[int, Failure | None]) -> bool:
    """Whether two failures at different sizes asked for the same bytes, which are too many without any batch."""
    (ran_a, failure_a), (ran_b, failure_b) = a, b
    if ran_a == ran_b or failure_a is None or failure_b is None:
        return False
    return failure_a.requested == failure_b.requested and failure_b.exceeds_limit_alone
