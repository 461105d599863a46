"""When no micro-batch fits: where the memory went, and which settings would need less."""

import logging
from typing import Any

from trainapp.config.schema import ActivationCheckpointing, Precision
from trainapp.memory.kinds import MemoryKind
from trainapp.oom.incident import Incident
from trainapp.plan.trace import traced_peak
from trainapp.train.run import Run
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


def memory_report(run: Run, failure: Incident) -> str:
    """The final message of a run that cannot continue: memory by kind, then what would help, largest saving first."""
    parts = sorted(failure.parts.items(), key=lambda item: -item[1])
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    lines = [
        f"out of memory in {failure.phase} with {kind} {failure.old_size}: {_why_no_smaller(run, failure)}.",
        failure.message,
        f"{'limit':<18}{bytes_text(failure.limit):>12}",
        *(f"{MemoryKind(name).label:<18}{bytes_text(size):>12}" for name, size in parts if size),
    ]
    savings = [(saving, text) for saving, text in _savings(run, failure) if saving > 0.01 * failure.limit]
    if savings:
        lines.append("What would help, largest saving first:")
        lines += [f"  {bytes_text(saving):>10}  {text}" for saving, text in sorted(savings, reverse=True)]
    saved = run.checkpointer.newest_name()
    lines.append(f"The last checkpoint is {saved}." if saved else "No checkpoint was written yet.")
    return "\n".join(lines)


def _why_no_smaller(run: Run, failure: Incident) -> str:
    sizes = run.sizes.evaluation if failure.evaluating else run.sizes.train
    if failure.old_size <= sizes.smallest:
        return "nothing is left to halve"
    return "a smaller one cannot help, since what fails asks for the same memory at every size"


def _savings(run: Run, failure: Incident) -> list[tuple[int, str]]:
    """`(bytes, setting)`: state from the sizes of its tensors, activations from a traced step."""
    config, static = run.config, run.meter.static
    state = static[MemoryKind.OPTIMIZER_STATE]
    found = [
        (static[MemoryKind.WEIGHT_AVERAGE], "train.ema=null: no average of the weights"),
        (state, "optimizer=sgd optimizer.momentum=0: no optimizer state"),
    ]
    if "Adam" in config.optimizer.target:
        found.append((state // 2, "optimizer=sgd: one moment per parameter instead of two"))
    if failure.evaluating:  # the rest is of a training step
        return found
    others: list[tuple[str, dict[str, Any]]] = []
    if config.precision.mode in ("fp32", "tf32"):
        others.append(("precision=bf16: smaller activations", {"precision": Precision(mode="bf16")}))
    if config.activation_checkpointing.mode == "none":
        for mode in ("full", "selective"):
            settings = ActivationCheckpointing(mode=mode)
            text = f"activation_checkpointing={mode}: recomputed instead of kept"
            others.append((text, {"activation_checkpointing": settings}))
    return found + _traced_savings(run, failure.old_size, others)


def _traced_savings(run: Run, samples: int, others: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, str]]:
    """How much less memory a step with micro-batches of `samples` would need with other settings."""
    try:
        now = traced_peak(run, samples)
        return [(now - traced_peak(run, samples, **settings), text) for text, settings in others]
    except Exception as error:  # some models cannot be traced; the rest of the report still helps
        log.debug("the model could not be traced: %s", error)
        return []
