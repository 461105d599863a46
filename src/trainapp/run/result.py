"""What a run says of itself: a line or two at its start, a table and result.json at its end."""

import contextlib
import json
import logging
import math
import signal
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainapp.config.schema import WITHOUT_NUMBERS, Batch
from trainapp.data.progress import Progress
from trainapp.files import atomic_write, strict_json
from trainapp.tracking.tracker import RESULT
from trainapp.training.session import Session
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


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

    @property
    def for_sweeper(self) -> float | None:
        """What Hydra's optimizing sweepers receive."""
        value: float | None = getattr(self, self.sweeper_receives)
        return value


@dataclass
class Result(RunResult):
    """What `trainapp.train` returns. run_dir: where the run has written everything."""

    run_dir: Path = field(kw_only=True)


def result_of(session: Session, seconds: float) -> RunResult:
    """The run's result. Collective: call on every rank."""
    progress, size = session.state.progress, session.sizes.train.size
    peaks = session.ranks.all_gather_object((session.memory.peak, session.memory.peak_reserved))
    return RunResult(
        objective=progress.objective,
        objective_note=_note(progress),
        metric=session.objective.metric,
        direction=session.objective.direction,
        best_objective=progress.best,
        best_step=progress.best_step,
        sweeper_receives="objective",
        evaluation=session.evaluation.last,
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=session.batches.accumulation(size),
        oom_restarts=session.ranks.all_reduce_max(session.sizes.oom_restarts)[0],
        micro_schedule=session.sizes.micro_schedule(),
        peak_memory_bytes=max(peak for peak, _ in peaks),
        peak_reserved_bytes=max(reserved for _, reserved in peaks),
        samples_per_second=session.meter.samples_per_second(),
        seconds=seconds,
        checkpoint=session.checkpointer.newest_name(),
        ended=_why_ended(session),
    )


def _why_ended(session: Session) -> str | None:
    """None where nothing was trained."""
    progress, train = session.state.progress, session.config.train
    if session.config.mode != "train":
        return None
    if progress.stopped is not None:
        return progress.stopped
    if session.is_finished:
        by_steps = train.max_steps is not None and progress.step >= train.max_steps
        return f"train.max_steps={train.max_steps}" if by_steps else f"train.max_epochs={train.max_epochs}"
    return signal.Signals(session.stop.agreed).name if session.stop.agreed else None


def _note(progress: Progress) -> str | None:
    """Why the objective is not a number, and whether it ever was; None if it is, or if nothing was evaluated."""
    if progress.objective is None or math.isfinite(progress.objective):
        return None
    return f"{progress.objective} at {'the last' if progress.best is not None else 'every'} evaluation"


