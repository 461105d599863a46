"""Lock the run directory, then run: in this process, in workers it starts, or as one rank of torchrun or Slurm. Imports
no torch before the process is prepared for it.
"""

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

import trainapp
from trainapp.config import command_line, replaced_options
from trainapp.config.schema import Config
from trainapp.errors import Reported, UserError
from trainapp.files import COMMAND, CONFIG, HYDRA, OVERRIDES
from trainapp.launch import environment
from trainapp.memory import host
from trainapp.run import directory
from trainapp.signals import StopRequest

# On import, torch 2.13 reads the first of these that is set: c10/cuda/CUDAAllocatorConfig.h. (The second only in a ROCm
# build.)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_RESTART_PATIENCE = 30.0  # seconds that a launcher may take to end the previous workers
# Here, because jobs of a launcher such as submitit import the callbacks, not __main__, before they are composed.
environment.register()
replaced_options.install()


class RefuseSecondRun(Callback):
    """A callback of Hydra that takes the lock before Hydra opens the log.

    Hydra swallows exceptions raised in callbacks, hence `Reported`.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Take the lock. Called by Hydra; in a sweep each job takes its own."""
        environment.use_time_of_sweep()
        run_dir = OmegaConf.select(config, "hydra.run.dir", throw_on_resolution_failure=False)
        if run_dir is None:  # reported later, with other mistakes
            return
        try:
            _claim(Path(str(run_dir)))
        except UserError as error:
            raise Reported(error) from None


@contextlib.contextmanager
def locked(run_dir: str) -> Iterator[None]:
    """Hold the run directory's lock inside the block. Raises UserError if another run uses the directory."""
    try:
        _claim(Path(run_dir))
        yield
    finally:
        directory.release(Path(run_dir))


def _claim(run_dir: Path) -> None:
    """Take the lock, on rank 0 only."""
    if not environment.is_rank_zero():
        return
    patience = _RESTART_PATIENCE if directory.has_restarted() else 0.0
    directory.acquire(run_dir, patience)


def describe(composed: DictConfig, config: Config, overrides: list[str], flags: list[str]) -> None:
    """Write .hydra/ with the composed configuration, the overrides, and the command for `trainapp continue`. Hydra
    would do so before the run can be refused.

    Raises UserError if the directory belongs to another experiment.
    """
    if not config.activity.writes_settings or not environment.is_rank_zero():
        return
    if not environment.is_one_of_many_ranks():  # those ask rank 0, in `worker.run_worker`
        directory.require_same_experiment(config)

    # Hydra's own files: the composed configuration, and the overrides of the user.
    run_dir = Path(config.run_dir)
    (run_dir / HYDRA).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(composed, run_dir / CONFIG)
    overrides_of_sweep = os.environ.get(environment.SWEEP_SHARE, "").splitlines()
    overrides_of_user = []
    for override in overrides:
        if override not in overrides_of_sweep:
            overrides_of_user.append(command_line.as_entered(override))
    OmegaConf.save(overrides_of_user, run_dir / OVERRIDES)

    # The command that `trainapp continue` repeats.
    if config.activity.trains:
        command: dict[str, Any] = {"arguments": [*flags, *overrides_of_user], "cwd": os.getcwd()}
        command.update(_origin())
        (run_dir / COMMAND).write_text(json.dumps(command, indent=1) + "\n")


def _origin() -> dict[str, str]:
    """Return when, where and with what a process of a run was started, for its page."""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "host": platform.node(),
        "trainapp": trainapp.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def launch(config: Config, by_launcher: bool = False) -> float | None:
    """Do what `mode` says: in this process (parallel=single), in workers that it starts, or as one rank if torchrun,
    srun or submitit started several processes. Return the objective, if the mode has one.

    Raises UserError for mistakes and SystemExit when a signal ended the run.

    Args:
        config: the configuration.
        by_launcher: whether one of Hydra's launchers runs this job of a sweep: others may then follow in this process.
    """
    if config.mode == "plan":
        from trainapp.planning import printed

        with StopRequest():
            return printed.print_plan(config)

    # Refuse several processes where one does the work, before torch is imported.
    if config.activity.is_one_process:
        environment.require_one_process(f"mode={config.mode}", "start it once")
    elif config.parallel.strategy == "single":
        environment.require_one_process("parallel=single", "choose parallel=ddp or parallel=fsdp")

    # torch checks CUBLAS_WORKSPACE_CONFIG once, at the process's first matmul on CUDA (2.13, ATen/Context.cpp): if it
    # is unset then, a later job of the sweep with train.deterministic=true is refused. Not set for every run:
    # before Hopper it makes each of cuBLAS's workspaces 24 MiB larger.
    prepare_process(config.memory.expandable_segments, config.train.deterministic or by_launcher)

    # Each mode imports what it needs: torch, and its own room.
    if config.mode == "lr_find":
        from trainapp.run import lr_find

        return lr_find.run(config)
    if config.mode == "export":
        from trainapp.run import trained

        with StopRequest():
            trained.export(config)
        return None
    if config.parallel.strategy == "single":
        from trainapp.run import runner

        return runner.run(config).objective

    # Workers that this process starts, or this process as one of the ranks.
    from trainapp.launch import elastic

    if "TORCHELASTIC_RUN_ID" in os.environ:  # a worker that torchrun restarts keeps the time of the first
        torchrun = psutil.Process(os.getppid())
        config = dataclasses.replace(config, started=torchrun.create_time())
    return elastic.run(config).objective


def prepare_process(expandable_segments: bool, deterministic: bool) -> None:
    """Set variables that malloc, torch and cuBLAS read once per process, unless the user has. Call before torch is
    imported.

    Args:
        expandable_segments: the setting `memory.expandable_segments`.
        deterministic: whether a run in this process may have `train.deterministic=true`.
    """
    host.prepare_allocator()
    is_set_by_user = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    if expandable_segments and not is_set_by_user:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
