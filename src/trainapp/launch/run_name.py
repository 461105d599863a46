"""Names that the configuration of Hydra computes: of a run's directory, the same on all ranks of a run and unique among
runs, and of what Hydra writes there. Imports no torch.
"""

import datetime
import os
import secrets

import psutil
from omegaconf import DictConfig, OmegaConf

from trainapp.launch import environment


def register() -> None:
    """Make `run_name` and `by_mode` known in configurations, once per process."""
    OmegaConf.register_new_resolver("run_name", default_run_name, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("by_mode", by_mode, replace=True)


def by_mode(of_run: str, of_plan: str, of_lr_find: str, *, _root_: DictConfig) -> str:
    """The second name for `mode=plan`, the third for `mode=lr_find`: whatever chose the mode, Hydra then writes none of
    a run's files.
    """
    mode = OmegaConf.select(_root_, "mode", throw_on_resolution_failure=False)
    return {"plan": of_plan, "lr_find": of_lr_find}.get(str(mode), of_run)


def default_run_name(run_id: str | None = None) -> str:
    """`2026-01-31/12-30-00-a1b2c3`; with `parallel.run_id`, or in a worker of torchrun or Slurm, a name from that id.

    Seconds alone would let runs that start together share a directory. A launcher's id survives requeueing, so that
    the run resumes in its directory; for Slurm it is `<job>.<step>`, one per srun.
    """
    if run_id:
        return f"runs/{run_id}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        if run_id in ("", "none"):  # torchrun without --rdzv-id: its process identifies the run
            started = datetime.datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
            return f"torchrun/{started:%Y-%m-%d_%H-%M-%S}-{os.getppid()}"
        return f"torchrun/{run_id}"
    task = environment.scheduler_task()
    if task is not None and task.world > 1:
        return f"slurm/{task.job}"
    return f"{datetime.datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(3)}"
