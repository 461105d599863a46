"""Do what `mode` says: in this process, in workers it starts, or as one rank of torchrun or Slurm. Imports no torch
before the process is prepared for it.
"""

import dataclasses
import os

import psutil

from trainapp.config.schema import Config
from trainapp.launch import environment
from trainapp.launch.process import prepare_process, uses_expandable_segments
from trainapp.run.directory import REPLACES_A_PROCESS
from trainapp.signals import StopRequest


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
    if REPLACES_A_PROCESS in os.environ:  # `train.max_time` counts from the start of the process that it replaces
        config = dataclasses.replace(config, started=psutil.Process().create_time())
    prepare_process(uses_expandable_segments(config), config.train.deterministic or by_launcher)

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
