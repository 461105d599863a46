"""The rows of a table: the trials of a sweep or the runs in a folder, ranked, and means over their seeds."""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainapp.config.resume_rules import is_of_experiment
from trainapp.errors import UserError
from trainapp.files import (
    COMMAND,
    CONFIG,
    EVALUATIONS,
    METRICS,
    OVERRIDES,
    RESULT,
    json_lines,
    json_object,
    strict_json,
)
from trainapp.report.page import Goal
from trainapp.report.run_files import state_of
from trainapp.run import directory
from trainapp.sweep.journal import JOURNAL, Journal, common_objective
from trainapp.sweep.outcome import TrialState, facts_of
from trainapp.units import flat

SEED = "train.seed"
# The states of rows beside those of trials.
NOT_BEGUN = "not begun"  # of a grid
INTERRUPTED = "interrupted"  # the sweep was killed, and the job with it
UNFINISHED = "unfinished"  # of a run in a folder
_MERGED_BY_MEAN = ("objective", "best_objective", "seconds", "steps")
_MERGED_BY_MAXIMUM = ("oom_restarts", "peak_memory_bytes")


@dataclass
class Row:
    """A run, or several that differ only in their seed."""

    name: str
    folder: Path
    settings: dict[str, str]  # those in which runs differ
    state: str  # a `TrialState`, or one of the words below; of several seeds: all of theirs
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # see `outcome.facts_of`; of a running one, from what it has logged
    error: str = ""
    identity: str = ""  # of a run in a folder: the settings that its overrides do not name, without the seed
    spread: float | None = None  # of several seeds: the standard deviation of their best values
    is_whole: bool = True  # of several seeds: whether all have finished

    @property
    def best(self) -> float | None:
        """The best value of its objective."""
        return self.facts.get("best_objective")

    @property
    def has_no_best(self) -> bool:
        """Whether no evaluation of it is better than another (`Config.has_best`): the last one counts."""
        return _has_no_best(self.facts)

    @property
    def settings_text(self) -> str:
        """The settings, as overrides."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def _has_no_best(facts: dict[str, Any]) -> bool:
    return "direction" in facts and facts["direction"] is None


def read_rows(folder: Path) -> list[Row]:
    """Return the jobs of a sweep, or the runs in a folder. Raises UserError for a folder without any."""
    if (folder / JOURNAL).exists():
        rows = read_sweep(Journal(folder, writes=False))
    else:
        rows = read_folder(folder)
    if not rows:
        raise UserError(f"{folder}: no sweep and no runs are here; name the directory of a sweep, or one with runs")
    return rows


def read_sweep(journal: Journal, is_live: bool = True) -> list[Row]:
    """Return the trials of a sweep, and the configurations of a grid that have not begun.

    Finished trials keep their result when they are trained longer.

    Args:
        journal: of the sweep.
        is_live: whether to read what the other trials have logged, and to add what has not begun.
    """
    request = journal.last_request
    names: list[str] = []  # of the swept settings
    if request:
        names = [dimension.key.lstrip("+~") for dimension in journal.space.dimensions]
    objective = common_objective(journal.facts)  # most likely also that of trials without a value so far
    sweep_folder = journal.path.parent

    # Trials that have not ended also show what they have logged since.
    rows = []
    for trial in journal.trials:
        folder = Path(trial.folder or sweep_folder / str(trial.number))
        settings = dict(zip(names, trial.values, strict=True))
        row = Row(str(trial.number), folder, settings, trial.state, trial.facts, trial.error)
        may_have_news = trial.folder and not trial.state.has_ended
        if is_live and may_have_news:
            _read_news(row, sweep_folder, objective)
        rows.append(row)

    if is_live and request and request["asked"]["sampler"] == "grid":
        rows += _rows_not_begun(journal, names)
    return rows


def _read_news(row: Row, sweep_folder: Path, objective: Goal) -> None:
    """Update the row of a trial by the files in its directory."""
    result = json_object(row.folder / RESULT)
    row.facts = row.facts | facts_of(result)
    if state_of(result) == TrialState.FINISHED:  # by hand
        row.state = TrialState.FINISHED
        return
    row.facts = _with_logged_values(row.folder, row.facts, objective)

    # If the sweep was killed, its journal still calls the job running.
    is_in_use = directory.is_in_use(row.folder) or directory.is_in_use(sweep_folder)
    if row.state == TrialState.RUNNING and not is_in_use:
        row.state = INTERRUPTED


def _rows_not_begun(journal: Journal, names: Sequence[str]) -> list[Row]:
    """Return the configurations of a grid that have no trial yet. names: of the swept settings."""
    begun = {trial.values for trial in journal.trials}
    rows = []
    for values in journal.space.grid():
        if values not in begun:
            settings = dict(zip(names, values, strict=True))
            rows.append(Row("", journal.path.parent, settings, NOT_BEGUN))
    return rows


def read_folder(folder: Path) -> list[Row]:
    """Return the runs in a folder, at any depth, with the overrides in which they differ."""
    runs = [path.parents[1] for path in sorted(folder.rglob(COMMAND))]
    overrides_by_run = {run: _read_overrides(run) for run in runs}
    shared = _overrides_of_all(overrides_by_run.values())
    results = {run: json_object(run / RESULT) for run in runs}
    objective = common_objective(results.values())

    # Runs that have not finished show what they have logged so far.
    rows = []
    for run, overrides in overrides_by_run.items():
        facts = results[run]
        state = state_of(facts)
        if state != TrialState.FINISHED:
            facts = _with_logged_values(run, facts, objective)
            if directory.is_in_use(run):
                state = TrialState.RUNNING
            elif not state:
                state = UNFINISHED
        settings = {name: value for name, value in overrides.items() if (name, value) not in shared}
        name_of_run = str(run.relative_to(folder))
        rows.append(Row(name_of_run, run, settings, state, facts, identity=_identity(run)))
    return rows


def _read_overrides(run: Path) -> dict[str, str]:
    """Return the overrides of a run, by setting."""
    overrides = {}
    for text in yaml.safe_load((run / OVERRIDES).read_text()) or []:
        name, _, value = text.lstrip("+").partition("=")
        overrides[name] = value
    return overrides


def _overrides_of_all(overrides_of_runs: Collection[dict[str, str]]) -> set[tuple[str, str]]:
    """Return the overrides that all runs have; none for a single run, whose row shows all of its own."""
    if len(overrides_of_runs) < 2:
        return set()
    items_of_runs = [set(overrides.items()) for overrides in overrides_of_runs]
    return set.intersection(*items_of_runs)


def _identity(run: Path) -> str:
    """Return what a configuration file may have changed: the settings of the experiment and its length, as JSON."""
    composed = yaml.safe_load((run / CONFIG).read_text())
    settings: dict[str, Any] = {}
    for name, value in flat(composed):
        if is_of_experiment(name) or name.startswith("train.max_"):
            settings[name] = value
    settings[SEED] = None
    return strict_json(settings)


def _with_logged_values(folder: Path, facts: dict[str, Any], objective: Goal) -> dict[str, Any]:
    """Return the facts of a run that has not finished, with what it has logged since.

    Args:
        folder: of the run.
        facts: so far.
        objective: the run's, if the facts do not tell.
    """
    logged: dict[str, Any] = {}
    lines = json_lines(folder / METRICS)
    if lines:
        logged["steps"] = max(lines[-1]["step"], facts.get("steps", 0))

    # The objective by which evaluations are compared: the run's, or that of the other runs.
    if _has_no_best(facts):
        objective = None  # that of the other runs is not this run's
    metric, direction = common_objective([facts]) or objective or ("", "")

    evaluations = [line for line in json_lines(folder / EVALUATIONS) if line.get(metric) is not None]
    if evaluations:
        choose_best = max if direction == "max" else min
        best = choose_best(evaluations, key=lambda evaluation: evaluation[metric])
        logged["metric"] = metric
        logged["direction"] = direction
        logged["objective"] = evaluations[-1][metric]
        logged["best_objective"] = best[metric]
        logged["best_step"] = best["step"]
    return facts | logged


def objective_of(rows: Sequence[Row]) -> Goal:
    """Return the objective shared by all rows that have a value; None if they differ, or none has a value."""
    return common_objective(row.facts for row in rows if row.best is not None)


def rank(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, the best first; those without a value, or of which not all seeds have finished, last.

    Rows with different objectives keep their order.
    """
    objective = objective_of(rows)
    if objective is None:
        return list(rows)
    _, direction = objective
    sign = -1 if direction == "max" else 1

    def loss(row: Row) -> float:
        return math.inf if row.best is None else sign * row.best

    return sorted(rows, key=lambda row: (not row.is_whole, loss(row)))


