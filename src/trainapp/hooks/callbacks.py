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

    Attributes:
        step: finished optimizer steps.
        epoch: the epoch of the next step, from 0.
        samples: samples trained, over all ranks.
        model: the trained model, with its own weights even if evaluations use those of `train.ema`. Under DDP and FSDP
            every rank must make the same forward.
        run_dir: the run's directory.
        tracker: has `scalars(values, step)`, `text(tag, text, step)`, `image(tag, path, step)` and `note(text)`; writes
            only on rank 0.
        rank: of this process, from 0.
        world: the number of ranks.
        waited: seconds that this process has waited for batches.
        evaluated: the evaluation data sets by name, "" for the data's own split.
        stop: ends the run after this step, as if it had reached its end; takes the reason, for result.json.
        pause: saves the run and ends the process, to be resumed.
        is_stopping: whether a signal has asked for that.
        length: steps of the whole run, None if unknown.
        is_scheduled: whether `every.eval` asks for an evaluation at this step. One that is made only because the run
            ends, or before the first step to check the objective, should not change how training continues.
        logged: the step's loss, rates and other metrics if it is logged (`every.log`), otherwise empty.
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
        """Return a path in this folder of the run directory, for this step's evaluation of the set `name`."""
        directory = self.run_dir / folder
        directory.mkdir(exist_ok=True)
        prefix = f"{name}_" if name else ""
        return directory / f"{prefix}step_{self.step:08d}{suffix}"


def labels_of(data: Any) -> Sequence[str]:
    """Return a data set's class names, if it has `class_names`; otherwise an empty list."""
    return list(getattr(data, "class_names", None) or ())


