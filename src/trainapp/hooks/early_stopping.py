"""Early stopping: the callback that `stopping.patience` builds."""

import math
from collections.abc import Mapping
from typing import Any

from trainapp.errors import UserError
from trainapp.hooks.callbacks import View
from trainapp.hooks.metrics import as_logged, asked


class EarlyStopping:
    """Ends the run once `metric` has not improved by more than `min_delta` for `patience` evaluations in a row.

    direction: "max" or "min". A value that is not finite is no improvement. Its state is in the checkpoints.
    """

    def __init__(self, patience: int, min_delta: float, direction: str, metric: str):
        self.patience, self.min_delta, self.direction, self.metric = patience, min_delta, direction, metric
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0  # evaluations without an improvement since

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Count this evaluation. Raises UserError for a metric that there is not."""
        metric = as_logged(self.metric, metrics)
        if metric not in metrics and self.best is None and not self.bad:  # else one that only some batches have
            raise UserError(
                f"stopping.metric={self.direction} {self.metric}: there is no such metric; there are "
                f"{', '.join(asked(name) for name, value in metrics.items() if isinstance(value, float))}"
            )
        value = metrics.get(metric, math.nan)
        gain = math.inf if self.best is None else value - self.best if self.direction == "max" else self.best - value
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.best_step, self.bad = value, view.step, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            best = "a number" if self.best is None else f"{self.best:.6g}, of step {self.best_step},"
            view.stop(f"stopping.patience={self.patience}: {self.metric} has not improved on {best} since")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]
