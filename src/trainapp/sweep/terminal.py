"""What a sweep shows on the terminal: lines about its jobs, a line of progress, and the table of the leaderboard."""

import shlex
import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.config.schema import Config, Sweep
from trainapp.files import CHECKPOINTS, COMMAND, CONFIG, checkpoint_name, json_object, shown
from trainapp.report import page
from trainapp.signals import TIME_IS_UP, how_to_quit, named
from trainapp.sweep import rows, samplers
from trainapp.sweep.composing import ComposedJob
from trainapp.sweep.jobs import RunningJobs
from trainapp.sweep.journal import Journal, Trial, common_objective
from trainapp.sweep.outcome import CONSOLE_LOG, TrialState
from trainapp.sweep.rows import SEED, Row, objective_of, rank
from trainapp.sweep.slots import Slot
from trainapp.sweep.trial_queue import TrialQueue
from trainapp.tracking.terminal import is_live
from trainapp.units import listed, plural

_SHOW_EVERY = 1.0  # seconds between two lines of progress
_STATES_OF_PROGRESS = (TrialState.FINISHED, TrialState.RUNNING, TrialState.PAUSED, TrialState.FAILED)
_FEWEST_CHARACTERS = 20  # for the settings beside the other columns; with fewer they are lines of their own
_INDENT_BELOW = 4  # of those lines


