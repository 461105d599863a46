"""Finds the micro-batch that fits: halve after a failure, then try what lies between, and remember the bounds.

Halving alone ends at 64 where 100 would fit. After a number of clean steps a larger size is tried: the middle between
the largest that worked and the smallest that failed. A failed try costs that one step's retry. The search ends when
the two bounds are within 5% of each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainapp.batches import bucket_of, measure, narrow

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
    numbers: int = 0  # in the largest micro-batch that ended well: shapes of one bucket differ up to twofold

    @property
    def proven(self) -> bool:
        """Proven sizes are no longer watched, which costs time on the CPU."""
        return self.clean >= self.clean_steps

    def succeeded(self, ran: int, *_: int) -> int | None:
        """A step ended well. Returns the larger size that the next step tries, if it is time for one.

        ran: the largest micro-batch in it; only full ones prove anything (one less: see `batching.cut`). What bytes
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
        self.size, self.settled = self.works or max(self.smallest, self.size // 2), False
        return True


@dataclass
class Sizes:
    """One search for each shape of data, so that a long batch does not shrink all the others.

    start: the size that a first shape begins with. `current` is the bucket of the micro-batch at work.
    """

    start: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1
    one_shape: bool = False  # all data in one bucket: ranks could not agree on the buckets of their own batches
    searches: dict[int, SizeSearch] = field(default_factory=dict)
    current: int | None = None
    ran: dict[int, int] = field(default_factory=dict)  # largest micro-batch of each bucket since the last commit
    numbers: dict[int, int] = field(default_factory=dict)  # the same in numbers instead of samples

    def __post_init__(self):
        if self.one_shape:  # from the start, so that a rank which fails before its first batch is no exception
            self.search(0)

    @property
    def size(self) -> int:
        """The largest size in force: what is fetched at a time."""
        return max((search.size for search in self.searches.values()), default=self.start)

    @property
    def size_at_work(self) -> int:
        """The size in force for the micro-batch at work."""
        return self.searches[self.current].size if self.current in self.searches else self.size

    @property
    def proven(self) -> bool:
        """Whether no bucket is being tried."""
        return bool(self.searches) and all(search.proven for search in self.searches.values())

    @property
    def settled(self) -> bool:
        """Whether no larger size will be tried."""
        return all(search.settled for search in self.searches.values())

    def search(self, bucket: int) -> SizeSearch:
        """The search of a bucket. A new one begins where the others' experience puts it: bytes go with numbers."""
        if bucket not in self.searches:
            size = self.start
            if bucket and any(s.fails for s in self.searches.values()):
                fitting = min(
                    (s.size * known / bucket for known, s in self.searches.items() if known and s.fails), default=size
                )
                size = min(size, max(self.smallest, int(fitting)))
            self.searches[bucket] = SizeSearch(size, self.clean_steps, self.grow, smallest=self.smallest)
        return self.searches[bucket]

    def split(self, batch: Any) -> Iterator[Any]:
        """Cut what was fetched to the size in force for its shape. Most often it is one piece already."""
        samples, numbers = measure(batch)
        bucket = 0 if self.one_shape else bucket_of(samples, numbers)
        size = self.search(bucket).size
        self.current = bucket
        numbers = numbers * min(size, samples) // max(1, samples)
        self.numbers[bucket] = max(numbers, self.numbers.get(bucket, 0))
        if samples <= size or not samples:
            self.ran[bucket] = max(samples, self.ran.get(bucket, 0))
            yield batch
            return
        self.ran[bucket] = max(size, self.ran.get(bucket, 0))
        for start in range(0, samples, size):
            yield narrow(batch, start, size, samples)

    @property
    def watched(self) -> bool:
        """Whether the micro-batch at work is of an unproven size, or the longest so far of a proven one."""
        search = self.search(self.current or 0)
        return not search.proven or self.numbers.get(self.current or 0, 0) > search.numbers

    def succeeded(self) -> dict[int, int]:
        """A step (or an evaluation batch) ended well. Returns `{bucket: size}` for what is tried next."""
        grown = {}
        for bucket, ran in self.ran.items():
            self.searches[bucket].numbers = max(self.searches[bucket].numbers, self.numbers.get(bucket, 0))
            following = self.searches[bucket].succeeded(ran)
            if following is not None:
                grown[bucket] = following
        self.ran.clear()
        self.numbers.clear()
        return grown

    def failed(self) -> tuple[int, int] | None:
        """Memory ran out in the micro-batch at work: `(old size, new size)`, or None at the smallest."""
        self.ran.clear()
        self.numbers.clear()
        if not self.searches:  # at the very first fetch: no shape is known yet
            old, self.start = self.start, max(self.smallest, self.start // 2)
            return None if old <= self.smallest else (old, self.start)
        search = self.search(self.current if self.current is not None else self._largest_bucket())
        old = search.size
        return (old, search.size) if search.failed() else None

    def _largest_bucket(self) -> int:
        return max(self.searches, key=lambda bucket: self.searches[bucket].size, default=0)

    def agree(self, smallest: Callable[[int], int]) -> None:
        """Take the smallest of the ranks' sizes; the search ends for all where it ends for one."""
        for search in self.searches.values():
            size = smallest(search.size)
            search.settled = not smallest(int(not search.settled))
            if size != search.size:
                search.size, search.clean = size, 0
            search.clean = smallest(search.clean)

    def force(self, size: int) -> None:
        """Set the size of every shape, as a schedule asks."""
        self.start = size
        for search in self.searches.values():
            search.size, search.clean = size, 0

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {
            "start": self.start,
            "buckets": {b: [s.size, s.works, s.fails, s.settled] for b, s in self.searches.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """A hint from an earlier run: sizes still have to prove themselves. Never above `start`.

        One of a run that told shapes apart says nothing to one that does not, nor the other way round.
        """
        if self.one_shape != (list(saved["buckets"]) in ([0], ["0"])):
            return
        for bucket, (size, works, fails, settled) in saved["buckets"].items():
            numbers = (size, works, *(() if fails is None else (fails,)))
            if not all(isinstance(n, int) for n in numbers) or size < 1:
                raise ValueError(f"no sizes: {saved['buckets']}")
            search = SizeSearch(min(size, self.start), self.clean_steps, self.grow, smallest=self.smallest)
            search.works, search.fails, search.settled = min(works, search.size), fails, settled
            self.searches[int(bucket)] = search
