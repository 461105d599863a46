"""Reads a part of a stream, from any position in it.

A position in a stream is that of the samples trained, never of those fetched. A source with `state_dict` and
`load_state_dict` continues from its own state; any other is read again from the beginning of its epoch, up to the
position. Generators that the source owns return to where they were. Both ways end with samples that were trained
before, which are compared: a stream that is not the same again is refused. The beginning of an epoch is no exception:
it is reached by the end of the one before, since an order may depend on what was read until then.
"""

import contextlib
import copy
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from trainapp.data.loader import seed_generators
from trainapp.data.sample_fingerprint import fingerprint
from trainapp.data.stream import is_of_datasets, part_of, tells_position
from trainapp.rng import generator_state, preserved_rng, set_generator_state
from trainapp.torch_workers import become_main_process, is_loader_worker

COMPARED = 4  # samples before a position: compared when it is reached again
GeneratorsOf = Callable[[Any], dict[str, Any]]  # the random generators that an object owns, by name
_CPU = torch.device("cpu")


class _End(Enum):
    END = "after the last sample"  # instead of a sample; stays itself in another process


_END = _End.END


class Place(NamedTuple):
    """From where a source can be read: before the sample `number` of an epoch.

    state: what its `state_dict` said there; None: it is the beginning of the epoch. generators: the states of those
    that the source owns; None: those with which it was built.
    """

    epoch: int
    number: int = 0
    state: Any = None
    generators: dict[str, Any] | None = None


class Position(NamedTuple):
    """A place in a part of a stream: after `number` samples of an epoch, and `before` of the epoch before it.

    base: from where the samples up to there are read again, in this epoch or in an earlier one; None: from the
    beginning of this one. last: the fingerprints of the samples that were trained last, the newest at the end.
    """

    epoch: int = 0
    number: int = 0
    before: int = 0
    base: Place | None = None
    last: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return self._asdict() | {"base": self.base and self.base._asdict()}

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Position":
        """The inverse of `state_dict`."""
        return cls(**saved | {"base": saved["base"] and Place(**saved["base"]), "last": tuple(saved["last"])})


class Read(NamedTuple):
    """Read up to `most` samples, at least one, from `position`; None: from where the last ones ended."""

    position: Position | None
    most: int


class Chunk(NamedTuple):
    """Samples of one epoch in a row. base: from where they can be read again.

    ended: whether they are the epoch's last, or it has none. tells: whether the source has states. skipped: how many
    samples were read again to come here. problem: why the position cannot be reached.
    """

    epoch: int
    base: Place
    samples: list[Any]
    ended: bool
    tells: bool
    skipped: int = 0
    problem: str | None = None


def no_generators(source: Any) -> dict[str, Any]:
    """None that are known."""
    return {}


