"""Environment variables set by this process's launcher (torchrun, Slurm's srun, submitit), and the default name of a
run's directory. Imports no torch.

Source of Slurm's names: srun(1), "Output environment variables".
"""

import datetime
import os
import re
import secrets
from dataclasses import dataclass
from typing import Any

import omegaconf
import psutil
from omegaconf import DictConfig, OmegaConf

from trainapp.errors import UserError

SWEEP_STARTED = "TRAINAPP_SWEEP_STARTED"  # variable that tells a job when its sweep began
SWEEP_SHARE = "TRAINAPP_SWEEP_SHARE"  # variable that tells a job which overrides its sweep has added


@dataclass(frozen=True)
class SchedulerTask:
    """This process's place among the tasks that a scheduler started together."""

    rank: int
    world_size: int  # the number of tasks
    local_rank: int
    job: str  # an id that survives requeueing
    first_host: str  # the host of rank 0


def scheduler_task() -> SchedulerTask | None:
    """Return the task described by srun's or submitit's variables; None in a process that neither of them started.

    SLURM_NTASKS is not read: it is also set in a batch script, where a command without srun is a single process.
    """
    env = os.environ
    if "SUBMITIT_LOCAL_GLOBALID" in env:
        return SchedulerTask(
            rank=int(env["SUBMITIT_LOCAL_GLOBALID"]),
            world_size=int(env["SUBMITIT_LOCAL_NTASKS"]),
            local_rank=int(env["SUBMITIT_LOCAL_LOCALID"]),
            job=env["SUBMITIT_LOCAL_JOB_ID"],
            first_host="127.0.0.1",
        )
    if "SLURM_STEP_ID" in env:
        first_host = "127.0.0.1"  # on one machine
        if env["SLURM_STEP_NUM_NODES"] != "1":
            first_host = _first_host(env["SLURM_STEP_NODELIST"])
        return SchedulerTask(
            rank=int(env["SLURM_PROCID"]),
            world_size=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            job=f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}",
            first_host=first_host,
        )
    return None


def is_rank_zero() -> bool:
    """Return whether this process is the only one, or rank 0 of those that torchrun or a scheduler started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ.get("RANK", "0") == "0"
    task = scheduler_task()
    return task is None or task.rank == 0


def is_one_of_many_ranks() -> bool:
    """Return whether torchrun started this process, or a scheduler started it as one of several tasks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    task = scheduler_task()
    return task is not None and task.world_size > 1


def require_one_process(subject: str, advice: str) -> None:
    """Raise UserError if a launcher started this process as a rank, of several as a rule.

    Args:
        subject: the setting or function that is for one process.
        advice: what to do where there are several, for the message.
    """
    if not is_one_of_many_ranks():
        return
    if os.environ.get("WORLD_SIZE") == "1":
        raise UserError(f"{subject}: torchrun started this process as its only rank; start it without torchrun")
    raise UserError(f"{subject}: torchrun, srun or submitit started several processes; {advice}")


def is_submitit_job() -> bool:
    """Return whether submitit started this process as a job of a sweep. The job's tasks are the run's ranks."""
    return "SUBMITIT_EXECUTOR" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


def export_torch_variables() -> None:
    """Set the variables that torch reads (RANK, WORLD_SIZE, ...) from the scheduler's. torchrun's are kept."""
    task = scheduler_task()
    if "RANK" in os.environ or task is None:
        return

    job, _, step = task.job.partition(".")
    # Below 32768, where Linux's ephemeral ports start; different for the steps of one job.
    port = 20000 + (int(job) + 1009 * int(step or 0)) % 12000
    variables = {
        "RANK": task.rank,
        "WORLD_SIZE": task.world_size,
        "LOCAL_RANK": task.local_rank,
        "MASTER_ADDR": task.first_host,
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list: gpu003 of `gpu[003-010,12],cpu1`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]


def register() -> None:
    """Register the resolvers `run_name` and `by_mode`, once per process."""
    _register("run_name", default_run_name, use_cache=True, replace=True)
    _register("by_mode", by_mode, replace=True)


def use_time_of_sweep() -> None:
    """Let `${now:...}`, in a job of a sweep, be when the sweep began. Call after Hydra has registered its own."""
    started = os.environ.get(SWEEP_STARTED)
    if started:
        start_time = datetime.datetime.fromisoformat(started)
        _register("now", lambda pattern: start_time.strftime(pattern), use_cache=True, replace=True)


def _register(*arguments: Any, **options: Any) -> None:
    register_resolver: Any = OmegaConf.register_resolver
    if omegaconf.__version__.startswith("2.3."):  # there it is another function
        register_resolver = OmegaConf.register_new_resolver
    register_resolver(*arguments, **options)


def by_mode(of_run: str, of_plan: str, of_lr_find: str, *, _root_: DictConfig) -> str:
    """Return the name for the current mode; plan and lr_find must not overwrite a run's files."""
    mode = OmegaConf.select(_root_, "mode", throw_on_resolution_failure=False)
    if mode == "plan":
        return of_plan
    if mode == "lr_find":
        return of_lr_find
    return of_run


def default_run_name() -> str:
    """Return `2026-01-31/12-30-00-a1b2c3`; in a worker of torchrun or Slurm a name from the launcher's id.

    Seconds alone would let runs that start together share a directory. A launcher's id survives requeueing, so that
    the run resumes in its directory; for Slurm it is `<job>.<step>`, one per srun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        if run_id in ("", "none"):  # torchrun without --rdzv-id: its process identifies the run
            torchrun = psutil.Process(os.getppid())
            started = datetime.datetime.fromtimestamp(torchrun.create_time())
            return f"torchrun/{started:%Y-%m-%d_%H-%M-%S}-{torchrun.pid}"
        return f"torchrun/{run_id}"

    task = scheduler_task()
    if task is not None and task.world_size > 1:
        return f"slurm/{task.job}"

    # A process of its own.
    suffix = secrets.token_hex(3)
    return f"{datetime.datetime.now():%Y-%m-%d/%H-%M-%S}-{suffix}"
