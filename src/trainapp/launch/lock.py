"""The lock of the run directory, taken before a run or sweep writes in it. Imports no torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.config import replaced_options
from trainapp.errors import Reported, UserError
from trainapp.launch import environment
from trainapp.run import directory

_RESTART_PATIENCE = 30.0  # seconds that a launcher may take to end the previous workers
# Here, because jobs of a launcher such as submitit import the callback, not __main__, before they are composed.
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
