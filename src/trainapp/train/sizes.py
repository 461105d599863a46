"""The micro-batch sizes of a run: initial values, schedule, and the sizes used."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from trainapp.config.schema import Config
from trainapp.data.micro_batch_sizes import MicroBatchSizes, Plan
from trainapp.data.step_batches import StepBatches
from trainapp.parallel.ranks import Ranks

Recorded = dict[int, dict[int, int]]  # by attempt, the size of each bucket
log = logging.getLogger(__name__)


class PlannedSizes(NamedTuple):
    """Sizes that a plan expects to fit. evaluation: None where there is none, or none was asked for."""

    train: int
    evaluation: int | None


@dataclass
class Sizes:
    """Micro-batch sizes, in samples per forward on one rank."""

    train: MicroBatchSizes
    evaluation: MicroBatchSizes
    parts: int | None = None  # `accumulation.steps`: the minimum number of micro-batches per step
    # `batch.micro_schedule`: sizes by the attempt from which they apply. A step that is skipped is an attempt, too.
    schedule: dict[int, Plan] = field(default_factory=dict)
    # Since the run began, in whatever process: sizes that this rank used, recoveries, and what a replay of these sizes
    # does not repeat.
    recorded: Recorded = field(default_factory=dict)
    oom_restarts: int = 0
    not_replayed: set[str] = field(default_factory=set)
    origin: str = "share"  # what decided the training size: see `initial_sizes`

    def begin_with(self, planned: PlannedSizes) -> None:
        """Start with sizes that a plan expects to fit."""
        self.train.start = max(self.train.smallest, min(planned.train, self.train.start))
        self.train.is_planned = True
        self.begin_evaluation_with(planned.evaluation)
        self.origin = "planned"

    def begin_evaluation_with(self, planned: int | None) -> None:
        """Start evaluation with such a size, where no evaluation has begun."""
        if planned is not None and not self.evaluation.searches:
            self.evaluation.start = min(planned, self.evaluation.start)
            self.evaluation.is_planned = True

    def follow_schedule(self, attempt: int) -> None:
        """Apply the schedule's entry for this attempt, if any."""
        if attempt in self.schedule:
            for size in self.train.follow(self.schedule.pop(attempt)):
                log.warning(
                    "batch.micro_schedule: %d from step %d has failed in this run; the micro-batch stays at %d",
                    size,
                    attempt,
                    self.train.size,
                )

    def record(self, attempt: int) -> bool:
        """Record the sizes of a finished attempt. Returns whether they differ from those of the one before."""
        plan = self.train.as_plan()
        if next(reversed(self.recorded.values()), None) == plan:
            return False
        self.recorded[attempt] = plan
        return True

    @property
    def used(self) -> dict[int, Plan]:
        """This rank's record as a schedule, which replays the run on one rank; for several see `history`."""
        return as_schedule(self.recorded)

    def history(self, ranks: Ranks) -> dict[str, Any]:
        """The records of all ranks, for a checkpoint or the result. Primitives only. Collective."""
        by_rank = ranks.all_gather_object((self.recorded, self.oom_restarts, self.not_replayed))
        recorded, restarts, not_replayed = zip(*by_rank, strict=True)
        return {
            "used": _merged(list(recorded)),
            "oom_restarts": max(restarts),  # a rank that evaluates alone recovers alone
            "not_replayed": sorted(set().union(*not_replayed)),
        }

    def happened(self) -> dict[str, Any]:
        """What the next process or run must know beside the sizes, see `continue_history`. Primitives only."""
        return {"oom_restarts": self.oom_restarts, "not_replayed": sorted(self.not_replayed)}

    def continue_history(self, saved: dict[str, Any] | None, hint: dict[str, Any] | None) -> None:
        """Add to the record of a checkpoint instead of beginning a new one.

        The checkpoint knows neither of the error that has led back to it nor of those after it: `hint` counts them.
        """
        known, failed = saved or {}, hint or {}
        self.recorded = dict(known.get("used", {}))
        counts = (known.get("oom_restarts"), failed.get("oom_restarts"))
        self.oom_restarts = max((count for count in counts if type(count) is int and 0 <= count < 2**31), default=0)
        reasons = [*_strings(known.get("not_replayed")), *_strings(failed.get("not_replayed"))]
        self.not_replayed = set(reasons)

    def scalars(self, batches: StepBatches) -> dict[str, float]:
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
    attempts: int = 0,
    retries_in_place: bool = True,
    hint: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    planned: Callable[[], PlannedSizes | None] = lambda: None,
    remembered: dict[str, Any] | None = None,
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `hint`: what a restart of this run left behind. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry that applies to the coming attempt; later ones replace any of the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, found in the same amount of memory (the caller passes None otherwise).
    5. `planned`, for `batch.micro_size=plan`: the largest sizes that are predicted to fit. It is called only here.
    6. `remembered`: where an earlier run of the same configuration ended.
    7. This rank's share of the global batch; where a size that fails costs a restart of all workers, it is then
       replaced by what is expected to fit (`plan.first_size`).

    For evaluation: `hint`, `batch.eval_micro_size=N`, `saved`, `planned` with training's, `remembered`, twice this
    rank's share (without gradients more fits).

    global_size: samples per optimizer step over all ranks. eval_samples: the same of an evaluation. attempts: finished
    steps, skipped ones included. smallest: some models cannot train on single samples. retries_in_place: whether a size
    that fails costs one retried step; where it costs a restart of all workers, no larger size is tried. hint, saved,
    remembered: as `Sizes.state_dict` returns them, `hint` may have only one of the two; damaged ones are ignored.
    """
    batch, hint = config.batch, hint or {}
    share = -(-global_size // world)
    sizes = _as_configured(config, share, -(-eval_samples // world), smallest, retries_in_place)
    if batch.micro_schedule is not None:
        sizes.schedule = _from_attempt(batch.micro_schedule, attempts + 1, share)
    if _is_valid(hint, "micro"):
        sizes.train.start = min(sizes.train.start, hint["micro"]["start"])
        sizes.train.load_state_dict(hint["micro"])
        sizes.schedule.pop(attempts + 1, None)
        sizes.origin = "hint"
    elif sizes.schedule:
        sizes.follow_schedule(attempts + 1)
        sizes.origin = "schedule"
    elif isinstance(batch.micro_size, int) or sizes.parts is not None:
        sizes.origin = "given"
    elif _is_known(saved, "micro"):
        sizes.train.load_state_dict(saved["micro"])
        sizes.origin = "saved"
    elif batch.micro_size == "plan" and (first := planned()) is not None:
        sizes.begin_with(first)
    elif _is_known(remembered, "micro"):
        sizes.train.load_state_dict(remembered["micro"])
        sizes.origin = "remembered"
    others: tuple[dict[str, Any] | None, ...] = (saved,) if sizes.evaluation.is_planned else (saved, remembered)
    _load_evaluation(sizes.evaluation, hint, () if batch.eval_micro_size != "auto" else others)
    return sizes


def _as_configured(config: Config, share: int, eval_share: int, smallest: int, retries_in_place: bool) -> Sizes:
    """What the configuration says, for this rank's share of a training step and of an evaluation."""
    batch, parts = config.batch, config.accumulation.steps
    start = share
    if parts != "auto":
        start = -(-share // parts)
    elif isinstance(batch.micro_size, int):
        start = min(batch.micro_size, share)
    grows = config.oom.grow and config.oom.keep_global_batch and batch.micro_schedule is None and parts == "auto"
    grows = grows and retries_in_place
    eval_start = _eval_start(config, share, eval_share)
    return Sizes(
        train=MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=smallest),
        evaluation=MicroBatchSizes(eval_start, config.oom.clean_steps, grow=grows),
        parts=None if parts == "auto" else parts,
    )


