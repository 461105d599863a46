"""Runs in this process, in workers started here, or as a rank that torchrun or Slurm started. Imports torch."""

import os

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.memory import host_guard


def launch(config: Config) -> float | None:
    """Train, evaluate, export or plan as `config` says, with as many processes as it asks for. Returns the objective.

    The run takes place in this process (parallel=single), in workers that this process starts, or, where torchrun,
    srun or submitit started this process as one of several, in it as one of the ranks. Raises UserError for mistakes
    and SystemExit when a signal ended the run.
    """
    if config.mode == "plan":
        from trainapp.plan import report

        return report.run(config)
    host_guard.prepare_allocator()
    if config.memory.expandable_segments:
        # Read once, when CUDA starts. A value that the user has set wins.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if config.parallel.strategy == "single":
        if environment.is_one_of_many_ranks():
            raise UserError(
                "parallel=single, but torchrun, srun or submitit started several processes: choose parallel=ddp or "
                "parallel=fsdp"
            )
        from trainapp.run import runner

        return runner.run(config).objective
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
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return outcome.objective
