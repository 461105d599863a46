"""What is left of a run for its reader: a line or two at its start, a table and result.json at its end."""

import contextlib
import logging
from pathlib import Path
from typing import Any

from trainapp.config.schema import WITHOUT_NUMBERS
from trainapp.run.result import RunResult, write
from trainapp.tracking.tracker import RESULT
from trainapp.train.run import Run
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


def opening_lines(run: Run) -> list[str]:
    """One, and in training another where only a part of the parameters is trained."""
    return [opening_line(run), *_share_trained(run)]


def _share_trained(run: Run) -> list[str]:
    """Of shards, too, `numel` counts the whole."""
    parameters = list(run.state.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    if run.config.mode not in ("train", "lr_find") or trained == total:
        return []
    return [f"{trained} of {total} parameters are trained ({100 * trained / total:.2f}%)"]


def opening_line(run: Run) -> str:
    """Model, device, precision; in training also how the global batch is cut."""
    state, batches, parts = run.state, run.batches, run.sizes.parts
    parameters = sum(p.numel() for p in state.model.parameters())
    micro_size = run.sizes.train.size
    count = batches.accumulation(micro_size, parts)
    if parts:
        micro_size = -(-state.global_size // count)
    name = run.config.model.target.rpartition(".")[2]
    if not name[0].isupper():  # a function that builds the model
        name = type(state.model).__name__.removeprefix("FSDP")
    model = f"{name} with {_count_text(parameters)} parameters on {state.device}, {state.precision.mode}"
    if run.config.mode not in ("train", "lr_find"):
        return model
    return (
        f"{model}; global batch {state.global_size} = micro-batch {micro_size} x {count} accumulated "
        f"x {batches.world} rank{'s' * (batches.world > 1)}; {_data_text(run)}" + _schedule_text(run)
    )


def _data_text(run: Run) -> str:
    """Samples and steps per epoch; of a stream, what ends the run."""
    train, batches = run.config.train, run.batches
    if batches.steps_per_epoch is not None:
        return f"{batches.samples} samples, {batches.steps_per_epoch} steps per epoch"
    epochs = "" if train.max_epochs is None else f", at most {train.max_epochs} epochs (train.max_epochs)"
    return "a stream" if train.max_steps is None else f"a stream, at most {train.max_steps} steps{epochs}"


def _schedule_text(run: Run) -> str:
    """The coming entries of `batch.micro_schedule`."""
    if run.config.batch.micro_schedule is None:
        return ""
    entries = [f"{sizes} from step {step}" for step, sizes in sorted(run.sizes.schedule.items())]
    more = f", ... ({len(entries)} changes)" if len(entries) > 4 else ""
    return f"; batch.micro_schedule is in force{': ' if entries else ''}{', '.join(entries[:4])}{more}"


def report(run: Run, result: RunResult) -> None:
    """Write result.json and print the summary."""
    run_dir = Path(run.config.run_dir)
    # Keep the result of a run that had already finished.
    if run.config.mode == "train" and (run.meter.samples or not (run_dir / RESULT).exists()):
        try:
            write(run_dir, result)
        except OSError as error:
            run.tracker.unwritable(run_dir / RESULT, error)
    if result.objective_note:
        log.warning("eval %s is %s", result.metric, result.objective_note)
    if run.config.mode != "lr_find":  # it ends with what it has found
        print_summary(run, result)
    if run.stop.agreed and run.config.checkpointing.save:
        print(f"Resume with:\n  {run.config.command}", flush=True)


def print_summary(run: Run, result: RunResult) -> None:
    """The table that ends a run."""
    config, progress = run.config, run.state.progress
    rows: list[tuple[str, Any]] = []
    if result.objective is not None and config.mode not in WITHOUT_NUMBERS:
        best = f" (best {progress.best:.4f} at step {progress.best_step})" if progress.best is not None else ""
        rows.append((f"eval {result.metric}", (result.objective_note or f"{result.objective:.4f}") + best))
    if config.mode == "train":
        is_more = result.peak_reserved_bytes > result.peak_memory_bytes
        reserved = f" ({bytes_text(result.peak_reserved_bytes)} reserved)" if is_more else ""
        peak = f"{bytes_text(result.peak_memory_bytes)} of {bytes_text(run.memory.budget)}{reserved}"
        has_trained = run.meter.samples > 0  # in this process: a finished run may be started again
        rows += [
            ("steps", f"{result.steps} ({result.samples} samples)"),
            *([("ended by", progress.stopped)] if progress.stopped else []),
            ("time", f"{result.seconds:.1f} s"),
            *([("throughput", f"{result.samples_per_second:.0f} samples/s")] if has_trained else []),
            *([("peak memory", peak)] if result.peak_memory_bytes else []),
            *([("micro-batch", _micro_batches(run))] if has_trained else []),
            *([("left out", f"{result.left_out} unreadable files")] if result.left_out else []),
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


def _micro_batches(run: Run) -> str:
    """Size and number; where there are several updates, those of each."""
    parts = []
    for name, own in run.sizes.by_update.items():
        size = own.train.size
        parts.append(f"{name} {size} x {run.batches.accumulation(size, run.sizes.parts)}".lstrip())
    return f"{', '.join(parts)} accumulated"


def _count_text(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)
