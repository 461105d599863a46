"""Which samples a step trains on, and how they are cut into micro-batches.

The sampler's whole state is (seed, epoch, samples consumed): it depends on neither batch size nor workers nor ranks,
so a retry or a resume may change all three and still see the same samples. Streams are in `data.stream_batches`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainapp.data.loader import BatchLoader, Request, Split, fetched_apart
from trainapp.data.micro_batch import MicroBatch, ranges
from trainapp.data.order import Order, order_of
from trainapp.data.progress import Progress
from trainapp.data.step_batches import DUMMY, StepBatches
from trainapp.parallel.ranks import Ranks


class TrainBatches(StepBatches):
    """The training samples of an indexable data set, step by step.

    order: which sample stands where in an epoch; None: see `order_of`. For the others see `StepBatches` and
    `BatchLoader`. Attribute: `samples` in the data set.
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
        order: Order | None = None,
    ):
        super().__init__(BatchLoader(dataset, seed, workers, device, ahead, split), global_size, rank, world)
        self.dataset, self.seed, self.drop_last = dataset, seed, drop_last
        self.state_owner, self.samples = dataset, len(dataset)
        self.order: Order = order or order_of(seed, self.samples)

    @property
    def order_name(self) -> str:
        """What a checkpoint must know of the order besides (seed, epoch, samples consumed)."""
        return self.order.name

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

    def epochs(self, progress: Progress) -> float:
        """The epochs so far, with the fraction of the present one."""
        return progress.epoch + progress.consumed / self.epoch_samples

    def step_samples(self, progress: Progress) -> int:
        """Samples of the coming step over all ranks."""
        return self._samples_of(progress.consumed)

    def example(self, samples: int) -> Any:
        """The first `samples` samples of the data set as a batch, on the CPU."""
        return self._source.fetcher[Request(0, list(range(min(samples, self.samples))))]

    def after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """`(epoch, consumed)` after the step that begins at the given position."""
        consumed += self.global_size
        needed = self.global_size if self.drop_last else 1  # for another step
        return (epoch, consumed) if self.samples - consumed >= needed else (epoch + 1, 0)

    def _samples_of(self, consumed: int) -> int:
        return max(0, min(self.global_size, self.samples - consumed))

    def _largest_share(self, epoch: int, consumed: int) -> int:
        return -(-self._samples_of(consumed) // self.world)

    def _local(self, epoch: int, consumed: int) -> Sequence[int]:
        samples = self._samples_of(consumed)
        start, end = (consumed + samples * rank // self.world for rank in (self.rank, self.rank + 1))
        return self.order.indices(epoch, start, end)


class EvalBatches:
    """The evaluation samples in the data set's order, split evenly over the ranks; each sample is seen once.

    equal: the same number of batches on every rank, for models whose forward is collective. split: as for training.
    Attribute: `samples` in the data set.
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
        self.dataset, self.state_owner, self.samples = dataset, dataset, len(dataset)
        self.start, self.end = (self.samples * r // world for r in (rank, rank + 1))
        self.equal = equal
        self._source = BatchLoader(dataset, seed, workers, device, ahead, split)
        self._seed, self._workers = seed, workers

    def spread(self, count: int) -> list[Any]:
        """Some samples of this rank's share, from first to last, twice. Each is a batch of its own, on the CPU."""
        last = self.end - self.start - 1
        numbers = sorted(
            {self.start + last * number // max(1, count - 1) for number in range(count if last >= 0 else 0)}
        )
        return fetched_apart(self.dataset, self._seed, [Request(0, [number]) for number in numbers * 2], self._workers)

    def example(self, samples: int) -> Any:
        """The first `samples` samples of the data set as a batch, on the CPU. The same on every rank."""
        request = Request(0, list(range(min(samples, self.samples))))
        return fetched_apart(self.dataset, self._seed, [request], self._workers)[0]

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """Batches of this rank's share, after the first `done` samples of it.

        ranks: those that evaluate together; `done` may differ between them after one of them ran out of memory.
        """
        start = min(self.start + done, self.end)
        own = -(-(self.end - start) // size)
        count = ranks.all_reduce_max(own)[0] if self.equal else own
        dummies = itertools.repeat(DUMMY, count - own)
        # Cut as they are fetched: a list of them would grow with the data set.
        pieces = itertools.chain((list(range(*piece)) for piece in ranges(start, self.end, size)), dummies)
        asked, used = itertools.tee(pieces)  # holds as many as are fetched ahead
        batches = self._source.batches(Request(0, indices) for indices in asked)
        number = 0  # not by `enumerate`: under it, `zip` would keep the first batch to the end
        for indices, batch in zip(used, batches, strict=True):
            number += 1  # noqa: SIM113
            again = functools.partial(self._source.piece, batch, 0, indices)
            yield MicroBatch(batch, number == count, number <= own, len(indices), again)

    def close(self) -> None:
        """End the worker processes."""
        self._source.close()
