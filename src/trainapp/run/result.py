"""How a run ended: what result.json holds."""

import json
import math
import signal
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainapp import strict_json
from trainapp.config import micro_schedule
from trainapp.data.progress import Progress
from trainapp.files import atomic_write
from trainapp.tracking.tracker import RESULT
from trainapp.train.run import Run

_NOTES = ("objective_note",)  # in the file only where there is something to say


@dataclass
class RunResult:
    """How a run ended; written to result.json. Sizes in samples, memory in bytes."""

    objective: float | None  # of the last evaluation; it may be nan or inf, which the file cannot hold
    objective_note: str | None  # why it is not a number
    metric: str
    direction: str  # "min" or "max": which values of it are better
    best_objective: float | None  # of all evaluations; None where none was finite
    best_step: int | None
    sweeper_receives: str  # which of the two a sweeper is given: its name here
    evaluation: dict[str, float]  # the last evaluation's metrics, those of `eval` as `eval_NAME/METRIC`
    steps: int
    samples: int
    micro_size: int
    accumulation: int
    oom_restarts: int  # since the run began, in whatever process
    micro_schedule: dict[
        Any, Any
    ]  # sizes by step, or such by the update's name; set as batch.micro_schedule, it replays the sizes of this run
    peak_memory_bytes: int
    peak_reserved_bytes: int  # with the allocator's unused cache, which counts towards the limit on CUDA
    samples_per_second: float
    seconds: float
    checkpoint: str | None
    ended: str | None = None  # why: the setting of its length, what has stopped it, or the signal
    left_out: int = 0  # files that this process's data sets could not read, each counted once: see docs/images.md

    @property
    def for_sweeper(self) -> float | None:
        """What Hydra's optimizing sweepers receive."""
        value: float | None = getattr(self, self.sweeper_receives)
        return value


@dataclass
class Result(RunResult):
    """What `trainapp.train` returns. run_dir: where the run has written everything."""

    run_dir: Path = field(kw_only=True)


def result_of(run: Run, seconds: float) -> RunResult:
    """The run's result. Collective: call on every rank."""
    progress, size = run.state.progress, run.sizes.train.size
    peaks = run.ranks.all_gather_object((run.memory.peak, run.memory.peak_reserved))
    return RunResult(
        objective=progress.objective,
        objective_note=_note(progress),
        metric=run.objective.metric,
        direction=run.objective.direction,
        best_objective=progress.best,
        best_step=progress.best_step,
        sweeper_receives="objective",
        evaluation=run.last_evaluation,
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=run.batches.accumulation(size, run.sizes.parts),
        oom_restarts=run.ranks.all_reduce_max(run.sizes.oom_restarts)[0],
        micro_schedule=run.sizes.micro_schedule(),
        peak_memory_bytes=max(peak for peak, _ in peaks),
        peak_reserved_bytes=max(reserved for _, reserved in peaks),
        samples_per_second=run.meter.samples_per_second(),
        seconds=seconds,
        checkpoint=run.checkpointer.newest_name(),
        ended=_why_ended(run),
        left_out=_left_out(run),
    )


def _left_out(run: Run) -> int:
    """How many files the data sets of all ranks list in their attribute `left_out`, if they have one. Collective."""
    sets = (run.batches.dataset, *(evaluated.dataset for evaluated in run.eval_sets.values()))
    lists = [found for data in sets if isinstance(found := getattr(data, "left_out", None), list)]
    by_rank = run.ranks.all_gather_object({str(name) for found in lists for name in found})
    return len(set().union(*by_rank))


def _why_ended(run: Run) -> str | None:
    """None where nothing was trained."""
    progress, train = run.state.progress, run.config.train
    if run.config.mode != "train":
        return None
    if progress.stopped is not None:
        return progress.stopped
    if run.is_finished:
        by_steps = train.max_steps is not None and progress.step >= train.max_steps
        return f"train.max_steps={train.max_steps}" if by_steps else f"train.max_epochs={train.max_epochs}"
    return signal.Signals(run.stop.agreed).name if run.stop.agreed else None


def _note(progress: Progress) -> str | None:
    """Why the objective is not a number, and whether it ever was; None if it is, or if nothing was evaluated."""
    if progress.objective is None or math.isfinite(progress.objective):
        return None
    return f"{progress.objective} at {'the last' if progress.best is not None else 'every'} evaluation"


def read(run_dir: Path) -> RunResult | None:
    """The result that `write` has left; None where there is none that can be read, or one of an older version."""
    try:
        facts = json.loads((run_dir / RESULT).read_text())
        facts = dict.fromkeys(_NOTES) | facts
        facts["micro_schedule"] = micro_schedule.check(facts["micro_schedule"] or {1: facts["micro_size"]})
        return RunResult(**{own.name: facts[own.name] for own in fields(RunResult)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(run_dir: Path, result: RunResult) -> None:
    """Write result.json. Raises OSError when it cannot be written; an older one then stays."""
    facts = asdict(result)
    for note in _NOTES:
        if facts[note] is None:
            del facts[note]
    with atomic_write(run_dir / RESULT) as file:
        file.write(strict_json.dumps(facts, indent=1) + "\n")
