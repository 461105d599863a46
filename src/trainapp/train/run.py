"""The `Run`: everything that the loop works with, in named parts."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainapp.checkpoint.checkpointer import Checkpointer, NullCheckpointer
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.durations import RunLength, parse, to_steps
from trainapp.config.schema import Config
from trainapp.data.eval_stream import EvalStream
from trainapp.data.progress import Progress
from trainapp.data.sampler import EvalBatches
from trainapp.data.step_batches import StepBatches
from trainapp.errors import UserError
from trainapp.memory.device import DeviceMemory
from trainapp.memory.levers.budget import Budget, NoBudget
from trainapp.memory.levers.offload import NoOffload, Offload
from trainapp.optim import schedules
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.optim.schedules import Schedule
from trainapp.parallel.ranks import Flags, Ranks, SingleRank
from trainapp.parallel.strategy import SingleDevice
from trainapp.signals import StopRequest
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.train.autotuner import Autotuner
from trainapp.train.losses import Task
from trainapp.train.phase import Phase
from trainapp.train.restore_point import RestorePoint
from trainapp.train.sizes import Sizes
from trainapp.train.totals import Totals

EvalSets = dict[str, "EvalBatches | EvalStream"]  # by name; the data's own validation split is ""


class Step(NamedTuple):
    """The coming optimizer step."""

    number: int  # from 1; the same again after a skipped step
    attempt: int  # from 1, skipped steps included: what `batch.micro_schedule` counts
    samples: int  # over all ranks
    is_logged: bool
    is_drawn: bool  # plot its memory


class Objective(NamedTuple):
    """What "best" means."""

    direction: str  # "max" or "min"
    metric: str


@dataclass
class Cadences:
    """How often, in optimizer steps; 0 is never.

    evaluate_epochs, save_epochs: the same in epochs, at whose ends it is done, where their lengths are not known.
    """

    log: int
    evaluate: int
    save: int
    evaluate_epochs: int = 0
    save_epochs: int = 0

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates at all."""
        return self.evaluate > 0 or self.evaluate_epochs > 0

    @classmethod
    def of(cls, config: Config, length: RunLength) -> "Cadences":
        """From `every.*`. Raises UserError for a duration that cannot be measured against this length."""
        every, steps = config.every, {}
        epochs = {"eval": _epochs(every.eval, length), "save": _epochs(every.save, length)}
        for name, value in {"log": every.log, "eval": every.eval, "save": every.save}.items():
            try:
                steps[name] = 0 if epochs.get(name) else to_steps(value, length)
            except ValueError as error:
                raise UserError(f"every.{name}: {error}") from None
        return cls(steps["log"], steps["eval"], steps["save"], epochs["eval"], epochs["save"])


def _epochs(value: int | str | None, length: RunLength) -> int:
    """Whole epochs of unknown length; 0 for any other duration."""
    if value is None or length.steps_per_epoch is not None:
        return 0
    amount, unit = parse(value)
    return int(amount) if unit == "epochs" and amount == int(amount) else 0


def run_length(config: Config, batches: StepBatches, progress: Progress) -> RunLength:
    """What durations are measured against: the steps so far, and those from here to the end.

    Where neither data nor global batch have changed, that is the same at every position: skipped steps count, too.
    """
    train, steps_per_epoch = config.train, batches.steps_per_epoch
    rest = batches.steps_left(progress.consumed)
    ends = [] if train.max_steps is None else [train.max_steps]
    if train.max_epochs is not None and steps_per_epoch is not None and rest is not None:
        epochs = train.max_epochs - progress.epoch
        left = rest + (epochs - 1) * steps_per_epoch if epochs > 0 else 0
        ends.append(progress.step + progress.skipped + left)
    # mode=eval and mode=export take no step and need no end
    return RunLength(steps_per_epoch, batches.global_size, min(ends, default=1))


@dataclass
class Attempt:
    """The step or evaluation in progress: what recovery needs to know when it fails."""

    phase: Phase = Phase.START
    started: float = 0.0  # time.monotonic()
    retried: set[tuple] = field(default_factory=set)  # what was retried at the same size in the present step
    evaluation: Totals | None = None  # totals so far of the data set that is being evaluated
    evaluated: dict[str, dict[str, float]] = field(default_factory=dict)  # the results of those before it, by name
    refused: int = 0  # allocations that the device's allocator had refused when it began