class Reader(Dataset):
    """Reads one part of a stream: `reader[Read(...)]` is a `Chunk`, or in a worker process its pickle.

    The end of an epoch is followed by the next one, which `set_epoch` announces if the source has it. The global
    generators are seeded before each sample from (seed, epoch, part, number), so that random transforms in the source
    give the same sample again. Pickled, because torch sends every tensor of a worker by an open file.
    """

    def __init__(self, source: Any, seed: int, index: int, count: int, generators_of: GeneratorsOf = no_generators):
        self.source, self.seed, self.part = part_of(source, index, count), seed, (index, count)
        self._tells, self._pickles = tells_position(self.source), False
        # Hugging Face's order is one of (seed, epoch), or, without a seed, of more than the generators that it holds.
        self._generators_of = no_generators if is_of_datasets(self.source) else generators_of
        self._built = self._generators()
        self._iterator: Iterator[Any] = iter(())
        self._epoch = self._number = -1
        self._base = Place(0)  # at `_next` or before it
        self._next: Any = _END  # read ahead, so that the last sample of an epoch is known as such

    def __getitem__(self, request: Read) -> Any:
        if is_loader_worker():
            become_main_process()
            self._pickles = True
        with preserved_rng(_CPU):
            problem, skipped = None, 0
            if request.position is not None:
                problem, skipped = self._go_to(request.position)
            elif self._next is _END:
                self._begin_next_epoch()
            chunk = self._chunk(request.most)._replace(skipped=skipped, problem=problem)
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL) if self._pickles else chunk

    def _chunk(self, most: int) -> Chunk:
        if self._tells and not self._number:
            most = 1  # the others of the epoch can then be read again from a state in it
        base = self._base
        samples: list[Any] = []
        while self._next is not _END and len(samples) < most:
            samples.append(self._take(becomes_base=len(samples) + 1 == most))
        return Chunk(self._epoch, base, samples, self._next is _END, self._tells)

    def _take(self, becomes_base: bool = False) -> Any:
        """The next sample. becomes_base: whether the place after it does."""
        sample, self._number = self._next, self._number + 1
        if becomes_base and self._tells:
            self._base = Place(self._epoch, self._number, self._state(), self._generators())
        self._next = self._read()
        return sample

    def _go_to(self, position: Position) -> tuple[str | None, int]:
        """Read up to the position. Returns why that failed, or None, and how many samples were read again.

        Where the state leads to another sample, as that of a source which shuffles with the global generators whenever
        it begins, everything is read again from the beginning of the epoch.
        """
        base = position.base
        if base is None or base.state is None:
            return self._reach(position)
        if self._tells:
            problem, skipped = self._reach(position)
            if problem is None:
                return None, skipped
        self._tells = False
        return self._reach(position._replace(base=base._replace(number=0, state=None)))

    def _reach(self, position: Position) -> tuple[str | None, int]:
        """As `_go_to`, in the way that the position says."""
        self._open(position.base or Place(position.epoch))
        again: deque[Any] = deque(maxlen=COMPARED)
        skipped = 0
        while self._epoch < position.epoch:
            trained = position.before if self._epoch + 1 == position.epoch else None
            while self._next is not _END and self._number != trained:
                again.append(self._take())
                skipped += 1
            if self._next is not _END:
                return f"epoch {self._epoch} continues after the {trained} samples that it had before", skipped
            if trained is not None and self._number < trained:
                return f"epoch {self._epoch} ended after {self._number} samples, and had {trained} before", skipped
            self._begin_next_epoch()
        while self._number < position.number and self._next is not _END:
            again.append(self._take(becomes_base=self._number + 1 == position.number))
            skipped += 1
        return self._difference(position, again), skipped

    def _difference(self, position: Position, again: Sequence[Any]) -> str | None:
        """Whether it is not what was trained that leads to the position. again: the samples read, the newest last."""
        if self._number < position.number:
            ended, trained = self._number, position.number
            return f"it ended after {ended} samples of epoch {position.epoch}, of which {trained} were trained before"
        # What both have: a state may be of a place after the first of those that were saved.
        pairs = zip(reversed(again), reversed(position.last), strict=False)
        back = next((back for back, (own, last) in enumerate(pairs) if fingerprint(own) != last), None)
        if back is None:
            return None
        number, epoch = position.number - back, position.epoch
        if number <= 0:
            number, epoch = position.before + number, epoch - 1
        return (
            f"sample {number} of epoch {epoch} is not the one that was trained before: the data has changed, or the "
            "stream has another order each time (give its shuffling a seed) or one that depends on the epochs before "
            "(make it a function of the epoch, which `set_epoch` receives, or add it to a `state_dict`), or its "
            "`state_dict` does not count a sample before it is yielded"
        )

    def _begin_next_epoch(self) -> None:
        base = self._base
        self._open(Place(self._epoch + 1, generators=self._generators()))
        if self._tells:
            self._base = base  # until the source has a state in this epoch

    def _open(self, place: Place) -> None:
        """Begin at the place."""
        self._epoch, self._number = place.epoch, place.number
        seed_generators(self.seed, self._epoch, *self.part)  # for what the source shuffles when an epoch begins
        generators = self._built if place.generators is None else place.generators
        self._base = place._replace(generators=generators)
        if place.state is None:
            self._return_generators(generators)  # before `set_epoch`, which may seed them
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self._epoch)
        if place.state is not None:
            self.source.load_state_dict(copy.deepcopy(place.state))
            self._return_generators(generators)
        self._iterator = iter(self.source)
        before = self._state() if self._tells and place.state is None else None
        self._next = self._read()
        if before is not None and self._next is not _END and pickle.dumps(before) == pickle.dumps(self._state()):
            self._tells = False  # its state does not move with the samples

    def _read(self) -> Any:
        seed_generators(self.seed, self._epoch, *self.part, self._number)
        return next(self._iterator, _END)

    def _state(self) -> Any:
        return copy.deepcopy(self.source.state_dict())

    def _generators(self) -> dict[str, Any]:
        return {name: copy.deepcopy(generator_state(own)) for name, own in self._generators_of(self.source).items()}

    def _return_generators(self, states: dict[str, Any]) -> None:
        for name, own in self._generators_of(self.source).items() if states else ():
            with contextlib.suppress(Exception):  # another kind of generator now: the samples will differ
                set_generator_state(own, states[name])