class SweepTerminal:
    """What a sweep prints: its size at the start, a line per start and end of a job, progress, the table at its end."""

    def __init__(self, settings: Sweep, journal: Journal, queue: TrialQueue, running: RunningJobs, config: Config):
        """Prepare the line of progress.

        Args:
            settings: of the sweep.
            journal: of the sweep.
            queue: its trials.
            running: its running jobs.
            config: of the first job.
        """
        self.settings = settings
        self.journal = journal
        self.folder = journal.path.parent
        self.queue = queue
        self.running = running
        self.config = config
        self._progress_line = tqdm(bar_format="{desc}", disable=not is_live())
        self._shown_at = 0.0

    def close(self) -> None:
        """Leave the line of progress."""
        self._progress_line.close()

    def print_line(self, text: str) -> None:
        """Print a line, above the line of progress if there is one."""
        if self._progress_line.disable:
            print(text, flush=True)
        else:
            tqdm.write(text)

    @property
    def how_to_continue(self) -> str:
        """The command that continues the sweep, for a message."""
        return f"Continue with:\n  python -m trainapp continue {shown(self.folder)}"

    def print_opening(self) -> None:
        """Print what the sweep has to do, and what it has done."""
        # What there is to do: how many jobs, how many at a time, with which memory, where.
        parts = [f"sweep of {plural(self.queue.count, 'job')}", self._concurrency()]
        if not self.running.packs:
            memory_overrides = self.running.slots[0].memory_overrides(self.config)
            parts += [f"each with {override}" for override in memory_overrides]
        parts.append(f"in {shown(self.folder)}")
        text = ", ".join(parts)

        # What an earlier process of the sweep has done.
        for state, count in self.queue.states.items():
            text += f"; {count} {state}"
        print(text)

        dimensions = [f"  {dimension.key}: {dimension}" for dimension in self.queue.space.dimensions]
        print("\n".join(dimensions), flush=True)

    def _concurrency(self) -> str:
        """Return how many jobs run at a time, for a message."""
        slot_count = len(self.running.slots)
        number = slot_count if slot_count > 1 else "one"
        text = f"{number} at a time"
        if self.running.packs:
            text = f"at most {text}"
        return text

    def announce_start(self, trial: Trial, job: ComposedJob, slot: Slot) -> None:
        """Print that a job starts or continues, where, and with which settings."""
        verb = "continues" if (job.folder / CHECKPOINTS).exists() else "starts"
        text = f"job {trial.number} {verb}"
        if str(slot):
            text += f" on {slot}"
        swept_overrides = self.queue.space.swept_overrides(trial.values)
        if swept_overrides:
            text += f": {' '.join(swept_overrides).replace('+', '')}"
        self.print_line(text)

    def announce_end(self, trial: Trial) -> None:
        """Print how a trial has ended."""
        facts = trial.facts
        text = f"job {trial.number} {trial.state}"
        if trial.state in (TrialState.PAUSED, TrialState.STOPPED) and "steps" in facts:
            text += f" at step {facts['steps']}"
        best = facts.get("best_objective")
        if best is not None:
            text += f", best {facts['metric']} {best:.4g} at step {facts['best_step']}"

        # A job that could not start has no output.
        if trial.error:
            text += f": {trial.error}"
            log = Path(trial.folder) / CONSOLE_LOG
            if trial.folder and log.exists():
                text += f"; see {shown(log)}"
        self.print_line(text)

    def show_progress(self) -> None:
        """Show the numbers of jobs by state, and the best value, on the terminal's last line."""
        if self._progress_line.disable or time.monotonic() - self._shown_at < _SHOW_EVERY:
            return
        self._shown_at = time.monotonic()
        states = self.queue.states
        counts = [f"{states[state]} {state}" for state in _STATES_OF_PROGRESS if states[state]]
        text = f"{', '.join(counts)} of {self.queue.count}"

        # From the journal alone: the logs of all jobs would take long to read.
        trial_rows = rows.read_sweep(self.journal, is_live=False)
        best = best_text(trial_rows)
        if best:
            text += f"; best {best}"
        self._progress_line.set_description_str(text)

    def announce_stop(self, reason: int) -> None:
        """Print that the sweep stops, and what its jobs do. With a launcher it has left at once.

        reason: the signal, or TIME_IS_UP.
        """
        consequence = "the running jobs save and end"
        if reason == TIME_IS_UP:
            self.print_line(f"sweep.max_time: {consequence}")
        else:
            self.print_line(f"{named(reason)}: {consequence}; {how_to_quit(reason)}")

    def print_closing(self) -> None:
        """Print why jobs are left, and how to run them."""
        states = self.queue.states
        failed_count = states[TrialState.FAILED]
        paused_count = states[TrialState.PAUSED]
        if self.queue.has_failed_often:
            print(f"sweep.max_failures={self.settings.max_failures}: no more jobs were started")
        if failed_count:
            print(f"{failed_count} failed; sweep.retry_failed=true runs them again when the sweep is continued")
        if paused_count:
            print(f"{paused_count} paused; `trainapp continue {shown(self.folder)}/NUMBER` trains one to its end")
        count_not_begun = self.queue.count - len(self.queue.trials)
        if count_not_begun > 0 and self.settings.sampler != "grid":
            text = f"{count_not_begun} jobs have not begun"
            if self.queue.is_exhausted:
                text = f"sweep.sampler: found no other configuration, and {text}"
            print(text)


def best_text(rows: Sequence[Row]) -> str:
    """Return the best value so far, for a line of progress; empty if there is none."""
    ranked = rank(rows)
    if not ranked or ranked[0].best is None:
        return ""
    best = ranked[0]
    return f"{best.facts['metric']} {best.best:.4g} (job {best.name})"


# The table of the leaderboard


