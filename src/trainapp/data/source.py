"""A run's progress, and how samples become the micro-batches of steps and evaluations, for indexable data and streams.

A `Source` chooses a step's samples: `data.sampler` for indexable data, `data.stream` for streams.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainapp.data.batch import MicroBatch, cut, own_part, ranges, size_for
from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.sampler import Sampler, Share, Source
from trainapp.data.stream import HeldSamples, Stream
from trainapp.data.stream_reader import Shard, is_stream
from trainapp.parallel.ranks import Ranks, SingleRank


class Cadence(NamedTuple):
    """The steps, numbered from 1, that have an update: the multiples of `every`, and the first step, so that its memory
    needs show at once. With an `offset`, the steps that are `offset` more than a multiple, and no others.
    """

    every: int = 1
    offset: int | None = None

    def includes(self, step_number: int) -> bool:
        """Whether this step has the update."""
        if self.offset is None:
            return step_number == 1 or step_number % self.every == 0
        return step_number % self.every == self.offset % self.every

    @property
    def first_step(self) -> int:
        """The first step that has the update."""
        return next(filter(self.includes, itertools.count(1)))


EVERY_STEP = Cadence()


def update_after(update: int, step: int, cadences: Sequence[Cadence]) -> int | None:
    """The index of the update after `update` in the step after `step` finished ones; None if `update` is its last.

    cadences: of each update; the first has every step.
    """
    for number in range(update + 1, len(cadences)):
        if cadences[number].includes(step + 1):
            return number
    return None


@dataclass
class Progress:
    """The run's progress. With the seed, `epoch` and `consumed` are the sampler's whole state."""

    step: int = 0  # applied optimizer steps
    epoch: int = 0
    consumed: int = 0  # samples trained in this epoch
    samples: int = 0  # trained in all epochs together
    skipped: int = 0  # steps skipped, for a value that was not finite or a count of 0
    evaluated_at: int = 0  # the step of the last evaluation, so that a restart does not repeat it
    objective: float | None = None  # value in the last evaluation
    best: float | None = None
    best_step: int | None = None
    stopped: str | None = None  # why the run ended early; None if it did not
    update: int = 0  # index of the current step's coming update; with one optimizer, a step has one
    applied: int = 0  # number of the step's finished updates that changed the parameters

    def finish_update(self, applied: bool, cadences: Sequence[Cadence]) -> bool:
        """Count an update of the step, see `update_after`. Returns whether it was the last, which finishes the step. A
        step counts as skipped if none of its updates was applied.
        """
        self.applied += applied
        later = update_after(self.update, self.step, cadences)
        if later is not None:
            self.update = later
            return False
        self.step += self.applied > 0
        self.skipped += self.applied == 0
        self.update = self.applied = 0
        return True

    def begin_next_epoch(self) -> None:
        """Skip the rest of this epoch."""
        self.epoch, self.consumed = self.epoch + 1, 0


class TrainBatches:
    """The training samples, step by step, as micro-batches on the device.

    global_size: samples per optimizer step over all ranks; may change between steps. workers, split: see `BatchLoader`;
    shards: see `Stream`; drop_last, weights: see `Sampler`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_size: int,
        seed: int,
        device: torch.device,
        ranks: Ranks | None = None,
        workers: int = 0,
        shards: int = 1,
        drop_last: bool = False,
        weights: str | None = None,
        split: Split | None = None,
    ):
        ranks = ranks or SingleRank()
        self.dataset, self.global_size, self.world_size = dataset, global_size, ranks.world_size
        self.source: Source
        if is_stream(dataset):
            self.source = Stream(dataset, seed=seed, ranks=ranks, shards=shards, in_process=workers == 0)
            workers = 0  # the source has its own reader processes; samples are collated here
        else:
            place = {"rank": ranks.rank, "world_size": ranks.world_size}
            self.source = Sampler(dataset, seed=seed, drop_last=drop_last, weights=weights, **place)
        self.samples = self.source.samples  # in the data set; 0 if unknown
        self._drop_last = drop_last
        self._loader = BatchLoader(self.source.fetched, seed, workers, device, split)
        self._open: Iterator[MicroBatch] = iter(())
        self._position: tuple | None = None  # of the open iterator: `_requests`' arguments; None: unknown

    @property
    def split(self) -> Split | None:
        """What cuts a fetched batch; None: its samples are collated again."""
        return self._loader.split

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch: fewer than `samples` if `drop_last` drops some."""
        return self.samples - self.samples % self.global_size if self._drop_last else self.samples

    def steps_left(self, consumed: int = 0) -> int | None:
        """Optimizer steps left in an epoch after its first `consumed` samples, the last possibly with fewer samples;
        None if unknown.
        """
        return self.source.steps_left(consumed, self.global_size)

    def epochs(self, progress: Progress) -> float:
        """Epochs so far, with the fraction of the current one if known."""
        return progress.epoch + (progress.consumed / self.epoch_samples if self.samples else 0.0)

    def share(self, progress: Progress) -> Share:
        """This rank's samples of the coming step. Collective for a stream, whose samples it reads."""
        return self.source.share(progress.epoch, progress.consumed, self.global_size)

    def example(self, samples: int) -> Any:
        """The first `samples` samples as a batch, on the CPU. Those of a stream are kept for training."""
        return self._loader.example(self.source.first(samples)[0], samples)

    def accumulation(self, size: int) -> int:
        """The number of micro-batches in a full step on this rank."""
        return -(-self.global_size // self.world_size // size)

    def micro_batches(
        self,
        progress: Progress,
        sizes: Sequence[int],
        cadences: tuple[Cadence, ...] = (EVERY_STEP,),
        fewest: Sequence[int] = (),
    ) -> Iterator[MicroBatch]:
        """The coming step's micro-batches, on the device; the same number on every rank.

        sizes: micro-batch size per update; fewest: samples that a micro-batch must have, per update, if more than one;
        cadences: see `update_after`. The next update's batches are prefetched. Batches prefetched for another position
        or other sizes are dropped, and their samples fetched again.
        """
        step = progress.step if _differ_by_step(cadences) else 0  # a skipped step does not count
        bounds = tuple(zip(fewest or [1] * len(sizes), sizes, strict=True))
        position = (progress.epoch, progress.consumed, step, progress.update, bounds, cadences)
        if self._position != position:
            self._open = iter(())  # ends the workers' iteration before the next one starts
            self._open = self._loader.batches(self._requests(*position))
        self._position = None  # an aborted step leaves the iterator mid-step
        for micro in self._open:
            yield micro
            if micro.last:
                break
        if self.source.looks_ahead:
            self._position = self._after_update(*position)

    def advance(self, progress: Progress) -> None:
        """Count the step's samples as trained."""
        share = self.share(progress)
        self.source.commit()
        progress.samples += share.total
        progress.epoch, progress.consumed = share.after

    def begin_epoch(self, epoch: int) -> None:
        """Skip the rest of earlier epochs."""
        self.source.begin_epoch(epoch)
        self.drop_fetched()

    def drop_fetched(self) -> None:
        """Free prefetched batches. The next step fetches the same samples again."""
        self._open, self._position = iter(()), None

    def close(self) -> None:
        """End the worker processes."""
        self.drop_fetched()
        self._loader.close()
        self.source.close()

    def _requests(self, *position: Any) -> Iterator[Request]:
        """This rank's micro-batches, as many as on the rank with the most samples, so some may be dummies."""
        while True:
            epoch, consumed, _, update, bounds, _ = position
            fewest, size = bounds[update]
            share = self.source.share(epoch, consumed, self.global_size)
            size = size_for(share.largest, size, fewest)
            count, start = -(-share.largest // size), share.start
            for number, piece in enumerate(cut(share.numbers, size, count, fewest), start=1):
                yield Request(epoch, piece, range(start, start + len(piece)), number == count, fewest)
                start += len(piece)
            if not self.source.looks_ahead:
                return
            position = self._after_update(*position)

    def _after_update(
        self, epoch: int, consumed: int, step: int, update: int, bounds: tuple[Any, ...], cadences: tuple[Cadence, ...]
    ) -> tuple:
        """The position of the next update: on the same samples, or on the next step's."""
        later = update_after(update, step, cadences)
        if later is not None:
            return epoch, consumed, step, later, bounds, cadences
        after = self.source.share(epoch, consumed, self.global_size).after
        return *after, step + _differ_by_step(cadences), 0, bounds, cadences


def _differ_by_step(cadences: Sequence[Cadence]) -> bool:
    """Return whether some steps lack an update."""
    return max(cadence.every for cadence in cadences) > 1


class EvalBatches:
    """The samples of an evaluation set in its order, split evenly over the ranks; each sample is seen once.

    workers, split: see `BatchLoader`. equal: whether every rank has the same number of batches, for models whose
    forward is collective. Attributes: `samples`, number of samples in the data set, 0 if unknown; `is_stream`, whether
    an evaluation can only start at the first sample.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        device: torch.device,
        ranks: Ranks | None = None,
        workers: int = 0,
        split: Split | None = None,
        equal: bool = False,
    ):
        ranks = ranks or SingleRank()
        self.dataset, self.equal, self.is_stream = dataset, equal, is_stream(dataset)
        self.samples = 0 if self.is_stream else len(dataset)
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.start, self.end = own_part(self.samples, ranks.rank, ranks.world_size)
        if self.is_stream:
            self._shard = Shard(dataset, seed, in_process=workers == 0)
            dataset, workers = HeldSamples(dataset), 0
        self._loader = BatchLoader(dataset, seed, workers, device, split)

    def example(self, samples: int) -> Any:
        """The first `samples` samples of an indexable data set as a batch, on the CPU. The same on every rank."""
        return self._loader.example(self.dataset, samples)

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """Batches of this rank's share, after its first `done` samples: a stream is read again up to there.

        ranks: the ranks that evaluate together; `done` may differ between them after one ran out of memory.
        """
        pieces = self._read(done, size) if self.is_stream else self._pieces(done, size, ranks)
        if self.equal and self.is_stream:  # empty ones follow while another rank has samples
            pieces = itertools.chain(pieces, itertools.repeat([]))
            pieces = itertools.takewhile(lambda piece: ranks.all_reduce_max(len(piece))[0] > 0, pieces)
        yield from self._loader.batches(Request(0, numbers, numbers) for numbers in pieces)

    def _pieces(self, done: int, size: int, ranks: Ranks) -> Iterator[Sequence[int]]:
        """The samples of each batch. Lazy: a list would grow with the data set."""
        start = min(self.start + done, self.end)
        own = -(-(self.end - start) // size)
        count = ranks.all_reduce_max(own)[0] if self.equal else own
        yield from (list(range(*piece)) for piece in ranges(start, self.end, size))
        yield from itertools.repeat([], count - own)

    def _read(self, done: int, size: int) -> Iterator[list[int]]:
        """The same for a stream, of which every rank reads all and keeps every `world_size`-th sample."""
        self._shard.go_to(0)
        first, held = 0, self._loader.fetcher.dataset
        while read := self._shard.available(0, size * self.world_size):
            numbers = [
                n
                for n in range(first, first + read)
                if n % self.world_size == self.rank and n // self.world_size >= done
            ]
            held.samples = {number: self._shard.sample(number - first) for number in numbers}
            held.spare = self._shard.sample(0)
            if numbers:
                yield numbers
            self._shard.advance(read)
            first += read
        held.samples = {}

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()
        if self.is_stream:
            self._shard.close()
