"""Evaluation of a stream."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from trainapp.data.loader import BatchLoader, Request, Split
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.sample_fingerprint import fingerprint
from trainapp.data.step_batches import DUMMY
from trainapp.data.stream_parts import READ_AT_ONCE, HeldSamples, Part
from trainapp.data.stream_reader import COMPARED, GeneratorsOf, Position, Reader, no_generators
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks

log = logging.getLogger(__name__)


class EvalStream:
    """A stream to evaluate, from beginning to end. Every rank reads all of it and keeps every `world`-th sample.

    Generators that the stream owns begin as they were built, so that every evaluation has the same samples.

    equal, split, workers: as for `EvalBatches`; at most one process reads it.
    """

    samples = 0  # unknown
    state_owner = None  # each evaluation reads it from the beginning

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
        generators_of: GeneratorsOf = no_generators,
    ):
        self.dataset, self.equal, self.rank, self.world = dataset, equal, rank, world
        self._held = HeldSamples(dataset)
        self._source = BatchLoader(self._held, seed, 0, device, split=split)
        self._part = Part(Reader(dataset, seed, 0, 1, generators_of), in_process=workers == 0)
        self._done = 0  # samples of this rank that are finished
        self._has_ended = False  # the evaluation before this one
        self._first: list[str] | None = []  # fingerprints of its first samples; None: they have been others

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """As `EvalBatches.from_sample`. What was read and is not finished stays for a retry."""
        if done < self._done or (self._has_ended and not done):
            self._part.go_to(Position())
            self._done = 0
        elif done > self._done:  # a batch was finished in part, or all of it by another process
            self._skip(done - self._done)
        self._has_ended = False
        spare = None
        while True:
            read = self._part.available(0, size * self.world)
            samples, first = self._part.samples(read), self._part.number
            if not first:
                self._compare(samples[:COMPARED])
            own = list(range(first + (self.rank - first) % self.world, first + read, self.world))
            spare = samples[-1] if samples else spare
            is_over = not own
            if self.equal:
                is_over = ranks.all_reduce_max(len(own))[0] == 0
            if is_over:
                self._has_ended = True
                return
            self._held.hold(own, [samples[number - first] for number in own], spare)
            numbers = own or DUMMY
            batch = next(self._source.batches(iter([Request(0, numbers)])))
            again = functools.partial(self._source.piece, batch, 0, numbers)
            ends = self._part.ends_after(0, read)
            yield MicroBatch(batch, ends, bool(own), len(numbers), again)
            self._finish(len(own), read)

    def _compare(self, samples: list[Any]) -> None:
        """Whether this evaluation begins as the one before it."""
        if self._first is None:
            return
        first = [fingerprint(sample) for sample in samples]
        if any(own != before for own, before in zip(first, self._first, strict=False)):
            log.warning(
                "the evaluation stream %s begins with other samples than before: its evaluations cannot be compared, "
                "and a resumed run's are not those of a run that was never stopped; let its order and its random "
                "transforms depend on nothing that an evaluation changes (give its shuffling a seed, and draw from the "
                "global generators, which are seeded for each sample)",
                type(self.dataset).__name__,
            )
            self._first = None
        elif len(first) > len(self._first):
            self._first = first

    def _skip(self, samples: int) -> None:
        """Read and finish so many of this rank's samples, some at a time. Raises UserError where there are fewer."""
        while samples:
            some = min(samples, READ_AT_ONCE)
            last = (self._done + some - 1) * self.world + self.rank  # the number of this rank's last one
            if self._part.available(0, last + 1 - self._part.number) <= last - self._part.number:
                raise UserError("data: the stream has fewer samples than were read of it before")
            self._finish(some)
            samples -= some

    def _finish(self, samples: int, read: int | None = None) -> None:
        """Count so many of this rank's samples as finished. read: of all ranks'; None: those before its next one."""
        self._done += samples
        if read is None:  # the last ones may be fewer than one of each rank
            read = self._part.available(0, self._done * self.world - self._part.number)
        self._part.advance(read)

    def close(self) -> None:
        """End the process that reads."""
        self._source.close()
        self._part.close()
