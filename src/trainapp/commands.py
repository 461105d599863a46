"""The commands beside training, such as `trainapp continue DIR`. Imports no torch."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainapp.config.command_line import command, override, with_changes
from trainapp.errors import UserError
from trainapp.files import CALLER, json_object
from trainapp.launch.launch import COMMAND
from trainapp.new import project
from trainapp.report import diff, page
from trainapp.sweep import leaderboard, rows, tables
from trainapp.sweep.journal import JOURNAL, Journal


def resumed(arguments: Sequence[str]) -> list[str]:
    """The arguments that continue a sweep or a run in its directory, with the given overrides in place of its own; in
    the working directory that it was started in. Raises UserError for a directory of neither.
    """
    folder = _folder("continue", arguments)
    if (folder / JOURNAL).exists():
        asked, name = Journal(folder, writes=False).last_request, "hydra.sweep.dir"
        given = _entered(asked["command"], asked["cwd"], arguments[1:])
    else:
        given, name = _entered(*_of_run("continue", folder), arguments[1:]), "hydra.run.dir"
    return [*given, override(name, str(folder))]


def rerun(arguments: Sequence[str]) -> list[str]:
    """The arguments of a new run, or with -m of a sweep, from those of a run, some changed. A relative hydra.run.dir is
    the caller's.
    """
    own = _of_run("rerun", _folder("rerun", arguments))
    changes = [text.partition("=") for text in arguments[1:]]
    folders = ("hydra.run.dir", "hydra.sweep.dir")
    given = _entered(*own, [override(n, str(Path(v).resolve())) if n in folders else n + s + v for n, s, v in changes])
    print(f"in {own[1]}: {command(given)}", flush=True)
    return given


def _of_run(name: str, folder: Path) -> tuple[list[str], str]:
    """The arguments that started a run, and its working directory."""
    if not (facts := json_object(folder / COMMAND)):
        neither = "neither a sweep nor a run of the command line was started here"
        why = "a sweep is here; name one of its jobs" if (folder / JOURNAL).exists() else neither
        raise UserError(f"trainapp {name} {folder}: {why}")
    return facts["arguments"], facts["cwd"]


def _entered(given: Sequence[str], cwd: str, changes: Sequence[str]) -> list[str]:
    """Go to the working directory. The arguments, with changes."""
    os.environ.setdefault(CALLER, os.getcwd())
    try:
        os.chdir(cwd)
    except OSError as error:
        raise UserError(f"{cwd}: it was started in this directory, which is gone ({error.strerror})") from None
    return with_changes(given, changes)


def show_leaderboard(arguments: Sequence[str]) -> None:
    """Print the table of a sweep or of a folder of runs."""
    if arguments[1:]:
        raise UserError(f"trainapp leaderboard {' '.join(arguments)}: give one directory")
    leaderboard.show(_folder("leaderboard", arguments))


def write_report(arguments: Sequence[str]) -> None:
    """Write the page of a run or a sweep into its directory, or that of several runs over each other here."""
    folders = [_folder("report", [argument]) for argument in arguments] or [_folder("report", [])]
    path = (folders[0] if len(folders) == 1 else Path.cwd()) / page.NAME
    try:
        if len(folders) == 1 and not (path.parent / ".hydra").exists():
            tables.write_page(path.parent, rows.read_rows(path.parent))
        else:
            page.write_runs(folders, path)
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
    run_a, run_b = (_folder("diff", [run]) for run in parsed.runs)
    code = diff.show(run_a, run_b, parsed.step)
    sys.stdout.flush()
    sys.exit(code)


class _DiffParser(argparse.ArgumentParser):
    """The arguments of `trainapp diff`."""

    def error(self, message: str) -> NoReturn:
        """Raise a mistake as elsewhere."""
        raise UserError(f"trainapp diff: {message}; usage: {_DIFF.partition(':')[0]}")


def _step(text: str) -> int | str:
    """Return a step, or "best". Raises a mistake for anything else."""
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be the step of a checkpoint, or best")
    return text if text == "best" else int(text)


def _folder(name: str, arguments: Sequence[str]) -> Path:
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"trainapp {name}: give the directory of a {'run' if name == 'rerun' else 'sweep or a run'}")
    folder = Path(arguments[0]).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"trainapp {name} {arguments[0]}: there is no such directory")
    return folder


_DIFF = (
    "trainapp diff RUN_A RUN_B [--step N|best]: prints the settings, logged values and weights (of the newest "
    "checkpoints, or of step N, with what was logged until then) in which two runs differ; exits with 0 if what they "
    "logged and their weights are identical bit for bit, 1 if not, 2 if they cannot be compared"
)


class Command(NamedTuple):
    """A command: what does it, and how it is used. `function` returns arguments with which a run or sweep follows."""

    function: Callable[[Sequence[str]], list[str] | None]
    usage: str


COMMANDS = {
    "new": Command(project.command, project.USAGE),
    "continue": Command(
        resumed,
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
    "diff": Command(show_difference, _DIFF),
}


def run(name: str, arguments: Sequence[str]) -> bool:
    """Do a command. Returns whether a run or sweep follows, with the arguments that it has set in `sys.argv`."""
    if {"--help", "-h"} & {*arguments}:
        print(COMMANDS[name].usage)
        return False
    try:
        further = COMMANDS[name].function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    sys.argv[1:] = further or []
    return further is not None
