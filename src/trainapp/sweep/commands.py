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
    """The arguments that continue a sweep or a run in its directory, with the given overrides in place of its own; in
    the working directory that it was started in. Raises UserError for a directory of neither.
    """
    folder = _folder("continue", arguments)
    if (folder / NAME).exists():
        asked = Journal(folder, writes=False).asked
        given, name = _in_place(asked["command"], asked["cwd"], arguments), "hydra.sweep.dir"
    else:
        given, name = _in_place(*_of_run("continue", folder), arguments), "hydra.run.dir"
    return [*given, command_line.override(name, str(folder))]


def rerun(arguments: Sequence[str]) -> list[str]:
    """The arguments of a new run, or with -m of a sweep, from those of a run, some changed. A relative hydra.run.dir is
    the caller's.
    """
    absolute = [
        command_line.override(name, str(Path(value).resolve()))
        if name in ("hydra.run.dir", "hydra.sweep.dir")
        else text
        for text, (name, _, value) in ((text, text.partition("=")) for text in arguments)
    ]
    return _in_place(*_of_run("rerun", _folder("rerun", arguments)), absolute)


def _in_place(given: Sequence[str], cwd: str, arguments: Sequence[str]) -> list[str]:
    """Go to the working directory. The arguments, with the changes that follow the first of the command's."""
    try:
        os.chdir(cwd)
    except OSError as error:
        raise UserError(f"{cwd}: it was started in this directory, which is gone ({error.strerror})") from None
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
    """Overrides in which the later one of a setting, or of a group's option, takes the earlier one's place; flags come
    first. A group's own class goes with its settings (see `command_line.for_hydra`) where another option is chosen.
    """
    found = {_key(text): text for text in given}
    for text in changes:
        key = _key(text)
        own = [name for name, old in found.items() if old.startswith(f"++{key}.") or old == f"~{key}"]
        for name in own if "=" in text and not text.startswith("~") else ():
            del found[name]
        found[key] = text
    return sorted(found.values(), key=lambda text: not text.startswith("-"))


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
    if arguments[1:] and name == "leaderboard":
        raise UserError(f"trainapp leaderboard {' '.join(arguments)}: give one directory")
    try:
        further = COMMANDS[name](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
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
