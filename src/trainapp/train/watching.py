"""When memory is watched: decided here, for steps, micro-batches and evaluation alike.

Watching costs time on the CPU, where it counts every tensor. So a step is watched while its size is unproven, to
enforce the limit and to learn what the size needs; when it is logged, at most once in a while; and when it is drawn. In
others, and in evaluation, single micro-batches are: those whose size is unproven, or longer than any before.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.train.run import Run, Step


@contextlib.contextmanager
def watch_step(run: Run, step: Step) -> Iterator[None]:
    """Use around a whole step. `run.attempt.peak` is then its peak in bytes; None where it was not watched."""
    run.attempt.step, run.attempt.peak = step, None
    if not _is_watched(run, step):
        yield
        return
    # Both live on. Created before the block, they are not what a first step leaves behind.
    run.state.precision.scaler.scale(run.meter.weight(step.samples))
    is_rehearsed = run.rehearsals > 0  # within the block: more than a step
    with run.memory.watch(run.meter.resident(), track_modules=run.sizes.train.is_untried):
        yield
    if not is_rehearsed:
        run.memory.note_step()
        run.attempt.peak = run.memory.watched_peak


def _is_watched(run: Run, step: Step) -> bool:
    # Watching runs a compiled step uncompiled: it would round otherwise, in steps that depend on the clock.
    is_due = step.is_logged and run.memory.watch_is_due and not run.config.train.compile
    return run.sizes.train.is_unproven or step.is_drawn or is_due


def watch_micro_batch(run: Run, sizes: MicroBatchSizes, batch: Any) -> contextlib.AbstractContextManager[None]:
    """Use around the forward and backward of a micro-batch, or its evaluation. Within a watched step, it only adds the
    batch.
    """
    if run.memory.watching or sizes.needs_watching:
        return run.memory.watch(run.meter.resident(batch))
    return contextlib.nullcontext()
