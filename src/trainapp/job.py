"""What the loop works with: a run's parts, its cadences, and where it is."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainapp.batching import EvalBatches, TrainBatches
from trainapp.checkpoint import Checkpoints
from trainapp.finite import FiniteGuard
from trainapp.memory import DeviceMemory
from trainapp.meter import Meter
from trainapp.optim.schedules import Schedule
from trainapp.parallel.ranks import Alone
from trainapp.parallel.strategies import Single
from trainapp.saving import Saver
from trainapp.search import Plan
from trainapp.signals import StopRequest
from trainapp.state import RestorePoint, TrainState, has_batchnorm
from trainapp.tasks import Task
from trainapp.tracking import Tracker


@dataclass
class Sums:
    """Of losses, of what they were averaged over, and of metrics; on the device until somebody asks."""

    loss: Tensor | float = 0.0
    count: Tensor | int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    def add(
        self, loss: Tensor, count: Tensor | int, metrics: dict[str, Tensor], samples: int = 0, real: bool = True
    ) -> None:
        """One more micro-batch; one that is not real adds its metrics' names only."""
        if not real:
            loss, count, samples = torch.zeros_like(loss), 0, 0
            metrics = {name: torch.zeros_like(value) for name, value in metrics.items()}
        # All together or, when memory runs out in one of the sums, not at all.
        added = {name: self.metrics.get(name, 0) + value for name, value in metrics.items()}
        loss, count = self.loss + loss, self.count + count
        self.loss, self.count, self.samples = loss, count, self.samples + samples
        self.metrics.update(added)

    def over(self, ranks: Alone) -> "Sums":
        """The sums over all ranks."""
        if ranks.world == 1:
            return self
        names = sorted(self.metrics)
        values = [self.loss, self.count, *(self.metrics[name] for name in names)]
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=ranks.device) for value in values]
        loss, count, *metrics = ranks.total(torch.stack(numbers))
        return Sums(loss, count, dict(zip(names, metrics, strict=True)), self.samples)

    def means(self) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`. Waits for the device."""
        count = max(1, int(self.count))
        return {name: float(value) / count for name, value in {"loss": self.loss, **self.metrics}.items()}


@dataclass
class Job:
    """Everything that the loop works with. `phase` tells where it is, for whoever catches an error."""

    state: TrainState
    strategy: Single
    ranks: Alone
    task: Task
    batches: TrainBatches
    eval_batches: EvalBatches | None
    schedule: Schedule
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker
    checkpoints: Checkpoints
    saver: Saver
    guard: FiniteGuard
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
    size_plan: dict[int, Plan] = field(default_factory=dict)  # `oom.schedule`: the micro-batch from a step on
    sizes_used: dict[int, Plan] = field(default_factory=dict)  # the same, as it came out: replays this run
    noted_batchnorm: bool = False  # that its statistics are those of micro-batches
    timeline: bool = False  # draw the memory of one healthy step
    phase: str = "data"
    attempt_started: float = 0.0  # time.monotonic() of the step or evaluation at work
    retried: tuple | None = None  # the attempt that was last repeated at its own size
    evaluation: Sums | None = None  # what the evaluation at work has finished; None: none is at work
    saved_at: int = 0
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
        """Remember from which step on the micro-batch was this one, so that `oom.schedule` can replay the run."""
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
    def eval_ranks(self) -> Alone:
        """The ranks that evaluate together: all, or each by itself."""
        return self.ranks if self.strategy.equal_batches else Alone()

    def flags(self) -> tuple[int, int, int]:
        """What ranks agree on in every step: the signal to stop for, whether one still writes a checkpoint, and
        whether one has news for the search."""
        return self.stop.signal or 0, int(self.saver.busy), int(self.state.micro.has_news)

    def due(self, every: int, done_at: int) -> bool:
        """Whether something with this cadence is still to be done at the present step."""
        step = self.state.progress.step
        return bool(every) and step != done_at and (step % every == 0 or self.finished)
