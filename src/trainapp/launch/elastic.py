"""The ranks of a run: workers that this process starts and restarts through torch's elastic launcher, or this process
itself if torchrun or a scheduler started it as a rank.
"""

import contextlib
import datetime
import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import LOG, json_object
from trainapp.launch import environment
from trainapp.memory import host
from trainapp.memory.detection import causes
from trainapp.parallel.ranks import DistributedRanks, Ranks, answered_by_rank_zero
from trainapp.run import directory
from trainapp.signals import ECHO, TO_BE_CONTINUED, Interrupted, handled_by, pass_on
from trainapp.sizes.record import RESTART
from trainapp.torch_private import Restart, asked_before_restarts
from trainapp.tracking import terminal

if TYPE_CHECKING:  # not imported at run time: the launcher starts faster
    from trainapp.run.result import Result

log = logging.getLogger(__name__)
# How a worker ended, as it can be sent to the parent: its result, a mistake, or a stop.
Outcome: TypeAlias = "Result | UserError | Interrupted"


def run(config: Config) -> "Result":
    """Train, evaluate or predict, in workers that it starts or in this process as one rank. Returns the result.

    Raises UserError for mistakes, TrainingStopped if training cannot continue, and Interrupted after a signal.
    """
    outcome = run_worker(config) if environment.is_one_of_many_ranks() else run_workers(config)
    if isinstance(outcome, (UserError, Interrupted)):
        raise outcome
    return outcome


def run_workers(config: Config) -> Outcome:
    """Run the workers on this machine until they end.

    Raises UserError for settings that do not suit this machine, and TrainingStopped after `parallel.max_restarts`
    restarts, or for an error that another would repeat (see `Failures`).
    """
    settings = config.parallel
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers_to_start(config),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_timeout=int(settings.timeout),
        max_restarts=settings.max_restarts,
        signals_to_handle="SIGQUIT",  # the others are handled by `signals_forwarded` and the system
    )
    # With the launcher's own store shared, restarted workers would find the addresses of the dead ones (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    failures = Failures(Path(config.run_dir))
    try:
        with signals_forwarded(failures), asked_before_restarts(failures.decide):
            outcomes: dict[int, Outcome] = elastic_launch(launch, _run_started)(config)
    except ChildFailedError as error:
        if failures.signal:
            is_saved = error.get_first_failure()[1].exitcode == TO_BE_CONTINUED
            return Interrupted(TO_BE_CONTINUED if is_saved else 128 + failures.signal, failures.signal)
        raise TrainingStopped(_why_it_ended(error, failures)) from None
    return next((own for own in outcomes.values() if isinstance(own, (UserError, Interrupted))), outcomes[0])


@contextlib.contextmanager
def signals_forwarded(failures: "Failures") -> Iterator[None]:
    """Inside the block, a signal goes to the workers, which agree on the stop and return: torch's launcher would kill
    them after 30 s. A second one, or one without workers, raises Interrupted. Then the former handler gets the signal.
    """

    others = {child.pid for child in multiprocessing.active_children()}  # the caller's own

    def forward(number: int, frame: object) -> None:
        if failures.signal and time.monotonic() - failures.signalled_at < ECHO:
            return
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # workers that end have not failed
        pids = [worker.pid for worker in multiprocessing.active_children() if worker.pid and worker.pid not in others]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        is_first, failures.signal, failures.signalled_at = not failures.signal, number, time.monotonic()
        if not (is_first and pids):
            raise Interrupted(128 + number, number)

    try:
        with handled_by(forward) as former:
            yield
    finally:
        if failures.signal:
            pass_on(failures.signal, former[failures.signal])


class Failures:
    """Counts the workers' failures. `incurable`: an error that a restart would repeat, because it is in Python code
    (see `leave_error`) or occurred twice at the same step. `signal`: the number of the launcher's last, or 0.

    A restart with a smaller micro-batch is not counted: a search for the size may need many, and ends at 1 anyway.
    """

    def __init__(self, run_dir: Path):
        self.run_dir, self.count, self.for_memory = run_dir, 0, 0
        self.incurable: str | None = None
        self.signal, self.signalled_at = 0, 0.0
        self.left: dict[str, tuple[int, bool]] = {}  # the last workers' errors
        take_errors(run_dir)  # discard those of an earlier run
        self._before: set[str] = set()
        self._recoveries = 0

    def decide(self) -> Restart:
        """Called after each failure, before the workers are restarted."""
        self.left = left = take_errors(self.run_dir)
        repeated = (text for text, (_, repeats) in left.items() if repeats or text in self._before)
        self.incurable = min(repeated, default=None)
        if self.incurable is not None or self.signal:
            return Restart.REFUSED
        self._before = set(left)
        # Free only if the count has risen: workers that end before they read restart.json would restart forever.
        recoveries = json_object(self.run_dir / RESTART).get("recoveries", 0)
        if recoveries > self._recoveries:
            self._recoveries = recoveries
            self.for_memory += 1
            return Restart.FREE
        self.count += 1
        self._recoveries = 0  # after a crash the workers resume with the checkpoint's, which is lower
        return Restart.COUNTED


