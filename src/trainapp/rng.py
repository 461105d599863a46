"""Random generators: seeding the global ones, the states of generator objects, and draws that belong to samples.

The global generators of a run are never saved. They are seeded at the start of an update, from (`train.seed`, step,
update, rank), and at the start of an evaluation, from the seed and the name of its data. A retry, a resume, a plan and
draws in callbacks therefore change nothing.

What a forward draws from torch's generators belongs to its samples (`SampleDraws`), so that it depends neither on how
the samples are cut into micro-batches nor on the ranks.
"""

import contextlib
import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from trainapp.torch_private import graph_task, outside_dispatch_modes

CPU = torch.device("cpu")
ALL = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64: the step from word to word, and the multipliers of its finaliser
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SAMPLE = 0xC6BC279692B5C323  # the step from sample to sample
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_from(device: torch.device, *numbers: int) -> None:
    """Seed the global generators of Python, NumPy, torch's CPU and this device from all of the numbers."""
    seed = hash(numbers) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would look for every kind of device
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def evaluation_key(seed: int, name: str) -> tuple[int, int]:
    """What to seed from for an evaluation of the data set of this name: all of a run draw the same numbers."""
    return seed, zlib.crc32(name.encode())  # Python's hash of a string differs between processes


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restore the global generators of Python, NumPy, torch's CPU and the device after the block, for example one that
    fetches samples within a step. Takes about 50 microseconds.
    """
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    with outside_dispatch_modes():  # a fake tensor would not hold the state
        own = torch.default_generator.get_state()
        on_device: Any = None
        if device.type == "cuda":
            on_device = torch.cuda.get_rng_state(device)
        elif device.type == "mps":
            on_device = torch.mps.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with outside_dispatch_modes():
            torch.default_generator.set_state(own)
            if device.type == "cuda":
                torch.cuda.set_rng_state(on_device, device)
            elif device.type == "mps":
                torch.mps.set_rng_state(on_device)


def is_generator(value: Any) -> bool:
    """Whether the value is a generator object of torch, NumPy or Python, except SystemRandom, which has no state."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python, without the number of children spawned by a NumPy one."""
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():  # a fake tensor would not hold the state
            return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """The inverse of `generator_state`."""
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():
            generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


# --- draws that belong to samples


def hashed(*numbers: int) -> int:
    """64 well-mixed bits from integers: SplitMix64's finaliser."""
    bits = hash(numbers) & ALL
    bits = (bits ^ bits >> 30) * FACTORS[0] & ALL
    bits = (bits ^ bits >> 27) * FACTORS[1] & ALL
    return bits ^ bits >> 31


PADDING = "padding of "  # begins the topics under which a record notes tasks whose results depend on the padding


def topic_of(kernel: str) -> str:
    """Return the topic under which a draw with unknown samples is noted."""
    return f"draws of {kernel}"


class RandomDraw(NamedTuple):
    """A draw: its kernel, the shape of its first argument, and the integers among the others."""

    kernel: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()


class DrawLayout(NamedTuple):
    """Where a draw holds the samples. axis: their dimension, None where there is none: all micro-batches draw the same.
    rows: in it, per sample. interleaved: these are one batch apart instead of neighbours, as in `cat([view, view])`.
    varies: its shape follows the batch in another way, so it is drawn per micro-batch.
    """

    kernel: str
    dimensions: int
    axis: int | None = None
    rows: int = 1
    interleaved: bool = False
    varies: bool = False

    def fits(self, drawn: RandomDraw, samples: int) -> bool:
        """Whether it can be this draw, of a batch of so many samples."""
        is_same = (drawn.kernel, len(drawn.shape)) == (self.kernel, self.dimensions)
        return is_same and (self.axis is None or drawn.shape[self.axis] == self.rows * samples)


@dataclass
class DrawRecord:
    """What is known of the draws in a run's forwards.

    places: by work (an update, or evaluation), then by the draw's number. Of work that is not listed, the first
    dimension holds the samples if its size fits. depends: what depends on the micro-batch, by topic, in words. draws:
    whether anything was drawn.
    """

    places: dict[str, dict[int, DrawLayout]] = field(default_factory=dict)
    depends: dict[str, str] = field(default_factory=dict)
    draws: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: a resumed run draws as it would have."""
        return vars(self) | {"places": {work: {n: [*own] for n, own in of.items()} for work, of in self.places.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. What this process has noted stays, too."""
        depends = state["depends"] | self.depends
        vars(self).update(state)
        self.depends = depends
        self.places = {work: {n: DrawLayout(*own) for n, own in of.items()} for work, of in state["places"].items()}

    def place(self, work: str, number: int, drawn: RandomDraw, samples: int) -> DrawLayout:
        """Where a draw of this work holds the samples. One that differs from what was learnt takes the axis of another
        that it fits, and is noted: the number of draws then depends on the batch. Negative: `SampleDraws.place`.
        """
        known, (kernel, shape, _) = self.places.get(work), drawn
        if shape == () and not kernel.startswith("randperm"):
            return DrawLayout(kernel, 0)
        if known is None:
            return (
                DrawLayout(kernel, len(shape), 0)
                if shape[:1] == (samples,)
                else DrawLayout(kernel, len(shape), varies=True)
            )
        if number in known and known[number].fits(drawn, samples):
            return known[number]
        if number >= 0:
            order = "the forward draws in another order, or another number of times, than before the first step"
            self.depends.setdefault("number of draws", f"{kernel} of {list(shape)}: {order}, and later draws follow it")
        others = [own._replace(kernel=kernel) for own in known.values() if own.axis is not None]
        return next((own for own in others if own.fits(drawn, samples)), DrawLayout(kernel, len(shape), varies=True))


