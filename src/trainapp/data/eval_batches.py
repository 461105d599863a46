"""How the samples of an evaluation set become micro-batches, for indexable data and streams."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainapp.data.batch import MicroBatch, part_bounds, ranges
from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.stream import NumberedSamples
from trainapp.data.stream_reader import Shard, is_stream
from trainapp.parallel.ranks import Ranks, SingleRank


class EvalBatches:
    """The samples of an evaluation set in its order, split evenly over the ranks; each sample is seen once.

    Args:
        dataset: the evaluation set.
        seed: of the samples' random transforms.
        device: of the batches.
        ranks: None: one.
        workers: see `BatchLoader`.
        split: see `BatchLoader`.
        equal: whether every rank has the same number of batches, for models whose forward is collective.

    Attributes:
        samples: the number of samples in the data set, 0 if unknown.
        is_stream: whether an evaluation can only start at the first sample.
        is_shared: whether the ranks share the set; otherwise each reads all of it, see `read_all`.
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
        self.dataset = dataset
        self.equal = equal
        self.is_stream = is_stream(dataset)
        self.is_shared = True
        self.samples = 0 if self.is_stream else len(dataset)
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.start, self.end = part_bounds(self.samples, ranks.rank, ranks.world_size)
        if self.is_stream:
            self._shard = Shard(dataset, seed, in_process=workers == 0)
            self._batch_samples = NumberedSamples(dataset)
            self._loader = BatchLoader(self._batch_samples, seed, 0, device, split)
        else:
            self._loader = BatchLoader(dataset, seed, workers, device, split)

    def example(self, samples: int) -> Any:
        """Return the first `samples` samples of an indexable data set as a batch, on the CPU. The same on every
        rank.
        """
        return self._loader.example(self.dataset, samples)

    def read_all(self) -> None:
        """Read the whole set on this rank from now on, as a single rank would. Call on every rank."""
        self.is_shared = False
        self.rank = 0
        self.world_size = 1
        self.start = 0
        self.end = self.samples

    def from_sample(self, evaluated: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """Yield the batches of this rank's share, without its first samples: a stream is read again up to there.

        Args:
            evaluated: the number of this rank's samples that were evaluated before, which are left out.
            size: samples per batch.
            ranks: those that evaluate together; `evaluated` may differ between them after one ran out of memory.
        """
        if not self.is_stream:
            pieces = self._pieces(evaluated, size, ranks)
        elif self.equal:
            pieces = _until_all_ranks_end(self._read_pieces(evaluated, size), ranks)
        else:
            pieces = self._read_pieces(evaluated, size)
        yield from self._loader.batches(Request(0, numbers, numbers) for numbers in pieces)

    def _pieces(self, evaluated: int, size: int, ranks: Ranks) -> Iterator[Sequence[int]]:
        """Yield the numbers of each batch's samples. Lazy: a list would grow with the data set."""
        start = min(self.start + evaluated, self.end)
        batches_here = -(-(self.end - start) // size)  # rounded up
        most_batches = batches_here
        if self.equal:
            most_batches = ranks.all_reduce_max(batches_here)[0]

        for batch_start, batch_end in ranges(start, self.end, size):
            yield list(range(batch_start, batch_end))
        for _ in range(most_batches - batches_here):  # empty ones, to keep in step with the other ranks
            yield []

    def _read_pieces(self, evaluated: int, size: int) -> Iterator[Sequence[int]]:
        """Yield the numbers of each batch's samples in a stream, of which every rank reads all and keeps every
        `world_size`-th sample.
        """
        self._shard.go_to(0)
        start = 0  # the number of the first sample that is read for this batch
        while True:
            samples_read = self._shard.available(0, size * self.world_size)
            if samples_read == 0:
                break

            # The ranks take the samples in turn. Those that this rank has evaluated before are left out.
            numbers = []
            for number in range(start, start + samples_read):
                number_on_rank, rank = divmod(number, self.world_size)
                if rank == self.rank and number_on_rank >= evaluated:
                    numbers.append(number)

            # Hold the samples while the loader collates them, and release all that were read afterwards.
            self._batch_samples.samples = {number: self._shard.sample(number - start) for number in numbers}
            self._batch_samples.spare = self._shard.sample(0)
            if numbers:
                yield numbers
            self._shard.advance(samples_read)
            start += samples_read
        self._batch_samples.samples = {}

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()
        if self.is_stream:
            self._shard.close()


def _until_all_ranks_end(pieces: Iterator[Sequence[int]], ranks: Ranks) -> Iterator[Sequence[int]]:
    """Yield a rank's pieces, then empty ones while another rank has samples. Collective."""
    while True:
        piece = next(pieces, [])
        most_samples = ranks.all_reduce_max(len(piece))[0]
        if most_samples == 0:
            return
        yield piece
