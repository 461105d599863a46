"""Which process of a run holds the lock of its directory, and when. Imports no torch.

Rank 0 of those that torchrun or a scheduler started; otherwise the process of the command line, workers or not.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.config.schema import Config
from trainapp.errors import Reported, UserError
from trainapp.launch import environment
from trainapp.run import lock

_RESTART = 30.0  # seconds that a launcher may take to end the workers before these


class RefuseSecondRun(Callback):
    """Takes the lock before Hydra writes the directory's .hydra and log, which may be those of a run in progress."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, which hides Exceptions from here. In a sweep each job takes the lock of its own."""
        parallel = OmegaConf.select(config, "parallel") or {}
        try:
            _claim(Path(str(config.hydra.run.dir)), parallel.get("nodes"), parallel.get("run_id"))
        except UserError as error:
            raise Reported(error) from None


@contextlib.contextmanager
def per_directory(config: Config) -> Iterator[None]:
    """Hold the run directory's lock inside the block. Raises UserError when another run uses the directory."""
    run_dir = Path(config.run_dir)
    _claim(run_dir, config.parallel.nodes, config.parallel.run_id)
    try:
        yield
    finally:
        lock.release(run_dir)


def for_worker(config: Config) -> contextlib.AbstractContextManager[None]:
    """Hold rank 0's lock in a worker that this program's launcher started. Others hold the run's own."""
    run_dir = Path(config.run_dir)
    if environment.is_rank_zero() and not lock.is_held(run_dir):
        return lock.held_by_worker(run_dir)
    return contextlib.nullcontext()


def _claim(run_dir: Path, nodes: Any, run_id: Any) -> None:
    if environment.is_rank_zero():
        shared_as = str(run_id) if nodes not in (None, 1) else None
        has_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        lock.acquire(run_dir, shared_as, _RESTART if has_restarted else 0.0)
