"""Other sweepers of Hydra, such as hydra-optuna-sweeper: their table at the end. Imports no torch."""

import atexit
import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.errors import UserError
from trainapp.sweep import leaderboard

_OWN = "hydra_plugins.trainapp_sweeper.TrainappSweeper"


class TableAtEnd(Callback):
    """Prints the table; through `atexit`, since Hydra skips `on_multirun_end` after a failed job or a signal."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None and config.hydra.sweeper._target_ != _OWN:
            atexit.register(_show, Path(str(folder)).resolve())


def _show(folder: Path) -> None:
    with contextlib.suppress(UserError):  # no job has begun
        leaderboard.show(folder)
