"""Callbacks, which run users' code between steps, and two built-in ones: early stopping and profiling.

A callback is an object with any of these methods:

| method | when |
|---|---|
| `after_step(view)` | once per finished optimizer step, after its commit; not for skipped steps |
| `after_evaluation(view, metrics)` | after an evaluation, with its values and the metrics' results, by name |
| `on_end(view)` | after the last step of this process, when the checkpoint is written |

They run on every rank, one after the other, with the model in evaluation mode, without gradients. Generators and modes
are restored afterwards. If they have `state_dict` and `load_state_dict`, their state is in the checkpoints.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from trainapp.errors import UserError
from trainapp.hooks.metrics import no_such_metric
from trainapp.tracking.tracker import Tracker
from trainapp.validation import NonNegativeInt, PositiveInt

log = logging.getLogger(__name__)
METHODS = ("after_step", "after_evaluation", "on_end")


@dataclass(frozen=True)
class View:
    """A callback's view of the run.

    step: finished optimizer steps. epoch: epoch of the coming step, from 0. samples: samples trained, over all ranks.
    model: the trained model, with its own weights even if evaluations use those of `train.ema`. Under DDP and FSDP
    every rank must make the same forward. tracker: has `scalars(values, step)`, `text(tag, text, step)`, `image(tag,
    path, step)` and `note(text)`; writes only on rank 0. waited: seconds that this process has waited for batches.
    evaluated: the evaluation data sets by name, "" for the data's own split. stop: ends the run after this step, as if
    it had reached its end; takes the reason, for result.json. pause: saves the run and ends the process, to be
    continued. is_stopping: whether a signal has asked for that. length: steps of the whole run, None if unknown.
    is_scheduled: whether `every.eval` asks for an evaluation at this step; one that is made only because the run ends,
    or before the first step to check the objective, should not change how training continues. logged: the step's loss,
    rates and other metrics if it is logged (`every.log`), otherwise empty.
    """

    step: int
    epoch: int
    samples: int
    model: nn.Module
    run_dir: Path
    tracker: Tracker
    rank: int
    world: int
    waited: float
    evaluated: Mapping[str, Any]
    stop: Callable[[str], None]
    pause: Callable[[], None]
    is_stopping: Callable[[], bool]
    length: int | None
    is_scheduled: bool
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process should write files."""
        return self.rank == 0

    @property
    def data(self) -> Any:
        """The first evaluation data set, or None."""
        return next(iter(self.evaluated.values()), None)

    @property
    def labels(self) -> Sequence[str]:
        """The first set's class names, if it has `class_names`; otherwise empty."""
        return labels_of(self.data)

    def new_file(self, folder: str, name: str, suffix: str) -> Path:
        """A path in this folder of the run directory, for this step's evaluation of the set `name`."""
        (self.run_dir / folder).mkdir(exist_ok=True)
        return self.run_dir / folder / f"{name}{'_' if name else ''}step_{self.step:08d}{suffix}"


def labels_of(data: Any) -> Sequence[str]:
    """A data set's class names, if it has `class_names`; otherwise empty."""
    return list(getattr(data, "class_names", None) or ())


