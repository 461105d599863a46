"""Errors in phases and at steps of each cell where test_zoo.py has none: together, an early and a late one per phase.
Each cell has two of the four, which the next cell has the other way about.

The other phases: tests/oom/test_grid.py, on shipped models.
"""

import pytest

from . import cells
from .catalogue import ALL

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread")]
ERRORS = (("forward", 4), ("backward", 1), ("evaluate", 4), ("commit", 4))


CELLS = [(name, *ERRORS[turn]) for number, name in enumerate(ALL) for turn in ((0, 3), (1, 2))[number % 2]]


@pytest.mark.parametrize(("name", "phase", "step"), CELLS)
def test_an_error_leaves_no_trace(tmp_path, name, phase, step):
    assert cells.after_an_error(name, phase, step, tmp_path) == []
