"""Finds the micro-batch that fits: halve after a failure, then try what lies between, and remember the bounds.

Halving alone ends at 64 where 100 would fit. After a number of clean steps a larger size is tried: the middle between
the largest that worked and the smallest that failed. A failed try costs that one step's retry. The search ends when
the two bounds are within 5% of each other.
"""

from dataclasses import dataclass

CLOSE_ENOUGH = 0.95  # of the smallest size that failed


@dataclass
class SizeSearch:
    """The size in force for one kind of work on one shape of data. Sizes are samples for each forward on one rank.

    clean_steps: successes in a row until a size is proven, and a larger one is tried if `grow`.
    """

    size: int
    clean_steps: int = 3
    grow: bool = True
    clean: int = 0
    works: int = 0  # the largest proven size
    fails: int | None = None  # the smallest size that failed
    settled: bool = True  # no larger size is worth a try
    smallest: int = 1  # some models cannot train on single samples

    @property
    def proven(self) -> bool:
        """Proven sizes are no longer watched, which costs time on the CPU."""
        return self.clean >= self.clean_steps

    def succeeded(self, ran: int) -> int | None:
        """A step ended well. Returns the larger size that the next step tries, if it is time for one.

        ran: the largest micro-batch in it; only full ones prove anything (one less: see `batches.cut`). What bytes
        the step used says little of a larger size: another cut of the same samples has its peak elsewhere.
        """
        if ran < self.size - 1:
            return None
        self.clean += 1
        if not self.proven:
            return None
        self.works = max(self.works, self.size)
        if self.settled or not self.grow:
            return None
        following = self._larger()
        self.settled = following is None
        if following is not None:
            self.size, self.clean = following, 0
        return following

    def _larger(self) -> int | None:
        if self.fails is None or self.size >= CLOSE_ENOUGH * self.fails or self.fails - self.size <= 1:
            return None
        return (self.size + self.fails) // 2

    def failed(self) -> bool:
        """Memory ran out. Back to the largest size that works, else half. False when nothing is left to halve."""
        if self.size <= self.smallest:
            return False
        self.fails = min(self.size, self.fails or self.size)
        if self.works >= self.size:
            self.works = 0  # what fits once need not fit again
        # A size that has proven itself before does so again with one clean step.
        self.clean = self.clean_steps - 1 if self.works else 0
        self.size, self.settled = self.works or max(self.smallest, self.size // 2), not self.grow
        return True
