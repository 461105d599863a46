"""Runs in this process, in workers started here, or as a rank that torchrun or Slurm started. Imports torch."""

import os
from typing import TYPE_CHECKING

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.memory import host
from trainapp.run import run_dir

if TYPE_CHECKING:
    from trainapp.run.result import RunResult

# torch 2.13 reads the first of these that is set, while it is imported: c10/cuda/CUDAAllocatorConfig.h. (The second
# only in a build for ROCm.)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def launch(config: Config, is_sweep: bool = False) -> float | None:
    """Train, evaluate, export or plan as `config` says. Returns the objective: see `run`."""
    if config.mode == "plan":
        from trainapp.planning import screen

        return screen.run(config)
    if config.mode == "lr_find":
        return _lr_find(config)
    return run(config, is_sweep).for_sweeper


def run(config: Config, is_sweep: bool = False) -> "RunResult":
    """Train, evaluate or export with as many processes as `config` asks for. Returns how that ended.

    The run takes place in this process (parallel=single), in workers that this process starts, or, where torchrun,
    srun or submitit started this process as one of several, in it as one of the ranks. is_sweep: whether
    other jobs may follow in this process. Raises UserError for mistakes and SystemExit when a signal ended the run.
    """
    # torch checks CUBLAS_WORKSPACE_CONFIG once, at the process's first matmul on CUDA (2.13, ATen/Context.cpp): if it
    # is unset then, a later job of the sweep with train.deterministic=true is refused. Not set for every run:
    # before Hopper it makes each of cuBLAS's workspaces 24 MiB larger.
    prepare_process(config.memory.expandable_segments, config.train.deterministic or is_sweep)
    if config.parallel.nodes == 1 and not environment.is_one_of_many_ranks():  # the others ask rank 0, in `run_worker`
        run_dir.require_same_experiment(config)
    if config.parallel.strategy == "single":
        if environment.is_one_of_many_ranks():
            raise UserError(
                "parallel=single, but torchrun, srun or submitit started several processes: choose parallel=ddp or "
                "parallel=fsdp"
            )
        from trainapp.run import runner

        return runner.run(config)
    from trainapp.launch import elastic, worker

    if environment.is_one_of_many_ranks():
        environment.export_torch_variables()
        outcome = worker.run_worker(config)
    else:
        outcome = elastic.run_workers(config)
    if outcome.error:
        error = UserError(outcome.error)
        error.exit_code = outcome.exit_code
        raise error
    if outcome.result is None:
        raise SystemExit(outcome.exit_code)
    return outcome.result


def _lr_find(config: Config) -> float:
    if environment.is_one_of_many_ranks():
        raise UserError("mode=lr_find: torchrun, srun or submitit started several processes; start it once")
    prepare_process(config.memory.expandable_segments, config.train.deterministic)
    from trainapp.run import lr_find

    return lr_find.run(config)


def prepare_process(expandable_segments: bool, deterministic: bool) -> None:
    """Set what malloc, torch and cuBLAS read once per process. Call before torch is imported. The user's values win.

    deterministic: whether a run in this process may have `train.deterministic=true`.
    """
    host.prepare_allocator()
    if expandable_segments and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