def read(run_dir: Path) -> RunResult | None:
    """The result that `write` has left; None where there is none that can be read, or one of an older version."""
    try:
        facts = {"objective_note": None} | json.loads((run_dir / RESULT).read_text())
        facts["micro_schedule"] = Batch(micro_schedule=facts["micro_schedule"] or None).micro_schedule or {}
        return RunResult(**{own.name: facts[own.name] for own in fields(RunResult)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(run_dir: Path, result: RunResult) -> None:
    """Write result.json. Raises OSError when it cannot be written; an older one then stays."""
    facts = asdict(result)
    if facts["objective_note"] is None:
        del facts["objective_note"]
    with atomic_write(run_dir / RESULT) as file:
        file.write(strict_json(facts, indent=1) + "\n")


def opening_lines(session: Session) -> list[str]:
    """One, and in training another where only a part of the parameters is trained. Of shards, `numel` counts the
    whole.
    """
    parameters = list(session.state.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    if session.config.mode not in ("train", "lr_find") or trained == total:
        return [opening_line(session)]
    share = f"{trained} of {total} parameters are trained ({100 * trained / total:.2f}%)"
    return [opening_line(session), share]


def opening_line(session: Session) -> str:
    """Model, device, precision; in training also how the global batch is cut."""
    state, batches, micro_size = session.state, session.batches, session.sizes.train.size
    parameters = sum(p.numel() for p in state.model.parameters())
    count = batches.accumulation(micro_size)
    name = session.config.model.target.rpartition(".")[2]
    if not name[0].isupper():  # a function that builds the model
        name = type(state.model).__name__.removeprefix("FSDP")
    model = f"{name} with {_count_text(parameters)} parameters on {state.device}, {state.precision.mode}"
    if session.config.mode not in ("train", "lr_find"):
        return model
    return (
        f"{model}; global batch {session.config.batch.global_size} = micro-batch {micro_size} x {count} accumulated "
        f"x {batches.world} rank{'s' * (batches.world > 1)}; {_data_text(session)}" + _schedule_text(session)
    )


def _data_text(session: Session) -> str:
    """Samples and steps per epoch; of a stream, what ends the run."""
    train, batches = session.config.train, session.batches
    if batches.steps_per_epoch is not None:
        return f"{batches.samples} samples, {batches.steps_per_epoch} steps per epoch"
    epochs = "" if train.max_epochs is None else f", at most {train.max_epochs} epochs (train.max_epochs)"
    return "a stream" if train.max_steps is None else f"a stream, at most {train.max_steps} steps{epochs}"


def _schedule_text(session: Session) -> str:
    """The coming entries of `batch.micro_schedule`."""
    if session.config.batch.micro_schedule is None:
        return ""
    entries = [f"{sizes} from step {step}" for step, sizes in sorted(session.sizes.train.schedule.items())]
    more = f", ... ({len(entries)} changes)" if len(entries) > 4 else ""
    return f"; batch.micro_schedule is in force{': ' if entries else ''}{', '.join(entries[:4])}{more}"


def report(session: Session, result: RunResult) -> None:
    """Write result.json and print the summary."""
    run_dir = Path(session.config.run_dir)
    # Keep the result of a run that had already finished.
    if session.config.mode == "train" and (session.meter.samples or not (run_dir / RESULT).exists()):
        try:
            write(run_dir, result)
        except OSError as error:
            session.tracker.unwritable(run_dir / RESULT, error)
    if result.objective_note:
        log.warning("eval %s is %s", result.metric, result.objective_note)
    if session.config.mode != "lr_find":  # it ends with what it has found
        print_summary(session, result)
    if session.stop.agreed and session.config.checkpointing.save:
        print(f"Resume with:\n  {session.config.command}", flush=True)


def print_summary(session: Session, result: RunResult) -> None:
    """The table that ends a run."""
    config, progress = session.config, session.state.progress
    rows: list[tuple[str, Any]] = []
    if result.objective is not None and config.mode not in WITHOUT_NUMBERS:
        best = f" (best {progress.best:.4f} at step {progress.best_step})" if progress.best is not None else ""
        rows.append((f"eval {result.metric}", (result.objective_note or f"{result.objective:.4f}") + best))
    if config.mode == "train":
        is_more = result.peak_reserved_bytes > result.peak_memory_bytes
        reserved = f" ({bytes_text(result.peak_reserved_bytes)} reserved)" if is_more else ""
        peak = f"{bytes_text(result.peak_memory_bytes)} of {bytes_text(session.memory.budget)}{reserved}"
        has_trained = session.meter.samples > 0  # in this process: a finished run may be started again
        rows += [
            ("steps", f"{result.steps} ({result.samples} samples)"),
            *([("ended by", progress.stopped)] if progress.stopped else []),
            ("time", f"{result.seconds:.1f} s"),
            *([("throughput", f"{result.samples_per_second:.0f} samples/s")] if has_trained else []),
            *([("peak memory", peak)] if result.peak_memory_bytes else []),
            *([("micro-batch", _micro_batches(session))] if has_trained else []),
            ("OOM restarts", result.oom_restarts),
            ("checkpoint", result.checkpoint or "none"),
        ]
    rows.append(("outputs", config.run_dir))
    if "tensorboard" in config.tracker and config.mode not in WITHOUT_NUMBERS:
        with contextlib.suppress(ValueError):
            run_dir = Path(config.run_dir)
            shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
            rows.append(("TensorBoard", f"tensorboard --logdir {shown}"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)


def _micro_batches(session: Session) -> str:
    """Size and number; where there are several updates, those of each."""
    parts = []
    for name, own in session.sizes.by_update.items():
        parts.append(f"{name} {own.size} x {session.batches.accumulation(own.size)}".lstrip())
    return f"{', '.join(parts)} accumulated"


def _count_text(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)
