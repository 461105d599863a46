"""What one rank of a zoo cell does in a worker of tests/parallel/pool.py."""

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from parallel.faults import Fault, injected

from trainapp.config.schema import Config
from trainapp.launch import elastic
from trainapp.oom.report import OomReport
from trainapp.run import runner
from trainapp.tracking.tracker import Tracker
from trainapp.training.session import Session

from . import catalogue
from .harness import state_of


class OneRank(NamedTuple):
    """Its state at the end, the sizes that were used, and (phase, step) of its errors."""

    state: dict[str, Any]
    schedule: dict[int, Any]
    failures: list[tuple[str, int]]


def train(rank: int, config: Config, name: str, faults: Sequence[Fault], folder: str) -> OneRank:
    """The cell `name` on the ranks of the pool, with these faults."""
    catalogue.as_in_a_new_process(catalogue.ALL[name])
    runs: list[Session] = []
    failures: list[tuple[str, int]] = []

    def attempt(original: Any, session: Session) -> OomReport | None:
        runs.append(session)
        failure = original(session)
        if failure is not None:
            failures.append((failure.phase.value, failure.step))
        return failure

    with (
        mock.patch.object(runner, "attempt", functools.partial(attempt, runner.attempt)),
        mock.patch.object(Tracker, "picture"),
        injected(faults, Path(folder)) if faults else contextlib.nullcontext(),
        elastic.process_group(config) as ranks,
    ):
        result = runner.run(config, ranks)
    return OneRank(state_of(runs[-1], catalogue.ALL[name]), result.micro_schedule, failures)