def merge_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return one row for runs that differ only in `train.seed`; no rows if no two do."""
    # Runs of one experiment: the same settings but for the seed.
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        settings = [(name, value) for name, value in row.settings.items() if name != SEED]
        experiment = (row.identity, *settings)
        groups.setdefault(experiment, []).append(row)

    # Runs that repeat a seed, as they may in a folder, are not merged: their mean would count it twice.
    merged: list[Row] = []
    for (_, *settings), group in groups.items():
        seeds = {row.settings.get(SEED) for row in group}
        if len(seeds) < len(group):
            merged += group
        else:
            merged.append(_merge(dict(settings), group))

    begun = [row for row in rows if row.state != NOT_BEGUN]
    merged = [row for row in merged if row.state != NOT_BEGUN]
    if len(merged) < len(begun):
        return merged
    return []  # no two runs differ in their seed alone


def _merge(settings: dict[str, str], rows: list[Row]) -> Row:
    """Return the row of runs that differ only in their seed, with means over those that have finished."""
    finished = []
    for row in rows:
        has_value = row.best is not None or row.has_no_best
        if row.state == TrialState.FINISHED and has_value:
            finished.append(row)

    # Facts other than numbers, such as the metric, are those of the first run.
    facts = dict(finished[0].facts) if finished else {}
    for name in (*_MERGED_BY_MEAN, *_MERGED_BY_MAXIMUM):
        values = [row.facts[name] for row in finished if row.facts.get(name) is not None]
        if values and name in _MERGED_BY_MAXIMUM:
            facts[name] = max(values)
        elif values:
            facts[name] = statistics.fmean(values)

    best_values = [row.best for row in finished if row.best is not None]
    spread = None
    if len(best_values) > 1:
        spread = statistics.stdev(best_values)

    names = [row.name for row in rows if row.name]
    names.sort(key=lambda name: (len(name), name))  # by number
    states = sorted({row.state for row in rows})
    return Row(
        name=",".join(names),
        folder=rows[0].folder.parent,
        settings=settings,
        state=", ".join(states),
        facts=facts,
        spread=spread,
        is_whole=len(finished) == len(rows),
    )
