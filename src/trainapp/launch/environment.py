"""Who started this process: torchrun, or srun or submitit as one of several tasks. Imports no torch.

Source of srun's names: srun(1), output environment variables.
"""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """This process among the tasks of a job."""

    rank: int
    world: int
    local_rank: int
    job: str  # the same when the job is queued again
    first_host: str  # where rank 0 is


def task() -> Task | None:
    """From what srun or submitit's local executor has set; None in a process that neither of them started.

    Not from SLURM_NTASKS: a batch script has that, too, and what it runs without srun is one process.
    """
    env = os.environ
    if "SUBMITIT_LOCAL_GLOBALID" in env:
        return Task(
            rank=int(env["SUBMITIT_LOCAL_GLOBALID"]),
            world=int(env["SUBMITIT_LOCAL_NTASKS"]),
            local_rank=int(env["SUBMITIT_LOCAL_LOCALID"]),
            job=env["SUBMITIT_LOCAL_JOB_ID"],
            first_host="127.0.0.1",
        )
    if "SLURM_STEP_ID" in env:
        one_node = env["SLURM_STEP_NUM_NODES"] == "1"
        return Task(
            rank=int(env["SLURM_PROCID"]),
            world=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            job=f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}",
            first_host="127.0.0.1" if one_node else _first_host(env["SLURM_STEP_NODELIST"]),
        )
    return None


def is_one_of_many() -> bool:
    """Whether torchrun started this process, or a scheduler as one of several tasks."""
    own = task()
    return "TORCHELASTIC_RUN_ID" in os.environ or (own is not None and own.world > 1)


def runs_sweep() -> bool:
    """Whether this process is a sweep's job that submitit started: with several tasks they are that job's ranks."""
    return "SUBMITIT_EXECUTOR" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


def adopt() -> None:
    """Give torch the names that it reads: RANK, WORLD_SIZE and so on."""
    own = task()
    if "RANK" in os.environ or own is None:
        return
    job, _, step = own.job.partition(".")
    names = {
        "RANK": own.rank,
        "WORLD_SIZE": own.world,
        "LOCAL_RANK": own.local_rank,
        "MASTER_ADDR": own.first_host,
        # Under 32768, from where Linux gives ports to whoever asks for any.
        "MASTER_PORT": 20000 + (int(job) + 1009 * int(step or 0)) % 12000,
    }
    for name, value in names.items():
        os.environ.setdefault(name, str(value))


def _first_host(nodes: str) -> str:
    """`gpu[003-010,12],cpu1` begins with gpu003."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
