"""Workers that this process starts and restarts through torch's elastic launcher."""

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.launch import environment
from trainapp.launch.devices import workers_to_start
from trainapp.launch.forwarded_signals import ReceivedSignal, signals_forwarded
from trainapp.launch.restarts import RestartPolicy
from trainapp.launch.worker import Outcome, run_in_started_process, run_worker
from trainapp.run.directory import HAS_NOT_SAVED, HAS_SAVED, REPLACES_WORKERS
from trainapp.signals import TO_BE_CONTINUED, Interrupted
from trainapp.torch_private import Restart, asked_before_restarts

if TYPE_CHECKING:  # not imported at run time: the launcher starts faster
    from trainapp.run.result import Result


def run(config: Config) -> "Result":
    """Train, evaluate or predict, in workers that this process starts, or as one rank if torchrun or a scheduler has
    started this process as one. Return the result.

    Raises UserError for mistakes, TrainingStopped if training cannot continue, and Interrupted after a signal.
    """
    if environment.is_one_of_many_ranks():
        outcome = run_worker(config)
    else:
        outcome = run_workers(config)
    if isinstance(outcome, (UserError, Interrupted)):
        raise outcome
    return outcome


def run_workers(config: Config) -> Outcome:
    """Run the workers on this machine until they end.

    Raises UserError for settings that do not suit this machine, and TrainingStopped after `parallel.max_restarts`
    restarts, or for an error that another would repeat (see `RestartPolicy`).
    """
    launch_config = _launch_config(config)
    # With the launcher's own store shared, restarted workers would find the addresses of the dead ones (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    # The launcher starts the workers, and asks the policy before it restarts them.
    received = ReceivedSignal()
    policy = RestartPolicy(Path(config.run_dir), received)

    def decide() -> Restart:
        os.environ[REPLACES_WORKERS] = HAS_SAVED if policy.has_saved() else HAS_NOT_SAVED  # restarted ones inherit it
        return policy.decide()

    try:
        with signals_forwarded(received), asked_before_restarts(decide):
            outcomes: dict[int, Outcome] = elastic_launch(launch_config, run_in_started_process)(config)
    except ChildFailedError as error:
        if received.number:
            return _interruption(error, received.number)
        raise TrainingStopped(policy.explain(error)) from None
    finally:
        os.environ.pop(REPLACES_WORKERS, None)

    # A mistake that any rank reports is the mistake of all.
    for outcome in outcomes.values():
        if isinstance(outcome, (UserError, Interrupted)):
            return outcome
    return outcomes[0]


def _launch_config(config: Config) -> LaunchConfig:
    """Return the launcher's settings. Raises UserError as `workers_to_start`."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers_to_start(config),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_timeout=int(config.parallel.timeout),
        max_restarts=config.parallel.max_restarts,
        signals_to_handle="SIGQUIT",  # the others are handled by `signals_forwarded` and the system
    )


def _interruption(error: ChildFailedError, number: int) -> Interrupted:
    """Return how workers have ended after this signal: whether the first to leave had saved."""
    _, first_failure = error.get_first_failure()
    if first_failure.exitcode == TO_BE_CONTINUED:
        return Interrupted(TO_BE_CONTINUED, number)
    return Interrupted(128 + number, number)
