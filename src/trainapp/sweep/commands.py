"""`trainapp continue DIR`, `leaderboard DIR`, `report DIR...` and `rerun RUN`, and the table of Hydra's other sweepers.
Imports no torch.
"""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.config import command_line
from trainapp.errors import UserError
from trainapp.launch.launch import COMMAND
from trainapp.report import page
from trainapp.sweep import leaderboard
from trainapp.sweep.journal import NAME, Journal

_SWEEPER = "hydra_plugins.trainapp_sweeper.TrainappSweeper"


def resumed(arguments: Sequence[str]) -> list[str]:
    """The arguments that continue a sweep or a run in its directory, with the given overrides added; in the working
    directory that it was started in. Raises UserError for a directory of neither.
    """
    folder = _folder("continue", arguments)
    if (folder / NAME).exists():
        first = Journal(folder, writes=False).asked
        os.chdir(first["cwd"])
        return [*with_changes(first["command"], arguments[1:]), command_line.override("hydra.sweep.dir", str(folder))]
    given, cwd = _of_run("continue", folder)
    os.chdir(cwd)
    return [*with_changes(given, arguments[1:]), command_line.override("hydra.run.dir", str(folder))]


def rerun(arguments: Sequence[str]) -> list[str]:
    """The arguments of a new run from those of another, with the given overrides in place of its own."""
    given, cwd = _of_run("rerun", _folder("rerun", arguments))
    os.chdir(cwd)
    return with_changes(given, arguments[1:])


def show_leaderboard(arguments: Sequence[str]) -> None:
    """Print the table of a sweep or of a folder of runs."""
    leaderboard.show(_folder("leaderboard", arguments))


def write_report(arguments: Sequence[str]) -> None:
    """Write the page of a run or a sweep into its directory, or that of several runs over each other here."""
    folders = [_folder("report", [argument]) for argument in arguments] or [_folder("report", [])]
    path = (folders[0] if len(folders) == 1 else Path.cwd()) / page.NAME
    try:
        if len(folders) == 1 and not (path.parent / ".hydra").exists():
            leaderboard.write_page(path.parent)
        else:
            page.write_runs(folders, path)
    except OSError as error:
        raise UserError(f"trainapp report: {path} cannot be written: {error.strerror}") from None
    print(path)


COMMANDS: dict[str, Callable[[Sequence[str]], list[str] | None]] = {
    "continue": resumed,
    "rerun": rerun,
    "leaderboard": show_leaderboard,
    "report": write_report,
}


def with_changes(given: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Overrides of which the later one of a setting, or of a group's option, counts."""
    changed = {_key(text) for text in changes}
    return [*(text for text in given if _key(text) not in changed), *changes]


def _key(text: str) -> str:
    return text if text.startswith("-") else text.lstrip("+~").partition("=")[0]


def _folder(name: str, arguments: Sequence[str]) -> Path:
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"trainapp {name}: give the directory of a {'run' if name == 'rerun' else 'sweep or a run'}")
    folder = Path(arguments[0]).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"trainapp {name} {arguments[0]}: there is no such directory")
    return folder


def _of_run(name: str, folder: Path) -> tuple[list[str], str]:
    """The arguments that started a run, and its working directory."""
    path = folder / COMMAND
    if not path.exists():
        raise UserError(f"trainapp {name} {folder}: neither a sweep nor a run of the command line was started here")
    facts = json.loads(path.read_text())
    return facts["arguments"], facts["cwd"]


def run(name: str, arguments: Sequence[str]) -> bool:
    """Do a command. Returns whether the program goes on, with the arguments that it has set in `sys.argv`."""
    further = COMMANDS[name](arguments)
    sys.argv[1:] = further or []
    return further is not None


class TableAtEnd(Callback):
    """Prints the table; through `atexit`, since Hydra skips `on_multirun_end` after a failed job or a signal."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None and config.hydra.sweeper._target_ != _SWEEPER:
            atexit.register(_show, Path(str(folder)).resolve())


def _show(folder: Path) -> None:
    with contextlib.suppress(UserError):  # no job has begun
        leaderboard.show(folder)
