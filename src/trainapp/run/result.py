"""A run's summary: a table and result.json at its end."""

import contextlib
import json
import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainapp.config.schema import Batch, Config
from trainapp.data.progress import Progress
from trainapp.errors import EXCEPTION, OUT_OF_MEMORY, UserError
from trainapp.files import RESULT, atomic_write, json_object, shown, strict_json
from trainapp.memory.detection import is_out_of_memory
from trainapp.report import page
from trainapp.report.run_files import state_of
from trainapp.signals import TIME_IS_UP, named
from trainapp.techniques.ladder import overrides_turned_on
from trainapp.training import stopping
from trainapp.training.dependence import known_dependence
from trainapp.training.session import Session
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


@dataclass
class Result:
    """A run's result, as returned by `trainapp.train` and stored in result.json. Sizes in samples, memory in bytes."""

    run_dir: Path  # the directory with the run's files; not in result.json
    # The last evaluation's value, which sweepers receive; may be nan or inf, which the file cannot hold.
    objective: float | None
    objective_note: str | None  # why it is not a number
    metric: str
    direction: str | None  # "min" or "max": which values of it are better; None: none is (`Config.has_best`)
    best_objective: float | None  # best value of all evaluations; None if none was finite, or without a direction
    best_step: int | None
    evaluation: dict[str, float]  # the last evaluation's metrics; sets in `eval` as `NAME/METRIC`
    steps: int
    samples: int
    micro_size: int
    accumulation: int
    oom_restarts: int  # since the run began, over all its processes
    # Sizes by step (with several updates, by name); as batch.micro_schedule it replays the sizes of this run.
    micro_schedule: dict[Any, Any]
    # Techniques that the run has turned on: each with the `attempt` at a step from which on its `settings` were in
    # force, and the `command` that trains with them from the start.
    turned_on: list[dict[str, Any]]
    peak_memory_bytes: int
    peak_reserved_bytes: int  # including the allocator's unused cache, which counts towards the limit on CUDA
    samples_per_second: float
    seconds: float  # over all its processes
    checkpoint: str | None
    draws: str  # by which of `train.draws` the forwards have drawn random numbers; none: they have not
    depends_on_micro_batch: list[str]  # what is known to, in steps as they were cut: see docs/oom.md
    # The signal that ended it, what it interrupted, and the seconds from it to the checkpoint, the most of all ranks.
    stopped: dict[str, Any] | None
    ended: str | None  # why: the setting of its length, the reason it stopped, or the signal; None: nothing trained


def result_of(session: Session) -> Result:
    """Return the run's result. Collective: call on every rank."""
    progress = session.state.progress
    size = session.sizes.train.size

    # What differs between ranks: their memory, and when a signal has reached them.
    stop = session.stop.facts if session.stop.agreed else None
    by_rank = session.ranks.all_gather_object((session.memory.peak, session.memory.peak_reserved, stop))
    peaks = [peak for peak, _, _ in by_rank]
    reserved_peaks = [reserved for _, reserved, _ in by_rank]
    stops = [stop for _, _, stop in by_rank if stop is not None]
    latest_stop = max(stops, key=lambda stop: stop["seconds"] or 0.0, default=None)

    return Result(
        run_dir=Path(session.config.run_dir),
        objective=progress.objective,
        objective_note=_note(progress, session.config.has_best),
        metric=session.objective.metric,
        direction=session.objective.direction,
        best_objective=progress.best,
        best_step=progress.best_step,
        evaluation=session.evaluation.last,
        steps=progress.step,
        samples=progress.samples,
        micro_size=size,
        accumulation=session.batches.accumulation(size),
        oom_restarts=session.ranks.all_reduce_max(session.sizes.oom_restarts)[0],
        micro_schedule=session.sizes.micro_schedule(),
        turned_on=session.turned_on.history(session.config.command),
        peak_memory_bytes=max(peaks),
        peak_reserved_bytes=max(reserved_peaks),
        samples_per_second=session.meter.samples_per_second(),
        seconds=session.meter.seconds,
        checkpoint=session.checkpointer.newest_name(),
        draws=_draws(session),
        depends_on_micro_batch=known_dependence(session),
        stopped=latest_stop,
        ended=_why_ended(session),
    )


