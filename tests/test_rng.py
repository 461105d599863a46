"""Random generators: seeding, and restoring an earlier state."""

import random

import numpy as np
import pytest
import runs
import torch

from trainapp import rng
from trainapp.rng import Generators, _python_position, preserved_rng, rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), [random.random(), random.gauss(0, 1)]


def test_generators_come_back():
    seed_everything(7)
    np.random.randn(), random.gauss(0, 1)  # both keep a second number for later
    state = rng_state(CPU)
    expected = draws()
    assert draws() != expected
    set_rng_state(state, CPU)
    assert draws() == expected


def test_generators_survive_a_file(tmp_path):
    state = rng_state(CPU)
    expected = draws()
    torch.save(state, tmp_path / "rng.pt")
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert draws() == expected


def test_preserved_rng_leaves_no_trace():
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with preserved_rng(CPU):
        draws()
    assert draws() == expected


def test_seed_0_is_a_seed():
    seed_everything(0)
    first = draws()
    seed_everything(0)
    assert draws() == first
    seed_everything(1)
    assert draws() != first


@pytest.mark.parametrize("first", ["random", "gauss", "seed", "nothing"])
@pytest.mark.parametrize(
    "second", ["random", "gauss", "seed", "numpy", "numpy seed", "all words", "all numpy's words", "nothing"]
)
def test_generators_return_to_the_last_take(first, second):
    """Whatever is drawn between two takes and after the last one."""
    draw = {
        "random": random.random,
        "gauss": lambda: random.gauss(0, 1),
        "seed": lambda: random.seed(3),
        "numpy": np.random.randn,
        "numpy seed": lambda: np.random.seed(3),
        "all words": lambda: [random.getrandbits(32) for _ in range(624)],  # back to the same position
        "all numpy's words": lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32),
        "nothing": lambda: None,
    }
    seed_everything(5)
    generators = Generators(CPU)
    generators.take()
    draw[first]()
    generators.take()
    state = rng_state(CPU)
    draw[second]()
    draw[first]()
    generators.restore()
    assert runs.differences(rng_state(CPU), state) == []


def test_the_state_of_pythons_generator_is_found_in_memory():
    """Otherwise every step copies it word by word, 20 microseconds. Holds for every CPython that trainapp supports."""
    before = _python_position()
    assert len(before) == 5 * 4
    random.random()
    assert _python_position() != before


def test_without_pythons_state_in_memory_it_is_copied(monkeypatch):
    monkeypatch.setattr(rng, "_PYTHON_WORDS", None)
    test_generators_return_to_the_last_take("random", "random")
