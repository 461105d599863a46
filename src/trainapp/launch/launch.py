"""Starts the process or processes of a run. Torch is imported from here on."""

import os

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import environment
from trainapp.memory import host_guard


def launch(config: Config) -> float | None:
    """Run in this process, in workers that it starts, or as the worker that this process is. Returns the objective."""
    host_guard.prepare_allocator()
    if config.memory.expandable_segments:
        # Read once, when CUDA starts. What the user set wins.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if config.parallel.strategy == "single":
        if environment.is_one_of_many():
            raise UserError(
                "parallel=single, but torchrun, srun or submitit started several processes: choose parallel=ddp or "
                "parallel=fsdp"
            )
        from trainapp.run import runner

        return runner.run(config).objective
    from trainapp.launch import elastic, worker

    if environment.is_one_of_many():
        environment.adopt()
        outcome = worker.work(config)
    else:
        outcome = elastic.start(config)
    if outcome.error:
        error = UserError(outcome.error)
        error.exit_code = outcome.exit_code
        raise error
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return outcome.objective
