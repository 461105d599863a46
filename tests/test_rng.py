"""Random generators: seeding, and returning to an earlier state."""

import random

import numpy as np
import torch

from trainapp.rng import preserved_rng, rng_state, seed_everything, set_rng_state

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