def print_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print columns of equal width, within the terminal's: what is the same in all rows is one line above, and the last
    column is wrapped, beside the others or below.
    """
    terminal_width = shutil.get_terminal_size((80, 24)).columns

    # What is the same in all rows.
    other_columns = [line[:-1] for line in cells]
    note, names, rows = page.without_constant(header[:-1], other_columns, first=3)
    if note:
        print(f"all: {note}")

    # The header is the first line; an empty last column has none.
    lines = [names, *rows]
    last_column = [line[-1] for line in cells]
    last_header = header[-1] if any(last_column) else ""
    last_column.insert(0, last_header)

    # Where the last column begins.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    is_beside = terminal_width - indent >= _FEWEST_CHARACTERS
    if not is_beside:
        indent = _INDENT_BELOW

    for line, last_cell in zip(lines, last_column, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        wrapped = textwrap.wrap(last_cell, terminal_width - indent, break_on_hyphens=False)
        if is_beside and wrapped:
            padded.append(wrapped.pop(0))
        print("  ".join(padded).rstrip(), flush=True)
        for text in wrapped:
            print(" " * indent + text, flush=True)


def print_importance(journal: Journal) -> None:
    """Print which settings matter, if Optuna is installed."""
    _, direction = common_objective(journal.facts) or ("", "")
    shares = samplers.importances(journal.space, journal.trials, direction)
    shares.pop(SEED, None)
    if len(shares) < 2:
        return
    texts = []
    for key, share in shares.items():
        setting = key.lstrip("+~")
        texts.append(f"{setting} {share:.2f}")
    print(f"importance: {', '.join(texts)}")


def print_notes(runs: Sequence[Row], ranked: Sequence[Row]) -> None:
    """Print what has not begun, what has failed, and why jobs are not ranked.

    Args:
        runs: all.
        ranked: those that have begun, ranked.
    """
    not_begun = [row.settings_text for row in runs if not row.name]
    if not_begun:
        print(f"{len(not_begun)} jobs have not begun: {listed(not_begun)}")

    # Each error once, with the jobs that have it.
    names_by_error: dict[str, list[str]] = {}
    for row in ranked:
        if row.error:
            names_by_error.setdefault(row.error, []).append(row.name)
    for error, names in names_by_error.items():
        print(f"{listed(names, 9)}: {error}")

    # Why the table has no ranks.
    has_values = any(row.best is not None for row in ranked)
    if has_values and objective_of(ranked) is None:
        print("not ranked: their objectives differ")
    without_best = [row.name for row in ranked if row.has_no_best]
    if without_best:
        print(f"not ranked: {listed(without_best)}: {NO_BEST}; {SET_OBJECTIVE}")


def print_commands(ranked: Sequence[Row]) -> None:
    """Print the commands that train the best run longer, evaluate and export it."""
    best = ranked[0]
    if objective_of(ranked) is None or not (best.folder / COMMAND).exists():
        return
    text = f"best: job {best.name}, {best.facts['metric']} {best.best:.6g}"
    if best.settings:
        text += f"; {best.settings_text}"
    print(text)
    config = yaml.safe_load((best.folder / CONFIG).read_text())
    _print_longer_command(best, config)

    best_step = best.facts.get("best_step") or 0
    checkpoint = best.folder / CHECKPOINTS / checkpoint_name(best_step)
    if not checkpoint.exists():
        return

    # The run's flags and packages decide what is composed and which classes may be built.
    arguments_of_run = json_object(best.folder / COMMAND)["arguments"]
    flags = [shlex.quote(argument) for argument in arguments_of_run if argument.startswith("--")]
    packages = config.get("user_packages")
    for title, mode in (("evaluate it", "eval"), ("export it", "export")):
        arguments = [*flags, f"mode={mode}", f"checkpointing.resume={shown(checkpoint)}"]
        if packages:
            package_list = ",".join(packages)
            arguments.append(f"'user_packages=[{package_list}]'")
        print(f"  {title:<16}  python -m trainapp {' '.join(arguments)}")


def _print_longer_command(best: Row, config: dict[str, Any]) -> None:
    """Print the command that trains the best run longer, if it has ended by its number of steps or epochs."""
    ended_by = best.facts.get("ended") or ""  # such as train.max_steps=100
    setting = ended_by.partition("=")[0].removeprefix("train.")
    if setting not in ("max_steps", "max_epochs"):
        return
    other_setting = "max_epochs" if setting == "max_steps" else "max_steps"
    command = f"python -m trainapp continue {shown(best.folder)} train.{setting}=N"
    settings_of_train = config.get("train", {})
    if settings_of_train.get(other_setting) is not None:  # else it would end the run as before
        command += f" train.{other_setting}=null"
    print(f"  train it longer   {command}")
