"""One rank of a distributed run: joins the process group, then runs as a single process would."""

import contextlib
import datetime
import gc
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.memory import host
from trainapp.memory.detection import causes
from trainapp.parallel.ranks import DistributedRanks, Ranks, answered_by_rank_zero
from trainapp.run import run_dir
from trainapp.tracking import terminal

if TYPE_CHECKING:  # the launcher need not wait for it
    from trainapp.run.result import RunResult

COLLECTED_WITHIN = 5.0  # seconds; a launcher that still collects outcomes looks every 0.1 s
log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """How a worker ended, in plain values that can be sent to the parent. `error`: a message for the user.

    result: None after an error or a signal.
    """

    result: "RunResult | None" = None
    error: str | None = None
    exit_code: int = 0


def run_worker(config: Config) -> Outcome:
    """Entry point of a worker. Its rank and those of its peers come from the environment: RANK, WORLD_SIZE, ..."""
    host.prepare_allocator()
    _log_to(Path(config.run_dir), int(os.environ["RANK"]))
    from trainapp.run import runner

    try:
        with process_group(config) as ranks:
            answered_by_rank_zero(ranks, lambda: run_dir.require_same_experiment(config))
            return Outcome(runner.run(config, ranks))
    except UserError as error:
        return Outcome(error=str(error), exit_code=error.exit_code)
    except runner.Interrupted as error:
        code = int(error.code or 0)
        _exit_if_not_collected(code)
        return Outcome(exit_code=code)
    except Exception as error:
        log.exception("this rank failed")
        leave_error(Path(config.run_dir), int(os.environ["RANK"]), error)
        raise


class LeftError(NamedTuple):
    """An error in one line, with its step. repeats: whether restarted workers would only run into it again."""

    text: str
    repeats: bool


# Of errors from outside of the program, such as a full disk or a lost device, some pass.
MAY_PASS = (OSError, RuntimeError, EOFError, MemoryError)


def leave_error(run_dir: Path, rank: int, error: Exception) -> None:
    """Leave the error for `take_error`. Not where it only says that another rank is gone."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, dist.DistError) or re.search(r"gloo|nccl|peer", text, re.IGNORECASE):
        return
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)  # an address is another one in another process
    place = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    repeats = not any(isinstance(cause, MAY_PASS) for cause in causes(error))
    with contextlib.suppress(OSError):  # then all restarts are tried
        error_file(run_dir, rank).write_text(json.dumps([f"{type(error).__name__}: {text}{place}", repeats]))


def take_error(run_dir: Path, rank: int) -> LeftError | None:
    """The error that this rank's last worker has left; None if it left none, as a killed one does."""
    path = error_file(run_dir, rank)
    try:
        text, repeats = json.loads(path.read_text(errors="replace"))
        path.unlink()
    except (OSError, ValueError, TypeError):
        return None
    return LeftError(str(text), repeats is True)


def error_file(run_dir: Path, rank: int) -> Path:
    """Where the error of a rank is left."""
    return run_dir / "ranks" / f"rank_{rank}.error"


def _exit_if_not_collected(code: int) -> None:
    """End this process soon: a launcher that got the signal, too, collects no outcomes, and the worker would wait."""
    timer = threading.Timer(COLLECTED_WITHIN, os._exit, [code])
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[Ranks]:
    """Join the group that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe. Yields the ranks."""
    device = _device(config, int(os.environ.get("LOCAL_RANK", 0)))
    timeout = config.parallel.timeout
    dist.init_process_group(
        _backend(config, device),
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    ranks = DistributedRanks(device, timeout, config.parallel.vote_on_oom)
    try:
        yield ranks
    finally:
        # After an error a peer may be gone, and destroying the group would wait for it.
        if sys.exc_info()[0] is None:
            ranks.release_groups()
            dist.destroy_process_group()
            # A group's threads end with the last reference to it, which may be in a cycle around a model. A thread that
            # frees a tensor while the interpreter ends aborts the process.
            gc.collect()


def _backend(config: Config, device: torch.device) -> str:
    """Of the default group, and of those that meshes split from it. NCCL has no collectives for tensors on the host,
    where `cpu_offload` keeps gradients: an overflow in fp16 is found there.
    """
    if device.type != "cuda":
        return "gloo"
    is_offloaded = config.parallel.strategy == "fsdp" and config.parallel.fsdp.cpu_offload
    return "cpu:gloo,cuda:nccl" if is_offloaded else "nccl"


def _device(config: Config, local_rank: int) -> torch.device:
    wanted = config.train.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        available = torch.cuda.device_count()
        # srun --gpus-per-task makes only its own GPU visible to each task.
        is_own = available == 1 and environment.scheduler_task() is not None
        index = 0 if is_own else local_rank
        if index >= available:
            raise UserError(f"local rank {local_rank}: this machine shows {available} GPUs; start one rank per GPU")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if wanted == "mps":
        raise UserError("train.device=mps: one device only; use parallel=single")
    return torch.device("cpu")


def _log_to(run_dir: Path, rank: int) -> None:
    """Rank 0 logs to the run's log and to the terminal, every other rank to a file in ranks/ next to it."""
    path = run_dir / "trainapp.log" if rank == 0 else run_dir / "ranks" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    handlers[0].setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    if rank == 0:
        handlers.append(terminal.Handler(sys.stderr))
        handlers[1].setFormatter(logging.Formatter("%(message)s"))
        handlers[1].addFilter(lambda record: record.exc_info is None)  # the parent shows the traceback
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
