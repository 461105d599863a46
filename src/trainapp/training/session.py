"""The `Session`: the live objects of one process."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch
from trainapp.data.eval_batches import EvalBatches
from trainapp.data.train_batches import TrainBatches
from trainapp.hooks.callbacks import Callbacks
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.losses.losses import Task, class_dim
from trainapp.memory.device import DeviceMemory
from trainapp.optim import schedules
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.strategy import Strategy
from trainapp.signals import StopRequest
from trainapp.sizes.record import Sizes
from trainapp.state.snapshot import Snapshot, State
from trainapp.techniques.ladder import Climb, TurnedOn
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import Tracker
from trainapp.training.engine import Engine, Totals
from trainapp.training.limits import Limits, later_check_is_due
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
            config: the run's configuration; `objective`, and `updates`, of which several have no best with auto.
            task: the evaluation task.
            sets: names of the evaluation sets; auto uses the first, the data's own validation split ("") if it has one.
        """
        if config.objective != "auto":
            return cls.parsed(config.objective)
        prefix = f"{sets[0]}/" if sets and sets[0] else ""
        if class_dim(task) == 1:
            by_task = cls("max", f"{prefix}accuracy")
        else:
            by_task = cls("min", f"{prefix}loss")
        if not config.has_best:
            return by_task._replace(direction=None)
        return by_task

    @classmethod
    def parsed(cls, setting: str) -> "Objective":
        """Return that of a setting such as "max accuracy"."""
        direction, metric = setting.split()
        return cls(direction, metric)


@dataclass(frozen=True)
class InitialWeights:
    """What a run that does not resume has loaded from `model.init_from`, counted by the names in the state dict."""

    source: str
    tensors: int | None  # that were loaded; None where the weights were loaded into the base of adapters
    of_tensors: int
    left_as_initialised: list[str]


@dataclass
class Evaluation:
    """State of the current evaluation, which continues after it ran out of memory, and results of the last one."""

    totals: Totals | None = None  # so far, for the current data set
    complete: bool = False  # whether all ranks have finished its micro-batches
    before: State | None = None  # of model, task and data, to which the current data set's evaluation returns
    rows_before: dict[str, Tensor] = field(default_factory=dict)  # copies of `per_sample_buffers`, as in `before`
    written: Collection[str] = ()  # state that the forward of its first micro-batch has written, or may have
    may_carry: bool = False  # whether that may be state on any rank, which later micro-batches show: `carried_state`
    is_tried_without: bool = False  # whether the next micro-batch is evaluated once without it, too
    embedded: Any = None  # its embeddings so far, if the loss compares them: see `training.evaluation`
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)  # metrics of the sets already evaluated, by name
    last: dict[str, float] = field(default_factory=dict)  # as logged, in this process


@dataclass
class AttemptState:
    """State of the current attempt at a step or evaluation."""

    started: float = 0.0  # time.monotonic()
    refused_before: int = 0  # allocations that the device's allocator had refused before the attempt


@dataclass
class RecoveryState:
    """What recovery needs to remember."""

    task_states: dict[str, Any] = field(default_factory=dict)  # of the run's start, where a new session may begin again
    retried_step: int = -1  # the last step retried at the same size
    chosen_config: Config | None = None  # without the techniques that are turned on
    climb: Climb | None = None  # with which this session began, if it has turned on a technique
    too_few_error: str = ""  # the model's error for too few samples, in parentheses; empty if there was none


