"""The `Session`: the live objects of one process."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.data.eval_batches import EvalBatches
from trainapp.data.train_batches import TrainBatches
from trainapp.hooks.callbacks import Callbacks
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.losses.losses import Task, class_dim
from trainapp.memory.device import DeviceMemory
from trainapp.optim import schedules
from trainapp.parallel.ranks import Flags, Ranks, SingleRank
from trainapp.parallel.strategy import SingleDevice
from trainapp.signals import AtWork, Stopped, StopRequest
from trainapp.sizes.record import Sizes
from trainapp.snapshot import Snapshot, State
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import Tracker
from trainapp.training.engine import Engine, Totals
from trainapp.training.limits import Interval, Limits
from trainapp.training.phase import Phase, UpdateContext

EvalSets = dict[str, EvalBatches]  # by name; the data's own validation split is ""


class Objective(NamedTuple):
    """The metric that selects the best checkpoint, and its direction."""

    direction: str | None  # "max" or "min"; None: its values are recorded, but none is the best (`Config.has_best`)
    metric: str

    @classmethod
    def of(cls, config: Config, task: Task, sets: Sequence[str]) -> "Objective":
        """Return that of `objective`; auto is the accuracy for classification, the loss for any other task.

        Args:
            config: with `objective`, and `updates`, of which several have no best with auto.
            task: the evaluation task.
            sets: names of the evaluation sets; auto uses the first, the data's own validation split ("") if it has one.
        """
        if config.objective != "auto":
            return cls.parsed(config.objective)
        prefix = f"{sets[0]}/" if sets and sets[0] else ""
        by_task = cls("max", f"{prefix}accuracy") if class_dim(task) == 1 else cls("min", f"{prefix}loss")
        return by_task if config.has_best else by_task._replace(direction=None)

    @classmethod
    def parsed(cls, setting: str) -> "Objective":
        """Return that of a setting such as "max accuracy"."""
        direction, metric = setting.split()
        return cls(direction, metric)


@dataclass
class Evaluation:
    """State of the current evaluation, which continues after it ran out of memory, and results of the last one."""

    totals: Totals | None = None  # so far, for the current data set
    complete: bool = False  # whether all ranks have finished its micro-batches
    before: State | None = None  # of model, task and data, to which the current data set's evaluation returns
    embedded: Any = None  # its embeddings so far, if the loss compares them: see `training.evaluate`
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)  # metrics of the sets already evaluated, by name
    last: dict[str, float] = field(default_factory=dict)  # as logged, in this process


@dataclass
class Attempt:
    """State of the current attempt at a step or evaluation."""

    started: float = 0.0  # time.monotonic()
    retried: int = -1  # the last step retried at the same size
    refused: int = 0  # failed allocations before the attempt
    too_few: str = ""  # the model's error for too few samples, in parentheses; empty if there was none
    logged: dict[str, float] = field(default_factory=dict)  # metrics of the step's finished updates


@dataclass
class Session:
    """The live objects of one process."""

    config: Config
    engine: Engine  # computes gradients and commits them
    ranks: Ranks
    batches: TrainBatches
    eval_sets: EvalSets  # empty: nothing to evaluate
    limits: Limits  # the run's length and cadences
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker
    checkpointer: Checkpointer
    stop: StopRequest
    objective: Objective
    metrics: StatefulMetrics
    callbacks: Callbacks
    filled: Mapping[str, Any]  # settings filled in from the data, and what was checked: see `Parts`
    checks: Mapping[str, str]
    evaluation: Evaluation = field(default_factory=Evaluation)
    attempt: Attempt = field(default_factory=Attempt)
    rehearsals: int = 0  # updates that `train.check_exactness` has yet to compare
    sizes: Sizes = field(init=False)  # micro-batch sizes; chosen after a checkpoint is read

    def __post_init__(self) -> None:
        """The engine's parts that other rooms use, as attributes: read 20 times per step."""
        self.state: TrainState = self.engine.state
        self.strategy: SingleDevice = self.engine.strategy
        self.snapshot: Snapshot = self.engine.snapshot

    @property
    def awaits_evaluation(self) -> bool:
        """Whether an evaluation is due and not yet done at this step."""
        return bool(self.eval_sets) and self._is_due(self.limits.evaluate, self.state.progress.evaluated_at)

    @property
    def evaluation_is_scheduled(self) -> bool:
        """Whether `every.eval` asks for an evaluation at this step. Only such a one may change how training continues:
        one that checks the objective before the first step, or that is made because the run ends, would make another
        run of the same one, started or extended differently.
        """
        progress = self.state.progress
        return progress.step > 0 and self.limits.evaluate.ends_at(progress)

    @property
    def save_is_due(self) -> bool:
        """Whether a checkpoint of this step is due: by cadence, clock or best evaluation, or at the run's end."""
        every, saved_at, progress = self.limits.save, self.checkpointer.saved_at, self.state.progress
        if saved_at == progress.step:
            return False
        is_best = progress.best_step == progress.step and any(every)
        return is_best or self.is_ending or self.checkpointer.is_due or self._is_due(every, saved_at)

    @property
    def is_ending(self) -> bool:
        """Whether the run has reached its end or, after a whole step, must stop: a signal or a failed callback."""
        must_end = self.stop.agreed > 0 or self.callbacks.failure is not None
        return self.is_finished or (must_end and not self.state.progress.update)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end, or a callback has ended it."""
        progress = self.state.progress
        return progress.stopped is not None or self.limits.end_at(progress.step, progress.epoch)

    @property
    def task(self) -> Task:
        """The evaluation task; with one optimizer, also the training task."""
        return self.engine.evaluated_task

    def coming_updates(self) -> Iterator[UpdateContext]:
        """Yield the remaining updates of the next step. Each starts after the previous one has finished."""
        yield self.begin_update()
        while self.state.progress.update:
            yield self.begin_update()

    def begin_update(self) -> UpdateContext:
        """Start the next update; for a stream, read its samples. Logged: every `every.log` steps, and the last step."""
        self.engine.phase = Phase.READ
        progress = self.state.progress
        update = self.state.updates[progress.update]
        if update.name:  # if there are several
            self.sizes.select_update(update.name)
        is_first_of_step = progress.update == 0
        if is_first_of_step:
            self.attempt.logged = {}

        step_number = progress.step + 1
        share = self.batches.share(progress)
        is_last_step = self.limits.end_at(step_number, share.after[0])
        log_every = self.limits.log
        return UpdateContext(
            update,
            step_number,
            attempt_number=step_number + progress.skipped,
            samples=share.total,
            is_logged=log_every > 0 and (step_number % log_every == 0 or is_last_step),
            plots_memory=self.memory.keep_events and not self.sizes.train.is_unvalidated,  # the step must be typical
            is_rehearsed=self.rehearsals > 0,
        )

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
        """The flags that this rank sends to the others once per step."""
        saver, every = self.checkpointer, self.limits.save.seconds
        is_saving = saver.pending is not None and saver.busy
        is_due = 0 < every <= time.monotonic() - saver.clock
        return Flags(self.stop.heard(), is_saving, self.sizes.train.has_news, is_due)

    def agreed_flags(self) -> Flags:
        """The flags of all ranks, of which a stop and a save by the clock are noted. Waits for the slowest rank."""
        flags = self.ranks.finish_flag_exchange()
        self.stop.agreed, self.checkpointer.is_due = flags.stop_signal, flags.save_is_due
        return flags

    def stop_heard(self) -> int:
        """The number of a signal to this rank, or to another one that has announced it; 0 without one."""
        return self.ranks.announced(self.stop.heard())

    def agree_on_stop(self) -> None:
        """After work that each rank does alone and a signal cuts short. Collective: every rank comes here, whether it
        has finished its work or has heard of a signal. Raises Stopped on all ranks if any has heard one.
        """
        self.stop.agreed = self.ranks.agree(self.stop_heard)
        if self.stop.agreed:
            raise Stopped

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around a computation without collectives, which a signal interrupts. Collective at its end, as
        `agree_on_stop`.
        """
        with contextlib.suppress(Stopped):
            self.stop.interrupts = True
            try:
                yield
            finally:
                self.stop.interrupts = False
        self.agree_on_stop()

    def note_stop(self) -> None:
        """After a save or a callback: a signal during it is honoured before the next step. Collective."""
        if not (self.is_finished or self.stop.agreed):
            self.stop.agreed = self.ranks.agree(self.stop_heard)

    def at_work(self) -> AtWork:
        """What a signal would interrupt now; called from its handler and from the thread that hears it."""
        config, saver, step = self.config, self.checkpointer, self.state.progress.step
        batch = f"micro-batch of {'evaluation' if config.mode == 'train' else config.mode}"
        name = {Phase.EVALUATE: batch, Phase.SAVE: "checkpoint"}.get(self.engine.phase, "step")
        if config.mode != "train":
            lost = "nothing" if config.continues else "the results so far"
            return AtWork(name, lost, config.continues, config.mode == "lr_find")
        saved_at = saver.committed_at or 0
        # Of several ranks, one may have finished a step before another.
        is_alone = self.ranks.world == 1 and not self.is_ending
        # A save that repeats that of this step replaces its checkpoint.
        is_saving = saver.pending is not None or self.engine.phase is Phase.SAVE
        is_idle = is_alone and not is_saving and saved_at == step
        is_saved = config.continues and saver.committed_at == step
        return AtWork(name, f"{step - saved_at} steps since step {saved_at}", is_saved, is_idle)

    def measure_length(self) -> None:
        """Recompute the run's length from its current position, and everything that depends on it.

        Raises UserError if the schedule's warm-up and decay no longer fit.
        """
        self.limits = Limits.of(self.config, self.batches, self.state.progress)
        self.schedule_rates()
        self.tracker.progress.bar.total = self.limits.length.total_steps

    def schedule_rates(self) -> None:
        """Rebuild each schedule for the current run length; schedules with state keep it.

        Raises UserError if the schedule does not fit the run.
        """
        config = self.config
        for update in self.state.updates:
            state, groups = update.schedule.state_dict(), update.optimizer.param_groups
            kept = [{name: group[name] for name in update.optimizer.defaults if name in group} for group in groups]
            update.schedule = schedules.for_optimizer(
                config.schedule, self.limits.length, update.optimizer, config.user_packages, self.objective.direction
            )
            if state:  # torch's; its constructor has reset options, such as momentum, to their initial values
                for group, own in zip(groups, kept, strict=True):
                    group.update(own)
                update.schedule.load_state_dict(state)

    def close(self) -> None:
        """End loader workers and close files."""
        self.batches.close()
        for evaluated in self.eval_sets.values():
            evaluated.close()
        self.callbacks.close()
        self.tracker.close()

    def _is_due(self, every: Interval, done_at: int) -> bool:
        progress = self.state.progress
        return any(every) and progress.step != done_at and (every.ends_at(progress) or self.is_finished)
