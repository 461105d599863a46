"""The table after a sweep by another of Hydra's sweepers; the program's own prints it itself."""

import atexit
import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.errors import UserError
from trainapp.sweep import leaderboard

_OWN_SWEEPER = "hydra_plugins.trainapp_sweeper.TrainappSweeper"


class TableAtEnd(Callback):
    """Prints the table; through `atexit`, since Hydra skips `on_multirun_end` after a failed job or a signal."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Print the table of this sweep when the process ends. Called by Hydra."""
        if config.hydra.sweeper._target_ == _OWN_SWEEPER:
            return
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None:
            atexit.register(_show_table, Path(str(folder)).resolve())


def _show_table(folder: Path) -> None:
    """Print the table, if any job has begun."""
    with contextlib.suppress(UserError):
        leaderboard.show(folder)
