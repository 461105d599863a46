"""The private part of torch's elastic launcher that the program uses: what decides on a restart.

As `torch_private.py`: used on torch 2.11 and 2.13, and tested by `tests/test_torch_private.py`.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any


class Restart(Enum):
    """Whether failed workers are restarted."""

    REFUSED = "refused"
    COUNTED = "counted"  # if fewer than `max_restarts` were counted so far
    FREE = "free"  # whatever `max_restarts` says


@contextlib.contextmanager
def asked_before_restarts(decide: Callable[[list[int]], Restart]) -> Iterator[None]:
    """Inside the block, the launcher asks `decide` before it restarts failed workers; on its own it only counts them.

    decide: called with the ranks of this node's workers, once for each time that one of them failed.
    """
    api: Any = importlib.import_module("torch.distributed.launcher.api")  # late: one process does not need it
    standard = api.LocalElasticAgent

    class Agent(standard):  # type: ignore[misc, valid-type]
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                decision = decide([worker.global_rank for worker in worker_group.workers])
                if decision is Restart.REFUSED:
                    self._remaining_restarts = 0
                elif decision is Restart.FREE:
                    # raise both: their difference is the workers' TORCHELASTIC_RESTART_COUNT
                    worker_group.spec.max_restarts += 1
                    self._remaining_restarts += 1
            return result

    api.LocalElasticAgent = Agent
    try:
        yield
    finally:
        api.LocalElasticAgent = standard
