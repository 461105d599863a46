"""One rank of a run, in this process: its process group, and what its launcher learns of how it ended."""

import contextlib
import datetime
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.launch.devices import backend_of, device_of_rank
from trainapp.launch.rank_log import log_to_run_dir
from trainapp.launch.restarts import write_error
from trainapp.memory import host
from trainapp.parallel.ranks import DistributedRanks, Ranks, answered_by_rank_zero
from trainapp.run import directory
from trainapp.signals import Interrupted

if TYPE_CHECKING:  # not imported at run time: the launcher, which imports this module, starts faster
    from trainapp.run.result import Result

log = logging.getLogger(__name__)
# A rank that has lost its peer waits so long with its own end: the launcher, which ends the others as soon as one has
# ended, then prints the error of the one that has failed first.
SECONDS_FOR_PEER = 2.0
# How a worker ended, as it can be sent to the launcher: its result, a mistake, or a stop.
Outcome: TypeAlias = "Result | UserError | Interrupted"


def run_in_started_process(config: Config) -> Outcome:
    """Run `run_worker` in a process of the launcher, with a status of its own for a Ctrl-C that comes before or after
    the time in which the run itself handles signals.

    A KeyboardInterrupt there would end the process with status 0 (torch 2.13, multiprocessing/spawn.py, `_wrap`), and
    the launcher would wait for its result for ever.
    """

    def leave(number: int, frame: object) -> None:
        if frame is not None:  # a signal, which the run has not only passed on at its end
            os._exit(128 + number)

    signal.signal(signal.SIGINT, leave)
    try:
        return run_worker(config)
    finally:  # the result is on the way to the launcher
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_worker(config: Config) -> Outcome:
    """Run one rank in this process, as set by RANK, WORLD_SIZE and so on in the environment."""
    host.prepare_allocator()
    environment.export_torch_variables()
    run_dir = Path(config.run_dir)
    rank = int(os.environ["RANK"])
    log_to_run_dir(run_dir, rank)
    from trainapp.run import runner

    # A mistake or a stop is the outcome; any other error may be worth a restart.
    try:
        world_size = int(os.environ["WORLD_SIZE"])
        require_several_ranks(config, world_size, f"WORLD_SIZE={world_size}, as the launcher has set it")
        with process_group(config) as ranks:
            answered_by_rank_zero(ranks, lambda: directory.require_same_experiment(config))
            return runner.run(config, ranks)
    except (UserError, Interrupted) as error:
        return error.with_traceback(None)
    except Exception as error:
        log.exception("this rank failed")
        if not write_error(run_dir, rank, error):
            time.sleep(SECONDS_FOR_PEER)
        raise


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[Ranks]:
    """Join the process group described by RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT. Yield the ranks."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = device_of_rank(config, local_rank)
    timeout = config.parallel.timeout
    dist.init_process_group(
        backend_of(config, device),
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )

    ranks = DistributedRanks(device, timeout, config.parallel.vote_on_oom)
    try:
        yield ranks
    finally:
        ranks.end_peer_watch()
        # After an error a peer may be gone, and destroying the group would wait for it. After a signal, peers may wait
        # for this rank: the end of its connections ends them.
        if sys.exc_info()[0] in (None, Interrupted):
            ranks.release_groups()
            dist.destroy_process_group()
            # A group's threads end with the last reference to the group, which a cycle around a model may hold. A
            # thread that frees a tensor while the interpreter exits aborts the process.
            gc.collect()
