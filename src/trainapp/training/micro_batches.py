"""The micro-batches of a step, and what is around each of them: ranks, and memory that is watched.

Watching costs time on the CPU, where it counts every tensor. So a step is watched while its size is unvalidated, to
enforce the limit and to learn what the size needs; when it is logged, at most once in a while; and when it is drawn. In
others, and in evaluation, single micro-batches are: those whose size is unvalidated, or longer than any before.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.memory.live_tensors import Category
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training.allocations import require_all_allocated
from trainapp.training.phase import Phase
from trainapp.training.session import Session, Step


def micro_batches(session: Session) -> Iterator[MicroBatch]:
    """The coming step's samples, fetched and cut to the size that fits: the same number of pieces on every rank."""
    batches, sizes = session.batches, session.sizes
    fetched = session.meter.timed(batches.micro_batches(session.state.progress, sizes.train.size, sizes.parts))
    return session.engine.micro_batches(
        session, (micro for batch in fetched for micro in sizes.train.cut(batch, session.ranks))
    )


@contextlib.contextmanager
def around(session: Session, micro: MicroBatch) -> Iterator[None]:
    """Around the forward and backward of a micro-batch. Only the last one of a step sums gradients over ranks."""
    attempt, sizes, step = session.attempt, session.sizes.train, session.engine.step
    is_first, attempt.micro_batches = attempt.micro_batches == 0, attempt.micro_batches + 1
    watching = watch_micro_batch(session, sizes, micro.data, None if is_first else micro.samples)
    with session.strategy.micro_batch(micro.last), watching:
        if step.is_logged and micro.real:
            # That are trained for each of the update's own.
            with session.meter.counting_flops(step.update.name, micro.samples * step.update.every):
                yield
        else:
            yield
    if sizes.is_unvalidated:
        require_all_allocated(session, sizes, session.ranks)
    if not attempt.phase.is_torn:  # a torn step stays torn until it is committed
        attempt.phase = Phase.DATA


def watch_step(session: Session, step: Step) -> contextlib.AbstractContextManager[None]:
    """Use around a whole step."""
    return _watched_step(session, step) if _is_watched(session, step) else contextlib.nullcontext()


@contextlib.contextmanager
def _watched_step(session: Session, step: Step) -> Iterator[None]:
    # Both live on. Created before the block, they are not what a first step leaves behind.
    session.engine.scaled(session.engine.weight_of(step.samples))
    with session.memory.watch(session.meter.resident()):
        yield
    session.memory.note_step()


def _is_watched(session: Session, step: Step) -> bool:
    # Watching runs a compiled step uncompiled: it would round otherwise, in steps that depend on the clock.
    is_due = step.is_logged and session.memory.watch_is_due and not session.config.train.compile
    return session.sizes.train.is_unvalidated or step.is_drawn or is_due


def watch_micro_batch(
    session: Session, sizes: MicroBatchSizes, batch: Any, samples: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Use around the forward and backward of a micro-batch, or its evaluation. Within a watched step, it only adds the
    batch. samples: tells the search for larger sizes how many have had this peak; None where it says little of others,
    as in the first micro-batch of a step, which no gradients precede.
    """
    if session.memory.watching or sizes.needs_watching:
        return _watched_micro_batch(session, sizes, batch, samples)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _watched_micro_batch(session: Session, sizes: MicroBatchSizes, batch: Any, samples: int | None) -> Iterator[None]:
    with session.memory.watch(session.meter.resident()):
        before = session.memory.lap()
        with session.memory.watch({Category.BATCH: tensors_in(batch)}):  # last, so that an error names it
            yield
        after = session.memory.lap()
    if samples and before and after:
        sizes.measured(samples, resident=before[0], peak=after[1], limit=session.memory.enforced)
