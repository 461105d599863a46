"""The operations are replaced and the generator is seeded for the tests of draws."""

import pytest
import torch

from trainapp.draws.random_operations import install


@pytest.fixture(autouse=True, scope="module")
def _installed():
    install("cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
