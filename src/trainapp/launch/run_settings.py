"""What a run writes before it starts: .hydra/, and the command for `trainapp continue`. Imports no torch."""

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import trainapp
from trainapp.config import command_line
from trainapp.config.schema import Config
from trainapp.files import COMMAND, CONFIG, HYDRA, OVERRIDES
from trainapp.launch import environment
from trainapp.run import directory


def write_settings(composed: DictConfig, config: Config, overrides: list[str], flags: list[str]) -> None:
    """Write .hydra/ with the composed configuration, the overrides, and the command for `trainapp continue`. Hydra
    would do so before the run can be refused.

    Raises UserError if the directory belongs to another experiment.
    """
    if not config.activity.writes_settings or not environment.is_rank_zero():
        return
    if not environment.is_one_of_many_ranks():  # those ask rank 0, in `worker.run_worker`
        directory.require_same_experiment(config)

    # Hydra's own files: the composed configuration, and the overrides of the user.
    run_dir = Path(config.run_dir)
    (run_dir / HYDRA).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(composed, run_dir / CONFIG)
    overrides_of_sweep = os.environ.get(environment.SWEEP_SHARE, "").splitlines()
    overrides_of_user = []
    for override in overrides:
        if override not in overrides_of_sweep:
            overrides_of_user.append(command_line.as_entered(override))
    OmegaConf.save(overrides_of_user, run_dir / OVERRIDES)

    # The command that `trainapp continue` repeats.
    if config.activity.trains:
        command: dict[str, Any] = {"arguments": [*flags, *overrides_of_user], "cwd": os.getcwd()}
        command.update(_origin())
        (run_dir / COMMAND).write_text(json.dumps(command, indent=1) + "\n")


def _origin() -> dict[str, str]:
    """Return when, where and with what a process of a run was started, for its page."""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "host": platform.node(),
        "trainapp": trainapp.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
