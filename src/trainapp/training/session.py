"""The `Session`: the live objects of one process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.data.source import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.hooks.callbacks import Callbacks
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.losses.losses import Task, class_dim
from trainapp.memory.device import DeviceMemory
from trainapp.optim import schedules
from trainapp.parallel.ranks import Flags, Ranks, SingleRank
from trainapp.parallel.strategy import SingleDevice
from trainapp.signals import StopRequest
from trainapp.sizes.record import Sizes
from trainapp.snapshot import Snapshot
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.training.engine import Engine, Totals
from trainapp.training.limits import Limits
from trainapp.training.phase import Attempt, Phase, Step

EvalSets = dict[str, EvalBatches]  # by name; the data's own validation split is ""


class Objective(NamedTuple):
    """What "best" means."""

    direction: str  # "max" or "min"
    metric: str

    @classmethod
    def of(cls, config: Config, task: Task, sets: Sequence[str]) -> "Objective":
        """From `objective`; auto is the accuracy of classification, and the loss of any other task.

        task: what is evaluated. sets: names of those that are; auto is of the first, which is the data's own validation
        split (""), if there is one.
        """
        if config.objective != "auto":
            direction, metric = config.objective.split()
            return cls(direction, metric)
        prefix = f"{sets[0]}/" if sets and sets[0] else ""
        return cls("max", f"{prefix}accuracy") if class_dim(task) == 1 else cls("min", f"{prefix}loss")


class Evaluated(NamedTuple):
    """What an evaluation of one data set has found, by metric: numbers, and what metrics with a state have computed."""

    means: dict[str, float]
    results: dict[str, Any]


@dataclass
class Evaluation:
    """What evaluations have found: the present one, which continues after it ran out of memory, and the last."""

    totals: Totals | None = None  # so far, of the data set that is being evaluated
    collector: Any = None  # of its batches, see `training.evaluate`
    finished: dict[str, Evaluated] = field(default_factory=dict)  # the results of those before it, by name
    last: dict[str, float] = field(default_factory=dict)  # as logged; of this process


@dataclass
class Session:
    """Everything that the loop works with: each field is one room's object."""

    config: Config
    engine: Engine  # computes gradients and commits them
    ranks: Ranks
    batches: TrainBatches
    eval_sets: EvalSets  # empty: nothing to evaluate
    limits: Limits  # the run's length and cadences
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker | SilentTracker
    checkpointer: Checkpointer
    stop: StopRequest
    objective: Objective
    metrics: StatefulMetrics
    callbacks: Callbacks
    evaluation: Evaluation = field(default_factory=Evaluation)
    sizes: Sizes = field(init=False)  # of micro-batches; chosen once a checkpoint is read

    @property
    def state(self) -> TrainState:
        """Model, optimizer, precision, weight average, progress."""
        return self.engine.state

    @property
    def strategy(self) -> SingleDevice:
        """How the model is spread over the ranks."""
        return self.engine.strategy

    @property
    def snapshot(self) -> Snapshot:
        """What a forward may change, to return to."""
        return self.engine.snapshot

    @property
    def attempt(self) -> Attempt:
        """Where the step is."""
        return self.engine.attempt

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the cadence asks for an evaluation that has not been done at this step."""
        return bool(self.eval_sets) and self._is_due(
            self.limits.evaluate, self.limits.evaluate_epochs, self.state.progress.evaluated_at
        )

    @property
    def save_is_due(self) -> bool:
        """Whether the cadence, the best evaluation so far, or the end of the run asks for a checkpoint of this step."""
        limits, saved_at, progress = self.limits, self.checkpointer.saved_at, self.state.progress
        if saved_at == progress.step:
            return False
        is_best = progress.best_step == progress.step and limits.saves
        return is_best or self.is_ending or self._is_due(limits.save, limits.save_epochs, saved_at)

    @property
    def is_ending(self) -> bool:
        """Whether the run has reached its end or, after a whole step, must stop: a signal or a failed hook."""
        must_end = self.stop.agreed > 0 or self.callbacks.failure is not None
        return self.is_finished or (must_end and not self.state.progress.update)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end, or a callback has ended it."""
        progress = self.state.progress
        return progress.stopped is not None or self._is_end(progress.step, progress.epoch)

    @property
    def task(self) -> Task:
        """What is evaluated; with one optimizer, what is trained, too."""
        return self.engine.evaluated_task

    def coming_updates(self) -> Iterator[Step]:
        """The remaining updates of the next step, one at a time: each is begun once the one before it is finished."""
        yield self.begin_update()
        while self.state.progress.update:
            yield self.begin_update()

    def begin_update(self) -> Step:
        """Turn to the next update; of a stream, read its samples. Every `every.log`-th step is logged, and the last
        one.
        """
        progress, every, self.attempt.phase = self.state.progress, self.limits.log, Phase.READ
        update = self.state.updates[progress.update]
        if update.name:  # one of several
            self.sizes.turn_to(update.name)
        if not progress.update:
            self.attempt.logged = {}
        number, share = progress.step + 1, self.batches.share(progress)
        is_logged = every > 0 and (number % every == 0 or self._is_end(number, share.after[0]))
        is_drawn = self.memory.keep_events and not self.sizes.train.is_unvalidated  # else the step may not be typical
        return Step(update, number, number + progress.skipped, share.total, is_logged, is_drawn)

    @property
    def eval_ranks(self) -> Ranks:
        """The ranks that evaluate together: all of them, or this one alone."""
        return self.ranks if self.strategy.forward_is_collective else SingleRank()

    @property
    def retries_in_place(self) -> bool:
        """Whether a step that runs out of memory is retried by these processes. Otherwise all workers restart."""
        recovers = self.strategy.recovers_in_place and self.config.parallel.vote_on_oom != "never"
        return recovers or self.ranks.world == 1

    def flags(self) -> Flags:
        """What this rank sends to the others once per step."""
        is_saving = self.checkpointer.pending is not None and self.checkpointer.busy
        return Flags(self.stop.signal or 0, is_saving, self.sizes.train.has_news)

    def measure_length(self) -> None:
        """Measure the run again from its present position, with all that depends on its length.

        Raises UserError where the schedule's warm-up and decay no longer fit.
        """
        self.limits = Limits.of(self.config, self.batches, self.state.progress)
        self.schedule_rates()
        self.tracker.progress.set_total(self.limits.length.total_steps)

    def schedule_rates(self) -> None:
        """Give each update the schedule of a run of this length. One that follows evaluations continues.

        Raises UserError where the schedule does not fit the run.
        """
        config = self.config
        for update in self.state.updates:
            state, groups = update.schedule.state_dict(), update.optimizer.param_groups
            kept = [{name: group[name] for name in update.optimizer.defaults if name in group} for group in groups]
            update.schedule = schedules.for_optimizer(
                config.schedule, self.limits.length, update.optimizer, config.user_packages, self.objective.direction
            )
            if state:  # torch's; its constructor has set options, such as momentum, to where they begin
                for group, own in zip(groups, kept, strict=True):
                    group.update(own)
                update.schedule.load_state_dict(state)
            if update.schedule.follows_evaluations:
                self._require_evaluations()

    def _require_evaluations(self) -> None:
        """Raises UserError where there are none, which a schedule follows."""
        if self.config.mode == "train" and not (self.eval_sets and self.limits.evaluates):
            why = "every.eval=null" if self.eval_sets else "the data has no validation split"
            raise UserError(
                f"schedule._target_={self.config.schedule.target}: it follows the {self.objective.metric} of "
                f"evaluations, but {why}: the rate would never change; evaluate, or choose another schedule"
            )

    def close(self) -> None:
        """End loader workers and close files."""
        self.batches.close()
        for evaluated in self.eval_sets.values():
            evaluated.close()
        self.callbacks.close()
        self.tracker.close()

    def _is_end(self, step: int, epoch: int) -> bool:
        train = self.config.train
        by_steps = train.max_steps is not None and step >= train.max_steps
        return by_steps or (train.max_epochs is not None and epoch >= train.max_epochs)

    def _is_due(self, every: int, every_epochs: int, done_at: int) -> bool:
        progress = self.state.progress
        if (every == 0 and every_epochs == 0) or progress.step == done_at:
            return False
        epoch_has_ended = every_epochs > 0 and progress.consumed == 0 and progress.epoch % every_epochs == 0
        return epoch_has_ended or (every > 0 and progress.step % every == 0) or self.is_finished
