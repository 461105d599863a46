"""Which samples a step trains on, and how they are cut into micro-batches.

The sampler's whole state is (seed, epoch, samples consumed): it depends on neither batch size nor workers nor ranks,
so a retry or a resume may change all three and still see the same samples.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.micro_batch import MicroBatch, cut, cut_evenly
from trainapp.data.progress import Progress
from trainapp.parallel.ranks import Ranks

_DUMMY = [0]  # the samples of a micro-batch that only keeps its rank in step with the others


def epoch_order(seed: int, epoch: int, samples: int) -> list[int]:
    """The order of an epoch: a permutation of range(samples), a pure function of its arguments."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator).tolist()


class Halves(NamedTuple):
    """A batch, and what `split` and collating again make of its two halves (of one of one sample: that, twice)."""

    batch: Any
    ranges: list[tuple[int, int]]
    split: list[Any]
    collated: list[Any]
    samples: int


class TrainBatches:
    """The training samples, step by step.

    global_size: samples per optimizer step over all ranks; it may change between two steps. drop_last: no step has
    fewer. rank, world: which part of each step is this process's. split: the task's way to cut a batch, see
    `BatchLoader`. Attributes: `samples` in the data set; `sizes_of_updates`, where a step has several updates, the
    micro-batch of each, so that their batches, too, are fetched ahead.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_size: int,
        seed: int,
        device: torch.device,
        workers: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        ahead: bool = True,
        split: Split | None = None,
    ):
        self.global_size, self.seed, self.rank, self.world = global_size, seed, rank, world
        self.dataset, self.samples = dataset, len(dataset)
        self.drop_last = drop_last
        self.sizes_of_updates: tuple[int, ...] = ()
        self._source = BatchLoader(dataset, seed, workers, device, ahead, split)
        self._order: tuple[int, list[int]] = (-1, [])
        self._open: Iterator[Any] = iter(())
        self._cuts: tuple[tuple, list[Sequence[int]]] = ((), [])
        self._position: tuple | None = None  # of the open iterator: `micro_batches`' next arguments; None: unknown

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch: fewer than `samples` where `drop_last` leaves some out."""
        return self.samples - self.samples % self.global_size if self.drop_last else self.samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last may have fewer samples."""
        return self.steps_left(0)

    def steps_left(self, consumed: int) -> int:
        """Optimizer steps of an epoch after its first `consumed` samples, however large their steps were."""
        left = self.samples - consumed
        return left // self.global_size if self.drop_last else -(-left // self.global_size)

    def accumulation(self, size: int, parts: int | None = None) -> int:
        """Micro-batches of a full step on this rank."""
        local = -(-self.global_size // self.world)
        return max(-(-local // size), parts or 1)

    def step_samples(self, progress: Progress) -> int:
        """Samples of the coming step over all ranks."""
        return min(self.global_size, self.samples - progress.consumed)

    def indices(self, progress: Progress) -> list[int]:
        """This rank's samples of the coming step."""
        return self._local(progress.epoch, progress.consumed)

    def micro_batches(self, progress: Progress, size: int, parts: int | None = None) -> Iterator[MicroBatch]:
        """The coming step's micro-batches, on the device; the same number on every rank.

        parts: cut evenly into at least this many; None cuts off `size` at a time. Batches fetched ahead for another
        position or another cut are dropped, and their samples fetched again.
        """
        update, sizes = (progress.update, self.sizes_of_updates) if self.sizes_of_updates else (0, (size,))
        sizes = (*sizes[:update], size, *sizes[update + 1 :])  # those of the others are what they were at last
        position = (progress.epoch, progress.consumed, update, sizes, parts)
        if self._position != position:
            self._open = iter(())  # ends the workers' iteration before the next one begins
            self._open = self._source.batches(self._requests(*position))
        self._position = None  # an aborted step leaves the iterator mid-step
        pieces = self._cut(progress.epoch, progress.consumed, size, parts)
        for number, piece in enumerate(pieces, start=1):
            batch, indices = next(self._open), piece or _DUMMY
            if not self._source.split_works:
                self._source.try_split(batch)
            again = functools.partial(self._source.piece, batch, position[0], indices)
            yield MicroBatch(batch, number == len(pieces), bool(piece), len(indices), again)
        self._position = self._after_update(*position)

    def halves(self, progress: Progress, size: int, parts: int | None = None) -> Halves | None:
        """The coming step's first micro-batch, cut in two in both ways; None where nothing but collating again cuts."""
        if not self._source.has_split:
            return None
        micro = next(self.micro_batches(progress, size, parts))
        position = (progress.epoch, progress.consumed, size, parts)
        indices = self._cut(*position)[0] or _DUMMY
        middle = len(indices) // 2
        ranges = [(0, middle), (middle, len(indices))] if middle else [(0, 1)] * 2
        collated = [self._source.collated(progress.epoch, indices, *ends) for ends in ranges]
        return Halves(micro.data, ranges, [micro.piece(*ends) for ends in ranges], collated, micro.samples)

    def example(self, samples: int) -> Any:
        """The first `samples` samples of the data set as a batch, on the CPU."""
        return self._source.fetcher[Request(0, list(range(min(samples, self.samples))))]

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

    def after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """`(epoch, consumed)` after the step that begins at the given position."""
        consumed += self.global_size
        needed = self.global_size if self.drop_last else 1  # for another step
        return (epoch, consumed) if self.samples - consumed >= needed else (epoch + 1, 0)

    def _requests(self, *position: Any) -> Iterator[Request]:
        while True:
            epoch, consumed, update, sizes, parts = position
            for piece in self._cut(epoch, consumed, sizes[update], parts):
                yield Request(epoch, piece or _DUMMY)
            position = self._after_update(*position)

    def _after_update(self, epoch: int, consumed: int, update: int, sizes: tuple[int, ...], parts: int | None) -> tuple:
        """The position of the next update: of the same samples, or of the next step's."""
        if update + 1 < len(sizes):
            return epoch, consumed, update + 1, sizes, parts
        return *self.after(epoch, consumed), 0, sizes, parts

    def _cut(self, *position: Any) -> list[Sequence[int]]:
        """`_pieces`, cached: without workers, the fetcher and the loop ask for the same ones in turn."""
        key = (*position, self.global_size)
        if self._cuts[0] != key:
            self._cuts = (key, self._pieces(*position))
        return self._cuts[1]

    def _pieces(self, epoch: int, consumed: int, size: int, parts: int | None) -> list[Sequence[int]]:
        """This rank's micro-batches: as many as the rank with the most samples has, so that some may be empty."""
        local = self._local(epoch, consumed)
        largest_share = -(-min(self.global_size, self.samples - consumed) // self.world)
        count = max(-(-largest_share // size), min(parts or 1, largest_share))
        pieces = cut(local, size) if parts is None else cut_evenly(local, count)
        if len(pieces) < count:
            pieces = cut_evenly(local, count)
        return pieces + [[]] * (count - len(pieces))

    def _local(self, epoch: int, consumed: int) -> list[int]:
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.seed, epoch, self.samples))
        chunk = self._order[1][consumed : consumed + self.global_size]
        return chunk[len(chunk) * self.rank // self.world : len(chunk) * (self.rank + 1) // self.world]


class EvalBatches:
    """The evaluation samples in the data set's order, split evenly over the ranks; each sample is seen once.

    equal: the same number of batches on every rank, for models whose forward is collective. split: as for training.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        device: torch.device,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        equal: bool = False,
        ahead: bool = True,
        split: Split | None = None,
    ):
        self.dataset, self.samples = dataset, len(dataset)
        self.start, self.end = (self.samples * r // world for r in (rank, rank + 1))
        self.equal = equal
        self._source = BatchLoader(dataset, seed, workers, device, ahead, split)

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """Batches of this rank's share, after the first `done` samples of it.

        ranks: those that evaluate together; `done` may differ between them after one of them ran out of memory.
        """
        pieces = cut(list(range(self.start + done, self.end)), size)
        if self.equal:
            pieces += [[]] * (ranks.all_reduce_max(len(pieces))[0] - len(pieces))
        batches = self._source.batches(Request(0, piece or _DUMMY) for piece in pieces)
        for piece, batch in zip(pieces, batches, strict=True):
            indices = piece or _DUMMY
            again = functools.partial(self._source.piece, batch, 0, indices)
            yield MicroBatch(batch, piece is pieces[-1], bool(piece), len(indices), again)

    def close(self) -> None:
        """End the worker processes."""
        self._source.close()
