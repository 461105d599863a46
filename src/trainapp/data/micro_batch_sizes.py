"""The micro-batch size of each shape of data, the same on all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainapp.data.batch import bucket_of, measure
from trainapp.data.micro_batch import MicroBatch, cut, cut_evenly, narrow
from trainapp.data.size_search import SizeSearch
from trainapp.parallel.ranks import Ranks

Plan = int | dict[int, int]  # the size of all shapes, or of each by its bucket


@dataclass
class MicroBatchSizes:
    """One search for each shape of data, so that a long batch does not shrink all the others.

    start: the size that a first shape begins with. `ranks`, in the methods, are those that go forward together. The
    searches are the same on all of them, for they change only by what all have told each other.
    """

    start: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1
    searches: dict[int, SizeSearch] = field(default_factory=dict)
    current: int | None = None  # the bucket of the micro-batch at work
    ran: dict[int, int] = field(default_factory=dict)  # largest micro-batch of each bucket since all were told
    numbers: dict[int, int] = field(default_factory=dict)  # the same in numbers instead of samples
    seen: dict[int, int] = field(default_factory=dict)  # the same over all that ended well, on this rank
    trying: bool = True  # whether what ran last, on any rank, had a size that is not proven

    @property
    def size(self) -> int:
        """The largest size in force: what is fetched at a time."""
        return max((search.size for search in self.searches.values()), default=self.start)

    @property
    def size_at_work(self) -> int:
        """The size in force for the micro-batch at work."""
        return self.size if self.current is None else self.search(self.current).size

    @property
    def proven(self) -> bool:
        """Whether no bucket is being tried."""
        return bool(self.searches) and all(map(self.covered, self.searches))

    @property
    def untried(self) -> bool:
        """Whether a size has not yet ended a step well."""
        return not all(search.clean for search in self.searches.values()) or not self.searches

    @property
    def settled(self) -> bool:
        """Whether no larger size will be tried."""
        return all(search.settled for search in self.searches.values())

    @property
    def has_news(self) -> bool:
        """Whether this rank has met a shape whose size is not proven, or might grow."""
        return not all(self.covered(bucket) and self.search(bucket).settled for bucket in self.ran)

    def covered(self, bucket: int) -> bool:
        """Whether the size in force for a shape is proven: by itself, or by as many samples of a larger shape."""
        own = self.search(bucket)
        return own.proven or any(
            s.proven and s.size >= own.size for other, s in self.searches.items() if other >= bucket
        )

    def in_force(self) -> Plan:
        """The sizes by bucket, or the one for all."""
        buckets = self.searches.keys() | self.ran.keys()
        sizes = {bucket: self.search(bucket).size for bucket in sorted(buckets)} if len(buckets) > 1 else {}
        return sizes if len(set(sizes.values())) > 1 else self.size

    def search(self, bucket: int) -> SizeSearch:
        """The search of a bucket. A new one begins where the others' experience puts it: bytes go with numbers."""
        if bucket in self.searches:
            return self.searches[bucket]
        size = self.start
        if bucket:
            known = [s.size * other / bucket for other, s in self.searches.items() if other and s.fails]
            size = max(self.smallest, int(min(known, default=size)))
        return SizeSearch(min(size, self.start), self.clean_steps, self.grow, smallest=self.smallest)

    def split(self, micro: MicroBatch, ranks: Ranks) -> Iterator[MicroBatch]:
        """Cut what was fetched to the size in force for its shape, on every rank into as many pieces. Most often one.

        Ranks need not ask each other where all sizes are proven and alike; a shape that is new to one of them then
        goes as it is, and has a size of its own as soon as the others have heard of it. Else they also hear at once
        of a size that is not proven.
        """
        samples, numbers = measure(micro.data)
        self.current = bucket = bucket_of(samples, numbers)
        size = self.search(bucket).size
        pieces = cut(range(samples), size) if samples > size else [range(samples)]
        if ranks.world > 1:
            uneven = not self.proven or len({search.size for search in self.searches.values()}) > 1
            count, unproven = ranks.all_reduce_max(len(pieces), int(not self.covered(bucket))) if uneven else (1, 0)
            if unproven:
                ranks.enable_votes(True)
            if count != len(pieces):
                pieces = cut_evenly(range(samples), count)
                pieces += [range(0)] * (count - len(pieces))
        longest = len(pieces[0])
        self.ran[bucket] = max(longest, self.ran.get(bucket, 0))
        self.numbers[bucket] = max(numbers * longest // max(1, samples), self.numbers.get(bucket, 0))
        if len(pieces) == 1:
            yield micro
            return
        for number, piece in enumerate(pieces, start=1):
            start, length = (piece[0], len(piece)) if piece else (0, 1)
            data = narrow(micro.data, start, length, samples)
            yield MicroBatch(data, last=micro.last and number == len(pieces), real=micro.real and len(piece) > 0)

    @property
    def watched(self) -> bool:
        """Whether the micro-batch at work is of an unproven size, or the longest so far of a proven one."""
        bucket = self.current or 0
        return not self.covered(bucket) or self.numbers.get(bucket, 0) > self.seen.get(bucket, 0)

    def succeeded(self, ranks: Ranks, news: bool = False) -> dict[int, int]:
        """A step (or an evaluation batch) ended well. Returns `{bucket: size}` for what is tried next.

        news: whether any rank `has_news`, as all of them know.
        """
        for bucket, numbers in self.numbers.items():
            self.seen[bucket] = max(numbers, self.seen.get(bucket, 0))
        self.numbers = {}
        if not (self.trying or (self.has_news if ranks.world == 1 else news)):
            return {}
        told, grown = ranks.all_gather_object(self.ran), {}
        buckets = sorted(set().union(*told))
        for bucket in buckets:
            search = self.searches[bucket] = self.search(bucket)
            # The most over ranks: those with fewer samples run smaller ones, and would never prove anything.
            following = search.succeeded(max(ran.get(bucket, 0) for ran in told))
            if following is not None:
                grown[bucket] = following
        self.ran = {}
        self.trying = not all(map(self.covered, buckets)) if buckets else self.trying
        return grown

    def failed(self, ranks: Ranks, culprit: bool = True) -> tuple[int, int] | None:
        """Memory ran out in the micro-batch at work: `(old size, new size)`, or None at the smallest.

        culprit: whether it did on this rank.
        """
        told = ranks.all_gather_object(self.current if culprit else None)
        self.ran, self.numbers, self.trying = {}, {}, True
        buckets = sorted({bucket for bucket in told if bucket is not None}) or self._largest_bucket()
        if not buckets:  # at the very first fetch: no shape is known yet
            old, self.start = self.start, max(self.smallest, self.start // 2)
            return None if old <= self.smallest else (old, self.start)
        changes = []
        for bucket in buckets:
            search = self.searches[bucket] = self.search(bucket)
            old = search.size
            changes.append((old, search.size) if search.failed() else None)
        return None if None in changes else changes[0]

    def _largest_bucket(self) -> list[int]:
        return sorted(self.searches, key=lambda bucket: self.searches[bucket].size)[-1:]

    def force(self, plan: Plan) -> None:
        """Set the size of every shape, or of each, as a schedule asks."""
        self.ran, self.trying = {}, True
        if isinstance(plan, int):
            self.start, plan = plan, dict.fromkeys(self.searches, plan)
        for bucket, size in plan.items():
            search = self.searches[bucket] = self.search(bucket)
            search.size, search.clean = size, 0

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {
            "start": self.start,
            "buckets": {b: [s.size, s.works, s.fails, s.settled] for b, s in self.searches.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """A hint from an earlier run: sizes still have to prove themselves. Never above `start`."""
        for bucket, (size, works, fails, settled) in saved["buckets"].items():
            numbers = (size, works, *(() if fails is None else (fails,)))
            if not all(isinstance(n, int) for n in numbers) or size < 1:
                raise ValueError(f"no sizes: {saved['buckets']}")
            search = SizeSearch(min(size, self.start), self.clean_steps, self.grow, smallest=self.smallest)
            search.works, search.fails, search.settled = min(works, search.size), fails, settled
            self.searches[int(bucket)] = search
        self.trying = True