@dataclass
class Callbacks:
    """The callbacks of a run, by name, in order. Raises UserError for one that has no method to call.

    Attributes:
        by_name: the callbacks.
        stepped_at: the step of the last call of `after_step`, or the run's first step; None before the run starts.
        failure: the message of the error that ends the run once it is saved.
    """

    by_name: Mapping[str, Any] = field(default_factory=dict)
    stepped_at: int | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        for name, callback in self.by_name.items():
            has_method = any(callable(getattr(callback, method, None)) for method in METHODS)
            if not has_method:
                raise UserError(
                    f"callbacks.{name}: a {type(callback).__name__} has none of the methods {', '.join(METHODS)}, so "
                    "it would never be called"
                )

    def having(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield `(name, bound method)` of the callbacks that have the method."""
        for name, callback in self.by_name.items():
            bound_method = getattr(callback, method, None)
            if callable(bound_method):
                yield name, bound_method

    def close(self) -> None:
        """Call the callbacks' `close()`, however the run ends."""
        for name, close in self.having("close"):
            try:
                close()
            except Exception:  # other callbacks and the trackers must still be closed
                log.exception("callbacks.%s: close failed", name)


class EarlyStopping:
    """`stopping.patience`: ends the run once a metric no longer improves. Its state is in the checkpoints.

    A non-finite value is never an improvement. Only scheduled evaluations count, see `View`.

    Args:
        patience: evaluations in a row without an improvement after which the run ends.
        min_delta: a change counts as an improvement if it is larger.
        direction: "max" or "min".
        metric: the name of the metric.
    """

    def __init__(self, patience: int, min_delta: float, direction: str, metric: str):
        self.patience = patience
        self.min_delta = min_delta
        self.direction = direction
        self.metric = metric
        self.best: float | None = None
        self.best_step = 0
        self._without_improvement = 0  # evaluations since the last improvement
        self._metric_exists = False  # whether an evaluation has had the metric

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Count a scheduled evaluation, and end the run if the patience is used up.

        Raises UserError for a metric that does not exist or is not a number.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        self._require_metric(numbers)
        if not view.is_scheduled:
            return

        # A metric that is missing now counts as not finite: an earlier evaluation had it.
        value = numbers.get(self.metric, math.nan)
        if self._is_improvement(value):
            self.best = value
            self.best_step = view.step
            self._without_improvement = 0
            return

        self._without_improvement += 1
        if self._without_improvement >= self.patience:
            view.stop(self._reason())

    def _require_metric(self, numbers: Mapping[str, float]) -> None:
        """Raise UserError unless this evaluation has the metric, or an earlier one had it: later ones may lack it."""
        has_counted = self.best is not None or self._without_improvement > 0  # perhaps before a resume
        if self.metric in numbers or has_counted:
            self._metric_exists = True
        if not self._metric_exists:
            raise no_such_metric("stopping.metric", self.direction, self.metric, numbers)

    def _is_improvement(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best
        if self.direction == "min":
            gain = -gain
        return gain > self.min_delta

    def _reason(self) -> str:
        """Return why the run stops, for result.json."""
        outcome = "has never been finite"
        if self.best is not None:
            outcome = f"has not improved on {self.best:.6g}, of step {self.best_step}, since"
        return f"stopping.patience={self.patience}: {self.metric} {outcome}"

    @property
    def _watched(self) -> str:
        """The metric and its direction, as in checkpoints."""
        return f"{self.direction} {self.metric}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "watched": self._watched,
            "best": self.best,
            "best_step": self.best_step,
            "bad": self._without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, unless it is another metric's or direction's."""
        if state.get("watched") != self._watched:
            return
        self.best = state["best"]
        self.best_step = state["best_step"]
        self._without_improvement = state["bad"]


class Profile:
    """`debug=profile`: profiles some steps with torch's profiler.

    Writes profile/rank_N.json, a trace for chrome://tracing or ui.perfetto.dev; rank 0 also prints the top operators
    and the time spent waiting for batches, and writes them to profile/summary.txt.

    Args:
        wait: steps before the first profiled one, which still validate sizes and choose kernels.
        steps: profiled steps.
        top: operators in the summary.
    """

    def __init__(self, wait: NonNegativeInt = 4, steps: PositiveInt = 5, top: PositiveInt = 15):
        self.wait = max(1, wait)  # callbacks are called after steps, so the first cannot be profiled
        self.steps = steps
        self.top = top
        self._profiler: Any = None  # while it runs
        self._finished_steps = 0  # of this process
        self._started_at = 0.0  # in `time.monotonic`
        self._waited_before = 0.0  # seconds that the process had waited for batches when the profile started

    def after_step(self, view: View) -> None:
        self._finished_steps += 1
        if self._finished_steps == self.wait:
            self._start(view)
        elif self._finished_steps == self.wait + self.steps:
            self._finish(view)

    def _start(self, view: View) -> None:
        activities = [ProfilerActivity.CPU]
        if next(iter(view.model.parameters())).device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._started_at = time.monotonic()
        self._waited_before = view.waited

    def on_end(self, view: View) -> None:
        """Finish a profile that the run's end has cut short."""
        if self._finished_steps <= self.wait:
            log.warning(
                "callbacks.profile: the run ended after %d steps, before one was profiled", self._finished_steps
            )
        elif self._profiler is not None:
            self._finish(view)

    def close(self) -> None:
        """Stop after an error: an open profiler would profile the next run of the process."""
        if self._profiler is not None:
            self._profiler.stop()

    def _finish(self, view: View) -> None:
        """Stop the profiler and write its trace, on rank 0 also the summary."""
        # The figures first: stopping and writing take time of their own.
        seconds = time.monotonic() - self._started_at
        waited = view.waited - self._waited_before
        profiler = self._profiler
        self._profiler = None  # before stopping it: an error must not stop it twice
        profiler.stop()

        folder = view.run_dir / "profile"
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank_{view.rank}.json"))
        if not view.is_rank_zero:
            return

        steps = self._finished_steps - self.wait
        percentage = 100 * waited / max(seconds, 1e-9)
        text = (
            f"{steps} steps up to step {view.step} took {seconds:.3f} s, of which {waited:.3f} s "
            f"({percentage:.0f}%) waiting for batches\n{self._operator_table(profiler)}\n"
        )
        (folder / "summary.txt").write_text(text)
        print(text, flush=True)
        view.tracker.note(f"the profile of {steps} steps is in {folder}")

    def _operator_table(self, profiler: Any) -> str:
        """Return a table of the slowest operators, by their time on the device."""
        device = "device" if ProfilerActivity.CUDA in profiler.activities else "cpu"
        averages = profiler.key_averages()
        return averages.table(sort_by=f"self_{device}_time_total", row_limit=self.top, max_name_column_width=60)
