"""Names the directory of a run: alike on all ranks of one run, different from every other run's. Imports no torch."""

import datetime
import os
import secrets

import psutil

from trainapp.launch import environment


def of_this_process(run_id: str | None = None) -> str:
    """`2026-01-31/12-30-00-a1b2c3`; with `parallel.run_id`, or in a worker of torchrun or Slurm, a name from that id.

    Seconds alone would let runs that start together share a directory. A launcher's id stays the same when the job is
    queued again, so that the run goes on in its directory; for Slurm it is `<job>.<step>`, one for each srun.
    """
    if run_id:
        return f"runs/{run_id}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        if run_id in ("", "none"):  # torchrun without --rdzv-id: its process tells this run from the next
            started = datetime.datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
            return f"torchrun/{started:%Y-%m-%d_%H-%M-%S}-{os.getppid()}"
        return f"torchrun/{run_id}"
    if environment.is_one_of_many():
        return f"slurm/{environment.task().job}"
    return f"{datetime.datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(3)}"