def _load_evaluation(sizes: MicroBatchSizes, hint: dict[str, Any], others: tuple[dict[str, Any] | None, ...]) -> None:
    """Continue from `hint`, else from the first of the others that knows sizes of evaluation."""
    if _is_valid(hint, "eval_micro"):
        sizes.start = min(sizes.start, hint["eval_micro"]["start"])
        sizes.load_state_dict(hint["eval_micro"])
        return
    known = next((source for source in others if _is_known(source, "eval_micro")), None)
    if known is not None:
        sizes.load_state_dict(known["eval_micro"])


def _eval_start(config: Config, share: int, eval_share: int) -> int:
    """Never more than this rank has: a size that is never reached is never proven."""
    size = config.batch.eval_micro_size
    return min(2 * share if size == "auto" else size, eval_share)


def _from_attempt(schedule: Mapping[int, Plan], attempt: int, share: int) -> dict[int, Plan]:
    """The rest of a schedule: what applies at `attempt`, and what comes later. No size is above this rank's share."""
    cut = {
        entry: {bucket: min(size, share) for bucket, size in plan.items()}
        if isinstance(plan, dict)
        else min(plan, share)
        for entry, plan in schedule.items()
    }
    later = {entry: plan for entry, plan in cut.items() if entry > attempt}
    in_force = max((entry for entry in cut if entry <= attempt), default=None)
    return later if in_force is None else {attempt: cut[in_force], **later}


def as_schedule(recorded: Recorded) -> dict[int, Plan]:
    """As short as possible: one number where the sizes of all shapes are equal, and only where they change."""
    schedule: dict[int, Plan] = {}
    for attempt, sizes in sorted(recorded.items()):
        distinct = set(sizes.values())
        plan: Plan = distinct.pop() if len(distinct) == 1 else dict(sorted(sizes.items()))
        if next(reversed(schedule.values()), None) != plan:
            schedule[attempt] = plan
    return schedule


def _merged(by_rank: list[Recorded]) -> Recorded:
    """One record for all ranks. They agree on the size of a shape, but not all have seen each shape."""
    merged: Recorded = {}
    in_force: list[dict[int, int]] = [{} for _ in by_rank]
    for attempt in sorted(set().union(*by_rank)):
        in_force = [own.get(attempt, before) for own, before in zip(by_rank, in_force, strict=True)]
        buckets = sorted(set().union(*in_force))
        merged[attempt] = {bucket: max(sizes.get(bucket, 0) for sizes in in_force) for bucket in buckets}
    return merged


def _strings(value: Any) -> list[str]:
    """The strings in a list that comes from a file."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


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
