"""The rows of a table: the trials of a sweep or the runs in a folder, ranked, and means over their seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainapp.config.resume_rules import is_of_experiment
from trainapp.errors import UserError
from trainapp.files import json_lines, json_object, strict_json
from trainapp.launch.launch import COMMAND
from trainapp.report.page import Goal
from trainapp.report.run_files import state_of
from trainapp.run import run_dir
from trainapp.sweep.jobs import RESULT
from trainapp.sweep.journal import JOURNAL, Journal, common_objective, facts_of
from trainapp.units import flat

SEED, NOT_BEGUN = "train.seed", "not begun"


@dataclass
class Row:
    """A run. settings: those in which runs differ. facts: see `facts_of`; of one that runs, of what it has logged.

    identity: of a run in a folder, the settings that its overrides do not tell, but for its seed.
    spread, is_whole: of a row for several seeds, the standard deviation of their best values, and whether all have
    finished.
    """

    name: str
    folder: Path
    settings: dict[str, str]
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    identity: str = ""
    spread: float | None = None
    is_whole: bool = True

    @property
    def best(self) -> float | None:
        """The best value of its objective."""
        return self.facts.get("best_objective")

    @property
    def has_no_best(self) -> bool:
        """Whether no evaluation of it is better than another (`Config.has_best`): the last one counts."""
        return _has_no_best(self.facts)

    @property
    def swept(self) -> str:
        """The settings, as overrides."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def _has_no_best(facts: dict[str, Any]) -> bool:
    return "direction" in facts and facts["direction"] is None


def of_sweep(journal: Journal, is_live: bool = True) -> list[Row]:
    """The trials of a sweep, and what a grid has left to begin. Finished ones keep their result when they are trained
    longer. is_live: read what the others have logged.
    """
    keys = [of.key.lstrip("+~") for of in journal.space.dimensions] if journal.last_request else []
    goal, rows = common_objective(journal.facts), []  # most likely also of those that have not said
    for trial in journal.trials:
        folder, facts, state = Path(trial.folder or journal.path.parent / str(trial.number)), trial.facts, trial.state
        if is_live and trial.folder and state not in ("finished", "failed", "infeasible"):
            result = json_object(folder / RESULT)
            facts = facts | facts_of(result)
            if state_of(result) == "finished":
                state = "finished"  # by hand
            else:
                facts = _so_far(folder, facts, goal)
            if state == "running" and not (run_dir.is_in_use(folder) or run_dir.is_in_use(journal.path.parent)):
                state = "interrupted"
        settings = dict(zip(keys, trial.values, strict=True))
        rows.append(Row(str(trial.number), folder, settings, state, facts, trial.error))
    if is_live and journal.last_request and journal.last_request["asked"]["sampler"] == "grid":
        known = {trial.values for trial in journal.trials}
        left = (dict(zip(keys, values, strict=True)) for values in journal.space.grid() if values not in known)
        rows += [Row("", journal.path.parent, settings, NOT_BEGUN) for settings in left]
    return rows


def of_folder(folder: Path) -> list[Row]:
    """The runs in a folder, at any depth, with the overrides in which they differ."""
    found = {}
    for path in sorted(folder.rglob(COMMAND)):
        given = yaml.safe_load((path.parent / "overrides.yaml").read_text()) or []
        found[path.parents[1]] = dict(text.lstrip("+").partition("=")[::2] for text in given)
    common = set.intersection(*(set(own.items()) for own in found.values())) if len(found) > 1 else set()
    results = {own: json_object(own / RESULT) for own in found}
    goal, rows = common_objective(results.values()), []
    for own, given in found.items():
        facts, state = results[own], state_of(results[own])
        if state != "finished":
            facts, state = _so_far(own, facts, goal), "running" if run_dir.is_in_use(own) else state or "unfinished"
        settings = {name: value for name, value in given.items() if (name, value) not in common}
        rows.append(Row(str(own.relative_to(folder)), own, settings, state, facts, identity=_identity(own)))
    return rows