@dataclass
class Session:
    """The live objects of one process."""

    config: Config  # with the techniques that are turned on
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
    filled: Mapping[str, Any]  # settings filled in from the data, and what was checked: see `Resources`
    checks: Mapping[str, str]
    initial_weights: InitialWeights | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    attempt: AttemptState = field(default_factory=AttemptState)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    step_metrics: dict[str, float] = field(default_factory=dict)  # to be logged: those of the step's finished updates
    topics_of_trials: frozenset[str] = frozenset()  # of what depends on the micro-batch, known before the first step
    compared_names: set[str] = field(default_factory=set)  # of state that forwards write: compared between ranks
    evaluated_sets: set[str] = field(default_factory=set)  # names of sets of which two micro-batches were evaluated
    # Follows a step's micro-batches: `trials.later_steps`, which belongs to a room above this one.
    later_check: Callable[["Session", Iterator[MicroBatch]], Iterator[MicroBatch]] | None = None
    turned_on: TurnedOn = field(default_factory=TurnedOn)  # techniques, by the run itself
    exactness_checks_left: int = 0  # updates that `train.check_exactness` has yet to compare
    sizes: Sizes = field(init=False)  # micro-batch sizes; chosen after a checkpoint is read

    def __post_init__(self) -> None:
        """Make the engine's parts that other rooms use attributes: they are read 20 times per step."""
        self.state: TrainState = self.engine.state
        self.strategy: Strategy = self.engine.strategy
        self.snapshot: Snapshot = self.engine.snapshot

    @property
    def awaits_evaluation(self) -> bool:
        """Whether an evaluation is due and not yet done at this step."""
        return bool(self.eval_sets) and self.limits.evaluation_is_due(self.state.progress)

    @property
    def save_is_due(self) -> bool:
        """Whether a checkpoint of this step is due: by cadence, clock or best evaluation, or at the run's end."""
        saver = self.checkpointer
        if saver.saved_at == self.state.progress.step:
            return False
        return saver.is_due or self.is_ending or self.limits.save_is_due(self.state.progress)

    @property
    def is_ending(self) -> bool:
        """Whether the run has reached its end or, after a whole step, must stop: a signal or a failed callback."""
        if self.is_finished:
            return True
        must_stop = self.stop.agreed > 0 or self.callbacks.failure is not None
        return must_stop and not self.state.progress.update

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end, or a callback has ended it."""
        return self.limits.is_finished(self.state.progress)

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
        with self.engine.at(Phase.READ):
            return self._coming_update()

    def _coming_update(self) -> UpdateContext:
        progress = self.state.progress

        # Select the update, where a step has several.
        update = self.state.updates[progress.update]
        if update.name:
            self.sizes.select_update(update.name)
        is_first_of_step = progress.update == 0
        if is_first_of_step:
            self.step_metrics = {}

        # A stream reads the step's samples here.
        step_number = progress.step + 1
        with self.meter.waiting():
            share = self.batches.share(progress)

        # The last step is logged, wherever the run ends.
        is_last_step = self.limits.end_at(step_number, share.after[0])
        log_every = self.limits.log
        return UpdateContext(
            update,
            step_number,
            batch_number=step_number + progress.skipped,
            samples=share.total,
            is_logged=log_every > 0 and (step_number % log_every == 0 or is_last_step),
            plots_memory=self.memory.keep_events and not self.sizes.train.is_unvalidated,  # the step must be typical
            checks_exactness=self.exactness_checks_left > 0,
        )

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Return the coming update's micro-batches, of the size that fits, fetched as needed: as many on every rank."""
        sizes_by_update = list(self.sizes.by_update.values())
        fetched = self.batches.micro_batches(
            self.state.progress,
            [sizes.size for sizes in sizes_by_update],
            self.state.cadences,
            [sizes.fewest_samples for sizes in sizes_by_update],
        )
        micro_batches = self.sizes.train.split_all(self.meter.timed(fetched), self.ranks)
        if self.later_check is not None and later_check_is_due(self.engine.context.step_number):
            return self.later_check(self, micro_batches)
        return micro_batches

    @property
    def eval_ranks(self) -> Ranks:
        """The ranks that evaluate together: all of them, or this one alone."""
        return self.ranks if self.strategy.forward_is_collective else SingleRank()

    @property
    def retries_in_place(self) -> bool:
        """Whether a step that runs out of memory is retried by these processes. Otherwise all workers restart."""
        recovers = self.strategy.recovers_in_place and self.config.parallel.vote_on_oom != "never"
        return recovers or self.ranks.world_size == 1

    def resume_facts(self) -> dict[str, Any]:
        """Return what a checkpoint tells a resumed run about sizes, techniques and draws: plain values."""
        return {
            "budget": self.memory.budget,
            "draws": self.engine.draw_record.state_dict(),
            **self.sizes.state_dict(),
            **self.turned_on.checkpoint_entry(),
            "seconds": self.meter.seconds,
        }

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
        for update in self.state.updates:
            update.schedule = schedules.rebuild(
                update.schedule,
                self.config.schedule,
                self.limits.length,
                update.optimizer,
                self.config.user_packages,
                self.objective.direction,
            )

    def close(self) -> None:
        """End loader workers and close files."""
        self.batches.close()
        for evaluated in self.eval_sets.values():
            evaluated.close()
        self.callbacks.close()
        self.tracker.close()
