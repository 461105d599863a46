"""Starts the process or processes of a run. Torch is imported from here on."""

import os

from trainapp.config import Config


def launch(config: Config):
    """Run in this process. Returns a `runner.RunResult`."""
    if config.memory.expandable_segments:
        # Read once, when CUDA starts. What the user set wins.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from trainapp import runner

    return runner.run(config)