@dataclass
class Callbacks:
    """The callbacks of a run, by name, in order.

    stepped_at: the step of the last call of `after_step`, or the run's first step; None before the run starts.
    failure: the message of the error that ends the run once it is saved.
    """

    by_name: Mapping[str, Any] = field(default_factory=dict)
    stepped_at: int | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        for name, callback in self.by_name.items():
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise UserError(
                    f"callbacks.{name}: a {type(callback).__name__} has none of the methods {', '.join(METHODS)}, so "
                    "it would never be called"
                )

    def having(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """`(name, method)` of the callbacks that have the method."""
        for name, callback in self.by_name.items():
            bound = getattr(callback, method, None)
            if callable(bound):
                yield name, bound

    def close(self) -> None:
        """Call the callbacks' `close()`, however the run ends."""
        for name, close in self.having("close"):
            try:
                close()
            except Exception:  # other callbacks and the trackers must still be closed
                log.exception("callbacks.%s: close failed", name)


class EarlyStopping:
    """`stopping.patience`: ends the run once `metric` has not improved by more than `min_delta` for `patience`
    evaluations in a row.

    direction: "max" or "min". A non-finite value is never an improvement. Only scheduled evaluations count, see `View`.
    Its state is in the checkpoints.
    """

    def __init__(self, patience: int, min_delta: float, direction: str, metric: str):
        self.patience, self.min_delta, self.direction, self.metric = patience, min_delta, direction, metric
        self._watched = f"{direction} {metric}"
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0  # evaluations since the last improvement
        self._exists = False  # whether an evaluation of this process had the metric

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Count a scheduled evaluation. Raises UserError for a metric that does not exist or is not a number."""
        metrics = {name: value for name, value in metrics.items() if isinstance(value, float)}
        self._exists |= self.metric in metrics or self.best is not None or self.bad > 0
        if not self._exists:  # later evaluations may lack it
            raise no_such_metric("stopping.metric", self.direction, self.metric, metrics)
        if not view.is_scheduled:
            return
        value = metrics.get(self.metric, math.nan)
        gain = math.inf if self.best is None else value - self.best if self.direction == "max" else self.best - value
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.best_step, self.bad = value, view.step, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            outcome = "has never been finite"
            if self.best is not None:
                outcome = f"has not improved on {self.best:.6g}, of step {self.best_step}, since"
            view.stop(f"stopping.patience={self.patience}: {self.metric} {outcome}")

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self._watched, "best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignores the state of another metric or direction."""
        if state.get("watched") == self._watched:
            self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]


class Profile:
    """`debug=profile`: profiles `steps` steps with torch's profiler, after the first `wait`, which still validate sizes
    and choose kernels.

    Writes profile/rank_N.json, a trace for chrome://tracing or ui.perfetto.dev; rank 0 also prints the `top` operators
    and the time spent waiting for batches, and writes them to profile/summary.txt.
    """

    def __init__(self, wait: NonNegativeInt = 4, steps: PositiveInt = 5, top: PositiveInt = 15):
        self.wait, self.steps, self.top = max(1, wait), steps, top  # callbacks are called after steps
        self._profiler: Any = None
        self._seen = 0
        self._started = self._waited = 0.0

    def after_step(self, view: View) -> None:
        self._seen += 1
        if self._seen == self.wait:
            on_device = next(view.model.parameters()).device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()
            self._started, self._waited = time.monotonic(), view.waited
        elif self._seen == self.wait + self.steps:
            self._finish(view)

    def on_end(self, view: View) -> None:
        """Finish a profile that the run's end has cut short."""
        if self._seen <= self.wait:
            log.warning("callbacks.profile: the run ended after %d steps, before one was profiled", self._seen)
        elif self._profiler is not None:
            self._finish(view)

    def close(self) -> None:
        """Stop after an error: an open profiler would profile the next run of the process."""
        if self._profiler is not None:
            self._profiler.stop()

    def _finish(self, view: View) -> None:
        seconds, waited = time.monotonic() - self._started, view.waited - self._waited
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = view.run_dir / "profile"
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank_{view.rank}.json"))
        if not view.is_rank_zero:
            return
        key = f"self_{'device' if ProfilerActivity.CUDA in profiler.activities else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=self.top, max_name_column_width=60)
        steps = self._seen - self.wait
        text = (
            f"{steps} steps up to step {view.step} took {seconds:.3f} s, of which {waited:.3f} s "
            f"({100 * waited / max(seconds, 1e-9):.0f}%) waiting for batches\n{table}\n"
        )
        (folder / "summary.txt").write_text(text)
        print(text, flush=True)
        view.tracker.note(f"the profile of {steps} steps is in {folder}")