def _draws(session: Session) -> str:
    """Return how the forwards have drawn random numbers, or `none`."""
    if not session.engine.draw_record.draws:
        return "none"
    return "per_sample" if session.engine.draws_by_sample else "device"


def _why_ended(session: Session) -> str | None:
    """Return why the run ended; None if nothing was trained."""
    progress = session.state.progress
    train = session.config.train
    if not session.config.activity.trains:
        return None
    if progress.stopped is not None:
        return progress.stopped

    # All steps were made, unless a signal came before their evaluation.
    if session.is_finished and not (session.stop.agreed and session.awaits_evaluation):
        if train.max_steps is not None and progress.step >= train.max_steps:
            return f"train.max_steps={train.max_steps}"
        return f"train.max_epochs={train.max_epochs}"

    if session.stop.agreed == TIME_IS_UP:
        return f"{named(TIME_IS_UP)}={train.max_time}"
    if session.stop.agreed:
        return named(session.stop.agreed)
    return None


def _note(progress: Progress, has_best: bool) -> str | None:
    """Return why the objective is not a number, and whether it ever was; None if it is one, or without an evaluation.

    Args:
        progress: the run's.
        has_best: whether the best value is known; otherwise only that of the last evaluation is.
    """
    if progress.objective is None or math.isfinite(progress.objective):
        return None
    was_never_finite = has_best and progress.best is None
    which = "every" if was_never_finite else "the last"
    return f"{progress.objective} at {which} evaluation"


