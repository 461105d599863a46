"""Watching the memory of a step and of its micro-batches: which are watched, and what is learnt from them.

Watching costs time on the CPU, where it counts every tensor. A step is watched while its size is unvalidated, to
enforce the limit and to measure what the size needs. Logged steps are watched at most every 5 s, and steps whose
memory is plotted always. In other steps, and in evaluation, only single micro-batches are watched: those of an
unvalidated size, or longer than any before.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trainapp.data.batch import MicroBatch, elements_in, tensors_in
from trainapp.draws.record import noted_draws
from trainapp.memory.cuda import refused_allocations
from trainapp.memory.live_tensors import Category
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session

Context = contextlib.AbstractContextManager[None]


class SwallowedOutOfMemory(torch.OutOfMemoryError):
    """An allocation failed in the step, and the caller swallowed the error."""


def micro_batch_context(session: Session, micro: MicroBatch) -> Context:
    """Return a context manager for the forward and backward of a micro-batch: gradient sync and memory tracking."""
    sizes = session.sizes.train
    sizes.begin(micro.bucket, micro.samples)
    gradient_sync = session.strategy.micro_batch(micro.last)  # only a step's last one sums gradients over ranks
    engine = session.engine
    if engine.is_first or engine.context.is_logged or is_watched(session, sizes):
        return _measured(session, micro, gradient_sync)
    return gradient_sync


@contextlib.contextmanager
def _measured(session: Session, micro: MicroBatch, gradient_sync: Context) -> Iterator[None]:
    engine = session.engine
    watching = watched(session, session.sizes.train, micro.data, micro.samples)

    # Until the first commit, note what draws from torch's generators.
    device = session.state.device
    if engine.is_first and not (engine.draws_by_sample and device.type == "cpu"):
        watching = noted_draws(engine.draw_record, device, engine.draws_by_sample, watching)

    # In a logged step, count the operations, for the utilisation of the device.
    counting: Context = contextlib.nullcontext()
    utilisation = session.meter.utilisation
    if engine.context.is_logged and micro.real and utilisation:
        update = engine.context.update
        samples = micro.samples * update.cadence.every  # since the update last ran
        counting = utilisation.counting(update.name, samples)
    with gradient_sync, watching, counting:
        yield


def watch_step(session: Session, context: UpdateContext) -> Context:
    """Return a context manager for a whole step, which watches its memory if that is due."""
    # Watching runs a compiled step uncompiled: results would round differently in steps chosen by the clock.
    is_due = context.is_logged and session.memory.watch_is_due and not session.config.train.compile
    if session.sizes.train.is_unvalidated or context.plots_memory or is_due:
        return _watched_step(session, context)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _watched_step(session: Session, context: UpdateContext) -> Iterator[None]:
    # Create the scale and weight tensors now, so they are not attributed to the step.
    session.engine.scaled(session.engine.weight_of(context.samples))
    with session.memory.watch(session.meter.resident()):
        yield
    session.memory.mark_step()


def is_watched(session: Session, sizes: MicroBatchSizes) -> bool:
    """Return whether the memory of the current micro-batch is tracked."""
    return session.memory.watching or sizes.is_unvalidated or sizes.needs_watching


@contextlib.contextmanager
def watched(
    session: Session, sizes: MicroBatchSizes, batch: Any, samples: int | None = None, always: bool = False
) -> Iterator[None]:
    """Watch the memory of forward and backward of a micro-batch, or of its evaluation. Within a watched step, only add
    the batch. Raises SwallowedOutOfMemory at its end, see `_require_all_allocated`.

    Args:
        sizes: the search that chose this size.
        batch: the micro-batch's data.
        samples: reported with the peak; None if the peak is not representative.
        always: watch whatever the sizes say.
    """
    if not (always or is_watched(session, sizes)):
        yield
        return
    sizes.current = sizes.current._replace(elements=elements_in(batch))

    # A step's first micro-batch is not typical: no gradients are in memory yet.
    is_typical = sizes is session.sizes.evaluation or session.engine.accumulates
    flushes_before = session.memory.cache_flushes()
    with session.memory.watch(session.meter.resident()):
        before = session.memory.lap()
        with session.memory.watch({Category.BATCH: tensors_in(batch)}):  # innermost, so that an error names it
            yield
        after = session.memory.lap()

    # The search learns what this size needs.
    if is_typical and samples and before and after:
        sizes.record_peak(samples, resident=before[0], peak=after[1], limit=session.memory.enforced)
    if sizes.is_unvalidated:
        _require_all_allocated(session, sizes)
        if session.memory.cache_flushes() > flushes_before:
            sizes.record_flush()
            session.memory.release()  # fragments of other sizes must not count again


# --- allocations that fail without an error, because a library catches it and falls back


def begin_counting_refused(session: Session) -> None:
    """Count refused allocations from here on. Only in unvalidated and logged steps: reading it takes time."""
    session.attempt.refused_before = refused_allocations()


def refused_in_attempt(session: Session) -> int:
    """Return the number of allocations that the device's allocator has refused since `begin_counting_refused`."""
    return refused_allocations() - session.attempt.refused_before


def _require_all_allocated(session: Session, sizes: MicroBatchSizes) -> None:
    """Raise SwallowedOutOfMemory if an allocation has failed in a micro-batch of an unvalidated size, a smaller size
    is left to try, and the other ranks can be informed.

    cuDNN's plan search catches such errors (torch 2.13, aten/src/ATen/native/cudnn/Conv_v8.cpp): it skips a plan whose
    workspace does not fit, runs the next, and keeps that one for the rest of the process. Its result may differ in the
    last bits from that of a process with more memory, and it may be slow, so such a size counts as too large. Two
    exceptions: the smallest size, since a slow step is better than none, and several ranks without votes, since all of
    them would have to restart. The allocator counts on the host, when an operation is launched, so reading its count
    does not wait for kernels.
    """
    count = refused_in_attempt(session)
    if count <= 0 or not session.config.oom.enabled:
        return
    begin_counting_refused(session)

    # Retry with a smaller size where one is left and all ranks can leave the step.
    ranks = session.eval_ranks if sizes is session.sizes.evaluation else session.ranks
    if sizes.can_shrink and (ranks.world_size == 1 or ranks.votes_enabled):
        raise SwallowedOutOfMemory(
            f"{count} allocation{'s' * (count > 1)} failed in this micro-batch and the error was caught, probably by "
            "cuDNN, which then uses another algorithm"
        )

    # Otherwise continue, and say so.
    reason = "no votes are held" if sizes.can_shrink else "the micro-batch is the smallest"
    session.tracker.warn_once(
        f"step {session.state.progress.step + 1}: allocations fail and the errors are caught, probably by cuDNN, "
        f"which then uses other algorithms; the step is not retried, since {reason}. It may be slow, and its result "
        "may differ in the last bits",
        topic="swallowed errors",
    )
