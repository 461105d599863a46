"""Finds the micro-batch size that fits: halves after a failure, then bisects between the bounds.

Halving alone ends at 64 where 100 would fit. After a number of clean steps a larger size is tried: the middle between
the largest that worked and the smallest that failed. A failed attempt costs that one step's retry. The search ends
when the two bounds are within 5% of each other.

Halving is also a slow way to find out that nothing fits. Where three sizes in a row fail at the same place and ask for
the same number of bytes, more than is free without any batch, the allocation does not shrink with the micro-batch: no
size fits. (Two are not enough: a layer twice as wide asks for the same bytes at half the size.)
"""

from dataclasses import dataclass, field

CLOSE_ENOUGH = 0.95  # of the smallest size that failed
ALIKE = 3  # failures that show that an allocation does not shrink


@dataclass(frozen=True)
class FailedAllocation:
    """An allocation that failed. Sizes are bytes.

    place: phase and module. requested: None if the error does not say. fixed_bytes: in use whatever the micro-batch.
    limit: the memory limit.
    """

    place: tuple[str, str]
    requested: int | None
    fixed_bytes: int
    limit: int

    @property
    def exceeds_limit_alone(self) -> bool:
        """Whether the allocation would fail with nothing else of the batch in memory."""
        return self.requested is not None and self.fixed_bytes + self.requested > self.limit

    def is_alike(self, other: "FailedAllocation") -> bool:
        """Whether both asked for the same number of bytes at the same place."""
        return (self.place, self.requested) == (other.place, other.requested)


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
    alike: list[tuple[int, FailedAllocation]] = field(
        default_factory=list
    )  # samples that ran and failed alike, in a row

    @property
    def is_proven(self) -> bool:
        """Whether the size is proven: it is then no longer watched, since watching costs time on the CPU."""
        return self.clean >= self.clean_steps

    def succeeded(self, ran: int) -> int | None:
        """Record a clean step. Returns the larger size to try next, or None.

        ran: the largest micro-batch in it; only full ones prove anything (one less: see `micro_batch.cut`). The bytes
        that the step used say little about a larger size: another cut of the same samples peaks elsewhere.
        """
        self.alike = []
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

    def failed(self, ran: int, failure: FailedAllocation | None = None) -> bool:
        """Memory ran out: fall back to the largest proven size, else to half of what ran. False if none can fit.

        ran: the largest micro-batch of the attempt. It is less than `size` where the step has fewer samples, and then
        the sizes in between would run the same samples at once and fail again.
        """
        if ran <= self.smallest or self._cannot_shrink(ran, failure):
            return False
        self.fails = min(ran, self.fails or ran)
        if self.works >= ran:
            self.works = 0  # a size that fitted once need not fit again
        # A size that was proven before needs only one clean step.
        self.clean = self.clean_steps - 1 if self.works else 0
        self.size = self.works or max(self.smallest, min(self.size, ran // 2))
        self.search_has_ended = not self.grow
        return True

    def _cannot_shrink(self, ran: int, failure: FailedAllocation | None) -> bool:
        """Whether sizes keep failing for an allocation that does not depend on them."""
        if failure is None or not failure.exceeds_limit_alone:
            self.alike = []
        elif self.alike and self.alike[-1][1].is_alike(failure):
            self.alike += [(ran, failure)] if self.alike[-1][0] != ran else []
        else:
            self.alike = [(ran, failure)]
        return len(self.alike) >= ALIKE


def require_possible(size: int, works: int, fails: int | None, ended: bool) -> None:
    """Raises ValueError for saved fields that no search can have: anything may have written their file."""
    numbers = (size, works, *(() if fails is None else (fails,)))
    if not all(type(n) is int for n in numbers) or type(ended) is not bool:  # True is an int, too
        raise ValueError(f"not a micro-batch size: {[size, works, fails, ended]}")
    if size < 1 or works < 0 or (fails is not None and max(size, works) >= fails):
        raise ValueError(f"not a possible state of a search: {[size, works, fails, ended]}")