def read(run_dir: Path) -> Result | None:
    """Return the result written by `write`; None if it is missing, unreadable or of an older version."""
    try:
        facts = {"run_dir": run_dir, "turned_on": []} | json.loads((run_dir / RESULT).read_text())
        # Its steps are numbers, of which JSON makes strings.
        batch = Batch(micro_schedule=facts["micro_schedule"] or None)
        facts["micro_schedule"] = batch.micro_schedule or {}
        values = {field.name: facts[field.name] for field in fields(Result)}
        return Result(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def forget_stop(run_dir: Path) -> None:
    """Remove the result of a run that was stopped or failed and now continues: if it dies, the file would be wrong."""
    if state_of(json_object(run_dir / RESULT)) in ("stopped", "failed"):
        (run_dir / RESULT).unlink()


def write_failure(session: Session, error: Exception) -> None:
    """Write result.json for a run that cannot continue: why, and how far it came."""
    facts = {
        "steps": session.state.progress.step,
        "samples": session.state.progress.samples,
        "oom_restarts": session.sizes.oom_restarts,
        "checkpoint": session.checkpointer.newest_name(),
    }
    _write_failure(Path(session.config.run_dir), error, facts)


def write_building_failure(config: Config, error: Exception) -> None:
    """Write result.json for a run that could not be built. The result of a run that continues here stays."""
    run_dir = Path(config.run_dir)
    if state_of(json_object(run_dir / RESULT)) in ("", "failed"):
        _write_failure(run_dir, error, {})


def _write_failure(run_dir: Path, error: Exception, facts: dict[str, Any]) -> None:
    message = str(error)
    if not isinstance(error, UserError):
        message = f"{type(error).__name__}: {message}"
    facts = {"failed": message, "error_kind": kind_of(error), **facts}
    with contextlib.suppress(OSError), atomic_write(run_dir / RESULT) as file:  # the error itself must be reported
        file.write(strict_json(facts, indent=1) + "\n")


def kind_of(error: Exception) -> str:
    """Return the kind of an error, as in `errors`."""
    if isinstance(error, UserError):
        return error.kind
    return OUT_OF_MEMORY if is_out_of_memory(error) else EXCEPTION


def write(result: Result) -> None:
    """Write result.json. Raises OSError if it cannot be written; an older file then stays."""
    facts = asdict(result)
    del facts["run_dir"]
    with atomic_write(result.run_dir / RESULT) as file:
        file.write(strict_json(facts, indent=1) + "\n")


def report(session: Session, result: Result) -> None:
    """Write result.json and the run's page, and print the summary."""
    # The files. The result of a finished run stays when it is restarted.
    path = result.run_dir / RESULT
    is_new = session.meter.samples or session.stop.agreed or read(result.run_dir) is None
    if session.config.activity.trains and is_new:
        try:
            write(result)
        except OSError as error:
            session.tracker.warn_unwritable(path, error)
        try:
            page.write_runs([result.run_dir], result.run_dir / page.NAME)
        except Exception as error:  # the run is more important than its record
            session.tracker.warn_unwritable(result.run_dir / page.NAME, error)

    # The terminal.
    if result.objective_note:
        log.warning("eval %s is %s", result.metric, result.objective_note)
    if session.config.mode != "lr_find":  # which ends with its suggestion
        print_summary(session, result)
    if session.stop.agreed:
        print_command(session)


def print_command(session: Session) -> None:
    """Print the command that continues a run stopped by a signal."""
    if stopping.at_work(session).is_saved:
        print(f"Resume with:\n  {session.config.command}", flush=True)


def print_summary(session: Session, result: Result) -> None:
    """Print the table at the end of a run."""
    config = session.config
    rows: list[tuple[str, str]] = []

    # What came out.
    was_interrupted = config.mode == "eval" and session.stop.agreed
    if result.objective is not None and config.activity.computes_loss and not was_interrupted:
        rows.append((f"eval {result.metric}", _objective_text(session, result)))
    if config.mode == "eval" and not was_interrupted:
        for name, value in result.evaluation.items():  # of all sets
            if name != result.metric:
                rows.append((f"eval {name}", f"{value:.4f}"))
    if config.activity.trains:
        rows.extend(_training_rows(session, result))

    # Where more is to be seen.
    rows.append(("outputs", config.run_dir))
    page_path = result.run_dir / page.NAME
    if config.activity.trains and page_path.exists():
        rows.append(("page", shown(page_path)))
    if "tensorboard" in config.tracker and config.activity.computes_loss:
        rows.append(("TensorBoard", f"tensorboard --logdir {shown(result.run_dir)}"))

    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    print("\n".join(lines), flush=True)


def _objective_text(session: Session, result: Result) -> str:
    """Return the last value of the objective, and the best one."""
    progress = session.state.progress
    text = result.objective_note or f"{result.objective:.4f}"
    if progress.best is not None:
        text += f" (best {progress.best:.4f} at step {progress.best_step})"
    return text


def _training_rows(session: Session, result: Result) -> list[tuple[str, str]]:
    """Return the rows that only a run that trains has."""
    progress = session.state.progress
    has_trained = bool(session.meter.samples)  # in this process: a finished run may be restarted
    steps = f"{result.steps} ({result.samples} samples)"
    if progress.skipped:
        steps += f", {progress.skipped} more skipped: not finite, or no count"
    rows = [("steps", steps), ("time", f"{result.seconds:.1f} s")]
    if progress.stopped or not has_trained:
        rows.append(("ended by", str(result.ended)))
    if has_trained:
        rows.append(("throughput", f"{result.samples_per_second:.0f} samples/s"))
        rows.append(("peak memory", _peak_text(session, result)))
        rows.append(("micro-batch", _micro_batch_text(session)))
    rows.append(("OOM retries", str(result.oom_restarts)))
    if session.turned_on.settings:
        rows.append(("turned on", _turned_on_text(session)))
    rows.append(("checkpoint", result.checkpoint or "none"))
    return rows


def _turned_on_text(session: Session) -> str:
    """Return the techniques that are turned on, from which attempt on, and the speed before."""
    turned_on = session.turned_on
    attempt = max(turned_on.by_attempt)
    text = f"{overrides_turned_on(turned_on.settings)}, from step {attempt} on"
    climb = session.recovery.climb
    if climb is not None and climb.samples_per_second is not None:
        text += f" ({climb.samples_per_second:.0f} samples/s before)"
    return text


def _peak_text(session: Session, result: Result) -> str:
    text = f"{bytes_text(result.peak_memory_bytes)} of {bytes_text(session.memory.budget)}"
    if result.peak_reserved_bytes > result.peak_memory_bytes:
        text += f" ({bytes_text(result.peak_reserved_bytes)} reserved)"
    return text


def _micro_batch_text(session: Session) -> str:
    """Return the size with which most steps were made; with several updates, by name."""
    progress = session.state.progress
    texts = []
    for update, size in session.sizes.usual_sizes(progress.step + progress.skipped).items():
        text = f"{size} x {session.batches.accumulation(size)}"
        if update:
            text = f"{update} {text}"
        texts.append(text)
    return f"{', '.join(texts)} accumulated"
