"""Errors at an early and at a late step of each cell. The other phases: tests/oom/test_grid.py, on shipped models."""

import pytest

from . import cells
from .catalogue import ALL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ERRORS = (
    *((phase, step) for phase in ("forward", "backward") for step in (1, 4)),
    *(("evaluate", step) for step in (2, 4)),
    ("commit", 4),
)


@pytest.mark.parametrize(("phase", "step"), ERRORS)
@pytest.mark.parametrize("name", ALL)
def test_an_error_leaves_no_trace(tmp_path, name, phase, step):
    assert cells.after_an_error(name, phase, step, tmp_path) == []
