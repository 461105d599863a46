"""The truth about a sweep: `sweep.jsonl` in its directory, to which only the sweep itself adds lines.

| event | of |
|---|---|
| `sweep` | the first line: what was asked for |
| `asked` | another start of the same command, whose grid may have grown |
| `trial` | a configuration: its number and values |
| `start` | a process of it, and its number of threads, which stays |
| `rung` | the value of a trial at a rung |
| `promote` | the rung that a trial passes, at once or when it has been paused |
| `end` | of a process: the trial's state, and the facts of its result.json |

A line is on the disk before anything follows from it. What a kill has left of a last line is cut off.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainapp.config import resume_rules
from trainapp.config.schema import Config
from trainapp.errors import NOT_FINITE, UserError
from trainapp.files import json_lines, strict_json
from trainapp.report.page import Goal
from trainapp.sweep.outcome import TrialState, kind_by_words
from trainapp.sweep.space import Space, Values

JOURNAL = "sweep.jsonl"


def common_objective(runs: Iterable[Mapping[str, Any]]) -> Goal:
    """Return the objective that the runs share, by their facts: its metric and its direction, max or min.

    None if no facts say it, if they differ, or if no value is better than another (`Config.has_best`).
    """
    objectives = objectives_of(runs)
    return objectives.pop() if len(objectives) == 1 else None


def objectives_of(runs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return the metric and the direction of each objective among the runs, by their facts."""
    objectives = set()
    for facts in runs:
        if facts.get("direction"):
            objectives.add((facts["metric"], facts["direction"]))
    return objectives


@dataclass
class Trial:
    """A configuration, and what has become of it."""

    number: int
    values: Values
    state: TrialState = TrialState.NEW
    threads: int | None = None  # None: torch's choice
    folder: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # see `outcome.facts_of`
    rung_values: dict[int, float | None] = field(default_factory=dict)  # at the rungs reached; None for nan
    passed_rungs: set[int] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)  # what the sampler notes of it
    error: str = ""  # why it failed
    error_kind: str = ""  # as in `errors`; empty if it is not known

    @property
    def is_held(self) -> bool:
        """Whether it has not passed the last rung that it has reached."""
        return bool(self.rung_values) and max(self.rung_values) not in self.passed_rungs

    @property
    def diverged(self) -> bool:
        """Whether it was ended by a loss or gradient that was not finite."""
        return self.state is TrialState.FAILED and self.error_kind == NOT_FINITE


class Journal:
    """A sweep's journal: what its lines say, and adding lines to it.

    Attributes: `first_request`, the first line, and `last_request`, the last one of the events `sweep` and `asked`;
    both are empty for a new sweep.
    """

    def __init__(self, folder: Path, writes: bool = True):
        self.path = folder / JOURNAL
        if writes:
            _cut_torn_line(self.path)
        self.trials: list[Trial] = []
        self.first_request: dict[str, Any] = {}
        self.last_request: dict[str, Any] = {}
        self.digests: dict[str, str] = {}  # of the configurations of a grid's jobs when they were checked, by overrides
        for line in json_lines(self.path):
            self._apply(line)

    @property
    def space(self) -> Space:
        """The search space that was asked for last."""
        return Space.from_dict(self.last_request["asked"])

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The facts of all trials."""
        return [trial.facts for trial in self.trials]

    def config_changes(self, first_config: Config) -> list[str]:
        """Return what has changed in the configuration of the first job since the sweep began."""
        changes = resume_rules.changes(self.first_request["config"], first_config.to_dict())
        return [str(change) for change in changes]

    def add(self, event: str, **facts: Any) -> None:
        """Write a line, and apply it. Raises UserError if it cannot be written."""
        text = strict_json({"event": event, **facts})
        try:
            with self.path.open("a") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # what was written is cut off when the sweep is continued
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        self._apply(json.loads(text))

    def _apply(self, line: dict[str, Any]) -> None:
        """Apply a line to the trials, or to what was asked for."""
        event = line["event"]
        if event in ("sweep", "asked"):
            self.first_request = self.first_request or line
            self.last_request = line
            self.digests |= line["digests"]
        elif event == "trial":
            trial = Trial(line["number"], tuple(line["values"]), attributes=line["attributes"])
            self.trials.append(trial)
        else:
            self._apply_to_trial(self.trials[line["number"]], event, line)

    def _apply_to_trial(self, trial: Trial, event: str, line: dict[str, Any]) -> None:
        if event == "start":
            trial.state = TrialState.RUNNING
            trial.threads = line["threads"]
            trial.error = ""
            trial.error_kind = ""
            trial.folder = str(self.path.parent.resolve() / line["folder"])  # the sweep may have been moved
        elif event == "rung":
            trial.rung_values[line["rung"]] = line["value"]
            trial.facts |= {"metric": line["metric"], "direction": line["direction"]}
        elif event == "end":
            trial.state = TrialState(line["state"])
            trial.error = line["error"]
            trial.error_kind = line.get("error_kind") or kind_by_words(trial.error)
            trial.facts |= line["facts"]
        elif event == "promote":
            trial.passed_rungs.add(line["rung"])


def _cut_torn_line(path: Path) -> None:
    """Cut off an incomplete last line."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content.endswith(b"\n"):
        return
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)
