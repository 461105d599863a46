"""The truth about a sweep: `sweep.jsonl` in its directory, to which only the sweep itself adds lines.

| event | of |
|---|---|
| `sweep` | the first line: what was asked for |
| `asked` | another start of the same command, whose grid may have grown |
| `trial` | a configuration: its number and values |
| `start` | a process of it, and its number of threads, which stays |
| `rung` | an evaluation at a rung: its value, and whether the run goes on |
| `promote` | the rung that a paused trial leaves |
| `end` | of a process: the trial's state, and the facts of its result.json |

A line is on the disk before anything follows from it. What a kill has left of a last line is cut off.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainapp.files import json_lines, strict_json
from trainapp.sweep.space import Values

NAME = "sweep.jsonl"
_FACTS = (
    *("metric", "direction", "objective", "objective_note", "best_objective", "best_step", "steps", "seconds"),
    *("micro_size", "accumulation", "oom_restarts", "peak_memory_bytes", "ended", "checkpoint"),
)


@dataclass
class Trial:
    """One configuration. state: new, running, paused (at a rung), stopped (by a signal, to be continued), finished,
    failed, or infeasible (it does not fit in memory). threads: None for torch's choice. facts: of its result.json.
    reached: values at rungs, None for nan. promoted: rungs that it has left. attributes: what the
    sampler notes of it. error: why it failed.
    """

    number: int
    values: Values
    state: str = "new"
    threads: int | None = None
    folder: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    reached: dict[int, float | None] = field(default_factory=dict)
    promoted: set[int] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0  # of all its processes that have ended

    @property
    def was_promoted(self) -> bool:
        """Whether it is paused and may go on: the sweep was killed before it did."""
        return self.state == "paused" and max(self.reached) in self.promoted

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient that was not finite has ended it."""
        return self.state == "failed" and "not finite" in self.error

    def finite(self, name: str) -> float | None:
        """A fact that is a number; None for one that is missing, nan or inf."""
        value = self.facts.get(name)
        return None if value is None else float(value)


class Journal:
    """Reads a sweep's journal and adds to it. first: what its first line holds; empty for a new sweep."""

    def __init__(self, folder: Path, writes: bool = True):
        self.path = folder / NAME
        if writes:
            _cut_torn_line(self.path)
        self.trials: list[Trial] = []
        self.first: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        for line in json_lines(self.path):
            self._apply(line)

    @property
    def keys(self) -> list[str]:
        """The settings in which trials differ, without Hydra's marks."""
        return [key.lstrip("+~") for key in self.asked["asked"]["dimensions"]] if self.asked else []

    def add(self, event: str, **facts: Any) -> None:
        """Write a line, and apply it."""
        line = json.loads(text := strict_json({"event": event, **facts}))
        with self.path.open("a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._apply(line)

    def _apply(self, line: dict[str, Any]) -> None:
        event = line["event"]
        if event in ("sweep", "asked"):
            self.first = self.first or line
            self.asked = line
            return
        if event == "trial":
            self.trials.append(Trial(line["number"], tuple(line["values"]), attributes=line["attributes"]))
            return
        trial = self.trials[line["number"]]
        if event == "start":
            trial.state, trial.threads, trial.folder, trial.error = "running", line["threads"], line["folder"], ""
        elif event == "rung":
            trial.reached[line["rung"]] = line["value"]
            trial.facts |= {"metric": line["metric"], "direction": line["direction"]}
            if line["goes_on"]:
                trial.promoted.add(line["rung"])
        elif event == "promote":
            trial.promoted.add(line["rung"])
        elif event == "end":
            trial.state, trial.error = line["state"], line["error"]
            trial.seconds += line["seconds"]
            trial.facts |= line["facts"]


def facts_of(result: dict[str, Any]) -> dict[str, Any]:
    """What the journal keeps of a result.json, or of a plan.json."""
    return {name: result[name] for name in _FACTS if name in result}


def _cut_torn_line(path: Path) -> None:
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
