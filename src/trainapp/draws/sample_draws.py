"""`SampleDraws`: within it, what is drawn from torch's generators belongs to the samples of a micro-batch."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from trainapp.draws.layout import DrawLayout, RandomDraw
from trainapp.draws.record import DrawRecord
from trainapp.draws.splitmix64 import WORD_MASK, hashed, signed
from trainapp.torch_private import graph_task

SAMPLE_STEP = 0xC6BC279692B5C323  # what the position of a sample adds to its key, per sample
MAX_DRAWS = 2**32  # per forward and backward: a seed further from the first one was set by the forward


class SampleDraws:
    """A context manager for the forward and backward of a micro-batch: what they draw depends on (key, number of the
    draw, position of the sample), not on the other samples. Has no effect before `random_operations.install`.

    The number of the draw is kept in the seed of torch's default generator. The first draw finds the seed of the entry
    and takes `first_seed`, a hash of the key; each draw leaves the next seed behind. So whatever saves and restores the
    generator (activation checkpointing, `fork_rng`) also saves and restores the number. On exit the generator is as on
    entry.

    Args:
        key: equal in a retry and on all ranks.
        positions: of the samples in the global batch, see `MicroBatch`.
        draw_record: knows the layouts of the draws; notes what depends on the micro-batch.
        work: by which the record knows the draws.
        log: where to put each draw, by number.
        alike: draw the same numbers for each sample.
        running_module: names the module that is running, for `modules`.

    Attributes:
        modules: the names of modules that have drawn, by the number of the draw.
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
        running_module: Callable[[], str] | None = None,
    ):
        self.key = key
        self.positions = positions
        self.draw_record = draw_record
        self.work = work
        self.log = log
        self.alike = alike
        self.running_module = running_module
        self.modules: dict[int, str] = {}
        self.first_seed = 0  # until the first draw
        self._entry_state: torch.Tensor | None = None  # of the generator, from the first draw on
        self._sample_keys: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __enter__(self) -> "SampleDraws":
        # Takes less than a microsecond: most forwards draw nothing. The generator's state is copied by the first draw.
        self._outer = SampleDraws.active
        SampleDraws.active = self
        self._entry_seed = torch.default_generator.initial_seed()
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *error: Any) -> None:
        SampleDraws.active = self._outer
        if torch.default_generator.initial_seed() == self._entry_seed:
            return
        if self._entry_state is None:  # seeded by the user before the first draw
            torch.default_generator.manual_seed(self._entry_seed)
        else:
            torch.default_generator.set_state(self._entry_state)

    @staticmethod
    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        """Inside the block, draws are torch's own."""
        active = SampleDraws.active
        SampleDraws.active = None
        try:
            yield
        finally:
            SampleDraws.active = active

    def covers_thread(self) -> bool:
        """Return whether this thread computes the micro-batch. Others, such as a user's prefetcher, draw as ever."""
        return threading.get_ident() == self._thread or graph_task() != -1

    def next_seed(self) -> int:
        """Return the seed of the coming draw, and advance the generator to the next one's."""
        generator = torch.default_generator
        seed = generator.initial_seed()
        is_unseeded = seed == self._entry_seed

        # The first draw of this micro-batch.
        if not self.first_seed:
            self.first_seed = hashed(*self.key)
            self.draw_record.draws = True
            if is_unseeded:
                self._entry_state = generator.get_state()

        # Without a draw before it, or after the generator was restored to its state then, numbers begin at 0.
        if is_unseeded:
            seed = self.first_seed
        generator.manual_seed(seed + 1 & WORD_MASK)
        return seed

    def layout_of(self, seed: int, draw: RandomDraw) -> DrawLayout:
        """Return the layout of the draw with this seed, which is logged by its number."""
        number = seed - self.first_seed & WORD_MASK
        if number >= MAX_DRAWS:
            number = -1 - seed  # from a seed that the forward has set: such draws have negative numbers
        if self.log is not None:
            self.log[number] = draw
        if self.running_module is not None:
            self.modules[number] = self.running_module()
        return self.draw_record.layout_of(self.work, number, draw, len(self.positions))

    def sample_keys(self, device: torch.device, samples: int) -> torch.Tensor:
        """Return a number per sample that depends on its position, int64 [samples, 1].

        Args:
            device: of the result.
            samples: the number of samples or, if all draw the same, of any rows.
        """
        if (device, samples) not in self._sample_keys:
            keys = (self._positions_on(device, samples) + 1) * signed(SAMPLE_STEP)
            self._sample_keys[device, samples] = keys[:, None]
        return self._sample_keys[device, samples]

    def keys_on_host(self, samples: int, seed: int) -> list[int]:
        """Return the elements of `sample_keys(...) + seed`, without waiting for a device."""
        positions = [0] * samples if self.alike else self.positions
        return [signed((int(position) + 1) * SAMPLE_STEP + seed) for position in positions]

    def _positions_on(self, device: torch.device, samples: int) -> torch.Tensor:
        """Return the positions of the samples, int64 [samples]. Does not wait for the device."""
        positions = self.positions
        if self.alike:
            return torch.zeros(samples, dtype=torch.int64, device=device)
        if isinstance(positions, range):  # in training
            return torch.arange(positions.start, positions.stop, positions.step, device=device)
        on_host = torch.tensor(positions, pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)
