"""How training samples become the micro-batches of steps, for indexable data and streams.

A `Source` chooses a step's samples: `data.sampler` for indexable data, `data.stream` for streams.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainapp.data.batch import MicroBatch, cut, size_for
from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.progress import Progress, update_after
from trainapp.data.sampler import Sampler, Share, Source
from trainapp.data.stream import Stream
from trainapp.data.stream_reader import is_stream
from trainapp.parallel.ranks import Ranks, SingleRank


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
        self.dataset, self.global_size, self.world = dataset, global_size, ranks.world
        self.source: Source
        if is_stream(dataset):
            self.source = Stream(dataset, seed=seed, ranks=ranks, shards=shards, in_process=workers == 0)
            workers = 0  # the source has its own reader processes; samples are collated here
        else:
            place = {"rank": ranks.rank, "world": ranks.world}
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
        return -(-self.global_size // self.world // size)

    def micro_batches(
        self, progress: Progress, sizes: Sequence[int], every: tuple[int, ...] = (1,), fewest: Sequence[int] = ()
    ) -> Iterator[MicroBatch]:
        """The coming step's micro-batches, on the device; the same number on every rank.

        sizes: micro-batch size per update; fewest: samples that a micro-batch must have, per update, if more than one;
        every: see `update_after`. The next update's batches are prefetched. Batches prefetched for another position or
        other sizes are dropped, and their samples fetched again.
        """
        step = progress.step if max(every) > 1 else 0  # a skipped step does not count
        bounds = tuple(zip(fewest or [1] * len(sizes), sizes, strict=True))
        position = (progress.epoch, progress.consumed, step, progress.update, bounds, every)
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
        self, epoch: int, consumed: int, step: int, update: int, bounds: tuple[Any, ...], every: tuple[int, ...]
    ) -> tuple:
        """The position of the next update: on the same samples, or on the next step's."""
        later = update_after(update, step, every)
        if later is not None:
            return epoch, consumed, step, later, bounds, every
        after = self.source.share(epoch, consumed, self.global_size).after
        return *after, step + (max(every) > 1), 0, bounds, every
