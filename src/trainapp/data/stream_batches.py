"""Steps over a stream: see `data.stream_reader` for what that is and how its position is kept."""

import logging
from typing import Any, NamedTuple

import torch

from trainapp.data.loader import BatchLoader, Fetcher, Request, Split
from trainapp.data.progress import Progress
from trainapp.data.step_batches import StepBatches
from trainapp.data.stream import has_parts
from trainapp.data.stream_parts import HeldSamples, Part
from trainapp.data.stream_reader import GeneratorsOf, Position, Reader, no_generators
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks

log = logging.getLogger(__name__)


class HeldStep(NamedTuple):
    """A step's samples on this rank. key: position and global size. numbers: one for each sample, unlike on any rank.

    total: over all ranks. largest: of the rank with the most. taken: by part. turn: the part that is next after it.
    """

    key: tuple[int, ...]
    numbers: list[int]
    total: int
    largest: int
    taken: list[int]
    turn: int
    ends_epoch: bool


class StreamBatches(StepBatches):
    """The training samples of a stream, step by step.

    Where the source can be read in parts, every rank reads its own, `shards` of them in turn; and each step exchanges
    how many samples the ranks have, until all parts have ended. Otherwise every rank reads the whole stream and keeps
    its share of each step, so that a step has the same samples on any number of ranks.
    workers: 0 reads in this process; else a process reads each part. split: see `BatchLoader`.
    """

    samples = 0  # unknown

    def __init__(
        self,
        dataset: Any,
        *,
        global_size: int,
        seed: int,
        device: torch.device,
        ranks: Ranks,
        shards: int = 1,
        workers: int = 0,
        split: Split | None = None,
        generators_of: GeneratorsOf = no_generators,
    ):
        self._held = HeldSamples(dataset)
        source = BatchLoader(self._held, seed, 0, device, split=split)
        super().__init__(source, global_size, ranks.rank, ranks.world, looks_ahead=False)
        self.dataset, self.seed, self.ranks = dataset, seed, ranks
        self._in_process, self._generators_of = workers == 0, generators_of
        self.state_owner = StreamPosition(self)
        self._make_parts(shards)

    def _make_parts(self, shards: int) -> None:
        count = self.world * shards
        self.is_parted = count > 1 and has_parts(self.dataset)
        places = [(self.rank * shards + shard, count) for shard in range(shards)] if self.is_parted else [(0, 1)]
        readers = [Reader(self.dataset, self.seed, *place, self._generators_of) for place in places]
        self._parts = [Part(reader, self._in_process) for reader in readers]
        self._turn, self._step = 0, HeldStep((), [], 0, 0, [], 0, False)

    @property
    def order_name(self) -> str:
        """See `StepBatches`."""
        return "stream"

    @property
    def steps_per_epoch(self) -> None:
        """Unknown."""
        return None

    def steps_left(self, consumed: int) -> None:
        """Unknown."""
        return

    def epochs(self, progress: Progress) -> float:
        """Those that have ended."""
        return float(progress.epoch)

    def step_samples(self, progress: Progress) -> int:
        """Samples of the coming step over all ranks: reads them. Collective. Raises UserError for an empty stream."""
        return self._held_step(progress.epoch, progress.consumed).total

    def after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """See `StepBatches`. Of the coming step alone."""
        step = self._held_step(epoch, consumed)
        return (epoch + 1, 0) if step.ends_epoch else (epoch, consumed + step.total)

    def advance(self, progress: Progress) -> None:
        """Count the step's samples as trained: only now does the stream's position move."""
        step = self._held_step(progress.epoch, progress.consumed)
        super().advance(progress)
        for part, taken in zip(self._parts, step.taken, strict=True):
            part.advance(taken)
        self._turn = step.turn
        if step.ends_epoch:
            self._turn = 0
            for part in self._parts:
                if part.epoch < progress.epoch:
                    part.begin_next_epoch()
        self._step = self._step._replace(key=())

    def example(self, samples: int) -> Any:
        """The next `samples` samples as a batch, on the CPU. They stay to be trained."""
        first = self.first(samples)
        return Fetcher(first, self.seed)[Request(0, range(len(first)))]

    def first(self, most: int) -> HeldSamples:
        """The next `most` samples that this rank reads, or those left of the epoch. They stay to be trained.

        Raises what the stream raises.
        """
        epoch = min(part.epoch for part in self._parts)
        samples, first = self._peek(epoch, most)[0], HeldSamples(self.dataset)
        first.hold(list(range(len(samples))), samples, None)
        return first

    def begin_epoch(self, epoch: int) -> None:
        """Leave out what is left of the epochs before this one."""
        for part in self._parts:
            part.go_to(Position(epoch))
        self._turn, self._step = 0, self._step._replace(key=())

    def close(self) -> None:
        """End the processes that read."""
        super().close()
        for part in self._parts:
            part.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the trained samples end, in each part that this rank reads."""
        return {
            "world": self.world,
            "rank": self.rank if self.is_parted else 0,
            "is_parted": self.is_parted,
            "turn": self._turn,
            "parts": [part.position().state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there. `misfit` then says why that cannot be, if it cannot: it depends on who reads which part."""
        shards = len(state["parts"])
        if self.is_parted or state["is_parted"]:
            if state["world"] != self.world:
                self.misfit = (
                    f"every rank of the {state['world']} that read the stream had a position in a part of its own, and "
                    f"now there are {self.world}"
                )
                return
            if shards != len(self._parts):
                log.info("the stream is read in %d parts per rank, as before, whatever data.num_workers says", shards)
                for part in self._parts:
                    part.close()
                self._make_parts(shards)
        for part, position in zip(self._parts, state["parts"], strict=True):
            part.go_to(Position.of(position))
        self._turn, self._step = state["turn"], self._step._replace(key=())

    def _local(self, epoch: int, consumed: int) -> list[int]:
        return self._held_step(epoch, consumed).numbers

    def _largest_share(self, epoch: int, consumed: int) -> int:
        return self._held_step(epoch, consumed).largest

    def _held_step(self, epoch: int, consumed: int) -> HeldStep:
        key = (epoch, consumed, self.global_size)
        if self._step.key != key:
            self._step = self._read_step(key)
        return self._step

    def _read_step(self, key: tuple[int, ...]) -> HeldStep:
        self.ranks.enable_votes(True)  # memory may run out on the rank that reads, however proven the sizes are
        step = self._read_part(key) if self.is_parted else self._read_whole(key)
        if step.total == 0:
            raise UserError(
                f"data: the stream has no samples in epoch {key[0]}; `iter` must begin anew each time, except after "
                "`load_state_dict`; to read it once, use train.max_epochs=1"
            )
        return step

    def _read_whole(self, key: tuple[int, ...]) -> HeldStep:
        """All of the step's samples, of which this rank keeps its share."""
        epoch, consumed, size = key
        samples, taken, turn = self._peek(epoch, size)
        self.ranks.check_peers()
        total = len(samples)
        start, end = (total * rank // self.world for rank in (self.rank, self.rank + 1))
        numbers = list(range(consumed + start, consumed + end))
        self._held.hold(numbers, samples[start:end], samples[0] if samples else None)
        ends = self._parts[0].ends_after(epoch, total)
        return HeldStep(key, numbers, total, -(-total // self.world), taken, turn, ends)

    def _read_part(self, key: tuple[int, ...]) -> HeldStep:
        """This rank's samples, from the parts that it reads. Collective."""
        (epoch, consumed, size), world, rank = key, self.world, self.rank
        if size < world:
            raise UserError(
                f"batch.global_size={size}: each of the {world} ranks reads a part of the stream, and needs at least "
                "one sample of each step"
            )
        samples, taken, turn = self._peek(epoch, size * (rank + 1) // world - size * rank // world)
        self.ranks.check_peers()
        own_end = all(part.ends_after(epoch, count) for part, count in zip(self._parts, taken, strict=True))
        by_rank = self.ranks.all_gather_object((len(samples), own_end))
        counts = [count for count, _ in by_rank]
        spare = samples[0] if samples else None
        if sum(counts) and not all(counts):  # a rank that has none any more only keeps in step with the others
            spare = next(one for one in self.ranks.all_gather_object(spare) if one is not None)
        numbers = [(consumed + number) * world + rank for number in range(len(samples))]
        self._held.hold(numbers, samples, spare)
        return HeldStep(key, numbers, sum(counts), max(counts), taken, turn, all(ended for _, ended in by_rank))

    def _peek(self, epoch: int, count: int) -> tuple[list[Any], list[int], int]:
        """The next `count` samples of the epoch, or as many as there are, from the parts in turn.

        Returns them, how many of each part, and whose turn it is then.
        """
        taken, turn, missing = [0] * len(self._parts), self._turn, 0
        picks: list[tuple[int, int]] = []
        if len(self._parts) == 1:
            taken[0] = self._parts[0].available(epoch, count)
            return self._parts[0].samples(taken[0]), taken, 0
        share = -(-count // len(self._parts))  # read at once: one by one would cost a state each
        while len(picks) < count and missing < len(self._parts):
            if self._parts[turn].available(epoch, max(share, taken[turn] + 1)) > taken[turn]:
                picks.append((turn, taken[turn]))
                taken[turn] += 1
                missing = 0
            else:
                missing += 1
            turn = (turn + 1) % len(self._parts)
        samples = [part.samples(number) for part, number in zip(self._parts, taken, strict=True)]
        return [samples[part][number] for part, number in picks], taken, turn


class StreamPosition:
    """What a checkpoint holds of the data: the stream's position, which moves only when a step is committed.

    So a rolled back step has nothing to restore here, and nothing in the source is looked for state of its own.
    """

    moves_at_commit = True

    def __init__(self, batches: StreamBatches):
        self._batches = batches

    def state_dict(self) -> dict[str, Any]:
        """See `StreamBatches`."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StreamBatches`."""
        self._batches.load_state_dict(state)
