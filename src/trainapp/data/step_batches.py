"""Steps over training data: which of a step's samples are this rank's, and how they are cut into micro-batches."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from trainapp.data.loader import BatchLoader, Request
from trainapp.data.micro_batch import MicroBatch, cut, cut_evenly
from trainapp.data.progress import Progress, due_updates

DUMMY = [0]  # the samples of a micro-batch that only keeps its rank in step with the others


class Halves(NamedTuple):
    """A batch, and what `split` and collating again make of its two halves (of one of one sample: that, twice)."""

    batch: Any
    ranges: list[tuple[int, int]]
    split: list[Any]
    collated: list[Any]
    samples: int


class StepBatches:
    """The training samples, step by step: what indexable data and streams have in common.

    global_size: samples per optimizer step over all ranks; it may change between two steps. rank, world: which part of
    each step is this process's. looks_ahead: whether the source may be asked for the samples of later steps. Attribute:
    `sizes_of_updates`, where a step has several updates, the micro-batch of each, and `every`, the steps in which each
    is made, so that their batches, too, are fetched ahead.

    A derived class has the methods below that raise NotImplementedError, and these attributes. dataset: the data.
    samples: in it, 0 where that is unknown. state_owner: what holds the data's state, see `checkpoint.stateful`.
    misfit: after a resume, why the saved position cannot be continued; None if it can.
    """

    dataset: Any
    samples: int
    state_owner: Any
    misfit: str | None = None

    def __init__(self, source: BatchLoader, global_size: int, rank: int, world: int, looks_ahead: bool = True):
        self.global_size, self.rank, self.world = global_size, rank, world
        self._source, self._looks_ahead = source, looks_ahead
        self.sizes_of_updates: tuple[int, ...] = ()
        self.every: tuple[int, ...] = (1,)
        self._open: Iterator[Any] = iter(())
        self._cuts: tuple[tuple, list[Sequence[int]]] = ((), [])
        self._position: tuple | None = None  # of the open iterator: `micro_batches`' next arguments; None: unknown

    @property
    def order_name(self) -> str:
        """What a checkpoint must know of the order besides (seed, epoch, samples consumed)."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps per epoch; None where that is unknown."""
        raise NotImplementedError

    def steps_left(self, consumed: int) -> int | None:
        """Optimizer steps of an epoch after its first `consumed` samples; None where that is unknown."""
        raise NotImplementedError

    def epochs(self, progress: Progress) -> float:
        """The epochs so far, with the fraction of the present one where it is known."""
        raise NotImplementedError

    def step_samples(self, progress: Progress) -> int:
        """Samples of the coming step over all ranks."""
        raise NotImplementedError

    def after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """`(epoch, consumed)` after the step that begins at the given position."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """Leave out what is left of the epochs before this one: nothing to do where a position is (epoch, consumed)."""

    def example(self, samples: int) -> Any:
        """The first `samples` samples of the data as a batch, on the CPU."""
        raise NotImplementedError

    def first(self, most: int) -> Any:
        """A data set that begins with the run's first `most` samples, or with as many as there are. Reading it consumes
        none of them.
        """
        return self.dataset

    def _local(self, epoch: int, consumed: int) -> Sequence[int]:
        """This rank's samples of the step that begins there, as the source knows them."""
        raise NotImplementedError

    def _largest_share(self, epoch: int, consumed: int) -> int:
        """The samples of the rank that has the most of that step."""
        raise NotImplementedError

    def accumulation(self, size: int, parts: int | None = None) -> int:
        """Micro-batches of a full step on this rank."""
        local = -(-self.global_size // self.world)
        return max(-(-local // size), parts or 1)

    def indices(self, progress: Progress) -> Sequence[int]:
        """This rank's samples of the coming step."""
        return self._local(progress.epoch, progress.consumed)

    def micro_batches(self, progress: Progress, size: int, parts: int | None = None) -> Iterator[MicroBatch]:
        """The coming step's micro-batches, on the device; the same number on every rank.

        parts: cut evenly into at least this many; None cuts off `size` at a time. Batches fetched ahead for another
        position or another cut are dropped, and their samples fetched again.
        """
        update, sizes = (progress.update, self.sizes_of_updates) if self.sizes_of_updates else (0, (size,))
        sizes = (*sizes[:update], size, *sizes[update + 1 :])  # those of the others are what they were at last
        step = progress.step if max(self.every) > 1 else 0  # a skipped step does not count
        position = (progress.epoch, progress.consumed, step, update, sizes, parts)
        if self._position != position:
            self._open = iter(())  # ends the workers' iteration before the next one begins
            self._open = self._source.batches(self._requests(*position))
        self._position = None  # an aborted step leaves the iterator mid-step
        pieces = self._cut(progress.epoch, progress.consumed, size, parts)
        for number, piece in enumerate(pieces, start=1):
            batch, indices = next(self._open), piece or DUMMY
            if not self._source.split_works:
                self._source.try_split(batch)
            again = functools.partial(self._source.piece, batch, position[0], indices)
            yield MicroBatch(batch, number == len(pieces), bool(piece), len(indices), again)
        if self._looks_ahead:
            self._position = self._after_update(*position)

    def halves(self, progress: Progress, size: int, parts: int | None = None) -> Halves | None:
        """The coming step's first micro-batch, cut in two in both ways; None where nothing but collating again cuts."""
        if not self._source.has_split:
            return None
        micro = next(self.micro_batches(progress, size, parts))
        position = (progress.epoch, progress.consumed, size, parts)
        indices = self._cut(*position)[0] or DUMMY
        middle = len(indices) // 2
        ranges = [(0, middle), (middle, len(indices))] if middle else [(0, 1)] * 2
        collated = [self._source.collated(progress.epoch, indices, *ends) for ends in ranges]
        return Halves(micro.data, ranges, [micro.piece(*ends) for ends in ranges], collated, micro.samples)

    def advance(self, progress: Progress) -> None:
        """Count the step's samples as trained."""
        progress.samples += self.step_samples(progress)
        progress.epoch, progress.consumed = self.after(progress.epoch, progress.consumed)

    def drop_fetched(self) -> None:
        """Free the batches that were fetched ahead. The next step fetches the same samples again."""
        self._open, self._position = iter(()), None

    def close(self) -> None:
        """End the worker processes."""
        self.drop_fetched()
        self._source.close()

    def _requests(self, *position: Any) -> Iterator[Request]:
        while True:
            epoch, consumed, _, update, sizes, parts = position
            for piece in self._cut(epoch, consumed, sizes[update], parts):
                yield Request(epoch, piece or DUMMY)
            if not self._looks_ahead:
                return
            position = self._after_update(*position)

    def _after_update(
        self, epoch: int, consumed: int, step: int, update: int, sizes: tuple[int, ...], parts: int | None
    ) -> tuple:
        """The position of the next update: of the same samples, or of the next step's."""
        later = [number for number in due_updates(step, self.every) if number > update]
        if later:
            return epoch, consumed, step, later[0], sizes, parts
        return *self.after(epoch, consumed), step + (max(self.every) > 1), 0, sizes, parts

    def _cut(self, *position: Any) -> list[Sequence[int]]:
        """`_pieces`, cached: without workers, the fetcher and the loop ask for the same ones in turn."""
        key = (*position, self.global_size)
        if self._cuts[0] != key:
            self._cuts = (key, self._pieces(*position))
        return self._cuts[1]

    def _pieces(self, epoch: int, consumed: int, size: int, parts: int | None) -> list[Sequence[int]]:
        """This rank's micro-batches: as many as the rank with the most samples has, so that some may be empty."""
        local = self._local(epoch, consumed)
        largest_share = self._largest_share(epoch, consumed)
        count = max(-(-largest_share // size), min(parts or 1, largest_share))
        pieces = cut(local, size) if parts is None else cut_evenly(local, count)
        if len(pieces) < count:
            pieces = cut_evenly(local, count)
        return pieces + [[]] * (count - len(pieces))
