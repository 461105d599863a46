"""What one rank of a zoo cell does in a worker of tests/parallel/pool.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from faults import Fault
from harness import state_of

from trainapp.config.schema import Config
from trainapp.launch import worker

from .catalogue import ALL
from .harness import Training


class OneRank(NamedTuple):
    """Its state at the end, the sizes that were used, and the number of errors."""

    state: dict[str, Any]
    schedule: dict[int, Any]
    failures: int


def train(rank: int, config: Config, name: str, faults: Sequence[Fault], folder: str) -> OneRank:
    """The cell `name` on the ranks of the pool, with these faults."""
    with worker.process_group(config) as ranks:
        training = Training(ALL[name], config, *faults, ranks=ranks, folder=Path(folder))
    if training.error is not None:
        raise training.error
    return OneRank(state_of(training.run), training.result.micro_schedule, len(training.failures))
