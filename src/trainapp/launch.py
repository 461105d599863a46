"""Starts the process or processes of a run. Torch is imported from here on."""

import os
from typing import TYPE_CHECKING

from trainapp import guard
from trainapp.config import Config

if TYPE_CHECKING:
    from trainapp.runner import RunResult


def launch(config: Config) -> "RunResult":
    """Run in this process."""
    guard.prepare_allocator()
    if config.memory.expandable_segments:
        # Read once, when CUDA starts. What the user set wins.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from trainapp import runner

    return runner.run(config)
