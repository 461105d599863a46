"""When even one sample does not fit: where the memory went, and which settings would make it less."""

from trainapp.config import Config
from trainapp.console import bytes_text
from trainapp.incident import Incident
from trainapp.job import Job


def memory_report(config: Config, job: Job, failure: Incident) -> str:
    """The last word of a run that cannot go on: the parts, then what would help, largest saving first."""
    static = job.meter.static
    parts = sorted(failure.parts.items(), key=lambda item: -item[1])
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    lines = [
        f"out of memory in {failure.phase} with {kind} {failure.old_size}: nothing is left to halve.",
        failure.message,
        f"{'limit':<18}{bytes_text(failure.limit):>12}",
        *(f"{name.replace('_', ' '):<18}{bytes_text(size):>12}" for name, size in parts if size),
    ]
    savings = [
        (saving, text) for saving, text in _savings(config, job, static, failure) if saving > 0.01 * failure.limit
    ]
    if savings:
        lines.append("What would help, largest saving first:")
        lines += [f"  {bytes_text(saving):>10}  {text}" for saving, text in sorted(savings, reverse=True)]
    saved = job.checkpoints.newest_name() if job.checkpoints.enabled else None
    lines.append(f"The last checkpoint is {saved}." if saved else "No checkpoint was written yet.")
    return "\n".join(lines)


def _savings(config: Config, job: Job, static: dict[str, int], failure: Incident) -> list[tuple[int, str]]:
    """`(bytes, setting)`: computed from the sizes of the parts."""
    state = static["optimizer_state"]
    activations = failure.parts["activations"]
    found = [
        (static["weight_average"], "train.ema=null: no average of the weights"),
        (state, "optimizer=sgd optimizer.momentum=0: no optimizer state"),
    ]
    if "Adam" in config.optimizer.target:
        found.append((state // 2, "optimizer=sgd: one moment for each parameter instead of two"))
    if job.state.precision.mode in ("fp32", "tf32"):
        found.append((activations // 2, "precision=bf16: about half of the activations (an estimate)"))
    return found
