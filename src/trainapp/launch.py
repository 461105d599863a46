"""Starts the process or processes of a run. Torch is imported from here on."""

import os

from trainapp import guard
from trainapp.config import Config
from trainapp.errors import UserError
from trainapp.run_name import started_by_a_launcher


def launch(config: Config) -> float | None:
    """Run in this process, in workers that it starts, or as the worker that this process is. Returns the objective."""
    guard.prepare_allocator()
    if config.memory.expandable_segments:
        # Read once, when CUDA starts. What the user set wins.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if config.parallel.strategy == "single":
        if started_by_a_launcher():
            raise UserError(
                "parallel=single, but torchrun or srun started several processes: choose parallel=ddp or parallel=fsdp"
            )
        from trainapp import runner

        return runner.run(config).objective
    from trainapp.parallel import launcher, worker

    if started_by_a_launcher():
        worker.adopt_slurm()
        outcome = worker.work(config)
    else:
        outcome = launcher.start(config)
    if outcome.error:
        error = UserError(outcome.error)
        error.exit_code = outcome.exit_code
        raise error
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return outcome.objective
