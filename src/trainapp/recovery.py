"""What follows an out-of-memory error: the step is taken back, the size shrinks, everybody is told."""

import logging
from dataclasses import dataclass

from trainapp import build
from trainapp.config import Config
from trainapp.console import bytes_text
from trainapp.errors import TrainingStopped
from trainapp.loop import Job

log = logging.getLogger(__name__)


@dataclass
class Failure:
    """What is known of an out-of-memory error, without the error: sizes in bytes."""

    phase: str
    message: str
    used: int
    requested: int | None
    trace: str


def undo_step(job: Job) -> None:
    """Back to the start of the step: gradients dropped, memory given back, generators and buffers as they were."""
    state = job.state
    state.optimizer.zero_grad(set_to_none=True)
    state.precision.reset_scaler()
    state.model.train()
    job.memory.release()
    if job.phase != "evaluate":  # an evaluation restores the generators itself and moves no buffer
        job.restore_point.restore()


def shrink(config: Config, job: Job, failure: Failure) -> None:
    """Make the size that failed smaller. Raises TrainingStopped when it is 1 already."""
    evaluating = failure.phase == "evaluate"
    search = job.state.eval_micro if evaluating else job.state.micro
    old = search.size
    if not search.shrink():
        raise TrainingStopped(memory_report(job, failure))
    setting = "evaluation micro-batch" if evaluating else "micro-batch"
    step = job.state.progress.step + (0 if evaluating else 1)
    text = (
        f"out of memory in {failure.phase} of step {step}: {failure.message} "
        f"(in use {bytes_text(failure.used)} of {bytes_text(job.memory.budget)}); "
        f"{setting} {old} -> {search.size}, the same step again"
    )
    if not evaluating and not config.oom.keep_global_batch:
        smaller = max(1, job.state.global_size * search.size // old)
        text += f"; oom.keep_global_batch=false: the global batch falls {job.state.global_size} -> {smaller}"
        build.set_global_size(config, job, smaller)
    log.warning("%s", text)
    job.tracker.text("out_of_memory", f"{text}\n\n```\n{failure.trace}\n```", job.state.progress.step)


def memory_report(job: Job, failure: Failure) -> str:
    """Where the memory went when even one sample does not fit, and what would make it less."""
    static, budget = job.meter.static, job.memory.budget
    lines = [
        f"out of memory in {failure.phase} with a micro-batch of 1: nothing is left to halve.",
        f"{failure.message}",
        f"limit             {bytes_text(budget):>12}",
        *(f"{kind.replace('_', ' '):<18}{bytes_text(size):>12}" for kind, size in static.items()),
        f"left for activations {bytes_text(max(0, budget - sum(static.values()))):>9}",
    ]
    advice = [
        (static["optimizer_state"] // 2, "optimizer=sgd keeps one moment instead of two"),
        (static["parameters"] + static["optimizer_state"], "a smaller model (model.width, model.depth)"),
    ]
    if job.state.precision.mode in ("fp32", "tf32"):
        advice.append((max(0, budget - sum(static.values())) // 2, "precision=bf16 halves most activations"))
    lines.append("What would help, largest saving first:")
    lines += [f"  about {bytes_text(saving):>10}  {text}" for saving, text in sorted(advice, reverse=True)]
    saved = job.checkpoints.newest_name() if job.checkpoints.enabled else None
    lines.append(f"Nothing is lost: the last checkpoint is {saved or 'none'}.")
    return "\n".join(lines)
