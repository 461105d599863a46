"""The micro-batch size for each shape of data, equal on all ranks, and the cutting of fetched batches to it. cuDNN's
autotuner follows the sizes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainapp.data.batch import MicroBatch, bucket_of, cut, elements_in, pieces_of, size_for
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.search import Demand, Measured, SizeSearch

Plan = int | dict[int, int]  # one size for all shapes, or a size per bucket


class Ran(NamedTuple):
    """The largest micro-batch of a shape, in samples and in elements; measurements of full-size micro-batches."""

    samples: int = 0
    elements: int = 0
    measured: Measured | None = None

    def merged(self, other: "Ran") -> "Ran":
        """The larger of each."""
        if self is NOTHING or self == other:
            return other
        measured = self.measured.worst(other.measured) if self.measured else other.measured
        return Ran(max(self.samples, other.samples), max(self.elements, other.elements), measured)


NOTHING = Ran()


@dataclass
class Seen:
    """What this rank has run of one shape."""

    attempt: Ran = NOTHING  # in the current attempt
    clean: Ran = NOTHING  # in clean steps, since the ranks last exchanged it
    longest: int = 0  # the most elements of a micro-batch in all clean steps
    shortest: int = 0  # the fewest samples of a micro-batch in all clean steps; 0 before the first
    shortest_of_attempt: int = 0


class Failure(NamedTuple):
    """Why a rank left the current attempt: memory ran out, or its model cannot run so few samples."""

    demand: Demand | None = None  # what was asked for, if memory ran out and that is known
    too_few: int = 0  # the number of samples that the model cannot run


OUT_OF_MEMORY = Failure()


@dataclass
class MicroBatchSizes:
    """One search per shape of data, so that a long batch does not shrink all the others. start: the first shape's size.

    ranks (in methods): the ranks running the same micro-batches together. Their searches are equal, because only
    exchanged values change a search.
    """

    start: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1
    searches: dict[int, SizeSearch] = field(default_factory=dict)  # by bucket
    seen: defaultdict[int, Seen] = field(default_factory=lambda: defaultdict(Seen))  # by bucket, on this rank alone
    current_bucket: int = 0  # the bucket of the current micro-batch; 0 before the first
    current_samples: int = 0  # of the current micro-batch
    current_elements: int = 0  # of the current micro-batch if its memory is watched; otherwise 0
    is_unvalidated: bool = True  # whether any rank last ran an unvalidated size
    # By bucket, the sizes of the last step's micro-batches, equal on all ranks: as a schedule, they reproduce the cut.
    in_force: dict[int, int] = field(default_factory=dict)
    used: dict[int, dict[int, int]] = field(default_factory=dict)  # the same by attempt, where it changed
    # `batch.micro_schedule`: sizes by the attempt from which they apply. A skipped step is also an attempt.
    schedule: dict[int, Plan] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The largest current size: the number of samples fetched at a time."""
        return max((search.size for search in self.searches.values()), default=self.start)

    @property
    def size_at_work(self) -> int:
        """The size of the current micro-batch's bucket."""
        return self.search(self.current_bucket).size if self.current_bucket else self.size

    @property
    def can_shrink(self) -> bool:
        """Whether the current micro-batch may be cut further."""
        smallest = self.search(self.current_bucket).smallest
        return (self.seen[self.current_bucket].attempt.samples or self.size) > smallest

    @property
    def fewest(self) -> int:
        """The number of samples that every micro-batch must have, whatever its shape."""
        return max((search.smallest for search in self.searches.values()), default=self.smallest)

    @property
    def may_have_too_few(self) -> bool:
        """Whether the current micro-batch may have too few samples for the model: none of its shape has run with so few
        in this process, but larger ones have, or ran out of memory.
        """
        seen, search = self.seen[self.current_bucket], self.search(self.current_bucket)
        larger = max(seen.attempt.samples, seen.shortest, search.works, search.fails or 0)
        has_run = 0 < seen.shortest <= self.current_samples
        return search.smallest <= self.current_samples < larger and not has_run

    @property
    def search_has_ended(self) -> bool:
        """Whether no larger size will be tried."""
        return all(search.search_has_ended for search in self.searches.values())

    @property
    def has_news(self) -> bool:
        """Whether this rank has seen a shape whose size is unvalidated or may still grow."""
        recent = (bucket for bucket, own in self.seen.items() if own.clean.samples or own.attempt.samples)
        return not all(self.is_validated(bucket) and self.search(bucket).search_has_ended for bucket in recent)

    @property
    def needs_watching(self) -> bool:
        """Whether the current micro-batch has an unvalidated size, or more elements than any clean one like it."""
        own = self.seen[self.current_bucket]
        return own.attempt.elements > own.longest or not self.is_validated(self.current_bucket)

    def is_validated(self, bucket: int) -> bool:
        """Whether a bucket's size is validated, by its own steps or by at least as many samples of a larger bucket."""
        own = self.search(bucket)
        if own.clean >= own.clean_steps:  # `own.is_validated`, inlined: runs for every micro-batch
            return True
        larger = (search for other, search in self.searches.items() if other >= bucket)
        return any(search.is_validated and search.size >= own.size for search in larger)

    def search(self, bucket: int) -> SizeSearch:
        """A bucket's search. A new one starts from other buckets' failures, scaled by their elements."""
        if bucket in self.searches:
            return self.searches[bucket]
        known = (s.size * other / bucket for other, s in self.searches.items() if bucket and s.fails)
        size = max(self.smallest, int(min(known, default=self.start)))
        return self._new(min(size, self.start))

    def _new(self, size: int) -> SizeSearch:
        return SizeSearch(size, self.clean_steps, self.grow, self.smallest)

    def follow_schedule(self, attempt: int) -> None:
        """Apply the schedule's entry for this attempt, if any."""
        if attempt in self.schedule:
            self.follow(self.schedule.pop(attempt))

    def record(self, attempt: int) -> bool:
        """Record the sizes of a finished attempt, once the ranks have exchanged them. Returns whether they have
        changed.
        """
        if next(reversed(self.used.values()), None) == self.in_force:
            return False
        self.used[attempt] = self.in_force
        return True

    def follow(self, plan: Plan) -> None:
        """Set one size for all shapes, or a size per bucket, from a schedule.

        A shape keeps its size if the scheduled one has failed in this run.
        """
        self._forget_attempt()
        if isinstance(plan, int):
            self.start, plan = plan, dict.fromkeys(self.searches, plan)
        for bucket, size in plan.items():
            search = self.searches[bucket] = self.search(bucket)
            if search.fails is None or size < search.fails:
                search.try_size(max(search.smallest, size))

    def cut(self, micro: MicroBatch, ranks: Ranks) -> Iterable[MicroBatch]:
        """Cut a fetched micro-batch to its bucket's size, into the same number of pieces on every rank, usually one.

        If all sizes are validated and equal, ranks skip the exchange: a shape first seen on one rank is not split in
        that step, and gets its own size once the ranks have exchanged it.
        """
        samples, elements = micro.samples, elements_in(micro.data)
        self.current_bucket = bucket = bucket_of(samples, elements)
        micro = MicroBatch(*micro[:-1], bucket)  # a quarter of the time of `_replace`
        fewest = self.search(bucket).smallest
        size = size_for(samples, self.search(bucket).size, fewest)
        pieces: list[Sequence[int]] = cut(range(samples), size) if samples > size else [range(samples)]
        if ranks.world > 1 and not self._all_alike():
            count, any_unvalidated = ranks.all_reduce_max(len(pieces), int(not self.is_validated(bucket)))
            if any_unvalidated:  # memory may run out
                ranks.enable_votes(True)
            if count != len(pieces):
                pieces = cut(range(samples), size, count, fewest)
        elif ranks.world > 1:
            pieces = [range(samples)]
        own, longest = self.seen[bucket], len(pieces[0])
        own.attempt = own.attempt.merged(Ran(longest, elements * longest // samples))
        shortest = longest if len(pieces) == 1 else min(len(piece) for piece in pieces if piece)
        own.shortest_of_attempt = min(own.shortest_of_attempt or shortest, shortest)
        self.current_samples, self.current_elements = shortest, 0
        return [micro] if len(pieces) == 1 else pieces_of(micro, pieces, fewest)

    def _all_alike(self) -> bool:
        """Whether every bucket seen so far has the same, validated size."""
        sizes = {search.size for search in self.searches.values()}
        return len(sizes) == 1 and all(map(self.is_validated, self.searches))

    def measured(self, samples: int, resident: int, peak: int, limit: int) -> None:
        """Record the peak of a micro-batch of the current bucket, in bytes, if the micro-batch was full-size.

        resident: bytes in use before it, gradients included; peak: highest value during it.
        """
        if self.search(self.current_bucket).is_full_size(samples):
            own = self.seen[self.current_bucket]
            own.attempt = own.attempt.merged(Ran(measured=Measured(peak - resident, limit - resident)))

    def succeeded(self, ranks: Ranks, news: bool | None = None) -> dict[int, int]:
        """Record a clean step or evaluation batch. Returns `{bucket: size}` of the larger sizes to try next.

        news: whether any rank `has_news`, equal on all ranks. None: this rank's own on a single rank, otherwise False.
        """
        if news is None:
            news = ranks.world == 1 and self.has_news
        for own in self.seen.values():
            own.longest = max(own.longest, own.attempt.elements)
            if own.shortest_of_attempt:
                own.shortest = min(own.shortest or own.shortest_of_attempt, own.shortest_of_attempt)
                own.shortest_of_attempt = 0
            own.clean, own.attempt = own.clean.merged(own.attempt), NOTHING
        if not (self.is_unvalidated or news):
            return {}
        # The largest over ranks: a rank with fewer samples runs smaller micro-batches and would never validate a size.
        largest = merged(ranks.all_gather_object({bucket: own.clean for bucket, own in self.seen.items()}))
        grown = {}
        self.in_force = {bucket: self._size_in_force(bucket, largest) for bucket in sorted({*self.searches, *largest})}
        for bucket, ran in largest.items():
            search = self.searches[bucket] = self.search(bucket)
            if (next_size := search.fitted(ran.samples, ran.measured)) is not None:
                grown[bucket] = next_size
        for own in self.seen.values():
            own.clean = NOTHING
        if largest:
            self.is_unvalidated = not all(map(self.is_validated, largest))
        return grown

    def _size_in_force(self, bucket: int, largest: dict[int, Ran]) -> int:
        """The size by which this step's batches of a bucket were cut. A new shape that was not split (see `cut`) ran at
        more than the size that it gets.
        """
        size = self.search(bucket).size
        return size if bucket in self.searches else max(min(size, self.size), largest[bucket].samples)

    def failed(self, ranks: Ranks, culprit: bool = True, failure: Failure = OUT_OF_MEMORY) -> tuple[int, int] | None:
        """The attempt failed: returns `(size that ran, new size)`, or None if no other size can help.

        culprit: whether it failed on this rank; failure: why.
        """
        attempt = {bucket: own.attempt for bucket, own in self.seen.items()}
        message = (attempt, self.current_bucket, failure) if culprit else (attempt, 0, None)
        by_rank = ranks.all_gather_object(message)
        self._forget_attempt()
        if any(own.demand.is_fixed for _, _, own in by_rank if own and own.demand):
            return None
        largest = merged([ran for ran, _, _ in by_rank])
        largest_bucket = sorted(self.searches, key=lambda bucket: self.searches[bucket].size)[-1:]
        failures = sorted({bucket for _, bucket, _ in by_rank if bucket}) or largest_bucket
        if not failures:  # in the first fetch: no shape is known yet
            old, self.start = self.start, max(self.smallest, self.start // 2)
            return None if old <= self.smallest else (old, self.start)
        # Create all searches before changing any: a new one starts from the failures of the others.
        self.searches |= {bucket: self.search(bucket) for bucket in failures}
        changes: list[tuple[int, int] | None] = []
        for bucket in failures:
            search = self.searches[bucket]
            ran = largest[bucket].samples if bucket in largest else search.size  # nothing ran if the fetch failed
            reasons = [own for _, failed, own in by_rank if own and failed == bucket] or [OUT_OF_MEMORY]
            too_few = max(own.too_few for own in reasons)
            out_of_memory = next((own for own in reasons if not own.too_few), None)
            if too_few:
                search.require_more_than(too_few)
                changes.append((too_few, search.size))
            if out_of_memory:
                changes.append((ran, search.size) if search.failed(ran, out_of_memory.demand) else None)
        return None if None in changes else changes[0]

    def _forget_attempt(self) -> None:
        for own in self.seen.values():
            own.attempt = own.clean = NOTHING
            own.shortest_of_attempt = 0
        self.is_unvalidated = True

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        buckets = {}
        for bucket, search in self.searches.items():
            bounds = [search.size, search.works, search.fails, search.search_has_ended, search.smallest]
            buckets[bucket] = [*bounds, search.last_demand and list(search.last_demand)]
        return {"start": self.start, "buckets": buckets}

    def load_state_dict(self, saved: dict[str, Any], is_lower: bool = False) -> None:
        """Start from saved sizes, between `smallest` and `start`, as unvalidated. Keys may be strings, as in JSON.

        is_lower: also lower `start` (the failure came before any shape was seen).
        """
        if is_lower:
            self.start = min(self.start, saved["start"])
        self.searches |= {int(bucket): self._loaded(*entry) for bucket, entry in saved["buckets"].items()}
        self.is_unvalidated = True

    def _loaded(
        self,
        size: int,
        works: int,
        fails: int | None,
        ended: bool,
        smallest: int = 1,
        demand: Sequence[Any] | None = None,
    ) -> SizeSearch:
        """A search from its record, of which earlier versions have only the first four."""
        if fails is not None and fails > self.start:  # from a larger global batch: unreachable here, so never validated
            fails, ended = None, True
        smallest = max(self.smallest, min(smallest, self.start))
        size = max(smallest, min(size, self.start))
        search = self._new(size)
        search.works, search.fails, search.search_has_ended = min(works, size), fails, ended or not self.grow
        search.smallest = smallest
        search.last_demand = None if demand is None else Demand(*demand)
        return search


def merged(by_rank: Sequence[dict[int, Ran]]) -> dict[int, Ran]:
    """The largest of each bucket that ran on any rank, in ascending order of buckets."""
    found = defaultdict[int, Ran](Ran)
    for own in by_rank:
        for bucket, ran in own.items():
            found[bucket] = found[bucket].merged(ran)
    return {bucket: ran for bucket, ran in sorted(found.items()) if ran.samples}


class Autotuner:
    """cuDNN's autotuner, switched on only while the current sizes are settled.

    With `cudnn.benchmark`, the first convolution of each shape times the algorithms, with workspaces that may not fit,
    and then empties the allocator's cache. A search for the micro-batch size would pay that for every convolution at
    every size it tries, and mistake failed workspaces for a size that does not fit.

    Switching it on later is not enough: torch keeps one plan per shape, chosen by heuristics or timed, and does not
    time a shape that has a plan (`run_single_conv` in aten/src/ATen/native/cudnn/Conv_v8.cpp, read in torch 2.4;
    verified in tests/gpu). But the key of that cache includes `cudnn.deterministic`. Unsettled sizes therefore run with
    deterministic algorithms, and the first step with a settled size finds no plan.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._is_on: bool | None = None  # None: not set yet
        self._settled: set[int] = set()  # ids of sizes

    def follow(self, sizes: MicroBatchSizes) -> bool:
        """Call before work that uses these sizes. True for the first work after the sizes have settled, in which
        algorithms are timed: this may need more memory than was validated. Equal on all ranks that share the sizes.
        """
        if not self.enabled:
            return False
        is_settled = sizes.search_has_ended and not sizes.is_unvalidated
        if is_settled is not self._is_on:
            torch.backends.cudnn.benchmark = self._is_on = is_settled
            torch.backends.cudnn.deterministic = not is_settled
        is_first = is_settled and id(sizes) not in self._settled
        if is_settled:
            self._settled.add(id(sizes))
        else:
            self._settled.discard(id(sizes))
        return is_first
