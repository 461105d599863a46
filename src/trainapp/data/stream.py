"""The steps of a stream, which is read sequentially: see `data.stream_reader`."""

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_convert

from trainapp.data.batch import compacted, own_part, tensors_in
from trainapp.data.sampler import Share, Source
from trainapp.data.stream_reader import Shard, StreamPosition
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.snapshot import checksum

log = logging.getLogger(__name__)


class HeldSamples(Dataset):
    """The samples of a step, by number, for the loader to collate. spare: a sample for a rank that only keeps in step
    with the others.
    """

    moves_at_commit = True  # with the stream's position: the source is not searched for state

    def __init__(self, source: Any, samples: dict[int, Any] | None = None):
        self.samples: dict[int, Any] = samples or {}
        self.spare: Any = None
        for name in ("collate", "split"):
            if callable(getattr(source, name, None)):
                setattr(self, name, getattr(source, name))

    def __getitem__(self, number: int) -> Any:
        sample = self.samples.get(number, self.spare)
        if not hasattr(self, "collate"):
            return sample  # torch's collating copies it
        # A user's collate may take samples apart, or pass them on to a task that writes to its batch: a retry needs
        # them unchanged.
        return copy.deepcopy(compacted(sample))

    def __len__(self) -> int:
        return len(self.samples)


def _digest_of(sample: Any) -> list[Any]:
    found = tensors_in(default_convert(sample))
    return [checksum(tensor).tolist() for tensor in found if tensor.layout is torch.strided and not tensor.is_nested]


class _Step(NamedTuple):
    """A step that was read. taken: number of samples from each shard. turn: the next shard after it."""

    key: tuple[int, ...] = ()
    share: Share = Share([], 0, 0, (0, 0), 0)
    taken: Sequence[int] = ()
    turn: int = 0