@dataclass
class Run:
    """Everything that the loop works with."""

    config: Config
    state: TrainState  # model, optimizer, precision, weight average, progress
    strategy: SingleDevice  # how the model is spread over the ranks
    ranks: Ranks
    task: Task
    batches: StepBatches
    eval_sets: EvalSets  # empty: nothing to evaluate
    length: RunLength
    schedule: Schedule  # the learning rate's factor, by finished steps
    sizes: Sizes  # micro-batches
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker | SilentTracker
    checkpointer: Checkpointer | NullCheckpointer
    nonfinite: NonFiniteCheck
    restore_point: RestorePoint
    stop: StopRequest
    cadences: Cadences
    objective: Objective
    activation_budget: Budget | NoBudget = field(default_factory=NoBudget)
    offload: Offload | NoOffload = field(default_factory=NoOffload)
    last_evaluation: dict[str, float] = field(default_factory=dict)  # as logged; of this process
    rehearsals: int = 0  # steps yet to be checked by `train.check_exactness`
    attempt: Attempt = field(default_factory=Attempt)
    autotuner: Autotuner = field(default_factory=Autotuner)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the cadence asks for an evaluation that has not been done at this step."""
        return bool(self.eval_sets) and self._is_due(
            self.cadences.evaluate, self.cadences.evaluate_epochs, self.state.progress.evaluated_at
        )

    @property
    def save_is_due(self) -> bool:
        """Whether the cadence, or the end of the run, asks for a checkpoint of this step."""
        cadences, saved_at = self.cadences, self.checkpointer.saved_at
        is_due = self._is_due(cadences.save, cadences.save_epochs, saved_at)
        return is_due or (self.is_ending and saved_at != self.state.progress.step)

    @property
    def is_ending(self) -> bool:
        """Whether the run has reached its end, or all ranks have agreed to stop."""
        return self.is_finished or self.stop.agreed > 0

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end."""
        progress = self.state.progress
        return self._is_end(progress.step, progress.epoch)

    def next_step(self) -> Step:
        """The coming optimizer step. Steps on the cadence are logged, and the run's last."""
        progress, every = self.state.progress, self.cadences.log
        number = progress.step + 1
        is_logged = every > 0 and (
            number % every == 0 or self._is_end(number, self.batches.after(progress.epoch, progress.consumed)[0])
        )
        # Only once the size is proven, so that the plot shows a typical step.
        is_drawn = self.memory.keep_events and not self.sizes.train.is_unproven
        return Step(number, number + progress.skipped, self.batches.step_samples(progress), is_logged, is_drawn)

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
        return Flags(self.stop.signal or 0, self.checkpointer.busy, self.sizes.train.has_news)

    def history(self) -> dict[str, Any]:
        """What a checkpoint and the result hold of the sizes so far, see `Sizes.history`. Collective."""
        if self.memory.has_hidden_failures:
            self.sizes.not_replayed.add(
                "a library, probably cuDNN, has caught the error of a failed allocation and taken another algorithm"
            )
        return self.sizes.history(self.ranks)

    def set_global_size(self, size: int) -> None:
        """`oom.keep_global_batch=false`: a smaller global batch: more steps, a longer schedule, rarer cadences."""
        self.sizes.not_replayed.add(f"batch.global_size: {size} from step {self.state.progress.step + 1} on")
        self.state.global_size = self.batches.global_size = size
        self.measure_length()

    def measure_length(self) -> None:
        """Measure the run again from its present position, with all that depends on its length.

        Raises UserError where the schedule's warm-up and decay no longer fit.
        """
        self.length = run_length(self.config, self.batches, self.state.progress)
        self.schedule = schedules.build(self.config.schedule, self.length)
        self.cadences = Cadences.of(self.config, self.length)
        self.tracker.progress.set_total(self.length.total_steps)

    def close(self) -> None:
        """End loader workers and close files."""
        self.batches.close()
        for evaluated in self.eval_sets.values():
            evaluated.close()
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
