"""The fixture `cell`; the pool of its processes is in tests/conftest.py."""

from pathlib import Path

import pytest

from .cell import Cell
from .pool import Pool


@pytest.fixture
def cell(pool: Pool, tmp_path: Path) -> Cell:
    return Cell(pool, tmp_path)
