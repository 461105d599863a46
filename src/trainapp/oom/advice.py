"""When even one sample does not fit: where the memory went, and which settings would make it less."""

import functools
import logging
from typing import Any

import torch

from trainapp.config.schema import ActivationCheckpointing, Config
from trainapp.memory.levers import activation_checkpointing
from trainapp.oom.incident import Incident
from trainapp.plan.trace import traced_peak
from trainapp.train.run import Run
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


def memory_report(config: Config, run: Run, failure: Incident) -> str:
    """The last word of a run that cannot go on: the parts, then what would help, largest saving first."""
    static = run.meter.static
    parts = sorted(failure.parts.items(), key=lambda item: -item[1])
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    lines = [
        f"out of memory in {failure.phase} with {kind} {failure.old_size}: nothing is left to halve.",
        failure.message,
        f"{'limit':<18}{bytes_text(failure.limit):>12}",
        *(f"{name.replace('_', ' '):<18}{bytes_text(size):>12}" for name, size in parts if size),
    ]
    savings = [
        (saving, text) for saving, text in _savings(config, run, static, failure) if saving > 0.01 * failure.limit
    ]
    if savings:
        lines.append("What would help, largest saving first:")
        lines += [f"  {bytes_text(saving):>10}  {text}" for saving, text in sorted(savings, reverse=True)]
    saved = run.checkpointer.newest_name()
    lines.append(f"The last checkpoint is {saved}." if saved else "No checkpoint was written yet.")
    return "\n".join(lines)


def _savings(config: Config, run: Run, static: dict[str, int], failure: Incident) -> list[tuple[int, str]]:
    """`(bytes, setting)`: states from the sizes of their tensors, the rest traced without using memory."""
    state = static["optimizer_state"]
    found = [
        (static["weight_average"], "train.ema=null: no average of the weights"),
        (state, "optimizer=sgd optimizer.momentum=0: no optimizer state"),
    ]
    if "Adam" in config.optimizer.target:
        found.append((state // 2, "optimizer=sgd: one moment for each parameter instead of two"))
    saving = functools.partial(_traced_saving, run, failure.old_size)
    if run.state.precision.mode in ("fp32", "tf32"):
        bf16 = torch.autocast(run.state.device.type, torch.bfloat16)
        found.append((saving(autocast=bf16), "precision=bf16: smaller activations"))
    if config.activation_checkpointing.mode == "none":
        for mode in ("full", "selective"):
            settings = ActivationCheckpointing(mode=mode)
            change = functools.partial(activation_checkpointing.apply, settings=settings)
            found.append((saving(change=change), f"activation_checkpointing={mode}: computed again, not kept"))
    return found


def _traced_saving(run: Run, samples: int, **other: Any) -> int:
    """Bytes that a step of `samples` would need less with another autocast or a changed model; 0 if not traceable."""
    state = run.state
    try:
        batch = run.batches.example(samples)
        now = {"autocast": state.precision.autocast}
        before = traced_peak(state.model, run.task, batch, **now)
        return before - traced_peak(state.model, run.task, batch, **now | other)
    except Exception as error:  # a model that looks at its data; the report is worth more than this line of it
        log.debug("the model could not be traced: %s", error)
        return 0
