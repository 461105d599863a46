"""How the samples of an evaluation set become micro-batches, for indexable data and streams."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainapp.data.batch import MicroBatch, part_bounds, ranges
from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.stream import HeldSamples
from trainapp.data.stream_reader import Shard, is_stream
from trainapp.parallel.ranks import Ranks, SingleRank


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
        self.rank, self.world = ranks.rank, ranks.world
        self.start, self.end = part_bounds(self.samples, ranks.rank, ranks.world)
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
        """The same for a stream, of which every rank reads all and keeps every `world`-th sample."""
        self._shard.go_to(0)
        first, held = 0, self._loader.fetcher.dataset
        while read := self._shard.available(0, size * self.world):
            numbers = [n for n in range(first, first + read) if n % self.world == self.rank and n // self.world >= done]
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
