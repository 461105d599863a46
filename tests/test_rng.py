"""Random generators: seeding, and restoring an earlier state."""

import random

import numpy as np
import pytest
import torch

from trainapp.rng import (
    evaluation_key,
    generator_state,
    is_generator,
    preserved_rng,
    seed_everything,
    seed_from,
    set_generator_state,
)

CPU = torch.device("cpu")


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), [random.random(), random.gauss(0, 1)]


def test_preserved_rng_leaves_no_trace():
    seed_everything(7)
    np.random.randn(), random.gauss(0, 1)  # both keep a second number for later
    with preserved_rng(CPU):
        expected = draws()
        assert draws() != expected
    assert draws() == expected


def test_a_step_is_seeded_by_its_numbers():
    """Also where something was drawn before: in a callback, an evaluation, a failed attempt."""
    drawn = {}
    for numbers in ((0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)):
        np.random.randn(), random.gauss(0, 1)  # both keep a second number for later
        seed_from(CPU, *numbers)
        drawn[numbers] = draws()
        seed_from(CPU, *numbers)
        assert draws() == drawn[numbers]
    assert len(set(map(str, drawn.values()))) == 4


def test_an_evaluation_is_seeded_by_its_name():
    """With the same numbers in every process."""
    seed_from(CPU, *evaluation_key(3, "hard"))
    assert random.random() == 0.6445671638438529


def test_the_system_is_no_generator():
    assert is_generator(random.Random(1))
    assert not is_generator(random.SystemRandom())


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator().manual_seed(1),
        np.random.default_rng(1),
        np.random.Generator(np.random.MT19937(1)),
        np.random.RandomState(1),
        random.Random(1),
    ],
    ids=lambda generator: type(generator).__name__,
)
def test_an_own_generator_comes_back(generator):
    def drawn():
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return [generator.normal() if hasattr(generator, "normal") else generator.gauss(0, 1) for _ in range(3)]

    drawn()
    state = generator_state(generator)
    expected = drawn()
    assert drawn() != expected
    for _ in range(2):
        set_generator_state(generator, state)
        assert drawn() == expected