class Stream(Source):
    """The training samples of a stream.

    If the source has shards, every rank reads its own, `shards` of them in turn; in each step the ranks exchange how
    many samples they have, until all shards have ended. Otherwise every rank reads the whole stream and keeps its share
    of each step, so a step has the same samples on any number of ranks. in_process: whether this process reads;
    otherwise one process per shard does.
    """

    samples, order_name, looks_ahead = 0, "stream", False
    moves_at_commit = True  # so that a rolled-back step has nothing to restore in the source

    def __init__(self, dataset: Any, *, seed: int, ranks: Ranks, shards: int = 1, in_process: bool = True):
        self.dataset, self.seed, self.ranks, self._in_process = dataset, seed, ranks, in_process
        self.fetched, self.state_owner = HeldSamples(dataset), self
        self._open(shards)

    def _open(self, shards: int) -> None:
        count, rank = self.ranks.world_size * shards, self.ranks.rank
        self.is_sharded = count > 1 and callable(getattr(self.dataset, "shard", None))  # Hugging Face's have it
        places = [(rank * shards + shard, count) for shard in range(shards)] if self.is_sharded else [(0, 1)]
        self._shards = [Shard(self.dataset, self.seed, *place, self._in_process) for place in places]
        self._turn, self._step = 0, _Step()

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        """Read the step's samples. Collective. Raises UserError for an empty stream."""
        key = (epoch, consumed, size)
        if self._step.key != key:
            self.ranks.enable_votes(True)  # reading may run out of memory on any rank, even with validated sizes
            self._step = self._read(*key)
        return self._step.share

    def commit(self) -> None:
        (epoch, consumed), self._turn = self._step.share.after, self._step.turn
        for shard, taken in zip(self._shards, self._step.taken, strict=True):
            shard.advance(taken)
            if consumed == 0 and shard.epoch < epoch:
                shard.begin_next_epoch()

    def first(self, most: int) -> tuple[HeldSamples, list[Any]]:
        """The next samples that this rank reads, fewer at the end of an epoch. They are kept for training."""
        epoch = min(shard.epoch for shard in self._shards)
        held = dict(enumerate(self._peek(epoch, most)[0]))
        return HeldSamples(self.dataset, held), list(held)

    def begin_epoch(self, epoch: int) -> None:
        for shard in self._shards:
            shard.go_to(epoch)
        self._turn, self._step = 0, _Step()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the trained samples, in each shard that this rank reads."""
        return {
            "world": self.ranks.world_size,
            "rank": self.ranks.rank if self.is_sharded else 0,
            "is_sharded": self.is_sharded,
            "turn": self._turn,
            "shards": [(shard.epoch, shard.number, tuple(shard.base)) for shard in self._shards],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the saved position. `misfit` says why that is impossible, if it is: shards belong to ranks."""
        if self.is_sharded or state["is_sharded"]:
            if state["world"] != self.ranks.world_size:
                self.misfit = (
                    f"each of the {state['world']} ranks that read the stream had a position in its own shard, but now "
                    f"there are {self.ranks.world_size} ranks"
                )
                return
            shards = len(state["shards"])
            if shards != len(self._shards):
                log.info("reading the stream in %d shards per rank, as before, regardless of data.num_workers", shards)
                self.close()
                self._open(shards)
        for shard, (epoch, number, base) in zip(self._shards, state["shards"], strict=True):
            shard.go_to(epoch, number, StreamPosition(*base))
        self._turn, self._step = state["turn"], _Step()

    def _read(self, epoch: int, consumed: int, size: int) -> _Step:
        """Read the step's samples: all of them, to keep this rank's share, or those of this rank's shards."""
        world_size, rank = self.ranks.world_size, self.ranks.rank
        if self.is_sharded and size < world_size:
            raise UserError(
                f"batch.global_size={size}: each of the {world_size} ranks reads a shard of the stream, and needs at "
                "least one sample of each step"
            )
        start, end = own_part(size, rank, world_size)
        samples, taken, turn = self._peek(epoch, end - start if self.is_sharded else size)
        ends = all(shard.available(epoch, count + 1) <= count for shard, count in zip(self._shards, taken, strict=True))
        spare = samples[0] if samples else None
        is_compared = world_size > 1 and not self.is_sharded and not self._step.key  # the first read
        digest = _digest_of(spare) if is_compared else None
        self.ranks.check_peers()
        if is_compared and any(other != digest for other in self.ranks.all_gather_object(digest)):
            log.warning(
                "data: ranks read different samples of the stream. Each must read all of it and keeps its part of "
                "each step: a stream that divides itself by rank loses samples; give it `shard(index, count)` instead"
            )
        if self.is_sharded:
            by_rank = self.ranks.all_gather_object((len(samples), ends))
            counts, ends = [count for count, _ in by_rank], all(ended for _, ended in by_rank)
            if sum(counts) and not all(counts):  # a rank without samples only keeps in step with the others
                spares = self.ranks.all_gather_object(compacted(spare))
                spare = next(sample for sample in spares if sample is not None)
            numbers = [(consumed + number) * world_size + rank for number in range(len(samples))]
        else:
            counts = [
                end - start for start, end in (own_part(len(samples), one, world_size) for one in range(world_size))
            ]
            start, end = own_part(len(samples), rank, world_size)
            samples, numbers = samples[start:end], list(range(consumed + start, consumed + end))
        total = sum(counts)
        if total == 0:
            raise UserError(
                f"data: the stream has no samples in epoch {epoch}; `iter` must start over each time, except after "
                "`load_state_dict`; to read it once, use train.max_epochs=1"
            )
        self.fetched.samples, self.fetched.spare = dict(zip(numbers, samples, strict=True)), spare
        after = (epoch + 1, 0) if ends else (epoch, consumed + total)
        share = Share(numbers, total, max(counts), after, sum(counts[:rank]))
        return _Step((epoch, consumed, size), share, taken, 0 if ends else turn)

    def _peek(self, epoch: int, count: int) -> tuple[list[Any], list[int], int]:
        """The next `count` samples of the epoch, or all that are left, from the shards in turn.

        Returns the samples, the number from each shard, and the shard whose turn is next.
        """
        if len(self._shards) == 1:  # all at once, and one more, which tells whether the epoch ends
            self._shards[0].available(epoch, count + 1)
        samples: list[Any] = []
        taken, turn, missing = [0] * len(self._shards), self._turn, 0
        while len(samples) < count and missing < len(self._shards):
            shard, number = self._shards[turn], taken[turn]
            if shard.available(epoch, number + 1) > number:
                samples.append(shard.sample(number))
                taken[turn], missing = number + 1, 0
            else:
                missing += 1
            turn = (turn + 1) % len(self._shards)
        return samples, taken, turn
