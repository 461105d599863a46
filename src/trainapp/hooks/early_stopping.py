"""Early stopping: the callback that `stopping.patience` builds."""

import math
from collections.abc import Mapping
from typing import Any

from trainapp.errors import UserError
from trainapp.hooks.callbacks import View
from trainapp.hooks.metrics import logged_name_of, setting_name


class EarlyStopping:
    """Ends the run once `metric` has not improved by more than `min_delta` for `patience` evaluations in a row.

    direction: "max" or "min". A value that is not finite is no improvement. Its state is in the checkpoints.
    """

    def __init__(self, patience: int, min_delta: float, direction: str, metric: str):
        self.patience, self.min_delta, self.direction, self.metric = patience, min_delta, direction, metric
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0  # evaluations without an improvement since
        self.is_known = False  # whether the task has the metric for some samples, if not in every evaluation

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Count this evaluation. Raises UserError for a metric that does not exist or is no number."""
        metrics = {name: value for name, value in metrics.items() if isinstance(value, float)}
        metric = logged_name_of(self.metric, metrics)
        may_lack_it = self.is_known or self.best is not None or self.bad  # it is one that only some batches have
        if metric not in metrics and not may_lack_it:
            raise UserError(
                f"stopping.metric={self.direction} {self.metric}: there is no such metric; there are "
                f"{', '.join(map(setting_name, metrics))}"
            )
        value = metrics.get(metric, math.nan)
        gain = math.inf if self.best is None else value - self.best if self.direction == "max" else self.best - value
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.best_step, self.bad = value, view.step, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            outcome = (
                "has never been finite"
                if self.best is None
                else f"has not improved on {self.best:.6g}, of step {self.best_step}, since"
            )
            view.stop(f"stopping.patience={self.patience}: {self.metric} {outcome}")

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self._watched, "best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of another metric or direction."""
        if state.get("watched") == self._watched:
            self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]

    @property
    def _watched(self) -> str:
        return f"{self.direction} {self.metric}"
