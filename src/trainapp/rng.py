"""Random generators: seeding the global ones, and the states of generator objects.

The global generators of a run are never saved. They are seeded at the start of a step, from (`train.seed`, step, rank),
and at the start of an evaluation, from the seed and the name of its data. A retry, a resume, a plan and draws in
callbacks therefore change nothing.
"""

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trainapp.torch_private import outside_dispatch_modes

CPU = torch.device("cpu")
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


def seed_evaluation(device: torch.device, seed: int, name: str) -> None:
    """Seed for an evaluation of the data set of this name: all evaluations of a run draw the same numbers."""
    seed_from(device, seed, zlib.crc32(name.encode()))  # Python's hash of a string differs between processes


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
