"""The entry point: Hydra composes the configuration, `reading` checks it, `launch` runs it.

Torch is not imported here, so that --help, --cfg and TAB stay fast.
"""

import logging
import os
import re
import shlex
import sys
import traceback
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainapp.config import compose, hydra_errors
from trainapp.config.compose import CONF
from trainapp.errors import UserError
from trainapp.launch import environment, run_name

OmegaConf.register_new_resolver("run_name", run_name.of_this_process, use_cache=True, replace=True)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(composed: DictConfig) -> float | None:
    """One run, or one job of a sweep. Returns the objective, for Hydra's optimizing sweepers."""
    hydra_config = HydraConfig.get()
    run_dir = str(Path(hydra_config.runtime.output_dir).resolve())
    try:
        if _is_sweep(hydra_config) and environment.is_one_of_many() and not environment.runs_sweep():
            raise UserError(
                "a multirun inside torchrun or srun would run on every rank: start it as `python -m trainapp -m "
                "parallel.devices=N ...`, which starts the workers of each job itself"
            )
        settings = compose.from_hydra(composed, run_dir, _command(hydra_config, run_dir))
        from trainapp.launch import launch  # late: it brings torch

        return launch.launch(settings)
    except Exception as error:
        if _is_sweep(hydra_config):
            _log_failure(error)  # Hydra shows only the first failed job's error and leaves its log empty
        elif isinstance(error, UserError):
            raise _Reported(error) from None  # past Hydra, which would print a line of its own before it
        raise


class _Reported(SystemExit):
    """Carries a user's mistake through Hydra, which prints whatever is an Exception."""

    def __init__(self, error: UserError):
        super().__init__(error.exit_code)
        self.error = error


def _command(hydra_config: DictConfig, run_dir: str) -> str:
    """The command that continues this run: the same overrides, in the same directory."""
    given = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # one may hold an interpolation
    overrides = [text for text in given if not text.startswith("checkpointing.resume=")]
    directories = [f"--config-dir {shlex.quote(folder)}" for folder in _config_directories(hydra_config)]
    return shlex.join(["python", "-m", "trainapp"]) + "".join(
        f" {part}"
        for part in [
            *directories,
            *(shlex.quote(text) for text in overrides),
            shlex.quote(f"hydra.run.dir={_quoted(run_dir)}"),
        ]
    )


def _quoted(value: str) -> str:
    """As Hydra's grammar wants it: quotes around what it would not read as one plain word."""
    if re.fullmatch(r"[\w/.:+-]+", value):
        return value
    return "'" + value.replace("'", "\\'") + "'"


def _config_directories(hydra_config: DictConfig) -> list[str]:
    return [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]


def _is_sweep(hydra_config: DictConfig) -> bool:
    return hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN"


def _log_failure(error: Exception) -> None:
    if isinstance(error, UserError):
        logging.getLogger(__name__).error("%s", error)
    else:
        logging.getLogger(__name__).exception("This job failed; the sweep goes on.")


def _importable(arguments: list[str]) -> None:
    """The user's own modules are found in the working directory and beside their --config-dir.

    `python -m` puts the working directory on the path and a console script does not: both are alike after this.
    """
    folders = [os.getcwd()]
    for position, argument in enumerate(arguments):
        if argument in ("--config-dir", "-cd") and position + 1 < len(arguments):
            folders.append(os.path.abspath(arguments[position + 1]))
        elif argument.startswith("--config-dir="):
            folders.append(os.path.abspath(argument.partition("=")[2]))
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _no_name(arguments: list[str]) -> str:
    """`precision=16: `, where that is among the arguments; nothing otherwise."""
    for argument in arguments:
        group, _, option = argument.partition("=")
        if (CONF / group.lstrip("+~")).is_dir() and not isinstance(yaml.safe_load(option), str | list):
            return f"{argument}: "
    return ""


def _inside_job(error: Exception) -> bool:
    """Whether it comes from a run, and not from Hydra's preparations for one."""
    return any(
        frame.filename == __file__ and frame.name == "job" for frame in traceback.extract_tb(error.__traceback__)
    )


def main() -> None:
    """Runs the command line; a user's mistake ends with one message and exit code 2, a fault keeps its trace."""
    _importable(sys.argv[1:])
    wants_traces = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors to us instead of printing them its own way
    try:
        job()
    except (_Reported, UserError) as reported:
        error = reported.error if isinstance(reported, _Reported) else reported
        if wants_traces:
            raise error from None
        hydra_errors.fail(str(error))
        sys.exit(error.exit_code)
    except ValueError as error:  # Hydra's own, for `precision=16`
        if wants_traces or not str(error).startswith("Config group override"):
            raise
        hydra_errors.fail(f"{_no_name(sys.argv[1:])}an option is chosen by its name; `trainapp --help` lists them")
        sys.exit(2)
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traces:
            raise
        hydra_errors.fail(
            hydra_errors.explain_hydra(error, (folder.name for folder in CONF.iterdir() if folder.is_dir()))
        )
        sys.exit(2)
    except OSError as error:
        if wants_traces or _inside_job(error):
            raise
        hydra_errors.fail(
            f"{error.filename}: {error.strerror}; hydra.run.dir or hydra.sweep.dir must name a folder of yours"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
