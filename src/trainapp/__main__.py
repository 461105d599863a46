"""The entry point: Hydra composes the configuration, `compose` checks it, `launch` runs it.

Torch is not imported here, so that --help, --cfg and shell completion stay fast.
"""

import dataclasses
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import trainapp
from trainapp import commands
from trainapp.config import command_line, compose, mistakes
from trainapp.errors import MustRestart, Reported, UserError
from trainapp.files import CONF
from trainapp.launch import environment, launch
from trainapp.launch.lock import locked
from trainapp.launch.process import replace_process
from trainapp.launch.run_settings import write_settings
from trainapp.signals import PAUSED, TIME_IS_UP, Interrupted

log = logging.getLogger(__name__)


# Hydra 1.4 takes the classes that its own settings, such as hydra.callbacks and hydra.job_logging, may name.
TRUSTED = ["trainapp.*", "hydra.*", "hydra_plugins.*", "logging.*", "colorlog.*"]
_OPTIONS: dict[str, Any] = compose.VERSION_BASE or {"execution_whitelist": TRUSTED}


@hydra.main(**_OPTIONS, config_path=str(CONF), config_name="train")
def job(composed: DictConfig) -> float | None:
    """One run, or one job of a sweep. Returns the objective, for Hydra's optimizing sweepers.

    Sweepers need a float, so nan and inf are returned unchanged. Optuna treats nan as a failed trial; older versions
    end the sweep there (Hydra's issue 2237).
    """
    hydra_config = HydraConfig.get()
    by_launcher = hydra_config.mode == RunMode.MULTIRUN  # one of Hydra's; its own sweeper starts commands
    run_dir = str(Path(hydra_config.runtime.output_dir).resolve())
    try:
        if by_launcher and not environment.is_submitit_job():
            advice = "start `python -m trainapp -m parallel.devices=N ...` once: each job starts its own workers"
            environment.require_one_process("multirun", advice)
        return _run_job(composed, run_dir, by_launcher)
    except Exception as error:
        if not by_launcher:
            if isinstance(error, UserError):
                raise Reported(error) from None
            raise

        # Hydra shows only the first failed job's error, and leaves the logs of all empty.
        if isinstance(error, UserError):
            log.error("%s", error)
        else:
            log.exception("This job failed; the sweep continues.")

        # Hydra keeps the error until the sweep ends, but the next job needs the memory that its frames hold.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        raise error  # a bare `raise` would restore the traceback in Python 3.10


def _run_job(composed: DictConfig, run_dir: str, by_launcher: bool) -> float | None:
    """Check the configuration and run it in its directory. Return the objective."""
    hydra_config = HydraConfig.get()
    with locked(run_dir):
        flags = command_line.flags(hydra_config)
        overrides = command_line.overrides(hydra_config)
        command = command_line.command([*flags, *overrides], run_dir)
        config = compose.from_hydra(composed, run_dir, command, overrides)

        # The direction of another sweeper, possibly an enumeration member such as `Direction.maximize`.
        direction = OmegaConf.select(hydra_config.sweeper, "direction")
        if direction:
            direction_name = str(getattr(direction, "name", direction))
            config = dataclasses.replace(config, sweeper_direction=direction_name[:3])

        write_settings(composed, config, hydra_config.overrides.task, flags)
        try:
            return launch.launch(config, by_launcher)
        except MustRestart as broken:
            if by_launcher or not config.activity.trains:  # other jobs follow in this process; or nothing to continue
                raise
            log.warning("%s", str(broken).partition("\n")[0])
            replace_process(run_dir, broken.has_saved)
        except Interrupted as stopped:
            if by_launcher and stopped.signal in (TIME_IS_UP, PAUSED) and config.train.max_time != "auto":
                return math.nan  # of this job alone; its objective is not compared
            raise


def main() -> None:
    """Run the command line. A UserError ends it with one message and its exit code; others keep a traceback."""
    # Commands beside training. Some leave the arguments of a run or a sweep that follows.
    if len(sys.argv) > 1 and sys.argv[1] in commands.COMMANDS:
        try:
            is_followed = commands.run(sys.argv[1], sys.argv[2:])
        except UserError as mistake:
            _fail(mistake)
        if not is_followed:
            return
    if sys.argv[1:] == ["--version"]:
        print(f"trainapp {trainapp.__version__}")  # Hydra's flag would print Hydra's version
        return

    command_line.add_import_paths(sys.argv[1:])
    sys.argv[1:] = command_line.for_hydra(sys.argv[1:])
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # make Hydra raise its errors instead of printing them
    try:
        job()
    except KeyboardInterrupt:  # before a run or a sweep hears signals
        sys.exit(130)
    except (Exception, Reported) as caught:
        error = caught.error if isinstance(caught, Reported) else caught
        user_error = _as_user_error(error)
        if wants_traceback or user_error is None:
            if error is caught:
                raise
            raise error from None
        _fail(user_error)


def _as_user_error(error: Exception) -> UserError | None:
    """Return the error of a mistake that the user can correct, also if Hydra has found it; None for all others."""
    if isinstance(error, UserError):
        return error
    message = mistakes.explain(error, sys.argv[1:])
    if message is None:
        return None
    return UserError(message)


def _fail(error: UserError) -> NoReturn:
    """Print the message of a mistake that the user can correct, without a traceback, and exit."""
    prefix = "trainapp: "
    lines = str(error).splitlines()
    indent = " " * len(prefix)
    print(prefix + f"\n{indent}".join(lines), file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
