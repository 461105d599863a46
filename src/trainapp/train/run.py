"""What the loop works with: a run's parts, its cadences, and where it is."""

from dataclasses import dataclass, field
from typing import Any

from trainapp.checkpoint.checkpointer import Checkpointer, NullCheckpointer
from trainapp.checkpoint.train_state import TrainState
from trainapp.data.micro_batch_sizes import Plan
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.memory.device import DeviceMemory
from trainapp.models.inspect import has_batchnorm
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.optim.schedules import Schedule
from trainapp.parallel.ranks import SingleRank
from trainapp.parallel.strategy import SingleDevice
from trainapp.signals import StopRequest
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import Tracker
from trainapp.train.losses import Task
from trainapp.train.totals import Totals
from trainapp.train.transaction import RestorePoint


@dataclass
class Run:
    """Everything that the loop works with. `phase` tells where it is, for whoever catches an error."""

    state: TrainState
    strategy: SingleDevice
    ranks: SingleRank
    task: Task
    batches: TrainBatches
    eval_batches: EvalBatches | None
    schedule: Schedule
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker
    checkpointer: Checkpointer | NullCheckpointer
    guard: NonFiniteCheck
    restore_point: RestorePoint
    stop: StopRequest
    config: dict[str, Any]  # as written into checkpoints
    objective: tuple[str, str]  # ("max", "accuracy")
    max_steps: int | None
    max_epochs: int | None
    log_every: int
    eval_every: int
    save_every: int
    grad_clip: float | None = None
    accumulation: int | None = None  # as many micro-batches as asked; None: what follows from the sizes
    size_plan: dict[int, Plan] = field(default_factory=dict)  # `batch.micro_schedule`: the micro-batch from a step on
    sizes_used: dict[int, Plan] = field(default_factory=dict)  # the same, as it came out: replays this run
    noted_batchnorm: bool = False  # that its statistics are those of micro-batches
    timeline: bool = False  # draw the memory of one healthy step
    phase: str = "data"
    attempt_started: float = 0.0  # time.monotonic() of the step or evaluation at work
    retried: tuple | None = None  # the attempt that was last repeated at its own size
    evaluation: Totals | None = None  # what the evaluation at work has finished; None: none is at work
    stopping: int = 0  # the signal that all ranks agreed to stop for

    def close(self) -> None:
        """End what runs beside the loop: loader workers, files."""
        self.batches.close()
        if self.eval_batches is not None:
            self.eval_batches.close()
        self.tracker.close()

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        progress = self.state.progress
        done = self.max_steps is not None and progress.step >= self.max_steps
        return done or (self.max_epochs is not None and progress.epoch >= self.max_epochs)

    @property
    def on_last_step(self) -> bool:
        """Whether the coming step is the run's last."""
        progress = self.state.progress
        last = self.max_steps is not None and progress.step + 1 >= self.max_steps
        epoch = self.batches.after(progress.epoch, progress.consumed)[0]
        return last or (self.max_epochs is not None and epoch >= self.max_epochs)

    @property
    def logs_coming_step(self) -> bool:
        """Whether the coming step's numbers are recorded: at the cadence, and at the end."""
        due = self.log_every and (self.state.progress.step + 1) % self.log_every == 0
        return bool(due) or (self.log_every > 0 and self.on_last_step)

    @property
    def draws_coming_step(self) -> bool:
        """Whether the coming step's memory is drawn: once, when the size is no longer new."""
        return self.timeline and not self.state.micro.trying

    def note_size(self) -> None:
        """Remember from which step on the micro-batch was this one, so that `batch.micro_schedule` replays it."""
        sizes, step = self.state.micro.in_force(), self.state.progress.step + 1
        if next(reversed(self.sizes_used.values()), None) == sizes:
            return
        size = self.state.micro.size
        self.sizes_used[step] = sizes
        cut = self.batches.accumulation(size, self.accumulation) > 1
        if cut and not self.noted_batchnorm and has_batchnorm(self.state.model):
            self.noted_batchnorm = True
            self.tracker.note(
                f"step {step}: the model has BatchNorm, whose statistics are those of the micro-batch ({size}), not of "
                "the global batch; GroupNorm (model.norm=group) does not depend on it"
            )

    @property
    def eval_ranks(self) -> SingleRank:
        """The ranks that evaluate together: all, or each by itself."""
        return self.ranks if self.strategy.forward_is_collective else SingleRank()

    def flags(self) -> tuple[int, int, int]:
        """What ranks agree on in every step: the signal to stop for, whether one still writes a checkpoint, and
        whether one has news for the search."""
        return self.stop.signal or 0, int(self.checkpointer.busy), int(self.state.micro.has_news)

    def due(self, every: int, done_at: int) -> bool:
        """Whether something with this cadence is still to be done at the present step."""
        step = self.state.progress.step
        return bool(every) and step != done_at and (step % every == 0 or self.finished)
