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

JOB = "TRAINAPP_SWEEP_JOB"  # environment variable with the directory of a sweep's job
RUNGS = "rungs.json"
ASKS = "rung_asks.json"
ANSWERS = "rung_answers.json"
_POLL = 0.05  # seconds


def write(path: Path, facts: Any) -> None:
    """Write a file of the protocol. Readers never see a part of it."""
    with atomic_write(path) as file:
        file.write(strict_json(facts))


def asks_sweep(run_dir: Path) -> bool:
    """Return whether a sweep with a pruner has started this process, not a user who resumes a run of a killed sweep."""
    rungs = json_object(run_dir / RUNGS)
    return bool(rungs) and (rungs["launched"] or os.environ.get(JOB) == str(run_dir))


class AskSweep:
    """The callback of a run with rungs, which asks its sweep at each of them, once, whether it may continue.

    Args:
        run_dir: has rungs.json, a list of `(number, fraction of the run)`, ascending.
        direction: of the objective.
        metric: of the objective.
        patience: seconds after which a run without an answer pauses, since its sweep was killed.
    """

    def __init__(self, run_dir: Path, direction: str, metric: str, patience: float = 300.0):
        self.run_dir = run_dir
        self.direction = direction
        self.metric = metric
        self.patience = patience
        rungs = json_object(run_dir / RUNGS)["rungs"]
        self.rungs: list[tuple[int, float]] = [tuple(rung) for rung in rungs]  # that are ahead

    def after_evaluation(self, view: "View", metrics: Mapping[str, Any]) -> None:
        """Ask at a rung, on rank 0: the other ranks wait at the end of the callbacks.

        Raises UserError for a run without an end.
        """
        if view.length is None:
            raise UserError("sweep.pruner: a stream's epochs have no known length; set train.max_steps")
        if view.step == 0:  # this evaluation only checks that the objective exists
            return

        # On all ranks, as their rungs are the same; then rank 0 asks.
        rung = self._pass_rungs(view.step, view.length)
        has_ended = view.step >= view.length
        if rung is None or has_ended or not view.is_rank_zero:
            return
        question = {
            "rung": rung,
            "step": view.step,
            "value": metrics.get(self.metric),
            "metric": self.metric,
            "direction": self.direction,
        }
        write(self.run_dir / ASKS, question)
        self._await_answer(rung, view)

    def _pass_rungs(self, step: int, length: int) -> int | None:
        """Remove the rungs up to this step. Return the number of the last one, None if there is none."""
        reached = [number for number, fraction in self.rungs if step >= round(fraction * length)]
        self.rungs = self.rungs[len(reached) :]
        if not reached:
            return None
        return reached[-1]

    def _await_answer(self, rung: int, view: "View") -> None:
        """Wait for the sweep's answer. Pause the run unless it passes."""
        deadline = time.monotonic() + self.patience
        answer = json_object(self.run_dir / ANSWERS)
        while answer.get("rung") != rung:  # none yet, or left by an earlier question
            if time.monotonic() > deadline:
                view.pause()
                return
            if view.is_stopping():
                return  # the sweep finds the question after the run has ended
            time.sleep(_POLL)
            answer = json_object(self.run_dir / ANSWERS)
        (self.run_dir / ANSWERS).unlink()
        if not answer["passes"]:
            view.pause()