def _identity(folder: Path) -> str:
    """What a configuration file may have changed: the settings of the experiment and its length."""
    config = flat(yaml.safe_load((folder / ".hydra/config.yaml").read_text()))
    kept = {name: value for name, value in config if is_of_experiment(name) or name.startswith("train.max_")}
    return strict_json(kept | {SEED: None})


def _so_far(folder: Path, facts: dict[str, Any], goal: Goal) -> dict[str, Any]:
    """The facts of a run that has not finished, with what it has logged since. goal: if the facts do not tell."""
    found: dict[str, Any] = {}
    if lines := json_lines(folder / "metrics.jsonl"):
        found["steps"] = max(lines[-1]["step"], facts.get("steps", 0))
    if _has_no_best(facts):
        goal = None  # that of the other runs is not its own
    metric, direction = common_objective([facts]) or goal or ("", "")
    evaluations = json_lines(folder / "evaluations.jsonl")
    if logged := [(own[metric], own["step"]) for own in evaluations if own.get(metric) is not None]:
        best, step = (max if direction == "max" else min)(logged, key=lambda own: own[0])
        found |= {"metric": metric, "direction": direction, "objective": logged[-1][0]}
        found |= {"best_objective": best, "best_step": step}
    return facts | found


def found_in(folder: Path) -> list[Row]:
    """The jobs of a sweep, or the runs in a folder. Raises UserError for a folder without any."""
    rows = of_sweep(Journal(folder, writes=False)) if (folder / JOURNAL).exists() else of_folder(folder)
    if not rows:
        raise UserError(f"{folder}: no sweep and no runs are here; name the directory of a sweep, or one with runs")
    return rows


def goal_of(rows: Sequence[Row]) -> Goal:
    """By which all rows with a value are compared; None if they differ, or none has one."""
    return common_objective(row.facts for row in rows if row.best is not None)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The best first; those without a value, or of which not all seeds have finished, last. Rows with different
    objectives keep their order.
    """
    if (goal := goal_of(rows)) is None:
        return list(rows)
    sign = -1 if goal[1] == "max" else 1
    return sorted(rows, key=lambda row: (not row.is_whole, math.inf if row.best is None else sign * row.best))


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for runs that differ only in `train.seed`; none if no two do."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        others = {name: value for name, value in row.settings.items() if name != SEED}
        groups.setdefault((row.identity, *others.items()), []).append(row)
    merged = list[Row]()
    for (_, *key), own in groups.items():
        differ = len({row.settings.get(SEED) for row in own}) == len(own)  # not repetitions in a folder of runs
        merged += [_merged(dict(key), own)] if differ else own
    merged = [row for row in merged if row.state != NOT_BEGUN]
    return merged if len(merged) < sum(row.state != NOT_BEGUN for row in rows) else []


def _merged(settings: dict[str, str], rows: list[Row]) -> Row:
    done = [row for row in rows if row.state == "finished" and (row.best is not None or row.has_no_best)]
    facts = dict(done[0].facts) if done else {}
    for name in ("objective", "best_objective", "seconds", "steps", "oom_restarts", "peak_memory_bytes"):
        if values := [value for row in done if (value := row.facts.get(name)) is not None]:
            is_most = name in ("oom_restarts", "peak_memory_bytes")
            facts[name] = max(values) if is_most else statistics.fmean(values)
    best = [row.best for row in done if row.best is not None]
    states = {row.state for row in rows}
    return Row(
        name=",".join(sorted((row.name for row in rows if row.name), key=lambda name: (len(name), name))),
        folder=rows[0].folder.parent,
        settings=settings,
        state=states.pop() if len(states) == 1 else ", ".join(sorted(states)),
        facts=facts,
        spread=statistics.stdev(best) if len(best) > 1 else None,
        is_whole=len(done) == len(rows),
    )
