"""Prepares this process as the command line does: CUDA reads its settings when torch is imported."""

import sys

import pytest

from trainapp.launch import launch

IN_TIME = "torch" not in sys.modules
launch.prepare_process(expandable_segments=True, deterministic=True)


@pytest.fixture
def prepared_in_time() -> bool:
    """Whether torch was imported only after that; not where tests of other folders were collected first."""
    return IN_TIME