def places_of(
    whole: dict[int, RandomDraw], part: dict[int, RandomDraw], samples: int, of_part: int
) -> dict[int, DrawLayout]:
    """Where each draw holds the samples, from the same forward of two batches with other numbers of samples."""
    places = {}
    for number, (kernel, shape, sizes) in whole.items():
        place, other = DrawLayout(kernel, len(shape), varies=True), part.get(number)
        if other is not None and (kernel, sizes) == (other.kernel, other.sizes) and len(shape) == len(other.shape):
            changed = [d for d, size in enumerate(shape) if size != other.shape[d]]
            if not changed:
                place = DrawLayout(kernel, len(shape))
            elif len(changed) == 1 and shape[changed[0]] * of_part == other.shape[changed[0]] * samples:
                place = DrawLayout(kernel, len(shape), changed[0], shape[changed[0]] // samples)
        places[number] = place
    return places


@contextlib.contextmanager
def noted_draws(
    draw_record: DrawRecord, device: torch.device, around: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    """Note whether the block, inside of `around`, draws from torch's generators. Takes 20 microseconds."""

    def states() -> list[torch.Tensor]:
        own = [torch.default_generator.get_state()]
        return [*own, torch.cuda.get_rng_state(device)] if device.type == "cuda" else own

    with outside_dispatch_modes():
        before = states()
    with around:
        yield
    with outside_dispatch_modes():
        draw_record.draws |= not all(map(torch.equal, before, states()))


class SampleDraws:
    """Around the forward and backward of a micro-batch: what is drawn depends on (key, number of the draw, position of
    the sample), not on the other samples. Needs the kernels of `draws.install`; without them it has no effect.

    The number is kept as the seed of torch's default generator: the first draw finds the seed of the entry and takes
    `base`; each draw advances it. So whatever saves and restores the generator (activation checkpointing, `fork_rng`)
    also saves and restores the number. On exit the generator is as it was.

    key: equal in a retry and on all ranks. positions: see `MicroBatch`. work: what the draw_record knows the draws by.
    log: where to note each draw, by number. alike: draw the same numbers for each sample.
    """

    active: "ClassVar[SampleDraws | None]" = None  # not thread-local: autograd's own threads recompute

    def __init__(
        self,
        key: tuple[int, ...],
        positions: Sequence[int],
        draw_record: DrawRecord,
        work: str,
        log: dict[int, RandomDraw] | None = None,
        alike: bool = False,
    ):
        self.key, self.positions, self.draw_record, self.work = key, positions, draw_record, work
        self.log, self.alike, self.base = log, alike, 0
        self._state: torch.Tensor | None = None
        self._keys: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __enter__(self) -> "SampleDraws":  # under a microsecond: most forwards draw nothing
        self._outer, SampleDraws.active = SampleDraws.active, self
        self._found, self._owner = torch.default_generator.initial_seed(), threading.get_ident()
        return self

    def __exit__(self, *error: Any) -> None:
        SampleDraws.active = self._outer
        if torch.default_generator.initial_seed() == self._found:
            return
        if self._state is None:  # seeded by the user before the first draw
            torch.default_generator.manual_seed(self._found)
        else:
            torch.default_generator.set_state(self._state)

    @staticmethod
    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        """Inside the block, draws are torch's own."""
        active, SampleDraws.active = SampleDraws.active, None
        try:
            yield
        finally:
            SampleDraws.active = active

    def covers_thread(self) -> bool:
        """Whether this thread computes the micro-batch. Others, such as a user's prefetcher, draw as ever."""
        return threading.get_ident() == self._owner or graph_task() != -1

    def next_seed(self) -> int:
        """The seed of the coming draw; the generator is advanced to the next one's."""
        generator = torch.default_generator
        seed = generator.initial_seed()
        if not self.base:
            self.base, self.draw_record.draws = hashed(*self.key), True
            if seed == self._found:
                self._state = generator.get_state()
        seed = self.base if seed == self._found else seed
        generator.manual_seed(seed + 1 & ALL)
        return seed

    def place(self, seed: int, drawn: RandomDraw) -> DrawLayout:
        """Where the draw with this seed holds the samples. Negative numbers: from a seed that the forward has set."""
        number = seed - self.base & ALL
        number = number if number < 2**32 else -1 - seed
        if self.log is not None:
            self.log[number] = drawn
        return self.draw_record.place(self.work, number, drawn, len(self.positions))

    def note(self, topic: str, text: str) -> None:
        """Note once what depends on the micro-batch nevertheless."""
        self.draw_record.depends.setdefault(topic, text)

    def keys(self, device: torch.device, samples: int) -> torch.Tensor:
        """A number per sample, int64 [samples, 1], which depends on its position."""
        if (device, samples) not in self._keys:
            at = torch.zeros(samples, dtype=torch.int64) if self.alike else torch.tensor(self.positions)
            self._keys[device, samples] = (at.to(device) + 1)[:, None] * signed(SAMPLE)
        return self._keys[device, samples]


def signed(bits: int) -> int:
    """64 bits as int64 reads them."""
    return (bits & ALL) - (2**64 if bits & 2**63 else 0)
