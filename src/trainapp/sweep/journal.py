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

from trainapp.errors import UserError
from trainapp.files import json_lines, strict_json
from trainapp.report.page import Goal
from trainapp.sweep.space import Space, Values

NAME = "sweep.jsonl"
# What is kept of a result.json, and the columns of leaderboard.csv.
FACTS = (
    *("metric", "direction", "objective", "objective_note", "best_objective", "best_step", "steps", "seconds"),
    *("micro_size", "accumulation", "oom_restarts", "peak_memory_bytes", "ended", "checkpoint"),
)


def facts_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the journal keeps of a result.json."""
    return {name: result[name] for name in FACTS if name in result}


def common_goal(runs: Iterable[Mapping[str, Any]]) -> Goal:
    """The metric of the objective and its direction, max or min; None if these facts do not tell, or differ, or if no
    value is better than another (`Config.has_best`).
    """
    goals = goals_of(runs)
    return goals.pop() if len(goals) == 1 else None


def goals_of(runs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """All of them."""
    return {(facts["metric"], facts["direction"]) for facts in runs if facts.get("direction")}


@dataclass
class Trial:
    """One configuration. state: new, running, paused (at a rung), stopped (by a signal, to be continued), finished,
    failed, or infeasible (it does not fit in memory). threads: None for torch's choice. facts: see `facts_of`. reached:
    values at rungs, None for nan. passed: rungs that it has left. attributes: what the sampler notes of it. error: why
    it failed.
    """

    number: int
    values: Values
    state: str = "new"
    threads: int | None = None
    folder: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    reached: dict[int, float | None] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def is_held(self) -> bool:
        """Whether it has not passed the last rung that it has reached."""
        return bool(self.reached) and max(self.reached) not in self.passed

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient that was not finite has ended it."""
        return self.state == "failed" and "not finite" in self.error


class Journal:
    """Reads a sweep's journal and adds to it. first: what its first line holds; empty for a new sweep."""

    def __init__(self, folder: Path, writes: bool = True):
        self.path = folder / NAME
        if writes:
            _cut_torn_line(self.path)
        self.trials: list[Trial] = []
        self.first: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.digests: dict[str, str] = {}  # of the configurations of a grid's jobs when they were checked, by overrides
        for line in json_lines(self.path):
            self._apply(line)

    @property
    def space(self) -> Space:
        """As asked for last."""
        return Space.from_dict(self.asked["asked"])

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The trials' facts."""
        return [own.facts for own in self.trials]

    def add(self, event: str, **facts: Any) -> None:
        """Write a line, and apply it."""
        line = json.loads(text := strict_json({"event": event, **facts}))
        try:
            with self.path.open("a") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # what was written is cut off when the sweep is continued
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        self._apply(line)

    def _apply(self, line: dict[str, Any]) -> None:
        event = line["event"]
        if event in ("sweep", "asked"):
            self.first, self.asked = self.first or line, line
            self.digests |= line["digests"]
            return
        if event == "trial":
            self.trials.append(Trial(line["number"], tuple(line["values"]), attributes=line["attributes"]))
            return
        trial = self.trials[line["number"]]
        if event == "start":
            trial.state, trial.threads, trial.error = "running", line["threads"], ""
            trial.folder = str(self.path.parent.resolve() / line["folder"])  # the sweep may have been moved
        elif event == "rung":
            trial.reached[line["rung"]] = line["value"]
            trial.facts |= {"metric": line["metric"], "direction": line["direction"]}
        elif event == "end":
            trial.state, trial.error = line["state"], line["error"]
            trial.facts |= line["facts"]
        elif event == "promote":
            trial.passed.add(line["rung"])


def _cut_torn_line(path: Path) -> None:
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
