"""The steps of a stream, which is read sequentially: see `data.stream_reader`."""

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_convert

from trainapp.data.batch import compacted, part_bounds, tensors_in
from trainapp.data.sampler import Share, Source
from trainapp.data.stream_reader import Shard, StreamPosition
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.state.checksum import checksum

log = logging.getLogger(__name__)


class NumberedSamples(Dataset):
    """The samples of a step, by number, for the loader to collate.

    Attributes:
        samples: by number.
        spare: a sample for a rank that only keeps in step with the others.
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


class _ReadStep(NamedTuple):
    """A step that was read."""

    key: tuple[int, ...] = ()  # its epoch, samples consumed before it, and size; empty before the first
    share: Share = Share([], 0, 0, (0, 0), 0)
    per_shard: Sequence[int] = ()  # number of samples from each of this rank's shards
    turn: int = 0  # the next shard after it


class Stream(Source):
    """The training samples of a stream.

    If the source has shards, every rank reads its own, `shards` of them in turn; in each step the ranks exchange how
    many samples they have, until all shards have ended. Otherwise every rank reads the whole stream and keeps its share
    of each step, so a step has the same samples on any number of ranks.

    Args:
        dataset: the stream.
        seed: for the samples' random transforms.
        ranks: of the run.
        shards: per rank.
        in_process: whether this process reads; otherwise one process per shard does.
    """

    samples = 0
    order_name = "stream"
    looks_ahead = False
    moves_at_commit = True  # so that a rolled-back step has nothing to restore in the source

    def __init__(self, dataset: Any, *, seed: int, ranks: Ranks, shards: int = 1, in_process: bool = True):
        self.dataset = dataset
        self.seed = seed
        self.ranks = ranks
        self._in_process = in_process
        self.fetched = NumberedSamples(dataset)
        self.state_owner = self
        self._open_shards(shards)

    def _open_shards(self, per_rank: int) -> None:
        """Open this rank's shards, or the whole stream if it has none. Reads nothing yet."""
        count = self.ranks.world_size * per_rank
        self.is_sharded = count > 1 and callable(getattr(self.dataset, "shard", None))  # Hugging Face's have it
        if self.is_sharded:
            first = self.ranks.rank * per_rank
            indices = range(first, first + per_rank)
        else:
            count = 1
            indices = range(1)
        self._shards = []
        for index in indices:
            shard = Shard(self.dataset, self.seed, index, count, self._in_process)
            self._shards.append(shard)
        self._turn = 0
        self._step = _ReadStep()

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        """Read the step's samples. Collective. Raises UserError for an empty stream."""
        key = (epoch, consumed, size)
        if self._step.key != key:
            self.ranks.enable_votes(True)  # reading may run out of memory on any rank, even with validated sizes
            self._step = self._read(*key)
        return self._step.share

    def commit(self) -> None:
        epoch, consumed = self._step.share.after
        epoch_has_ended = consumed == 0
        self._turn = self._step.turn
        for shard, count in zip(self._shards, self._step.per_shard, strict=True):
            shard.advance(count)
            if epoch_has_ended and shard.epoch < epoch:
                shard.begin_next_epoch()

    def first(self, most: int) -> tuple[NumberedSamples, list[Any]]:
        """Return the next samples that this rank reads, fewer at the end of an epoch, and their numbers. They are kept
        for training.
        """
        epoch = min(shard.epoch for shard in self._shards)
        samples, _, _ = self._peek(epoch, most)
        by_number = dict(enumerate(samples))
        return NumberedSamples(self.dataset, by_number), list(by_number)

    def begin_epoch(self, epoch: int) -> None:
        for shard in self._shards:
            shard.go_to(epoch)
        self._turn = 0
        self._step = _ReadStep()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the trained samples, in each shard that this rank reads."""
        rank = self.ranks.rank if self.is_sharded else 0
        positions = [(shard.epoch, shard.number, tuple(shard.base)) for shard in self._shards]
        return {
            "world": self.ranks.world_size,
            "rank": rank,
            "is_sharded": self.is_sharded,
            "turn": self._turn,
            "shards": positions,
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

            # The saved positions are of the shards as they were cut then.
            shards = len(state["shards"])
            if shards != len(self._shards):
                log.info("reading the stream in %d shards per rank, as before, regardless of data.num_workers", shards)
                self.close()
                self._open_shards(shards)

        for shard, (epoch, number, base) in zip(self._shards, state["shards"], strict=True):
            shard.go_to(epoch, number, StreamPosition(*base))
        self._turn = state["turn"]
        self._step = _ReadStep()

    def _read(self, epoch: int, consumed: int, size: int) -> _ReadStep:
        """Read the step's samples: all of them, to keep this rank's share, or those of this rank's shards."""
        world_size = self.ranks.world_size
        rank = self.ranks.rank
        if self.is_sharded and size < world_size:
            raise UserError(
                f"batch.global_size={size}: each of the {world_size} ranks reads a shard of the stream, and needs at "
                "least one sample of each step"
            )
        samples_to_read = size
        if self.is_sharded:
            samples_to_read = _part_size(size, rank, world_size)
        samples, per_shard, turn = self._peek(epoch, samples_to_read)
        epoch_ends = self._epoch_ends_after(epoch, per_shard)
        spare = samples[0] if samples else None

        # Once, ranks that should have read the same samples compare their first one.
        is_first_read = not self._step.key
        is_compared = is_first_read and world_size > 1 and not self.is_sharded
        digest = None
        if is_compared:
            digest = _digest_of(spare)
        self.ranks.check_peers()  # up to here, memory may have run out on any rank
        if is_compared:
            self._compare_ranks(digest)

        # Number this rank's samples, equal on no two ranks, and count the samples of each rank.
        if self.is_sharded:
            counts, epoch_ends, spare = self._gather_shards(len(samples), epoch_ends, spare)
            numbers = [(consumed + number) * world_size + rank for number in range(len(samples))]
        else:
            counts = [_part_size(len(samples), part, world_size) for part in range(world_size)]
            start, end = part_bounds(len(samples), rank, world_size)
            samples = samples[start:end]
            numbers = list(range(consumed + start, consumed + end))
        total = sum(counts)
        if total == 0:
            raise UserError(
                f"data: the stream has no samples in epoch {epoch}; `iter` must start over each time, except after "
                "`load_state_dict`; to read it once, use train.max_epochs=1"
            )
        self.fetched.samples = dict(zip(numbers, samples, strict=True))
        self.fetched.spare = spare

        # The next step begins after it, or with the first shard in the next epoch.
        after = (epoch, consumed + total)
        if epoch_ends:
            after = (epoch + 1, 0)
            turn = 0
        share = Share(numbers, total, largest=max(counts), after=after, start=sum(counts[:rank]))
        return _ReadStep((epoch, consumed, size), share, per_shard, turn)

    def _peek(self, epoch: int, count: int) -> tuple[list[Any], list[int], int]:
        """Return the next `count` samples of the epoch, or all that are left, from the shards in turn; the number from
        each shard; and the shard whose turn is next.
        """
        if len(self._shards) == 1:  # all at once, and one more, which tells whether the epoch ends
            self._shards[0].available(epoch, count + 1)

        # Take one sample from each shard in turn, until there are enough or all shards have ended in a row.
        samples: list[Any] = []
        per_shard = [0] * len(self._shards)
        turn = self._turn
        ended_in_a_row = 0  # shards that had no more samples
        while len(samples) < count and ended_in_a_row < len(self._shards):
            shard = self._shards[turn]
            number = per_shard[turn]
            if shard.available(epoch, number + 1) > number:
                samples.append(shard.sample(number))
                per_shard[turn] += 1
                ended_in_a_row = 0
            else:
                ended_in_a_row += 1
            turn = (turn + 1) % len(self._shards)
        return samples, per_shard, turn

    def _epoch_ends_after(self, epoch: int, per_shard: Sequence[int]) -> bool:
        """Return whether this rank's shards have no more samples of the epoch after so many from each."""
        for shard, count in zip(self._shards, per_shard, strict=True):
            has_another = shard.available(epoch, count + 1) > count
            if has_another:
                return False
        return True

    def _compare_ranks(self, digest: Any) -> None:
        """Warn if ranks have read different first samples. Collective."""
        digests = self.ranks.all_gather_object(digest)
        if any(other_digest != digest for other_digest in digests):
            log.warning(
                "data: ranks read different samples of the stream. Each must read all of it and keeps its part of "
                "each step: a stream that divides itself by rank loses samples; give it `shard(index, count)` instead"
            )

    def _gather_shards(self, samples: int, epoch_ends: bool, spare: Any) -> tuple[list[int], bool, Any]:
        """Return the number of samples on each rank, whether the epoch ends on all of them, and a spare sample for this
        rank. Collective.
        """
        by_rank = self.ranks.all_gather_object((samples, epoch_ends))
        counts = [rank_samples for rank_samples, _ in by_rank]
        epoch_ends_on_all = all(rank_ends for _, rank_ends in by_rank)

        # A rank without samples keeps in step with the others by computing on another rank's sample.
        some_ranks_lack_samples = sum(counts) > 0 and not all(counts)
        if some_ranks_lack_samples:
            spares = self.ranks.all_gather_object(compacted(spare))
            available_spares = [rank_spare for rank_spare in spares if rank_spare is not None]
            spare = available_spares[0]
        return counts, epoch_ends_on_all, spare


def _part_size(samples: int, part: int, parts: int) -> int:
    """Return the number of samples in a part, see `part_bounds`."""
    start, end = part_bounds(samples, part, parts)
    return end - start


def _digest_of(sample: Any) -> list[Any]:
    """Return checksums of a sample's dense tensors."""
    tensors = tensors_in(default_convert(sample))
    dense_tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    return [checksum(tensor).tolist() for tensor in dense_tensors]
