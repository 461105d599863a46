"""Random generators: seeding, and restoring an earlier state."""

import random

import numpy as np
import pytest
import runs
import torch

from trainapp import rng
from trainapp.rng import (
    Generators,
    _python_position,
    generator_state,
    is_generator,
    preserved_rng,
    rng_state,
    seed_everything,
    set_generator_state,
    set_rng_state,
)

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


@pytest.mark.parametrize("draws_before", [False, True])
def test_host_generators_come_back_from_where_they_have_not_moved(draws_before):
    """As where a model gives its blocks a stream of their own, and has put the global one back by the backward."""
    earlier = rng.HostGenerators()
    if draws_before:
        random.random()
    expected = random.getstate(), np.random.get_state(legacy=True)[2]
    with earlier.rewound():
        first = random.random(), np.random.rand()
    assert (random.getstate(), np.random.get_state(legacy=True)[2]) == expected
    with earlier.rewound():
        assert (random.random(), np.random.rand()) == first


@pytest.mark.parametrize("moved", [random.random, np.random.rand, lambda: random.seed(5), lambda: np.random.seed(5)])
def test_host_generators_do_not_take_a_later_state_for_an_earlier_one(moved):
    random.seed(1)
    np.random.seed(1)
    taken, expected = [], []
    for _ in range(3):
        taken += [rng.HostGenerators(), rng.HostGenerators()]
        expected.append((random.getstate(), np.random.get_state(legacy=True)[1].tolist()))
        moved()
        with preserved_rng(torch.device("cpu")):
            for _ in range(700):
                random.random()
                np.random.rand()
    for number, generators in enumerate(taken):
        with generators.rewound():
            assert (random.getstate(), np.random.get_state(legacy=True)[1].tolist()) == expected[number // 2]


def test_the_state_of_pythons_generator_is_found_in_memory():
    """Otherwise every step copies it word by word, 20 microseconds. Holds for every CPython that trainapp supports."""
    before = _python_position()
    assert len(before) == 5 * 4
    random.random()
    assert _python_position() != before


def test_without_pythons_state_in_memory_it_is_copied(monkeypatch):
    monkeypatch.setattr(rng, "_PYTHON_WORDS", None)
    test_generators_return_to_the_last_take("random", "random")


def test_the_system_is_no_generator():
    assert is_generator(random.Random(1))
    assert not is_generator(random.SystemRandom())


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_children_of_a_generator_come_back(bits):
    generator = np.random.Generator(bits(3))
    seeds = generator.bit_generator.seed_seq
    generator.spawn(2)
    state = generator_state(generator)
    expected = [child.random() for child in generator.spawn(3)], generator.random()
    for _ in range(2):
        set_generator_state(generator, state)
        assert ([child.random() for child in generator.spawn(3)], generator.random()) == expected
    assert generator.bit_generator.seed_seq is seeds  # whoever else spawns from it sees the same count
    again = np.random.Generator(bits(3))
    set_generator_state(again, state)
    assert ([child.random() for child in again.spawn(3)], again.random()) == expected


def test_a_state_without_the_number_of_children_is_taken():
    generator = np.random.default_rng(3)
    state = generator.bit_generator.state  # as checkpoints of earlier versions have it
    expected = generator.random()
    generator.spawn(2)
    set_generator_state(generator, state)
    assert generator.random() == expected
    assert generator.bit_generator.seed_seq.n_children_spawned == 2


def test_a_generator_without_a_seed_sequence():
    generator = np.random.Generator(np.random.RandomState(1)._bit_generator)
    state = generator_state(generator)
    expected = generator.random()
    set_generator_state(generator, state)
    assert generator.random() == expected
