"""How training samples become the micro-batches of steps, for indexable data and streams.

A `Source` chooses a step's samples: `data.sampler` for indexable data, `data.stream` for streams.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainapp.data.batch import MicroBatch, size_for, split_indices
from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.progress import EVERY_STEP, Cadence, Progress, update_after
from trainapp.data.sampler import Sampler, Share, Source
from trainapp.data.stream import Stream
from trainapp.data.stream_reader import is_stream
from trainapp.parallel.ranks import Ranks, SingleRank


class _UpdatePosition(NamedTuple):
    """An update, and how its samples are split into micro-batches."""

    epoch: int
    consumed: int  # samples of the epoch before the update's step
    step: int  # finished steps; 0 if every step has all updates
    update: int  # its index in the step
    sizes: tuple[int, ...]  # micro-batch size per update
    fewest: tuple[int, ...]  # samples that a micro-batch must have, per update
    cadences: tuple[Cadence, ...]  # see `update_after`


class TrainBatches:
    """The training samples, step by step, as micro-batches on the device.

    Args:
        dataset: the training samples.
        global_size: samples per optimizer step over all ranks; may change between steps.
        seed: of the order of the samples and their augmentation.
        device: of the batches.
        ranks: None: one.
        workers: see `BatchLoader`.
        shards: see `Stream`.
        drop_last: see `Sampler`.
        weights: see `Sampler`.
        split: see `BatchLoader`.
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
        self.dataset = dataset
        self.global_size = global_size
        self.world_size = ranks.world_size
        self.source: Source
        if is_stream(dataset):
            self.source = Stream(dataset, seed=seed, ranks=ranks, shards=shards, in_process=workers == 0)
            workers = 0  # the source has its own reader processes; samples are collated here
        else:
            self.source = Sampler(
                dataset, seed=seed, rank=ranks.rank, world_size=ranks.world_size, drop_last=drop_last, weights=weights
            )
        self.samples = self.source.samples  # in the data set; 0 if unknown
        self._drop_last = drop_last
        self._loader = BatchLoader(self.source.fetched, seed, workers, device, split)
        self._open: Iterator[MicroBatch] = iter(())
        self._position: _UpdatePosition | None = None  # of the open iterator; None: unknown

    @property
    def split(self) -> Split | None:
        """What splits a fetched batch; None: its samples are collated again."""
        return self._loader.split

    @property
    def has_users_collate(self) -> bool:
        """Whether the data set collates its samples by a method of its own: nothing is known of such batches."""
        return self._loader.fetcher.collate is not None

    @property
    def epoch_samples(self) -> int:
        """Samples in an epoch: fewer than `samples` if `drop_last` drops some."""
        dropped = self.samples % self.global_size if self._drop_last else 0
        return self.samples - dropped

    def steps_left(self, consumed: int = 0) -> int | None:
        """Return the optimizer steps left in an epoch after its first `consumed` samples, the last possibly with fewer
        samples; None if unknown.
        """
        return self.source.steps_left(consumed, self.global_size)

    def epochs(self, progress: Progress) -> float:
        """Return the epochs so far, with the fraction of the current one if known."""
        if self.samples == 0:
            return float(progress.epoch)
        return progress.epoch + progress.consumed / self.epoch_samples

    def share(self, progress: Progress) -> Share:
        """Return this rank's samples of the coming step. Collective for a stream, whose samples it reads."""
        return self.source.share(progress.epoch, progress.consumed, self.global_size)

    def example(self, samples: int) -> Any:
        """Return the first `samples` samples as a batch, on the CPU. Those of a stream are kept for training."""
        dataset, _ = self.source.first(samples)
        return self._loader.example(dataset, samples)

    def accumulation(self, size: int) -> int:
        """Return the number of micro-batches of this size in a full step on this rank."""
        return -(-self.global_size // self.world_size // size)

    def micro_batches(
        self,
        progress: Progress,
        sizes: Sequence[int],
        cadences: tuple[Cadence, ...] = (EVERY_STEP,),
        fewest: Sequence[int] = (),
    ) -> Iterator[MicroBatch]:
        """Yield the coming update's micro-batches, on the device; the same number on every rank.

        The next update's batches are prefetched. Batches prefetched for another position or other sizes are dropped,
        and their samples fetched again.

        Args:
            progress: says which update is the coming one.
            sizes: micro-batch size per update.
            cadences: see `update_after`.
            fewest: samples that a micro-batch must have, per update, if more than one.
        """
        # The number of the step is left out where all steps are alike: after a skipped step, which does not count, what
        # was prefetched would belong to another position.
        step = progress.step if _differ_by_step(cadences) else 0
        fewest = tuple(fewest) or (1,) * len(sizes)
        position = _UpdatePosition(
            progress.epoch, progress.consumed, step, progress.update, tuple(sizes), fewest, cadences
        )

        # Continue with what was prefetched if it begins here; otherwise start over.
        if self._position != position:
            self._open = iter(())  # ends the workers' iteration before the next one starts
            self._open = self._loader.batches(self._requests(position))

        self._position = None  # an aborted step leaves the iterator mid-step
        for micro in self._open:
            yield micro
            if micro.last:
                break
        if self.source.looks_ahead:
            self._position = self._position_after(position)

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
        self._open = iter(())
        self._position = None

    def close(self) -> None:
        """End the worker processes."""
        self.drop_fetched()
        self._loader.close()
        self.source.close()

    def _requests(self, position: _UpdatePosition) -> Iterator[Request]:
        """Yield the requests of this update and, if the source looks ahead, of all later ones."""
        while True:
            yield from self._update_requests(position)
            if not self.source.looks_ahead:
                return
            position = self._position_after(position)

    def _update_requests(self, position: _UpdatePosition) -> Iterator[Request]:
        """Yield this rank's micro-batches, as many as on the rank with the most samples, so some may be dummies."""
        share = self.source.share(position.epoch, position.consumed, self.global_size)

        # Every rank makes as many micro-batches as the largest share needs.
        fewest = position.fewest[position.update]
        size = size_for(share.largest, position.sizes[position.update], fewest)
        count = -(-share.largest // size)  # rounded up
        parts = split_indices(share.numbers, size, count, fewest)

        start = share.start  # the first position of the micro-batch in the global batch
        for number, indices in enumerate(parts, start=1):
            end = start + len(indices)
            yield Request(position.epoch, indices, range(start, end), last=number == count, fewest=fewest)
            start = end

    def _position_after(self, position: _UpdatePosition) -> _UpdatePosition:
        """Return the position of the next update: on the same samples, or on the next step's."""
        next_update = update_after(position.update, position.step, position.cadences)
        if next_update is not None:
            return position._replace(update=next_update)

        share = self.source.share(position.epoch, position.consumed, self.global_size)
        epoch, consumed = share.after
        step = position.step + 1 if _differ_by_step(position.cadences) else 0
        return position._replace(epoch=epoch, consumed=consumed, step=step, update=0)


def _differ_by_step(cadences: Sequence[Cadence]) -> bool:
    """Return whether some steps lack an update."""
    return max(cadence.every for cadence in cadences) > 1
