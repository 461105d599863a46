"""The micro-batch sizes of a run: initial values, schedule, and the sizes used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from trainapp.config.schema import Config
from trainapp.data.micro_batch_sizes import MicroBatchSizes, Plan
from trainapp.data.sampler import TrainBatches


@dataclass
class Sizes:
    """Micro-batch sizes, in samples per forward on one rank."""

    train: MicroBatchSizes
    evaluation: MicroBatchSizes
    parts: int | None = None  # `accumulation.steps`: the minimum number of micro-batches per step
    schedule: dict[int, Plan] = field(
        default_factory=dict
    )  # `batch.micro_schedule`: sizes by the step from which they apply
    used: dict[int, Plan] = field(default_factory=dict)  # the sizes actually used: as a schedule, they replay the run
    origin: str = "share"  # what decided the training size: see `initial_sizes`

    def follow_schedule(self, step: int) -> None:
        """Apply the schedule's entry for this step, if any."""
        if step in self.schedule:
            self.train.follow(self.schedule.pop(step))

    def record(self, step: int) -> bool:
        """Record the size of a finished step. Returns whether it differs from the step before."""
        plan = self.train.as_plan()
        if next(reversed(self.used.values()), None) == plan:
            return False
        self.used[step] = plan
        return True

    def scalars(self, batches: TrainBatches) -> dict[str, float]:
        """What a log step records of the sizes."""
        return {
            "batch/global_size": batches.global_size,
            "batch/micro_size": self.train.size,
            "batch/accumulation": batches.accumulation(self.train.size, self.parts),
            "batch/eval_micro_size": self.evaluation.size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint or for the next run of the same configuration."""
        return {"micro": self.train.state_dict(), "eval_micro": self.evaluation.state_dict()}


def initial_sizes(
    config: Config,
    world: int,
    global_size: int,
    eval_samples: int,
    *,
    smallest: int = 1,
    step: int = 0,
    hint: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    remembered: dict[str, Any] | None = None,
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `hint`: what a restart of this run left behind. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry that applies to the coming step.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, found in the same amount of memory (the caller passes None otherwise).
    5. `remembered`: where an earlier run of the same configuration ended.
    6. This rank's share of the global batch.

    For evaluation: `hint`, `batch.eval_micro_size=N`, `saved`, `remembered`, twice this rank's share (without gradients
    more fits).

    global_size: samples per optimizer step over all ranks. eval_samples: the same of an evaluation. step: finished
    optimizer steps. smallest: some models cannot train on single samples. hint, saved, remembered: as
    `Sizes.state_dict` returns them, `hint` may have only one of the two; damaged ones are ignored.
    """
    batch, parts, hint = config.batch, config.accumulation.steps, hint or {}
    start = share = -(-global_size // world)
    if parts != "auto":
        start = -(-share // parts)
    elif batch.micro_size != "auto":
        start = min(batch.micro_size, share)
    grows = config.oom.grow and config.oom.keep_global_batch and batch.micro_schedule is None and parts == "auto"
    sizes = Sizes(
        train=MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=smallest),
        evaluation=MicroBatchSizes(
            _eval_start(config, share, -(-eval_samples // world)), config.oom.clean_steps, grow=grows
        ),
        parts=None if parts == "auto" else parts,
    )
    if _is_valid(hint, "micro"):
        sizes.train.start = min(start, hint["micro"]["start"])
        sizes.train.load_state_dict(hint["micro"])
        sizes.origin = "hint"
    elif batch.micro_schedule is not None:
        sizes.schedule = _from_step(batch.micro_schedule, step + 1)
        sizes.origin = "schedule"
    elif batch.micro_size != "auto" or parts != "auto":
        sizes.origin = "given"
    elif _is_known(saved, "micro"):
        sizes.train.load_state_dict(saved["micro"])
        sizes.origin = "saved"
    elif _is_known(remembered, "micro"):
        sizes.train.load_state_dict(remembered["micro"])
        sizes.origin = "remembered"
    if _is_valid(hint, "eval_micro"):
        sizes.evaluation.start = min(sizes.evaluation.start, hint["eval_micro"]["start"])
        sizes.evaluation.load_state_dict(hint["eval_micro"])
    elif batch.eval_micro_size == "auto":
        known = next((source for source in (saved, remembered) if _is_known(source, "eval_micro")), None)
        if known is not None:
            sizes.evaluation.load_state_dict(known["eval_micro"])
    return sizes


def _eval_start(config: Config, share: int, eval_share: int) -> int:
    """Never more than this rank has: a size that is never reached is never proven."""
    size = config.batch.eval_micro_size
    return min(2 * share if size == "auto" else size, eval_share)


def _from_step(schedule: Mapping[int, Plan], step: int) -> dict[int, Plan]:
    """The rest of a schedule: what applies at `step`, and what comes later."""
    later = {entry: plan for entry, plan in schedule.items() if entry > step}
    in_force = max((entry for entry in schedule if entry <= step), default=None)
    return later if in_force is None else {step: schedule[in_force], **later}


def _is_known(source: dict[str, Any] | None, name: str) -> TypeGuard[dict[str, Any]]:
    """Whether a source has valid sizes, and of any shape."""
    return _is_valid(source, name) and bool(source[name]["buckets"])


def _is_valid(source: dict[str, Any] | None, name: str) -> TypeGuard[dict[str, Any]]:
    """Whether a source has valid sizes: it may be a damaged file."""
    try:
        if not source or not source[name]:
            return False
        MicroBatchSizes(1).load_state_dict(source[name])
        start = source[name]["start"]
        return type(start) is int and start >= 1
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
