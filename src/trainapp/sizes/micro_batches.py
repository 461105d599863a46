"""The micro-batch size for each shape of data, equal on all ranks, and how fetched batches are split to it."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainapp.data.batch import MicroBatch, bucket_of, elements_in, size_for, split_micro_batch
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.failures import OUT_OF_MEMORY, AttemptFailure, SizeChange, change_size
from trainapp.sizes.schedule import ScheduledSizes, SizeSchedule
from trainapp.sizes.search import PeakSample, SizeSearch
from trainapp.sizes.splitter import Splitter

LATEST = 4  # micro-batches that must have one shape for kernels to be timed for it


class LargestMicroBatch(NamedTuple):
    """The largest micro-batch of a shape, in samples and in elements; the peak of full-size micro-batches, and whether
    the device's allocator had to free its cache for one.
    """

    samples: int = 0
    elements: int = 0
    peak: PeakSample | None = None
    has_flushed: bool = False

    def merged(self, other: "LargestMicroBatch") -> "LargestMicroBatch":
        """Return the larger of each."""
        # Nearly always the same, in every step: no new tuple.
        if self is NOTHING_YET or self == other:
            return other
        peak = other.peak
        if self.peak:
            peak = self.peak.worst(other.peak)
        return LargestMicroBatch(
            max(self.samples, other.samples),
            max(self.elements, other.elements),
            peak,
            self.has_flushed or other.has_flushed,
        )


NOTHING_YET = LargestMicroBatch()


@dataclass
class ShapeHistory:
    """What this rank has run of one shape."""

    attempt: LargestMicroBatch = NOTHING_YET  # in the current attempt
    clean: LargestMicroBatch = NOTHING_YET  # in clean steps, since the ranks last exchanged it
    most_elements: int = 0  # of a micro-batch in all clean steps
    fewest_samples: int = 0  # of a micro-batch in all clean steps; 0 before the first
    fewest_samples_in_attempt: int = 0

    def finish_attempt(self) -> None:
        """Count the current attempt as clean."""
        # For all clean steps of this process.
        self.most_elements = max(self.most_elements, self.attempt.elements)
        if self.fewest_samples_in_attempt:
            before = self.fewest_samples or self.fewest_samples_in_attempt
            self.fewest_samples = min(before, self.fewest_samples_in_attempt)
        self.fewest_samples_in_attempt = 0

        # For the next exchange.
        self.clean = self.clean.merged(self.attempt)
        self.attempt = NOTHING_YET

    def forget_attempt(self) -> None:
        """Forget the current attempt, and what was not exchanged yet."""
        self.attempt = NOTHING_YET
        self.clean = NOTHING_YET
        self.fewest_samples_in_attempt = 0


class RankReport(NamedTuple):
    """What a rank tells the others about a failed attempt."""

    largest: dict[int, LargestMicroBatch]  # by bucket
    failed_bucket: int  # 0 if it did not fail here, or before any shape was known
    failure: AttemptFailure | None  # None if it did not fail here


class CurrentMicroBatch(NamedTuple):
    """What recovery and reports need to know of the micro-batch that is running."""

    bucket: int = 0  # 0 before the first
    samples: int = 0
    elements: int = 0  # 0 unless its memory is watched


NO_MICRO_BATCH = CurrentMicroBatch()


@dataclass
class MicroBatchSizes:
    """The micro-batch size for each shape of data. Each shape has a search of its own, so that a long batch does not
    shrink all the others.

    `ranks` (in methods): the ranks running the same micro-batches together. Their searches are equal, because only
    exchanged values change a search.

    Five predicates say how far the sizes have come. `is_unvalidated` and `search_has_ended` follow from what ranks have
    exchanged, so they are equal on all; the others are about this rank.

    | predicate | what it says | who asks |
    |---|---|---|
    | `is_validated` | this shape's size has had its clean steps | the other predicates, `split` |
    | `is_unvalidated` | a shape that some rank last ran has not | what guards a step: watch, votes, autotuner |
    | `needs_watching` | the current micro-batch has not, or has more elements than before | its watch |
    | `may_change` | a shape that this rank ran lately has not, or is still searched | the flags exchanged in a step |
    | `search_has_ended` | no shape is searched any longer | the note that says so, the autotuner |

    Args:
        start: the size of the first shape; no later one begins with more.
        first: a smaller size with which every shape begins, to grow from there; None: `start`.
        clean_steps, grow, smallest, reserve: see `SizeSearch`.
    """

    start: int
    clean_steps: int = 3
    grow: bool = True
    smallest: int = 1
    reserve: float = 0.0
    first: int | None = None
    limit: int | None = None  # the most samples of a micro-batch, whatever fits; None: no such limit
    searches: dict[int, SizeSearch] = field(default_factory=dict)  # by bucket
    # What this rank has run, by bucket.
    history: defaultdict[int, ShapeHistory] = field(default_factory=lambda: defaultdict(ShapeHistory))
    current: CurrentMicroBatch = NO_MICRO_BATCH
    # Elements per sample of the latest fetched micro-batches: their shapes, more exact than buckets.
    latest_shapes: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    # Whether any rank last ran an unvalidated size. After a failure or new sizes it is true until the next exchange.
    is_unvalidated: bool = True
    schedule: SizeSchedule = field(default_factory=SizeSchedule)

    @property
    def size(self) -> int:
        """The largest current size: the number of samples fetched at a time."""
        return max((search.size for search in self.searches.values()), default=self._first_size)

    @property
    def _first_size(self) -> int:
        """The size of a shape of which nothing is known."""
        return self.start if self.first is None else min(self.first, self.start)

    @property
    def current_size(self) -> int:
        """The size of the current micro-batch's bucket."""
        if not self.current.bucket:
            return self.size
        return self.stored_or_new_search(self.current.bucket).size

    @property
    def can_shrink(self) -> bool:
        """Whether the current micro-batch may be split further."""
        largest = self.history[self.current.bucket].attempt.samples or self.size
        return largest > self.stored_or_new_search(self.current.bucket).smallest

    @property
    def fewest_samples(self) -> int:
        """The number of samples that every micro-batch must have, whatever its shape."""
        return max((search.smallest for search in self.searches.values()), default=self.smallest)

    @property
    def may_have_too_few(self) -> bool:
        """Whether the current micro-batch may have too few samples for the model: none of its shape has run with so few
        in this process, but larger ones have, or ran out of memory.
        """
        history = self.history[self.current.bucket]
        search = self.stored_or_new_search(self.current.bucket)

        has_run_with_so_few = 0 < history.fewest_samples <= self.current.samples
        if has_run_with_so_few:
            return False

        largest_fitting = max(history.attempt.samples, history.fewest_samples, search.largest_validated)
        largest_tried = max(largest_fitting, search.smallest_excluded or 0)
        return search.smallest <= self.current.samples < largest_tried

    @property
    def tries_larger_size(self) -> bool:
        """Whether the current micro-batch's size has not run yet, and is larger than one that is validated."""
        search = self.stored_or_new_search(self.current.bucket)
        return search.clean == 0 and 0 < search.largest_validated < search.size

    @property
    def search_has_ended(self) -> bool:
        """Whether no larger size will be tried."""
        return all(search.search_has_ended for search in self.searches.values())

    @property
    def shape_is_steady(self) -> bool:
        """Whether the latest micro-batches on this rank had samples of one shape."""
        return len(self.latest_shapes) == LATEST and not self.shapes_vary

    @property
    def shapes_vary(self) -> bool:
        """Whether the latest micro-batches on this rank had samples of several shapes, such as images by their size."""
        return len(set(self.latest_shapes)) > 1

    @property
    def may_change(self) -> bool:
        """Whether this rank has seen a shape whose size is unvalidated or may still grow."""
        for bucket, history in self.history.items():
            ran_recently = history.clean.samples or history.attempt.samples
            if ran_recently and not (self.is_validated(bucket) and self.stored_or_new_search(bucket).search_has_ended):
                return True
        return False

    @property
    def needs_watching(self) -> bool:
        """Whether the current micro-batch has an unvalidated size, or more elements than any clean one like it."""
        history = self.history[self.current.bucket]
        return history.attempt.elements > history.most_elements or not self.is_validated(self.current.bucket)

    def is_validated(self, bucket: int) -> bool:
        """Return whether a bucket's size is validated, by its own steps or by as many samples of a larger bucket."""
        search = self.stored_or_new_search(bucket)
        if search.clean_in_process >= search.clean_steps:  # `is_validated`, inlined: runs for every micro-batch
            return True
        for larger_bucket, larger in self.searches.items():
            if larger_bucket >= bucket and larger.is_validated and larger.size >= search.size:
                return True
        return False

    def stored_or_new_search(self, bucket: int) -> SizeSearch:
        """Return a bucket's search. A new one starts from other buckets' failures, scaled by their elements, and is not
        stored: `searches` has only those that are equal on all ranks.
        """
        if bucket in self.searches:
            return self.searches[bucket]
        size = self._first_size
        if bucket:
            for failed_bucket, failed in self.searches.items():
                if failed.smallest_excluded:
                    size_of_as_many_elements = int(failed.size * failed_bucket / bucket)
                    size = min(size, size_of_as_many_elements)
        size = min(max(size, self.smallest), self.start)
        search = SizeSearch(size, self.clean_steps, self.grow, self.smallest, self.reserve)
        if self.first is not None and self.grow:
            search.most = self.start
            search.search_has_ended = False
        return search

    def _stored_search(self, bucket: int) -> SizeSearch:
        """Return a bucket's search; store a new one. Call on all ranks."""
        return self.searches.setdefault(bucket, self.stored_or_new_search(bucket))

    def apply_schedule(self, batch_number: int) -> None:
        """Apply the schedule's newest entry up to this attempt, once."""
        if not self.schedule.coming:
            return
        sizes = self.schedule.take_due(batch_number)
        if sizes is not None:
            self.set_sizes(sizes)

    def set_sizes(self, sizes: ScheduledSizes) -> None:
        """Set one size for all shapes, or a size per bucket, from a schedule.

        A shape keeps its size if the scheduled one has failed in this run.
        """
        self._forget_attempt()
        if isinstance(sizes, int):
            self.start = sizes
            self.first = None
            sizes = dict.fromkeys(self.searches, sizes)
        for bucket, size in sizes.items():
            search = self._stored_search(bucket)
            if search.smallest_excluded is None or size < search.smallest_excluded:
                search.try_size(max(search.smallest, size))

    def set_limit(self, size: int) -> None:
        """Let no micro-batch of any shape have more samples than this, also in a run that is resumed from here."""
        self._forget_attempt()
        self.limit = size
        self.start = min(self.start, size)
        self.searches = {}

    def begin(self, bucket: int, samples: int) -> None:
        """Note the micro-batch that runs next."""
        self.current = CurrentMicroBatch(bucket, samples)

    def split(self, micro: MicroBatch, ranks: Ranks) -> Iterable[MicroBatch]:
        """Split a fetched micro-batch into micro-batches of its bucket's size: usually one, and as many on every rank.

        If all sizes are validated and equal, ranks skip the exchange: a shape first seen on one rank is not split in
        that step, and gets its own size once the ranks have exchanged it.
        """
        samples = micro.samples
        elements = elements_in(micro.data)
        bucket = bucket_of(samples, elements)
        self.begin(bucket, samples)  # an error in the exchange between ranks is one of this shape
        self.latest_shapes.append(elements / samples)
        micro = MicroBatch(*micro[:-1], bucket)  # a quarter of the time of `_replace`
        parts = self._parts(bucket, samples, ranks)

        # Note what will run: the first is the largest; one without samples only keeps step with other ranks.
        largest = len(parts[0])
        smallest = largest
        if len(parts) > 1:
            smallest = min(len(part) for part in parts if part)
        history = self.history[bucket]
        history.attempt = history.attempt.merged(LargestMicroBatch(largest, elements * largest // samples))
        history.fewest_samples_in_attempt = min(history.fewest_samples_in_attempt or smallest, smallest)

        # Steps and evaluations note each micro-batch as it begins. Of other work, such as the embeddings of cached
        # gradients, the smallest is noted: an error may come from too few samples.
        self.begin(bucket, smallest)
        if len(parts) == 1:
            return [micro]
        return split_micro_batch(micro, parts, self.stored_or_new_search(bucket).smallest)

    def _parts(self, bucket: int, samples: int, ranks: Ranks) -> Sequence[Sequence[int]]:
        """Return the samples of each micro-batch: usually all of them in one, on every rank."""
        search = self.stored_or_new_search(bucket)
        size = size_for(samples, search.size, search.smallest)
        if ranks.world_size == 1:
            if samples <= size:
                return [range(samples)]
            return Splitter(samples, size, search.smallest).parts()
        if self._all_alike():
            return [range(samples)]
        return Splitter(samples, size, search.smallest).parts_on_all_ranks(ranks, self.is_validated(bucket))

    def split_all(self, fetched: Iterable[MicroBatch], ranks: Ranks) -> Iterator[MicroBatch]:
        """Split all fetched micro-batches, see `split`: each by the size when it is reached."""
        for micro in fetched:
            yield from self.split(micro, ranks)

    def _all_alike(self) -> bool:
        """Return whether every bucket seen so far has the same, validated size."""
        sizes = {search.size for search in self.searches.values()}
        return len(sizes) == 1 and all(map(self.is_validated, self.searches))

    def record_peak(self, samples: int, resident: int, peak: int, limit: int) -> None:
        """Record the peak of a micro-batch of the current bucket, in bytes, if the micro-batch was full-size.

        Args:
            samples: of the micro-batch.
            resident: bytes in use before it, gradients included.
            peak: the highest value during it.
            limit: the memory limit.
        """
        if not self.stored_or_new_search(self.current.bucket).is_full_size(samples):
            return
        history = self.history[self.current.bucket]
        history.attempt = history.attempt.merged(LargestMicroBatch(peak=PeakSample(peak - resident, limit - resident)))

    def record_flush(self) -> None:
        """Record that the device's allocator had to free its cache to serve the current micro-batch, without an error,
        see `SizeSearch.record_success`.
        """
        history = self.history[self.current.bucket]
        history.attempt = history.attempt._replace(has_flushed=True)

    def record_success(self, ranks: Ranks, may_change: bool | None = None) -> dict[int, int]:
        """Record a clean step or evaluation batch. Return `{bucket: size}` of the other sizes to try next.

        Args:
            ranks: see the class.
            may_change: whether any rank's `may_change` is true, equal on all ranks. None: this rank's on a single rank,
                otherwise False.
        """
        if may_change is None:
            may_change = ranks.world_size == 1 and self.may_change
        for history in self.history.values():
            history.finish_attempt()

        # The settled case, in nearly every step: the ranks exchange nothing.
        if not (self.is_unvalidated or may_change):
            return {}

        # The largest over ranks: a rank with fewer samples runs smaller micro-batches and would never validate a size.
        clean_here = {bucket: history.clean for bucket, history in self.history.items()}
        largest = merged(ranks.all_gather_object(clean_here))

        # Note the sizes of this step before they change.
        buckets = sorted({*self.searches, *largest})
        self.schedule.in_force = {bucket: self._size_in_force(bucket, largest) for bucket in buckets}

        # Every search advances by what has run of its shape.
        next_sizes = {}
        for bucket, micro_batch in largest.items():
            search = self._stored_search(bucket)
            next_size = search.record_success(micro_batch.samples, micro_batch.peak, micro_batch.has_flushed)
            if next_size is not None:
                next_sizes[bucket] = next_size
        for history in self.history.values():
            history.clean = NOTHING_YET
        if largest:
            self.is_unvalidated = not all(map(self.is_validated, largest))
        return next_sizes

    def _size_in_force(self, bucket: int, largest: Mapping[int, LargestMicroBatch]) -> int:
        """Return the size by which this step's batches of a bucket were split. A new shape that was not (see `split`)
        ran at more than the size that it gets.
        """
        size = self.stored_or_new_search(bucket).size
        if bucket in self.searches:
            return size
        return max(min(size, self.size), largest[bucket].samples)

    def record_failure(
        self, ranks: Ranks, failed_here: bool = True, failure: AttemptFailure = OUT_OF_MEMORY
    ) -> SizeChange | None:
        """Record that the attempt failed, and choose the next sizes. Collective.

        Args:
            ranks: see the class.
            failed_here: whether it failed on this rank.
            failure: why, if so.

        Returns:
            The change of the first shape that failed, or None if no other size can help.
        """
        # Exchange what each rank has run, and why it failed.
        largest_here = {bucket: history.attempt for bucket, history in self.history.items()}
        report = RankReport(largest_here, failed_bucket=0, failure=None)
        if failed_here:
            report = RankReport(largest_here, self.current.bucket, failure)
        reports = ranks.all_gather_object(report)
        self._forget_attempt()

        # Where the request is the same for every size, none can help.
        failures = [report.failure for report in reports if report.failure]
        if any(failure.allocation and failure.allocation.is_size_independent for failure in failures):
            return None

        # Find the shapes that failed.
        failed_buckets = sorted({report.failed_bucket for report in reports if report.failed_bucket})
        if not failed_buckets and self.searches:  # another phase than a micro-batch's: the largest size shrinks
            failed_buckets = sorted(self.searches, key=lambda bucket: self.searches[bucket].size)[-1:]
        if not failed_buckets:  # in the first fetch: no shape is known yet
            return self._halve_start()

        # Create all searches before changing any: a new one starts from the failures of the others.
        for bucket in failed_buckets:
            self._stored_search(bucket)
        changes = [self._change_search(bucket, reports) for bucket in failed_buckets]
        if None in changes:
            return None
        return changes[0]

    def _halve_start(self) -> SizeChange | None:
        before = self.start
        self.start = max(self.smallest, before // 2)
        if before <= self.smallest:
            return None
        return SizeChange(before, self.start)

    def _change_search(self, bucket: int, reports: Sequence[RankReport]) -> SizeChange | None:
        """Choose the next size of a bucket in which some rank has failed; see `record_failure`."""
        search = self.searches[bucket]
        failures = [report.failure for report in reports if report.failure and report.failed_bucket == bucket]
        largest_samples = search.size  # where the fetch failed, before anything ran
        largest = merged([report.largest for report in reports])
        if bucket in largest:
            largest_samples = largest[bucket].samples
        return change_size(search, failures, largest_samples)

    def _forget_attempt(self) -> None:
        for history in self.history.values():
            history.forget_attempt()
        self.is_unvalidated = True

    def state_dict(self) -> dict[str, Any]:
        """Return primitives only."""
        buckets = {bucket: search.state_dict() for bucket, search in self.searches.items()}
        state: dict[str, Any] = {"start": self.start, "buckets": buckets}
        if self.first is not None:
            state["first"] = self.first
        if self.limit is not None:
            state["limit"] = self.limit
        return state

    def load_state_dict(self, saved: dict[str, Any], is_lower: bool = False) -> None:
        """Start from saved sizes, between `smallest` and `start`, as unvalidated. Keys may be strings, as in JSON.

        Args:
            saved: a `state_dict`.
            is_lower: also lower `start` (the failure came before any shape was seen).
        """
        if is_lower:
            self.start = min(self.start, saved["start"])
        self.first = saved.get("first")  # only where the search has begun anew with it
        limit = saved.get("limit")  # not in checkpoints of earlier versions, nor where there is none
        if limit is not None:
            self.limit = limit
            self.start = min(self.start, limit)
        for bucket, search_state in saved["buckets"].items():
            search = SizeSearch(self.start, self.clean_steps, self.grow, self.smallest, self.reserve)
            search.load_state_dict(search_state, largest_size=self.start)
            self.searches[int(bucket)] = search
        self.is_unvalidated = True

    def begin_below(self, saved: dict[str, Any], bytes_less: int) -> bool:
        """Start from what saved sizes say of a lower memory limit, each with its peaks; those without are left out.
        Return whether there are any.

        Args:
            saved: a `state_dict`.
            bytes_less: by how many bytes the limit is lower now.
        """
        self.load_state_dict(saved)
        self.searches = {bucket: search for bucket, search in self.searches.items() if search.begin_below(bytes_less)}
        return bool(self.searches)


def merged(by_rank: Sequence[dict[int, LargestMicroBatch]]) -> dict[int, LargestMicroBatch]:
    """Return the largest of each bucket that ran on any rank, in ascending order of buckets."""
    largest = defaultdict[int, LargestMicroBatch](LargestMicroBatch)
    for largest_on_rank in by_rank:
        for bucket, micro_batch in largest_on_rank.items():
            largest[bucket] = largest[bucket].merged(micro_batch)
    buckets = sorted(bucket for bucket in largest if largest[bucket].samples)
    return {bucket: largest[bucket] for bucket in buckets}
