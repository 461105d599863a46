"""Random generators: seeding, and going back to an earlier state."""

import _random
import contextlib
import ctypes
import functools
import random
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import numpy as np
import torch

from trainapp.torch_private import outside_dispatch_modes


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The generators of Python, NumPy, torch's CPU and the device, as primitives and tensors."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    with outside_dispatch_modes():  # a fake tensor would not hold the state
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        }
        return state | device_rng_state(device)


def device_rng_state(device: torch.device) -> dict[str, Any]:
    """Torch's part of `rng_state`."""
    state: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `rng_state`. A state that was taken on another kind of device sets only what both have."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    with outside_dispatch_modes():
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
        elif device.type == "mps" and "mps" in state:
            torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restore all random generators after the block."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


class Generators:
    """The random generators at the start of a step.

    `rng_state` costs 80 microseconds in a training loop, nearly all of it for copying the 624 words of Python's and of
    NumPy's generator one by one, which most runs never touch. Their positions tell whether they have moved: each draw
    moves it, and four more words tell where exactly 624 draws, or a new seed, have led back to the same one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._numpy_seen = self._python_seen = b""
        self._full: dict[str, Any] | None = None

    def take(self) -> None:
        """Record the current state."""
        numpy_position, python_position = _numpy_position(), _python_position()
        # A cached Gaussian may be used up without moving the position.
        if self._full is None or not numpy_position or numpy_position != self._numpy_seen or self._full["numpy"][3]:
            self._full = rng_state(self.device)
        else:
            if not python_position or python_position != self._python_seen or self._full["python"][2] is not None:
                self._full["python"] = random.getstate()
            self._full |= device_rng_state(self.device)
        self._numpy_seen, self._python_seen = numpy_position, python_position

    def restore(self) -> None:
        """Return to the last `take`."""
        assert self._full is not None, "restore() before take()"
        set_rng_state(self._full, self.device)


class HostGenerators:
    """Python's and NumPy's global generators as they were when this was created."""

    _latest: "ClassVar[HostGenerators | None]" = None
    _of_python: tuple[Any, ...]
    _of_numpy: tuple[Any, ...]
    _positions_tell: bool

    def __init__(self) -> None:
        self._positions = (_python_position(), _numpy_position())
        latest = HostGenerators._latest
        if latest is not None and latest._positions_tell and latest._positions == self._positions:
            self._of_python, self._of_numpy, self._positions_tell = latest._of_python, latest._of_numpy, True
            return  # nothing has drawn since: saves 50 microseconds
        self._of_python = random.getstate()
        self._of_numpy = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        # A cached Gaussian may be used up without moving the position.
        self._positions_tell = all(self._positions) and self._of_python[2] is None and not self._of_numpy[3]
        HostGenerators._latest = self

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """That state inside the block; the present one again after it."""
        if self._positions_tell and self._positions == (_python_position(), _numpy_position()):
            try:
                yield
            finally:  # usually nothing has drawn from them: saves 70 microseconds
                if self._positions != (_python_position(), _numpy_position()):
                    random.setstate(self._of_python)
                    np.random.set_state(self._of_numpy)
            return
        python, numpy = random.getstate(), np.random.get_state(legacy=True)
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


_FIVE_WORDS = ctypes.c_char * (5 * 4)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(value: Any) -> bool:
    """Whether it is a generator object of torch, NumPy or Python."""
    return is_generator_class(type(value))


def is_generator_class(kind: type) -> bool:
    """Whether its objects are generators. Not SystemRandom: what the system draws has no state to return to."""
    return issubclass(kind, _GENERATORS) and not issubclass(kind, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():  # as above
            return generator.get_state()
    if isinstance(generator, np.random.Generator):
        state, seeds = generator.bit_generator.state, _seeds_of(generator)
        return state if seeds is None else {**state, _SPAWNED: seeds.n_children_spawned}
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """The inverse of `generator_state`."""
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():
            generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
        seeds = _seeds_of(generator)
        spawned = state.get(_SPAWNED)  # a checkpoint of an earlier version has none
        if seeds is not None and spawned is not None and spawned != seeds.n_children_spawned:
            # In place, by NumPy's own pickling: the number itself cannot be assigned.
            again = np.random.SeedSequence(**{**seeds.state, "n_children_spawned": spawned})
            seeds.__setstate__(again.__reduce__()[2])
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


_SPAWNED = "n_children_spawned"  # beside the bit generator's own state


def _seeds_of(generator: np.random.Generator) -> Any:
    """What `spawn` takes the seeds of the next children from, and counts; None where it was not seeded by one."""
    seeds = getattr(generator.bit_generator, "seed_seq", None)  # from NumPy 1.25 on
    return seeds if type(seeds) is np.random.SeedSequence else None


def _numpy_position() -> bytes:
    """The last four words and the position of NumPy's Mersenne Twister; empty if another generator has replaced it."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy forgets to export it
    if type(generator) is not np.random.MT19937:
        return b""
    return _numpy_words(generator).raw


@functools.lru_cache(maxsize=1)  # also keeps the generator, and so the address, alive
def _numpy_words(generator: Any) -> "ctypes.Array[ctypes.c_char]":
    return _FIVE_WORDS.from_address(generator.ctypes.state_address + 620 * 4)  # uint32 key[624]; int pos


def _python_position() -> bytes:
    """The position and the first four words of Python's; empty where its memory is laid out differently."""
    return _PYTHON_WORDS.raw if _PYTHON_WORDS else b""


def _python_words() -> "ctypes.Array[ctypes.c_char] | None":
    """The beginning of `int index; uint32 state[624]`, where CPython keeps the global generator; or None.

    Source: RandomObject in CPython's Modules/_randommodule.c, compared with what `getstate` says.
    """
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or _random.Random.__basicsize__ < object.__basicsize__ + 625 * 4:
        return None
    address = id(generator) + object.__basicsize__
    index, *words = struct.unpack("=i624I", ctypes.string_at(address, 625 * 4))
    return _FIVE_WORDS.from_address(address) if (*words, index) == random.getstate()[1] else None


_PYTHON_WORDS = _python_words()
