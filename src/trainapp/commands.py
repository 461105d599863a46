"""The commands beside training, such as `trainapp continue DIR`. Imports no torch."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainapp.config import command_line
from trainapp.errors import UserError
from trainapp.files import CALLER, COMMAND, HYDRA, json_object
from trainapp.new import project
from trainapp.report import diff, page
from trainapp.sweep import leaderboard, rows
from trainapp.sweep.journal import JOURNAL, Journal


class Command(NamedTuple):
    """A command: what does it, and how it is used. `function` returns arguments with which a run or sweep follows."""

    function: Callable[[Sequence[str]], list[str] | None]
    usage: str


def run(name: str, arguments: Sequence[str]) -> bool:
    """Run a command. Return whether a run or sweep follows, with the arguments that it has set in `sys.argv`."""
    if "--help" in arguments or "-h" in arguments:
        print(COMMANDS[name].usage)
        return False
    try:
        next_arguments = COMMANDS[name].function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    sys.argv[1:] = next_arguments or []
    return next_arguments is not None


# Commands that a run or a sweep follows


def continue_in_directory(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that continue a sweep or a run in its directory, with changes, and go to the working
    directory that it was started in.

    Args:
        arguments: the directory of the sweep or run, and overrides that replace its own.

    Raises UserError for a directory of neither.
    """
    folder = _folder("continue", arguments)

    # How it was started.
    if (folder / JOURNAL).exists():
        directory_setting = "hydra.sweep.dir"
        request = Journal(folder, writes=False).last_request
        previous_arguments = request["command"]
        working_directory = request["cwd"]
    else:
        directory_setting = "hydra.run.dir"
        previous_arguments, working_directory = _start_of_run("continue", folder)

    _enter(working_directory)
    changed = command_line.with_changes(previous_arguments, arguments[1:])
    return [*changed, command_line.override(directory_setting, str(folder))]


def rerun(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a new run, or with -m of a sweep, from those of another run, and go to its working
    directory.

    Args:
        arguments: the directory of the other run, and overrides that replace its own. A relative hydra.run.dir is
            relative to the caller's directory.
    """
    folder = _folder("rerun", arguments)
    previous_arguments, working_directory = _start_of_run("rerun", folder)

    # Resolve paths before leaving the caller's directory.
    changes = [_with_absolute_directory(argument) for argument in arguments[1:]]
    _enter(working_directory)

    changed = command_line.with_changes(previous_arguments, changes)
    print(f"in {working_directory}: {command_line.command(changed)}", flush=True)
    return changed


def _start_of_run(command: str, folder: Path) -> tuple[list[str], str]:
    """Return the arguments that started a run, and its working directory. Raises UserError if no run is here."""
    facts = json_object(folder / COMMAND)
    if not facts:
        if (folder / JOURNAL).exists():
            problem = "a sweep is here; name one of its jobs"
        else:
            problem = "neither a sweep nor a run of the command line was started here"
        raise UserError(f"trainapp {command} {folder}: {problem}")
    return facts["arguments"], facts["cwd"]


def _with_absolute_directory(argument: str) -> str:
    """Return an override whose value is absolute, if it sets the directory of the new run or sweep."""
    name, _, value = argument.partition("=")
    if name not in ("hydra.run.dir", "hydra.sweep.dir"):
        return argument
    path = Path(value).resolve()
    return command_line.override(name, str(path))


def _enter(working_directory: str) -> None:
    """Go to the directory in which a run or sweep was started; messages still show paths for the caller's directory."""
    os.environ.setdefault(CALLER, os.getcwd())
    try:
        os.chdir(working_directory)
    except OSError as error:
        problem = f"it was started in this directory, which is gone ({error.strerror})"
        raise UserError(f"{working_directory}: {problem}") from None


# Commands that show something


def show_leaderboard(arguments: Sequence[str]) -> None:
    """Print the table of a sweep or of a folder of runs."""
    if arguments[1:]:
        raise UserError(f"trainapp leaderboard {' '.join(arguments)}: give one directory")
    leaderboard.show(_folder("leaderboard", arguments))


def write_report(arguments: Sequence[str]) -> None:
    """Write the page of a run or a sweep into its directory, or that of several runs over each other here."""
    first_folder = _folder("report", arguments)
    other_folders = [_folder("report", [argument]) for argument in arguments[1:]]

    # The page of several runs belongs to none of their directories.
    directory_of_page = Path.cwd() if other_folders else first_folder
    path = directory_of_page / page.NAME
    is_run = (first_folder / HYDRA).exists()
    try:
        if other_folders or is_run:
            page.write_runs([first_folder, *other_folders], path)
        else:
            leaderboard.write_page(first_folder, rows.read_rows(first_folder))
    except OSError as error:
        raise UserError(f"trainapp report: {path} cannot be written: {error.strerror}") from None
    print(path)


def show_difference(arguments: Sequence[str]) -> NoReturn:
    """Print what differs between two runs, and exit with the code that says whether something does."""
    parser = _DiffParser(allow_abbrev=False, add_help=False)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--step", type=_step)
    parsed = parser.parse_args(arguments)
    if len(parsed.runs) != 2:
        parser.error("give the directories of two runs")
    run_a, run_b = [_folder("diff", [run]) for run in parsed.runs]
    code = diff.show(run_a, run_b, parsed.step)
    sys.stdout.flush()
    sys.exit(code)


class _DiffParser(argparse.ArgumentParser):
    """The arguments of `trainapp diff`."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError, as for mistakes elsewhere."""
        usage = _DIFF_USAGE.partition(":")[0]
        raise UserError(f"trainapp diff: {message}; usage: {usage}")


def _step(text: str) -> int | str:
    """Return a step, or "best". Raises ArgumentTypeError for anything else."""
    if text == "best":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be the step of a checkpoint, or best")
    return int(text)


def _folder(command: str, arguments: Sequence[str]) -> Path:
    """Return the directory that is a command's first argument. Raises UserError if there is none."""
    if not arguments or arguments[0].startswith("-"):
        kind = "run" if command == "rerun" else "sweep or a run"
        raise UserError(f"trainapp {command}: give the directory of a {kind}")
    folder = Path(arguments[0]).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"trainapp {command} {arguments[0]}: there is no such directory")
    return folder


_DIFF_USAGE = (
    "trainapp diff RUN_A RUN_B [--step N|best]: prints the settings, logged values and weights (of the newest "
    "checkpoints, or of step N, with what was logged until then) in which two runs differ; exits with 0 if what they "
    "logged and their weights are identical bit for bit, 1 if not, 2 if they cannot be compared"
)

COMMANDS = {
    "new": Command(project.command, project.USAGE),
    "continue": Command(
        continue_in_directory,
        "trainapp continue DIR [SETTING=VALUE ...]: continues a sweep or a run in its directory, with changed settings",
    ),
    "rerun": Command(
        rerun,
        "trainapp rerun RUN [SETTING=VALUE ...]: starts a new run, or with -m a sweep, from the overrides of another, "
        "with changed settings",
    ),
    "leaderboard": Command(
        show_leaderboard,
        "trainapp leaderboard DIR: prints the table of a sweep, also while it runs, or of a folder of runs",
    ),
    "report": Command(
        write_report,
        "trainapp report DIR [DIR ...]: writes report.html, the page of a run or a sweep, into its directory, or that "
        "of several runs over each other here",
    ),
    "diff": Command(show_difference, _DIFF_USAGE),
}
