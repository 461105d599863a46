"""What each process of a run with several ranks does: join the others, then run as a single process would."""

import contextlib
import datetime
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.memory import host_guard
from trainapp.parallel.ranks import DistributedRanks, Ranks
from trainapp.tracking import console

ASKED_WITHIN = 5.0  # seconds; a launcher that listens does so every 0.1 s
log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """How a worker ended, in plain values that travel to the parent. `error` is for the user, without a trace."""

    objective: float | None = None
    error: str | None = None
    exit_code: int = 0


def work(config: Config) -> Outcome:
    """The entry point of a worker that the launcher started; its environment tells the rank."""
    host_guard.prepare_allocator()
    _log_to(Path(config.run_dir), int(os.environ["RANK"]))
    from trainapp.run import runner

    try:
        with joined(config) as ranks:
            return Outcome(objective=runner.run(config, ranks).objective)
    except UserError as error:
        return Outcome(error=str(error), exit_code=error.exit_code)
    except runner.Interrupted as error:
        _leave_soon(error.code)
        return Outcome(exit_code=error.code)
    except Exception:
        log.exception("this rank failed")
        raise


def _leave_soon(code: int) -> None:
    """A launcher that got the signal itself asks no worker for its outcome any more, and each would wait for that."""
    timer = threading.Timer(ASKED_WITHIN, os._exit, [code])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """Among the ranks that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT name."""
    device = _device(config, int(os.environ.get("LOCAL_RANK", 0)))
    timeout = config.parallel.timeout
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    ranks = DistributedRanks(device, timeout, config.parallel.vote_on_oom)
    try:
        yield ranks
    finally:
        # After an error a peer may be gone: a clean good-bye would wait for it.
        if sys.exc_info()[0] is None:
            ranks.release_groups()
            dist.destroy_process_group()
            # A group ends its threads when nothing refers to it any more, be it a circle around a model. One that still
            # had a tensor to drop when the interpreter ended would abort the process.
            gc.collect()


def _device(config: Config, local_rank: int) -> torch.device:
    wants = config.train.device
    if wants == "cuda" or (wants == "auto" and torch.cuda.is_available()):
        there = torch.cuda.device_count()
        own = there == 1 and environment.task() is not None  # srun --gpus-per-task shows each task its own GPU only
        index = 0 if own else local_rank
        if index >= there:
            raise UserError(f"local rank {local_rank}: this machine shows {there} GPUs; start one rank for each")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if wants == "mps":
        raise UserError("train.device=mps: one device only; use parallel=single")
    return torch.device("cpu")


def _log_to(run_dir: Path, rank: int) -> None:
    """Rank 0 writes the run's log and speaks on the terminal, the others beside it in ranks/."""
    path = run_dir / "trainapp.log" if rank == 0 else run_dir / "ranks" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    handlers[0].setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    if rank == 0:
        handlers.append(console.Handler(sys.stderr))
        handlers[1].setFormatter(logging.Formatter("%(message)s"))
        handlers[1].addFilter(lambda record: record.exc_info is None)  # whoever started this process shows the trace
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
