"""Seeds and states of random generators.

The global generators of a run are never saved. They are seeded at the start of an update, from (`train.seed`, step,
update, rank), and at the start of an evaluation, from the seed and the name of its data. A retry, a resume, a plan and
draws in callbacks therefore change nothing.

What a forward draws from torch's generators belongs to its samples instead: see `draws`.
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


# --- the global generators


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
    """Return what to seed from for an evaluation of the data set of this name: all of a run draw the same numbers."""
    return seed, zlib.crc32(name.encode())  # Python's hash of a string differs between processes


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restore the global generators of Python, NumPy, torch's CPU and the device after the block, for example one that
    fetches samples within a step. Takes about 50 microseconds.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=True)
    with outside_dispatch_modes():  # a fake tensor would not hold the state
        cpu_state = torch.default_generator.get_state()
        device_state = _device_state(device)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        with outside_dispatch_modes():
            torch.default_generator.set_state(cpu_state)
            _set_device_state(device, device_state)


def _device_state(device: torch.device) -> Any:
    """Return the state of the device's generator; None of the CPU, which has the default one."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return None


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


# --- generator objects


def is_generator(value: Any) -> bool:
    """Return whether the value is a generator object of torch, NumPy or Python, except SystemRandom, which has no
    state.
    """
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of torch, NumPy or Python, without the number of children spawned by a NumPy
    one.
    """
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():  # a fake tensor would not hold the state
            return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `generator_state` has returned."""
    if isinstance(generator, torch.Generator):
        with outside_dispatch_modes():
            generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
