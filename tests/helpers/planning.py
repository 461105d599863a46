"""Plans made one after the other in a process that stays, for tests with many: starting one takes longer than a plan.

`trainapp.planning.process.ask`, which starts a process per plan, has its own tests: tests/planning/test_process.py.
"""

import functools
import multiprocessing
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from trainapp.config.schema import Config
from trainapp.planning import planner


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Ends with this process."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def traced_peak(config: Config, size: int) -> int:
    """Bytes of training with micro-batches of `size`, traced in this process."""
    return planner.estimator_of(config, "traced").peak(config, size, 0).total


def ask(config: Config, only: Collection[str] = ()) -> dict[str, Any]:
    """As `trainapp.planning.process.ask`, for this machine: what is pretended of other devices adds up in a process."""
    assert config.plan.device is None
    return _process().submit(planner.answer, config, only, None, "traced").result()