def _why_it_ended(error: ChildFailedError, failures: "Failures") -> str:
    log_place = f"its log is in {failures.run_dir}/ranks (rank 0: {LOG})"
    if failures.incurable is not None:
        return f"a rank failed with an error that a restart would repeat: {failures.incurable}; {log_place}"
    rank, failure = error.get_first_failure()
    message = failure.message  # the traceback is in the rank's log, and elastic has printed it
    reason = message["message"] if isinstance(message, dict) else message
    if failures.left:  # the launcher may first have seen a rank that lost its peer
        reason, (rank, _) = next(iter(failures.left.items()))
    free = f" (and {failures.for_memory} with a smaller micro-batch)" if failures.for_memory else ""
    return (
        f"rank {rank} failed (exit code {failure.exitcode}) after {failures.count - 1} restarts{free}: {reason}; "
        f"{log_place}"
    )


def workers_to_start(config: Config) -> int:
    """Return the number of processes to start: one per GPU, or `parallel.devices`.

    Raises UserError if that is too many, or too few for the strategy.
    """
    wanted = config.parallel.devices
    if wanted != "auto":
        require_several_ranks(config, wanted, f"parallel.devices={wanted}")
    if config.train.device == "cpu" or not torch.cuda.is_available():
        if wanted == "auto":
            raise UserError(
                "parallel.devices=auto: this machine has no GPUs; set parallel.devices=N for N processes on the CPU"
            )
        return wanted
    available = torch.cuda.device_count()
    if wanted != "auto" and wanted > available:
        raise UserError(f"parallel.devices={wanted}: this machine has {available} GPUs")
    if wanted == "auto":
        require_several_ranks(config, available, f"parallel.devices=auto (this machine has {available} GPU)")
        return available
    return wanted


def _run_started(config: Config) -> Outcome:
    """`run_worker` in a process of the launcher, before and after the time in which the run itself hears signals.

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
    _log_to(Path(config.run_dir), int(os.environ["RANK"]))
    from trainapp.run import runner

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
        leave_error(Path(config.run_dir), int(os.environ["RANK"]), error)
        raise


# Errors that may have an external, transient cause, such as a full disk or a lost device.
MAY_PASS = (OSError, RuntimeError, EOFError, MemoryError)


def leave_error(run_dir: Path, rank: int, error: Exception) -> None:
    """Leave the error for `take_errors`, unless it only says that another rank is gone."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, dist.DistError) or re.search(r"gloo|nccl|peer", text, re.IGNORECASE):
        return
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)  # addresses differ between processes
    place = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    repeats = not any(isinstance(cause, MAY_PASS) for cause in causes(error))
    with contextlib.suppress(OSError):  # without the file, all restarts are used
        left = json.dumps([f"{type(error).__name__}: {text}{place}", repeats])
        (run_dir / "ranks" / f"rank_{rank}.error").write_text(left)


def take_errors(run_dir: Path) -> dict[str, tuple[int, bool]]:
    """The errors left by the last workers, one line each with its step: the rank, and whether restarted workers would
    hit it again. A killed worker leaves none.
    """
    taken = {}
    for path in sorted((run_dir / "ranks").glob("*.error")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            text, repeats = json.loads(path.read_text(errors="replace"))
            path.unlink()
            taken[str(text)] = int(path.stem.rpartition("_")[2]), repeats is True
    return taken


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[Ranks]:
    """Join the process group described by RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT. Yields the ranks."""
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
        # After an error a peer may be gone, and destroying the group would wait for it. After a signal, peers may wait
        # for this rank: the end of its connections ends them.
        if sys.exc_info()[0] in (None, Interrupted):
            ranks.release_groups()
            dist.destroy_process_group()
            # A group's threads end with the last reference to the group, which a cycle around a model may hold. A
            # thread that frees a tensor while the interpreter exits aborts the process.
            gc.collect()


def _backend(config: Config, device: torch.device) -> str:
    """The backend of the default group and of the groups that meshes split from it. `cpu_offload` keeps gradients on
    the host and checks them for fp16 overflow there; NCCL has no collectives for host tensors.
    """
    if device.type != "cuda":
        return "gloo"
    is_offloaded = config.parallel.strategy == "fsdp" and config.parallel.fsdp.cpu_offload
    return "cpu:gloo,cuda:nccl" if is_offloaded else "nccl"


def _device(config: Config, local_rank: int) -> torch.device:
    wanted = config.train.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        available = torch.cuda.device_count()
        # srun --gpus-per-task makes only the task's own GPU visible to it.
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
    """Rank 0 logs to the run's log and to the terminal, every other rank to a file in ranks/."""
    path = run_dir / (LOG if rank == 0 else f"ranks/rank_{rank}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    handlers[0].setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    if rank == 0:
        handlers.append(terminal.Handler(sys.stderr))
        handlers[1].addFilter(lambda record: record.exc_info is None)  # the parent shows the traceback
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)
