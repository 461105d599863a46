"""The micro-batch size of each shape of data, the same on all ranks."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainapp.data.batch import MicroBatch, bucket_of, cut, cut_evenly, elements_in, pieces_of, saved_bucket
from trainapp.data.size_agreement import failed_buckets, largest_micro_batches, number_of_pieces
from trainapp.data.size_search import FailedAllocation, SizeSearch, require_possible
from trainapp.parallel.ranks import Ranks

_SIZE, _HAS_ENDED = operator.attrgetter("size"), operator.attrgetter("search_has_ended")
Plan = int | dict[int, int]  # one size for all shapes, or a size per bucket


@dataclass
class MicroBatchSizes:
    """One search per shape of data, so that a long batch does not shrink all the others. start: the first shape's size.

    The `ranks` of the methods are those that run the same micro-batches together. Their searches are equal, because
    only what all of them have exchanged changes a search (see `size_agreement`).
    """

    start: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1
    searches: dict[int, SizeSearch] = field(default_factory=dict)
    current_bucket: int | None = None  # the bucket of the current micro-batch
    # This rank's largest micro-batches by bucket: of the current attempt, in samples and in elements;
    attempt_samples: dict[int, int] = field(default_factory=dict)
    attempt_elements: dict[int, int] = field(default_factory=dict)
    # of all clean steps since the ranks last exchanged them, in samples; of all clean steps, in elements.
    largest_run: dict[int, int] = field(default_factory=dict)
    clean_elements: dict[int, int] = field(default_factory=dict)
    is_unproven: bool = True  # whether what ran last, on any rank, had a size that is not proven

    @property
    def size(self) -> int:
        """The largest current size: how many samples are fetched at a time."""
        return max(map(_SIZE, self.searches.values()), default=self.start)

    @property
    def size_at_work(self) -> int:
        """The size for the current micro-batch's bucket."""
        return self.size if self.current_bucket is None else self.search(self.current_bucket).size

    @property
    def can_shrink(self) -> bool:
        """Whether the current micro-batch may be cut further."""
        return self.attempt_samples.get(self.current_bucket or 0, self.size) > self.smallest

    @property
    def all_proven(self) -> bool:
        """Whether every bucket seen so far has a proven size."""
        return bool(self.searches) and all(map(self.is_proven, self.searches))

    @property
    def is_untried(self) -> bool:
        """Whether some size has not had a clean step yet."""
        return not all(search.clean for search in self.searches.values()) or not self.searches

    @property
    def has_failed(self) -> bool:
        """Whether some size is known to be too large."""
        return bool(self.failed_buckets)

    @property
    def failed_buckets(self) -> list[int]:
        """The buckets with a size that is known to be too large, in ascending order."""
        return sorted(bucket for bucket, search in self.searches.items() if search.fails is not None)

    @property
    def search_has_ended(self) -> bool:
        """Whether no larger size will be tried."""
        return all(map(_HAS_ENDED, self.searches.values()))

    @property
    def has_news(self) -> bool:
        """Whether this rank has seen a shape whose size is unproven or may still grow."""
        for bucket in self.largest_run.keys() | self.attempt_samples.keys():
            if not (self.is_proven(bucket) and self.search(bucket).search_has_ended):
                return True
        return False

    @property
    def needs_watching(self) -> bool:
        """Whether the current micro-batch has an unproven size, or more elements than any clean one of its bucket."""
        bucket = self.current_bucket or 0
        longest = self.attempt_elements.get(bucket, 0) > self.clean_elements.get(bucket, 0)
        return longest or not self.is_proven(bucket)

    def is_proven(self, bucket: int) -> bool:
        """Whether a bucket's size is proven, by its own steps or by at least as many samples of a larger bucket."""
        own = self.searches.get(bucket) or self.search(bucket)
        return own.clean >= own.clean_steps or any(  # SizeSearch.is_proven, inlined: asked for every micro-batch
            s.is_proven and s.size >= own.size for other, s in self.searches.items() if other >= bucket
        )

    def search(self, bucket: int) -> SizeSearch:
        """A bucket's search. A new one starts from other buckets' failures, scaled by their elements."""
        if bucket in self.searches:
            return self.searches[bucket]
        size = self.start
        if bucket:
            known = [s.size * other / bucket for other, s in self.searches.items() if other and s.fails]
            size = max(self.smallest, int(min(known, default=size)))
        return SizeSearch(min(size, self.start), self.clean_steps, self.grow, smallest=self.smallest)

    def as_plan(self) -> dict[int, int]:
        """By bucket, the sizes at which this attempt was cut: as a schedule, they reproduce the cut.

        A size above the fetch size had no effect, but as a schedule it would raise the fetch size. A shape that was
        left whole (see `cut`) ran at more than its size.
        """
        fetched, plan = self.size, {}
        for bucket in {*self.searches, *self.largest_run, *self.attempt_samples}:
            search = self.searches.get(bucket) or self.search(bucket)
            size, ran = search.size, self.attempt_samples.get(bucket, 0)
            size = fetched if size > fetched else size
            plan[bucket] = ran if ran > size else size  # no calls of `max`: this runs in every step
        return plan

    def follow(self, plan: Plan) -> list[int]:
        """Set one size for all shapes, or a size per bucket, as a schedule asks.

        A shape keeps its size where the scheduled one has failed in this run. Returns those failed sizes.
        """
        self._forget_attempt()
        if isinstance(plan, int):
            self.start, plan = plan, dict.fromkeys(self.searches, plan)
        refused = []
        for bucket, size in plan.items():
            search = self.searches[bucket] = self.search(bucket)
            if search.fails is not None and size >= search.fails:
                refused.append(size)
            else:
                search.size, search.clean = size, 0
        return refused

    def cut(self, micro: MicroBatch, ranks: Ranks) -> Iterable[MicroBatch]:
        """Cut a fetched micro-batch to its bucket's size, into the same number of pieces on every rank, usually one.

        Where all sizes are proven and equal, ranks skip the exchange: a shape that is new to one rank is then left
        whole, and gets its own size once the ranks have exchanged it.
        """
        samples, elements = micro.samples, elements_in(micro.data)
        self.current_bucket = bucket = bucket_of(samples, elements)
        size = (self.searches.get(bucket) or self.search(bucket)).size
        pieces: list[Sequence[int]] = cut(range(samples), size) if samples > size else [range(samples)]
        if ranks.world > 1:
            ask = not self.all_proven or len({search.size for search in self.searches.values()}) > 1
            count = number_of_pieces(ranks, len(pieces), not self.is_proven(bucket)) if ask else 1
            if count != len(pieces):
                pieces = cut_evenly(range(samples), count)
                pieces += [range(0)] * (count - len(pieces))
        longest = len(pieces[0])
        elements = elements * longest // samples
        self.attempt_samples[bucket] = max(longest, self.attempt_samples.get(bucket, 0))
        self.attempt_elements[bucket] = max(elements, self.attempt_elements.get(bucket, 0))
        return [micro] if len(pieces) == 1 else pieces_of(micro, pieces)

    def succeeded(self, ranks: Ranks, news: bool | None = None) -> dict[int, int]:
        """Record a clean step or evaluation batch. Returns `{bucket: size}` of the larger sizes to try next.

        news: whether any rank `has_news`, the same on all ranks. None: this rank's own if it is alone, else False.
        """
        if news is None:
            news = ranks.world == 1 and self.has_news
        for bucket, samples in self.attempt_samples.items():
            self.largest_run[bucket] = max(samples, self.largest_run.get(bucket, 0))
        for bucket, elements in self.attempt_elements.items():
            self.clean_elements[bucket] = max(elements, self.clean_elements.get(bucket, 0))
        self.attempt_samples, self.attempt_elements = {}, {}
        if not (self.is_unproven or news):
            return {}
        # The largest over ranks: a rank with fewer samples runs smaller micro-batches and would never prove a size.
        largest, grown = largest_micro_batches(ranks, self.largest_run), {}
        for bucket, samples in largest.items():
            search = self.searches[bucket] = self.search(bucket)
            next_size = search.succeeded(samples)
            if next_size is not None:
                grown[bucket] = next_size
        self.largest_run = {}
        self.is_unproven = not all(map(self.is_proven, largest)) if largest else self.is_unproven
        return grown

    def failed(self, ranks: Ranks, culprit: bool = True, why: FailedAllocation | None = None) -> tuple[int, int] | None:
        """Memory ran out: returns `(size that ran, new size)`, or None if no smaller size can fit.

        culprit: whether memory ran out on this rank; why: what is known of it.
        """
        bucket = self.current_bucket if culprit else None
        largest, failures = failed_buckets(ranks, self.attempt_samples, bucket, why if culprit else None)
        self._forget_attempt()
        if not failures:
            failures = dict.fromkeys(self._largest_bucket())
        if not failures:  # in the first fetch: no shape is known yet
            old, self.start = self.start, max(self.smallest, self.start // 2)
            return None if old <= self.smallest else (old, self.start)
        # Create all searches before changing any: a new one starts from the failures of the others.
        self.searches |= {bucket: self.search(bucket) for bucket in failures}
        changes = []
        for bucket, failure in failures.items():
            search = self.searches[bucket]
            ran = largest.get(bucket) or search.size  # nothing ran where the fetch failed
            changes.append((ran, search.size) if search.failed(ran, failure) else None)
        return None if None in changes else changes[0]

    def _forget_attempt(self) -> None:
        self.attempt_samples, self.attempt_elements, self.largest_run = {}, {}, {}
        self.is_unproven = True

    def _largest_bucket(self) -> list[int]:
        return sorted(self.searches, key=lambda bucket: self.searches[bucket].size)[-1:]

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {
            "start": self.start,
            "buckets": {b: [s.size, s.works, s.fails, s.search_has_ended] for b, s in self.searches.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Start from saved sizes, between `smallest` and `start`, as unproven. Raises ValueError if malformed."""
        self.searches |= {saved_bucket(key): self._loaded(*entry) for key, entry in saved["buckets"].items()}
        self.is_unproven = True

    def _loaded(self, size: int, works: int, fails: int | None, ended: bool) -> SizeSearch:
        require_possible(size, works, fails, ended)
        if fails is not None and fails > self.start:  # of a larger global batch: never reached, hence never proven
            fails, ended = None, True
        size = max(self.smallest, min(size, self.start))
        search = SizeSearch(size, self.clean_steps, self.grow, smallest=self.smallest)
        search.works, search.fails, search.search_has_ended = min(works, size), fails, ended or not self.grow
        return search
