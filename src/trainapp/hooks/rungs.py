"""How a run and the sweep that it belongs to agree on a pause: by files in the run's directory. Imports no torch.

The sweep writes `rungs.json` before it starts the run. At the first evaluation at or after a rung the run writes
`rung_asks.json` and waits for `rung_answers.json`. A question whose run has ended is answered all the same.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainapp.errors import UserError
from trainapp.files import atomic_write, json_object, strict_json

if TYPE_CHECKING:
    from trainapp.hooks.callbacks import View

JOB = "TRAINAPP_SWEEP_JOB"  # the variable that has the directory of a sweep's job
RUNGS, ASKS, ANSWERS = "rungs.json", "rung_asks.json", "rung_answers.json"
_POLL = 0.05  # seconds


def write(path: Path, facts: Any) -> None:
    """Write a file of the protocol at once."""
    with atomic_write(path) as file:
        file.write(strict_json(facts))


def asks_sweep(run_dir: Path) -> bool:
    """Whether a sweep with a pruner has started this process, not a user who continues the run of a killed one."""
    rungs = json_object(run_dir / RUNGS)
    return bool(rungs) and (rungs["launched"] or os.environ.get(JOB) == str(run_dir))


class AskSweep:
    """The callback of a run with rungs, `(number, fraction of the run)`, each of which it asks about once.

    direction, metric: the objective. patience: seconds after which a run without an answer pauses, since its sweep was
    killed.
    """

    def __init__(self, run_dir: Path, direction: str, metric: str, patience: float = 300.0):
        self.run_dir, self.direction, self.metric, self.patience = run_dir, direction, metric, patience
        self.rungs: list[tuple[int, float]] = [tuple(rung) for rung in json_object(run_dir / RUNGS)["rungs"]]

    def after_evaluation(self, view: "View", metrics: Mapping[str, Any]) -> None:
        """Ask, on rank 0: the others wait at the end of the callbacks. Raises UserError for a run without an end."""
        if view.length is None:
            raise UserError("sweep.pruner: a stream's epochs have no known length; set train.max_steps")
        if not view.step:  # only checks that the objective exists
            return None
        reached = [own for own in self.rungs if view.step >= round(own[1] * view.length)]
        self.rungs = self.rungs[len(reached) :]
        if not reached or not view.is_rank_zero or view.step >= view.length:
            return None
        rung, value = reached[-1][0], metrics.get(self.metric)
        goal = {"metric": self.metric, "direction": self.direction}
        write(self.run_dir / ASKS, {"rung": rung, "step": view.step, "value": value, **goal})
        until = time.monotonic() + self.patience
        while (answer := json_object(self.run_dir / ANSWERS)).get("rung") != rung:
            if time.monotonic() > until:
                return view.pause()
            if view.is_stopping():
                return None  # the sweep finds the question after the run has ended
            time.sleep(_POLL)
        (self.run_dir / ANSWERS).unlink()
        return None if answer["passes"] else view.pause()
