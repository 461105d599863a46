"""When memory is watched: decided here, for steps, micro-batches and evaluation alike.

Watching costs time on the CPU, where it counts every tensor. So a step is watched while its size is unproven, to
enforce the limit and to learn what the size needs; when it is logged, at most once in a while; and when it is drawn. In
others, and in evaluation, single micro-batches are: those whose size is unproven, or longer than any before.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainapp.data.batch import tensors_in
from trainapp.memory.categories import Category
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.train.run import Run, Step


def watch_step(run: Run, step: Step) -> contextlib.AbstractContextManager[None]:
    """Use around a whole step."""
    run.attempt.step = step
    return _watched_step(run, step) if _is_watched(run, step) else contextlib.nullcontext()


@contextlib.contextmanager
def _watched_step(run: Run, step: Step) -> Iterator[None]:
    # Both live on. Created before the block, they are not what a first step leaves behind.
    run.state.precision.scaler.scale(run.meter.weight(step.samples))
    is_rehearsed = run.rehearsals > 0  # within the block: more than a step
    with run.memory.watch(run.meter.resident(), track_modules=run.sizes.train.is_unproven):
        yield
    if not is_rehearsed:
        run.memory.note_step()


def _is_watched(run: Run, step: Step) -> bool:
    # Watching runs a compiled step uncompiled: it would round otherwise, in steps that depend on the clock.
    is_due = step.is_logged and run.memory.watch_is_due and not run.config.train.compile
    return run.sizes.train.is_unproven or step.is_drawn or is_due


def watch_micro_batch(
    run: Run, sizes: MicroBatchSizes, batch: Any, samples: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Use around the forward and backward of a micro-batch, or its evaluation. Within a watched step, it only adds the
    batch. samples: tells the search for larger sizes how many have had this peak; None where it says little of others,
    as in the first micro-batch of a step, which no gradients precede.
    """
    if run.memory.watching or sizes.needs_watching:
        return _watched_micro_batch(run, sizes, batch, samples)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _watched_micro_batch(run: Run, sizes: MicroBatchSizes, batch: Any, samples: int | None) -> Iterator[None]:
    with run.memory.watch(run.meter.resident()):
        before = run.memory.lap()
        with run.memory.watch({Category.BATCH: tensors_in(batch)}):  # last, so that an error names it
            yield
        after = run.memory.lap()
    if samples and before and after:
        sizes.measured(samples, resident=before[0], peak=after[1], limit=run.memory.enforced)
